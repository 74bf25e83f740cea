//! The operator's commands beside a program that runs: what they show is true, and what they steer happens.

use std::path::Path;

use super::namespaces;
use super::pair::program;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Name of the check.
pub const OPERATOR: &str = "operator: planes and paths of a running program, seen and steered from outside";

const PYTHON: &str = "/usr/bin/python3";
const SCRIPT: &str = include_str!("steering.py");

/// Runs it between two hosts made of network namespaces.
pub fn run(workspace: &Workspace) -> Outcome {
    if !Path::new(PYTHON).is_file() {
        return Err(Trouble::Skip(format!("{PYTHON} is not installed")));
    }
    program("ibv_rc_pingpong")?;
    let metaroce = workspace.metaroce();
    let server =
        format!("{} run -- ibv_rc_pingpong -d metaroce0 -g 0 -c -s 65536 -n 1000000", metaroce.display());
    let mut command = namespaces::netns(workspace)?;
    // The client's program does not end by itself, the script kills it, and the server fails for it sooner or later.
    command.args(["--planes", "2", "--end-server", "--server", &server, "--", PYTHON, "-c", SCRIPT]);
    let done = namespaces::run(command.arg(metaroce).arg("{server}"))?;
    if done.output.ends_with("done\n") { Ok(String::new()) } else { Err(Trouble::Fail(done.to_string())) }
}
