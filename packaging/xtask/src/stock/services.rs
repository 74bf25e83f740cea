//! perftest over unreliable services, to multicast groups and with shared receive queues.

use std::time::Duration;

use super::pair::{Circumstances, Pair};
use super::perftest;
use crate::report::{Outcome, Trouble};
use crate::workspace::Workspace;

const TIMEOUT: Duration = Duration::from_secs(60);

/// One run. Under loss perftest's receivers of unreliable Sends wait for ever, by design.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    program: &'static str,
    options: &'static str,
    loss_per_mille: u32,
}

const fn case(program: &'static str, options: &'static str, loss_per_mille: u32) -> Case {
    Case { program, options, loss_per_mille }
}

/// All of them.
pub const CASES: [Case; 11] = [
    case("ib_write_bw", "-c UC -s 65536", 0),
    case("ib_write_bw", "-c UC -s 65536", 10),
    case("ib_write_lat", "-c UC -s 2", 0),
    case("ib_send_bw", "-c UC -s 65536", 0),
    case("ib_send_lat", "-c UC -s 2", 0),
    case("ib_send_bw", "-c UD -s 2048", 0),
    case("ib_send_lat", "-c UD -s 2", 0),
    // Groups of IPv4 and IPv6, the last two bytes of this run's own: others on this host may be at it too.
    case("ib_send_bw", "-c UD -g -s 2048 -M 0:0:0:0:0:0:0:0:0:0:255:255:239:7:OWN", 0),
    case("ib_send_lat", "-c UD -g -s 2 -x 1 -M 255:14:0:0:0:0:0:0:0:0:0:0:0:7:OWN", 0),
    case("ib_send_bw", "--use-srq -q 4 -s 65536", 0),
    case("ib_send_bw", "--use-srq -q 4 -s 65536", 10),
];

impl Case {
    /// Its name.
    pub fn name(&self) -> String {
        let loss = if self.loss_per_mille == 0 { "" } else { ", 1 % loss" };
        format!("{}: {}{loss}", self.program, self.options)
    }

    /// Runs it and looks for the line of results.
    pub fn run(&self, workspace: &Workspace, seed: u64) -> Outcome {
        let words = ["-d", "metaroce0", "-x", "0", "-F", "-n", "1600"].into_iter();
        let [.., high, low] = std::process::id().to_be_bytes();
        let options = self.options.replace("OWN", &format!("{high}:{low}"));
        let arguments = words.chain(options.split(' ')).map(str::to_owned).collect();
        let circumstances = Circumstances::lossy(self.loss_per_mille, seed);
        let ended =
            Pair { program: self.program, arguments, circumstances, timeout: TIMEOUT }.run(workspace)?;
        let figure = perftest::figure(self.program, &ended.client.output);
        figure.ok_or_else(|| Trouble::Fail(ended.text("no line of results")))
    }
}
