//! Python programs with the device: one that has children (`system()`, fork without exec, multiprocessing), and what
//! rdma-core's newest suite tests beyond the installed one.

use std::path::Path;
use std::time::Duration;

use super::pair::Circumstances;
use crate::exec;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Name of the check.
pub const CHILDREN: &str = "children: system(), fork and multiprocessing of a program with an open device";

/// Name of the check.
pub const NEWEST: &str = "newest: what rdma-core 65 tests beyond 44, with the library of 44";

const PYTHON: &str = "/usr/bin/python3";
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs [`CHILDREN`].
pub fn run(workspace: &Workspace, seed: u64) -> Outcome {
    script(workspace, seed, include_str!("children.py"))
}

/// Runs [`NEWEST`].
pub fn newest(workspace: &Workspace, seed: u64) -> Outcome {
    script(workspace, seed, include_str!("newest.py"))
}

/// Runs a script, with and without loss.
fn script(workspace: &Workspace, seed: u64, script: &str) -> Outcome {
    if !Path::new(PYTHON).is_file() {
        return Err(Trouble::Skip(format!("{PYTHON} is not installed")));
    }
    for loss_per_mille in [0, 10] {
        let circumstances = Circumstances::lossy(loss_per_mille, seed);
        let mut command = circumstances.command(workspace, Path::new(PYTHON));
        let done = exec::run("python3", command.args(["-c", script]), TIMEOUT)?;
        if !done.success() || !done.output.ends_with("done\n") {
            return Err(Trouble::Fail(done.to_string()));
        }
    }
    Ok(String::new())
}
