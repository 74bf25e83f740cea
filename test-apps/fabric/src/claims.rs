//! The table of claims: what MetaRoCE promises, the goal, what the simulator measures, and the command that repeats it.
//!
//! Every claim is a function that runs scenarios (`scenarios/*.toml`, some values changed) and gives rows.

mod congestion;
mod failure;
mod loss;
mod scale;
mod versus;

use crate::run::{self, Outcome};
use crate::scenario::Scenario;
use serde::Serialize;

/// One line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The claim it belongs to.
    pub claim: &'static str,
    /// What that claim says.
    pub says: &'static str,
    /// What was run.
    pub what: String,
    /// The goal, in words.
    pub goal: String,
    /// What was measured.
    pub measured: String,
    /// The goal is reached.
    pub good: bool,
    /// The command that repeats it.
    pub command: String,
}

/// How much is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// A few seconds: what every build checks.
    Tests,
    /// A few minutes.
    Quick,
    /// Everything, at every burst size.
    Full,
}

impl Extent {
    /// Packets per burst to run with; 0 is adaptive.
    fn bursts(self) -> &'static [u8] {
        if self == Extent::Full { &[1, 15, 0] } else { &[0] }
    }
}

/// A claim.
pub struct Claim {
    /// Its short name.
    pub id: &'static str,
    /// What it says.
    pub says: &'static str,
    rows: fn(&mut Bench),
    tested: bool,
}

/// All claims in the order of the table.
pub const CLAIMS: [Claim; 19] = [
    Claim {
        id: "loss",
        says: "random loss, streaming Write, of its own loss-free goodput",
        rows: loss::streaming,
        tested: true,
    },
    Claim {
        id: "all-reduce",
        says: "ring all-reduce under loss, of its own loss-free speed",
        rows: loss::all_reduce,
        tested: false,
    },
    Claim {
        id: "all-to-all",
        says: "all-to-all under loss, of its own loss-free speed",
        rows: loss::all_to_all,
        tested: false,
    },
    Claim {
        id: "short",
        says: "short messages at 1 % loss: p99 over the loss-free p99, in round trips",
        rows: loss::short,
        tested: true,
    },
    Claim {
        id: "spray",
        says: "switch-side spraying and reordering, of in-order goodput",
        rows: loss::spray,
        tested: true,
    },
    Claim { id: "planes", says: "1 -> 4 -> 8 planes", rows: scale::planes, tested: true },
    Claim {
        id: "connections",
        says: "4,032 connections among 64 hosts on 1, 4 and 8 planes",
        rows: scale::connections,
        tested: false,
    },
    Claim {
        id: "plane-death",
        says: "one of four planes dies and comes back",
        rows: failure::plane_death,
        tested: true,
    },
    Claim {
        id: "last-plane",
        says: "the last plane dies and returns before the QP gives up",
        rows: failure::last_plane,
        tested: true,
    },
    Claim {
        id: "slow-path",
        says: "one path of 16 ten times slower, or with 5 % gray loss",
        rows: failure::slow_path,
        tested: false,
    },
    Claim {
        id: "descheduled",
        says: "the peer does not run for 5 ms, fifty times",
        rows: failure::descheduled,
        tested: false,
    },
    Claim {
        id: "incast",
        says: "many to one: fairness, utilisation, queue, completion times",
        rows: congestion::incast,
        tested: true,
    },
    Claim {
        id: "fan-in",
        says: "one client reads from many servers, mixed sizes",
        rows: congestion::fan_in,
        tested: true,
    },
    Claim {
        id: "cross-region",
        says: "30 ms round trip at 100 Gb/s, two bottlenecks",
        rows: congestion::cross_region,
        tested: false,
    },
    Claim {
        id: "ecn-only",
        says: "buffers of one bandwidth-delay product: no drops in steady state",
        rows: congestion::ecn_only,
        tested: true,
    },
    Claim {
        id: "storm",
        says: "every byte right under loss, duplication, damage and reordering",
        rows: loss::storm,
        tested: true,
    },
    Claim {
        id: "both-ways",
        says: "Write and Read in both directions at once share fairly; each direction has its own congestion control",
        rows: congestion::both_ways,
        tested: true,
    },
    Claim {
        id: "fat-tree",
        says: "collectives on an ECMP fat-tree with colliding flows, beside a model of RoCEv2 (single path, DCQCN)",
        rows: versus::fat_tree,
        tested: false,
    },
    Claim { id: "repeatable", says: "two runs are bit-identical", rows: scale::repeatable, tested: true },
];

/// Runs scenarios for claims and collects rows.
pub struct Bench {
    /// How much to run.
    pub extent: Extent,
    claim: &'static str,
    says: &'static str,
    rows: Vec<Row>,
}

impl Bench {
    /// Runs a scenario file with values changed.
    fn run(&self, text: &str, set: &[String]) -> Outcome {
        match Scenario::parse_with(text, set) {
            Ok(scenario) => run::run(&scenario),
            Err(error) => panic!("scenario of claim {}: {error}", self.claim),
        }
    }
    /// Adds a row: good if the condition holds and no check found a breach.
    fn row(&mut self, what: String, goal: &str, measured: String, good: bool, runs: &[&Outcome]) {
        let breaches: Vec<&String> = runs.iter().flat_map(|o| &o.breaches).collect();
        let measured = match breaches.first() {
            Some(first) => format!("{measured}; BREACH {first}"),
            None => measured,
        };
        self.rows.push(Row {
            claim: self.claim,
            says: self.says,
            what,
            goal: goal.to_owned(),
            measured,
            good: good && breaches.is_empty(),
            command: format!("cargo xtask results --only {}", self.claim),
        });
    }
}

/// Runs the claims whose name contains `only`, telling of each row as it is known.
pub fn run_all(extent: Extent, only: Option<&str>, mut tell: impl FnMut(&Row)) -> Vec<Row> {
    let mut all = Vec::new();
    for claim in &CLAIMS {
        let wanted = only.is_none_or(|o| claim.id.contains(o)) && (extent != Extent::Tests || claim.tested);
        if !wanted {
            continue;
        }
        let mut bench = Bench { extent, claim: claim.id, says: claim.says, rows: Vec::new() };
        (claim.rows)(&mut bench);
        bench.rows.iter().for_each(&mut tell);
        all.append(&mut bench.rows);
    }
    all
}

/// `key=value` settings from a list of pairs.
fn set(pairs: &[(&str, String)]) -> Vec<String> {
    pairs.iter().map(|(k, v)| format!("{k}={v}")).collect()
}

/// How a burst size is called.
fn burst_name(burst: u8) -> String {
    if burst == 0 { "adaptive".to_owned() } else { burst.to_string() }
}

fn percent(x: f64) -> String {
    format!("{:.2} %", 100.0 * x)
}
