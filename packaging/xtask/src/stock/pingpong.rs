//! `ibv_rc_pingpong` in all its ways and its siblings, with their own check of the data where they have one.

use std::time::Duration;

use super::pair::{Circumstances, Pair, Place};
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

/// Longest time for one run.
const TIMEOUT: Duration = Duration::from_secs(60);

const RC: &str = "ibv_rc_pingpong";
/// It says "success" and no rate; its `-c` is the number of clients.
const XRC: &str = "ibv_xsrq_pingpong";

/// One way to run one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    program: &'static str,
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
            cases.extend([0, 10].map(|loss_per_mille| Case { program: RC, options, size, loss_per_mille }));
        }
    }
    // On-demand paging, explicit, prefetched and implicit; completion times; device memory.
    let memory: [&[&str]; 5] =
        [&["-o", "-c"], &["-o", "-P", "-c"], &["-O", "-c"], &["-t", "-c"], &["-j", "-c"]];
    for options in memory {
        cases.extend([0, 10].map(|loss_per_mille| Case { program: RC, options, size: 4096, loss_per_mille }));
    }
    cases.extend([0, 10].map(|loss| Case {
        program: XRC,
        options: &["-c", "1"],
        size: 4096,
        loss_per_mille: loss,
    }));
    // UC and UD are not repaired: under loss their receivers wait for ever, by design.
    let others = [
        ("ibv_srq_pingpong", 4096, 0),
        ("ibv_srq_pingpong", 4096, 10),
        ("ibv_uc_pingpong", 4096, 0),
        ("ibv_ud_pingpong", 2048, 0),
    ];
    let waits: [&[&str]; 2] = [&["-c"], &["-e", "-c"]];
    for (program, size, loss_per_mille) in others {
        cases.extend(waits.map(|options| Case { program, options, size, loss_per_mille }));
    }
    cases
}

/// Data checked, at 1 % loss: the case that is run many times in a row.
pub fn repeated() -> Case {
    Case { program: RC, options: &["-c"], size: 4096, loss_per_mille: 10 }
}

impl Case {
    /// Name of the check.
    pub fn name(&self) -> String {
        let options = if self.options.is_empty() { "plain".to_owned() } else { self.options.join(" ") };
        let loss = if self.loss_per_mille == 0 { "" } else { ", 1 % loss" };
        format!("{}: {options}, {} B{loss}", self.program, self.size)
    }

    /// Runs it; both ends must report their rate and no wrong byte.
    pub fn run(&self, workspace: &Workspace, place: Place, seed: u64) -> Outcome {
        let iterations = if self.size > 100_000 { 100 } else { 1000 };
        let fixed =
            ["-d", "metaroce0", "-g", "0", "-s", &self.size.to_string(), "-n", &iterations.to_string()]
                .map(str::to_owned);
        let arguments = fixed.into_iter().chain(self.options.iter().map(|word| word.to_string())).collect();
        let circumstances = Circumstances { place, ..Circumstances::lossy(self.loss_per_mille, seed) };
        let ended =
            Pair { program: self.program, arguments, circumstances, timeout: TIMEOUT }.run(workspace)?;
        for end in [&ended.server, &ended.client] {
            if end.output.contains("invalid data") {
                return Err(Trouble::Fail(ended.text("wrong data arrived")));
            }
            let proof = if self.program == XRC { "success" } else { "usec/iter" };
            if !end.output.contains(proof) {
                return Err(Trouble::Fail(ended.text("an end did not report its rate")));
            }
        }
        let per_round = ended.client.output.lines().find_map(|line| line.split(" = ").nth(1));
        Ok(per_round.unwrap_or_default().to_owned())
    }
}
