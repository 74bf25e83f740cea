//! Programs that have the device or ids of rdma_cm open while addresses and interfaces come and go.

use std::path::Path;
use std::time::Duration;

use super::namespaces::{self, SKIP};
use crate::exec;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// A script in a network namespace of its own, with one plane.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    /// Name of the check.
    pub name: &'static str,
    script: &'static str,
}

/// All of them.
pub const CHECKS: [Check; 2] = [
    Check {
        name: "addresses: events, GID table, sysfs and connections agree after each change",
        script: include_str!("addresses.py"),
    },
    Check {
        name: "addresses: ids of rdma_cm hear of changed addresses and of the device's removal",
        script: include_str!("places.py"),
    },
];

const PYTHON: &str = "/usr/bin/python3";
const TIMEOUT: Duration = Duration::from_secs(60);

/// Runs one.
pub fn run(workspace: &Workspace, check: Check) -> Outcome {
    if !Path::new(PYTHON).is_file() {
        return Err(Trouble::Skip(format!("{PYTHON} is not installed")));
    }
    let mut command = namespaces::netns(workspace)?;
    command.args(["--planes", "1", "--ready", "ready", "--server", "echo ready", "--"]);
    command.arg(workspace.metaroce()).args(["run", "--", PYTHON, "-c", check.script]);
    let done = exec::run("python3", &mut command, TIMEOUT)?;
    match done.status.and_then(|status| status.code()) {
        Some(0) if done.output.ends_with("done\n") => Ok(String::new()),
        Some(SKIP) => Err(Trouble::Skip(done.output.trim().trim_start_matches("SKIP ").to_owned())),
        _ => Err(Trouble::Fail(done.to_string())),
    }
}
