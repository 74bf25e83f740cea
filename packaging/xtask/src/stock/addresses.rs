//! A program that has the device open while addresses of its interface come and go.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::namespaces::SKIP;
use crate::exec;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Name of the check.
pub const ADDRESSES: &str = "addresses: events, GID table, sysfs and connections agree after each change";

const PYTHON: &str = "/usr/bin/python3";
const SCRIPT: &str = include_str!("addresses.py");
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs it in a network namespace of its own.
pub fn run(workspace: &Workspace) -> Outcome {
    if !Path::new(PYTHON).is_file() {
        return Err(Trouble::Skip(format!("{PYTHON} is not installed")));
    }
    let netns =
        workspace.program("metaroce-netns").ok_or_else(|| Trouble::fail("metaroce-netns is not built"))?;
    let mut command = Command::new(netns);
    workspace.clear_settings(&mut command);
    command.args(["--planes", "1", "--ready", "ready", "--server", "echo ready", "--"]);
    command.arg(workspace.metaroce()).args(["run", "--", PYTHON, "-c", SCRIPT]);
    let done = exec::run("python3", command.current_dir(&workspace.root), TIMEOUT)?;
    match done.status.and_then(|status| status.code()) {
        Some(0) if done.output.ends_with("done\n") => Ok(String::new()),
        Some(SKIP) => Err(Trouble::Skip(done.output.trim().trim_start_matches("SKIP ").to_owned())),
        _ => Err(Trouble::Fail(done.to_string())),
    }
}
