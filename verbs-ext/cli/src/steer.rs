//! `metaroce plane` and `metaroce path`: steering running programs through their control sockets.

use std::process::ExitCode;

use clap::Subcommand;
use serde_json::{Value, json};

use crate::control;

/// `metaroce plane ...`
#[derive(Debug, clap::Args)]
pub struct PlaneArgs {
    #[command(subcommand)]
    command: PlaneCommand,
    /// Only this process; all of yours (root: everybody's) when not given
    #[arg(long, value_name = "PID", global = true)]
    pid: Option<i32>,
}

#[derive(Debug, Subcommand)]
enum PlaneCommand {
    /// Leave a plane at once: what is on its way there goes again elsewhere
    Down {
        /// Label or interface of the plane
        name: String,
    },
    /// Use a plane again
    Up {
        /// Label or interface of the plane
        name: String,
    },
    /// Send nothing new on a plane; what is on its way there may arrive
    Drain {
        /// Label or interface of the plane
        name: String,
    },
}

/// `metaroce path ...`
#[derive(Debug, clap::Args)]
pub struct PathArgs {
    #[command(subcommand)]
    command: PathCommand,
}

#[derive(Debug, Subcommand)]
enum PathCommand {
    /// Move a path to another source port, so that the fabric routes it another way
    Rehash {
        /// The process
        #[arg(long, value_name = "PID")]
        pid: i32,
        /// As `metaroce show paths` has it, for example 0/3
        #[arg(value_name = "CONN/PATH", value_parser = path_of)]
        path: (u32, u8),
    },
    /// Use an entropy value (source port) of a plane no more: paths that have it change to another
    Deny(Entropy),
    /// Take that back
    Allow(Entropy),
}

#[derive(Debug, clap::Args)]
struct Entropy {
    /// Only this process; all of yours (root: everybody's) when not given
    #[arg(long, value_name = "PID")]
    pid: Option<i32>,
    /// Label or interface of the plane
    plane: String,
    /// As `metaroce show paths` has it in the column `ent`
    entropy: u8,
}

fn path_of(text: &str) -> Result<(u32, u8), String> {
    let parsed = text.split_once('/').and_then(|(c, p)| Some((c.parse().ok()?, p.parse().ok()?)));
    parsed.ok_or_else(|| "a connection and a path, for example 0/3".to_owned())
}

/// Steers planes; 1 when nothing was steered, or not everything.
pub fn plane(args: &PlaneArgs) -> ExitCode {
    let (set, name) = match &args.command {
        PlaneCommand::Down { name } => ("down", name),
        PlaneCommand::Up { name } => ("up", name),
        PlaneCommand::Drain { name } => ("drain", name),
    };
    tell(args.pid, &json!({ "plane": name, "set": set }))
}

/// Steers paths; 1 when nothing was steered, or not everything.
pub fn path(args: &PathArgs) -> ExitCode {
    let entropy =
        |set: &str, e: &Entropy| tell(e.pid, &json!({ "plane": e.plane, "entropy": e.entropy, "set": set }));
    match &args.command {
        PathCommand::Rehash { pid, path: (connection, path) } => {
            tell(Some(*pid), &json!({ "connection": connection, "path": path, "set": "rehash" }))
        }
        PathCommand::Deny(e) => entropy("deny", e),
        PathCommand::Allow(e) => entropy("allow", e),
    }
}

/// Tells every process; what cannot be done is said, and the others are told all the same.
fn tell(pid: Option<i32>, what: &Value) -> ExitCode {
    let mut processes = match control::processes(pid) {
        Ok(processes) => processes,
        Err(error) => {
            eprintln!("metaroce: cannot look for processes: {error}");
            return ExitCode::FAILURE;
        }
    };
    if processes.is_empty() {
        eprintln!("metaroce: no process of yours in this network namespace has metaroce0 open");
        return ExitCode::FAILURE;
    }
    let mut code = ExitCode::SUCCESS;
    for process in &mut processes {
        match process.ask(what) {
            Ok(answer) => {
                if let Some(kept) = answer["kept"].as_u64().filter(|kept| *kept > 0) {
                    eprintln!(
                        "metaroce: process {}: {kept} connections have no other path that answers and go on using it \
                         until one does",
                        process.pid
                    );
                }
            }
            Err(error) => {
                eprintln!("metaroce: {error}");
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of__takes_what_show_prints() {
        assert_eq!(path_of("12/3"), Ok((12, 3)));
        for wrong in ["12", "1/", "/1", "1/300", "a/b"] {
            assert!(path_of(wrong).is_err(), "{wrong}");
        }
    }
}
