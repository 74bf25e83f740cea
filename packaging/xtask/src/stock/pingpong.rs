//! `ibv_rc_pingpong` in all its ways, with its own check of the data where it has one.

use std::time::Duration;

use super::pair::{Circumstances, Pair};
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Longest time for one run.
const TIMEOUT: Duration = Duration::from_secs(60);

/// One way to run it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    options: &'static [&'static str],
    size: u32,
    loss_per_mille: u32,
}

/// Every option with every size, with and without loss.
pub fn matrix() -> Vec<Case> {
    let options: [&[&str]; 6] = [&[], &["-e"], &["-c"], &["-N"], &["-m", "4096", "-c"], &["-e", "-c", "-N"]];
    let sizes = [1, 1023, 1024, 1025, 4096, 65536, 1 << 20];
    let mut cases = Vec::new();
    for options in options {
        for size in sizes {
            cases.extend([0, 10].map(|loss_per_mille| Case { options, size, loss_per_mille }));
        }
    }
    cases
}

/// Data checked, at 1 % loss: the case that is run many times in a row.
pub fn repeated() -> Case {
    Case { options: &["-c"], size: 4096, loss_per_mille: 10 }
}

impl Case {
    /// Name of the check.
    pub fn name(&self) -> String {
        let options = if self.options.is_empty() { "plain".to_owned() } else { self.options.join(" ") };
        let loss = if self.loss_per_mille == 0 { "" } else { ", 1 % loss" };
        format!("ibv_rc_pingpong: {options}, {} B{loss}", self.size)
    }

    /// Runs it; both ends must report their rate and no wrong byte.
    pub fn run(&self, workspace: &Workspace, seed: u64) -> Outcome {
        let iterations = if self.size > 100_000 { 100 } else { 1000 };
        let fixed =
            ["-d", "metaroce0", "-g", "0", "-s", &self.size.to_string(), "-n", &iterations.to_string()]
                .map(str::to_owned);
        let arguments = fixed.into_iter().chain(self.options.iter().map(|word| word.to_string())).collect();
        let circumstances = Circumstances::lossy(self.loss_per_mille, seed);
        let ended =
            Pair { program: "ibv_rc_pingpong", arguments, circumstances, timeout: TIMEOUT }.run(workspace)?;
        for end in [&ended.server, &ended.client] {
            if end.output.contains("invalid data") {
                return Err(Trouble::Fail(ended.text("wrong data arrived")));
            }
            if !end.output.contains("usec/iter") {
                return Err(Trouble::Fail(ended.text("an end did not report its rate")));
            }
        }
        let per_round = ended.client.output.lines().find_map(|line| line.split(" = ").nth(1));
        Ok(per_round.unwrap_or_default().to_owned())
    }
}
