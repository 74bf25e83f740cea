//! A Python program with an open device that has children: `system()`, fork without exec, multiprocessing.

use std::path::Path;
use std::time::Duration;

use super::pair::Circumstances;
use crate::exec;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Name of the check.
pub const CHILDREN: &str = "children: system(), fork and multiprocessing of a program with an open device";

const PYTHON: &str = "/usr/bin/python3";
const SCRIPT: &str = include_str!("children.py");
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs it, with and without loss.
pub fn run(workspace: &Workspace, seed: u64) -> Outcome {
    if !Path::new(PYTHON).is_file() {
        return Err(Trouble::Skip(format!("{PYTHON} is not installed")));
    }
    for loss_per_mille in [0, 10] {
        let circumstances = Circumstances::lossy(loss_per_mille, seed);
        let mut command = circumstances.command(workspace, Path::new(PYTHON));
        let done = exec::run("python3", command.args(["-c", SCRIPT]), TIMEOUT)?;
        if !done.success() || !done.output.ends_with("done\n") {
            return Err(Trouble::Fail(done.to_string()));
        }
    }
    Ok(String::new())
}
