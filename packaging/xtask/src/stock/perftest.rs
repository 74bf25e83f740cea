//! The matrix of perftest runs: which combinations there are, and a sample of them that covers every option.

use std::time::Duration;

use super::pair::{Circumstances, Pair, Place};
use crate::report::{Outcome, Trouble};
use crate::seed::Random;
use crate::workspace::Workspace;

/// Longest time for one run; every one takes a few seconds.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Programs, and what of the options they take.
const PROGRAMS: [Program; 9] = [
    Program { name: "ib_write_bw", extra: &[], bandwidth: true, events: false, sizes: true },
    Program { name: "ib_write_lat", extra: &[], bandwidth: false, events: false, sizes: true },
    Program { name: "ib_read_bw", extra: &[], bandwidth: true, events: true, sizes: true },
    Program { name: "ib_read_lat", extra: &[], bandwidth: false, events: true, sizes: true },
    Program { name: "ib_send_bw", extra: &[], bandwidth: true, events: true, sizes: true },
    Program { name: "ib_send_lat", extra: &[], bandwidth: false, events: true, sizes: true },
    Program {
        name: "ib_atomic_bw",
        extra: &["-A", "FETCH_AND_ADD"],
        bandwidth: true,
        events: true,
        sizes: false,
    },
    Program {
        name: "ib_atomic_bw",
        extra: &["-A", "CMP_AND_SWAP"],
        bandwidth: true,
        events: true,
        sizes: false,
    },
    Program {
        name: "ib_atomic_lat",
        extra: &["-A", "CMP_AND_SWAP"],
        bandwidth: false,
        events: true,
        sizes: false,
    },
];

/// Options, each tried alone: what it adds and which programs refuse it.
const OPTIONS: [(&str, &[&str], Needs); 11] = [
    ("plain", &[], Needs::Nothing),
    ("all sizes", &["-a"], Needs::Sizes),
    ("both ways", &["-b"], Needs::Bandwidth),
    ("4 qps", &["-q", "4"], Needs::Bandwidth),
    ("64 qps", &["-q", "64"], Needs::Bandwidth),
    ("lists of 16", &["-l", "16"], Needs::Bandwidth),
    ("events", &["-e"], Needs::Events),
    ("events, all sizes", &["-e", "-a"], Needs::EventsAndSizes),
    ("XRC", &["-c", "XRC"], Needs::Nothing),
    // perftest refuses it for atomics.
    ("on-demand paging", &["--odp"], Needs::Sizes),
    ("old post send", &["--use_old_post_send"], Needs::Nothing),
];

const LOSSES_PER_MILLE: [u32; 2] = [0, 10];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Program {
    name: &'static str,
    extra: &'static [&'static str],
    /// A _bw program: takes -b, -q and -l.
    bandwidth: bool,
    /// Takes -e (Write has no completion at the far end to wait for).
    events: bool,
    /// Takes -s and -a (an atomic has 8 bytes).
    sizes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    Bandwidth,
    Events,
    Sizes,
    EventsAndSizes,
}

/// One combination.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Case {
    program: usize,
    option: usize,
    loss_per_mille: u32,
}

/// Every combination that perftest accepts.
pub fn matrix() -> Vec<Case> {
    let mut cases = Vec::new();
    for (program, p) in PROGRAMS.iter().enumerate() {
        for (option, (_, _, needs)) in OPTIONS.iter().enumerate() {
            let taken = match needs {
                Needs::Nothing => true,
                Needs::Bandwidth => p.bandwidth,
                Needs::Events => p.events,
                Needs::Sizes => p.sizes,
                Needs::EventsAndSizes => p.events && p.sizes,
            };
            if taken {
                cases.extend(LOSSES_PER_MILLE.map(|loss_per_mille| Case { program, option, loss_per_mille }));
            }
        }
    }
    cases
}

/// At least `count` cases: enough that each program and each option is there with and without loss.
pub fn sample(random: &mut Random, count: usize) -> Vec<Case> {
    let mut cases = matrix();
    random.shuffle(&mut cases);
    let mut chosen: Vec<Case> = Vec::new();
    let mut rest = Vec::new();
    for case in cases {
        let same_loss = |other: &&Case| other.loss_per_mille == case.loss_per_mille;
        let program_seen = chosen.iter().filter(same_loss).any(|other| other.program == case.program);
        let option_seen = chosen.iter().filter(same_loss).any(|other| other.option == case.option);
        if program_seen && option_seen { rest.push(case) } else { chosen.push(case) }
    }
    let missing = count.saturating_sub(chosen.len()).min(rest.len());
    chosen.extend(rest.drain(..missing));
    chosen
}

impl Case {
    /// Name of the check.
    pub fn name(&self) -> String {
        let program = PROGRAMS[self.program];
        let extra = program.extra.last().map_or(String::new(), |word| format!(" {word}"));
        let loss = if self.loss_per_mille == 0 { "" } else { ", 1 % loss" };
        format!("{}{extra}: {}{loss}", program.name, OPTIONS[self.option].0)
    }

    /// Runs it and looks for the line of results.
    pub fn run(&self, workspace: &Workspace, place: Place, seed: u64) -> Outcome {
        let circumstances = Circumstances { place, ..Circumstances::lossy(self.loss_per_mille, seed) };
        let name = PROGRAMS[self.program].name;
        let ended = Pair { program: name, arguments: self.arguments(), circumstances, timeout: TIMEOUT }
            .run(workspace)?;
        figure(name, &ended.client.output).ok_or_else(|| Trouble::Fail(ended.text("no line of results")))
    }

    fn arguments(&self) -> Vec<String> {
        let program = PROGRAMS[self.program];
        let (name, words, _) = OPTIONS[self.option];
        let mut all: Vec<String> = ["-d", "metaroce0", "-x", "0", "-F"]
            .iter()
            .chain(program.extra)
            .chain(words)
            .map(|w| w.to_string())
            .collect();
        // Few enough that one run takes about a second, many enough that the queues wrap. Multiples of the 100 requests
        // perftest completes at a time and of the list length: with another number and several QPs that get on unevenly,
        // perftest counts completions that never come, stops polling too early and spins for ever.
        let iterations = match (name, program.bandwidth) {
            (_, true) if words.contains(&"-a") => 64,
            (_, false) if words.contains(&"-a") => 30,
            ("64 qps", _) => 200,
            (_, true) => 1600,
            (_, false) => 1000,
        };
        all.extend(["-n".to_owned(), iterations.to_string()]);
        if program.sizes && !words.contains(&"-a") {
            let size = if program.bandwidth { 65536 } else { 2 };
            all.extend(["-s".to_owned(), size.to_string()]);
        }
        all
    }
}

/// What the last row of a program's results says: the average of a `_bw`, the typical time of a `_lat`.
pub fn figure(program: &str, output: &str) -> Option<String> {
    let row = result_rows(output).pop()?;
    let (column, unit) = if program.ends_with("_bw") { (3, "MiB/s") } else { (4, "us typical") };
    Some(format!("{} {unit}", row.get(column).map_or("?", String::as_str)))
}

/// The rows of numbers perftest prints: size, iterations, then figures.
pub fn result_rows(output: &str) -> Vec<Vec<String>> {
    output
        .lines()
        .map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .filter(|row| row.len() >= 4 && row.iter().all(|word| word.parse::<f64>().is_ok()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn matrix__has_no_option_a_program_refuses() {
        let names: Vec<String> = matrix().iter().map(Case::name).collect();
        assert!(names.contains(&"ib_write_bw: 64 qps, 1 % loss".to_owned()));
        assert!(!names.iter().any(|name| name.starts_with("ib_write") && name.contains("events")));
        assert!(!names.iter().any(|name| name.contains("_lat") && name.contains("qps")));
        assert!(!names.iter().any(|name| name.contains("atomic") && name.contains("all sizes")));
        let mut unique = names.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), names.len());
    }

    #[test]
    fn sample__covers_programs_and_options_for_any_seed() {
        for seed in 0..50 {
            let chosen = sample(&mut Random::new(seed), 20);
            for loss in LOSSES_PER_MILLE {
                let with =
                    |f: &dyn Fn(&Case) -> bool| chosen.iter().any(|c| c.loss_per_mille == loss && f(c));
                assert!((0..PROGRAMS.len()).all(|program| with(&|c| c.program == program)));
                assert!((0..OPTIONS.len()).all(|option| with(&|c| c.option == option)));
            }
        }
    }

    #[test]
    fn figure__is_the_average_or_the_typical_time() {
        let bandwidth = "65536 1000 4100.10 4000.55 0.064009\n";
        assert_eq!(figure("ib_send_bw", bandwidth).as_deref(), Some("4000.55 MiB/s"));
        let latency = "2 1000 3.40 81.29 4.28 4.47 1.01 6.00 81.29\n";
        assert_eq!(figure("ib_send_lat", latency).as_deref(), Some("4.28 us typical"));
        assert_eq!(figure("ib_send_lat", "no table"), None);
    }

    #[test]
    fn result_rows__reads_perftests_table() {
        let output = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
            65536      1000             4100.10            4000.55   \t\t   0.064009\n-----\n";
        assert_eq!(result_rows(output), [["65536", "1000", "4100.10", "4000.55", "0.064009"]]);
    }
}
