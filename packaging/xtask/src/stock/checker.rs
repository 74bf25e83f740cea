//! The workspace's own verbs client, `metaroce-checker`: compares every byte, and every status with what verbs promise.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::pair::Circumstances;
use crate::exec;
use crate::report::{Report, Trouble};
use crate::workspace::Workspace;

const TIMEOUT: Duration = Duration::from_secs(600);

/// One run of the checker.
struct Run {
    name: &'static str,
    mode: &'static str,
    arguments: &'static [&'static str],
    faults: Faults,
}

/// What the network does to a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Faults {
    /// Nothing (some cases ask for damage themselves).
    None,
    /// 1 % loss and nothing else: an unreliable datagram that the network doubles arrives twice.
    Loss,
    /// 1 % loss, 2 % reordering, 1 % duplication.
    All,
}

const RUNS: [Run; 12] = [
    Run { name: "data", mode: "data", arguments: &["--big"], faults: Faults::None },
    Run {
        name: "data, unequal MTUs",
        mode: "data",
        arguments: &["--mtu-a", "4096", "--mtu-b", "512"],
        faults: Faults::None,
    },
    Run { name: "data, loss, reordering, duplication", mode: "data", arguments: &[], faults: Faults::All },
    Run { name: "messages", mode: "messages", arguments: &[], faults: Faults::None },
    Run { name: "messages, 1 % loss", mode: "messages", arguments: &[], faults: Faults::Loss },
    Run { name: "identity", mode: "identity", arguments: &[], faults: Faults::None },
    Run { name: "memory polling", mode: "poll", arguments: &[], faults: Faults::None },
    Run {
        name: "memory polling, loss, reordering, duplication",
        mode: "poll",
        arguments: &[],
        faults: Faults::All,
    },
    Run { name: "errors", mode: "errors", arguments: &[], faults: Faults::None },
    Run { name: "many QPs", mode: "scale", arguments: &[], faults: Faults::None },
    Run { name: "api", mode: "api", arguments: &[], faults: Faults::None },
    Run { name: "idle device", mode: "idle", arguments: &[], faults: Faults::None },
];

/// Names of all checks of this module, for filters.
pub fn names() -> impl Iterator<Item = String> {
    RUNS.iter().map(Run::title)
}

/// Runs all of them; what the checker counts is added to the report.
pub fn run(workspace: &Workspace, seed: u64, report: &mut Report) {
    let Some(program) = workspace.program("metaroce-checker") else {
        if report.wants_any(names()) {
            let text = "metaroce-checker is not in the release build";
            report.record("checker", Duration::ZERO, Err(Trouble::fail(text)));
        }
        return;
    };
    for run in RUNS.iter().filter(|run| report.wants(&run.title())).collect::<Vec<_>>() {
        let started = Instant::now();
        let outcome = match run.start(workspace, &program, seed) {
            Err(error) => Err(error.into()),
            Ok(done) => {
                let counts = Counts::read(&done.output);
                report.add(counts.passed, counts.failed, 0);
                let clean = done.success() && counts.failed == 0 && counts.passed > 0;
                let remark =
                    format!("{} checks passed, {} failed, seed {seed}", counts.passed, counts.failed);
                if clean { Ok(remark) } else { Err(Trouble::Fail(failures(&remark, &done))) }
            }
        };
        report.record(&run.title(), started.elapsed(), outcome);
    }
}

impl Run {
    fn title(&self) -> String {
        format!("checker: {}", self.name)
    }

    fn start(&self, workspace: &Workspace, program: &Path, seed: u64) -> std::io::Result<exec::Finished> {
        let faults: &[(&str, &str)] = match self.faults {
            Faults::All => &[("METAROCE_REORDER", "0.02"), ("METAROCE_DUP", "0.01")],
            Faults::None | Faults::Loss => &[],
        };
        let circumstances = Circumstances {
            environment: faults.iter().map(|(name, value)| (*name, value.to_string())).collect(),
            ..Circumstances::lossy(if self.faults == Faults::None { 0 } else { 10 }, seed)
        };
        let mut command = circumstances.command(workspace, program);
        command.args(["run", self.mode, "--json", "--seed", &seed.to_string(), "--metaroce"]);
        exec::run("metaroce-checker", command.arg(workspace.metaroce()).args(self.arguments), TIMEOUT)
    }
}

/// What the checker says in its closing line; when it did not get there, what it said line by line.
#[derive(Debug, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
}

impl Counts {
    fn read(output: &str) -> Counts {
        let lines = || output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        if let Some(last) = lines().find(|line| line["passed"].is_u64()) {
            let number = |name: &str| last[name].as_u64().unwrap_or(0);
            return Counts { passed: number("passed"), failed: number("failed") };
        }
        let count = |ok: bool| lines().filter(|line| line["ok"] == ok).count() as u64;
        Counts { passed: count(true), failed: count(false) }
    }
}

/// The lines that are not passes.
fn failures(remark: &str, done: &exec::Finished) -> String {
    let is_pass = |line: &&str| serde_json::from_str::<Value>(line).is_ok_and(|line| line["ok"] == true);
    let lines: Vec<&str> = done.output.lines().filter(|line| !is_pass(line)).collect();
    let end = done.status.map_or("ended by timeout".to_owned(), |status| status.to_string());
    format!("{remark}, {end}\n{}", lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts__closing_line_or_single_ones() {
        let lines = "{\"case\":\"a\",\"check\":\"x\",\"ok\":true,\"detail\":\"\"}\nnoise\n\
            {\"case\":\"a\",\"check\":\"y\",\"ok\":false,\"detail\":\"\"}\n";
        assert_eq!(Counts::read(lines), Counts { passed: 1, failed: 1 });
        let closed = format!("{lines}{{\"passed\":7,\"failed\":0,\"seed\":1}}\n");
        assert_eq!(Counts::read(&closed), Counts { passed: 7, failed: 0 });
    }
}
