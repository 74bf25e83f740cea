//! `cargo xtask bench`: the device beside plain UDP and TCP, interleaved in one run, since only ratios carry over from
//! machine to machine.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::exec;
use crate::report::{Trouble, progress};
use crate::stock::pair::{Circumstances, Pair, program, serve_and_connect};
use crate::stock::perftest::result_rows;
use crate::workspace::Workspace;
use crate::{ladder, packages};

/// Longest time for one measurement.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Something that is measured once per round.
struct Measure {
    name: &'static str,
    unit: &'static str,
    run: fn(&Workspace) -> Result<f64, Trouble>,
}

/// In the order of a round: each of ours directly after its yardstick.
const MEASURES: [Measure; 8] = [
    Measure { name: "iperf3 TCP", unit: "Gb/s", run: iperf3 },
    Measure { name: "UDP GSO blast", unit: "Gb/s", run: blast },
    Measure { name: "ib_write_bw 64 KiB", unit: "Gb/s", run: |w| bandwidth(w, "ib_write_bw") },
    Measure { name: "2 processes, long run", unit: "Gb/s", run: |w| pairs_together(w, 1) },
    Measure { name: "4 processes, long run", unit: "Gb/s", run: |w| pairs_together(w, 2) },
    Measure { name: "UDP ping-pong, one way", unit: "us", run: udp_pingpong },
    Measure { name: "ib_send_lat 2 B", unit: "us", run: |w| latency(w, "ib_send_lat") },
    Measure { name: "ib_write_lat 2 B", unit: "us", run: |w| latency(w, "ib_write_lat") },
];

/// A ratio of two measures and where it must lie.
struct Goal {
    of: &'static str,
    to: &'static str,
    bound: Bound,
}

#[derive(Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
    /// Shown only.
    None,
}

const GOALS: [Goal; 5] = [
    Goal { of: "ib_write_bw 64 KiB", to: "UDP GSO blast", bound: Bound::AtLeast(0.3) },
    Goal { of: "ib_write_bw 64 KiB", to: "iperf3 TCP", bound: Bound::None },
    // More processes than processors share them without getting into each other's way.
    Goal { of: "4 processes, long run", to: "2 processes, long run", bound: Bound::AtLeast(0.7) },
    Goal { of: "ib_send_lat 2 B", to: "UDP ping-pong, one way", bound: Bound::AtMost(3.0) },
    Goal { of: "ib_write_lat 2 B", to: "UDP ping-pong, one way", bound: Bound::AtMost(8.0) },
];

/// Runs all rounds, prints figures and ratios; false when a goal is missed or a measurement failed.
pub fn run(workspace: &Workspace, quick: bool, json_file: Option<&Path>) -> Result<bool, String> {
    packages::ensure(&[packages::BUILD, packages::BENCH])?;
    ladder::release_build(workspace)?;
    let rounds = if quick { 3 } else { 7 };
    let mut series: Vec<Vec<f64>> = vec![Vec::new(); MEASURES.len()];
    let mut broken = false;
    for round in 1..=rounds {
        progress(&format!("round {round} of {rounds}"));
        for (measure, values) in MEASURES.iter().zip(&mut series) {
            match (measure.run)(workspace) {
                Ok(value) => values.push(value),
                Err(Trouble::Skip(reason)) => println!("SKIP  {}: {reason}", measure.name),
                Err(Trouble::Fail(text)) => {
                    println!("FAIL  {}\n{text}", measure.name);
                    broken = true;
                }
            }
        }
    }
    println!("\n{:<26} {:>9} {:>9} {:>9}", "loopback, this run", "median", "min", "max");
    for (measure, values) in MEASURES.iter().zip(&series) {
        if let Some(figures) = Figures::of(values) {
            let Figures { median, min, max } = figures;
            println!("{:<26} {median:>9.2} {min:>9.2} {max:>9.2} {}", measure.name, measure.unit);
        }
    }
    println!();
    let met = GOALS.iter().map(|goal| judge(goal, &series)).fold(true, |all, met| all & met);
    if let Some(path) = json_file {
        std::fs::write(path, format!("{}\n", figures_json(&series)))
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(met && !broken)
}

/// Median, least and greatest of a series.
struct Figures {
    median: f64,
    min: f64,
    max: f64,
}

impl Figures {
    fn of(values: &[f64]) -> Option<Figures> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let upper = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[upper] } else { (sorted[upper - 1] + sorted[upper]) / 2.0 };
        Some(Figures { median, min, max })
    }
}

fn median_of(name: &str, series: &[Vec<f64>]) -> Option<f64> {
    let index = MEASURES.iter().position(|measure| measure.name == name)?;
    Some(Figures::of(&series[index])?.median)
}

/// Prints a ratio beside its goal; false when it misses.
fn judge(goal: &Goal, series: &[Vec<f64>]) -> bool {
    let text = format!("{} / {}", goal.of, goal.to);
    let Some(ratio) = median_of(goal.of, series).zip(median_of(goal.to, series)).map(|(of, to)| of / to)
    else {
        println!("{text:<48} not measured");
        return matches!(goal.bound, Bound::None);
    };
    let (met, want) = match goal.bound {
        Bound::AtLeast(bound) => (ratio >= bound, format!("goal at least {bound}")),
        Bound::AtMost(bound) => (ratio <= bound, format!("goal at most {bound}")),
        Bound::None => (true, String::new()),
    };
    println!("{text:<48} {ratio:>6.2}  {want}{}", if met { "" } else { "  MISSED" });
    met
}

fn figures_json(series: &[Vec<f64>]) -> Value {
    let measures: Vec<Value> = MEASURES
        .iter()
        .zip(series)
        .map(|(measure, values)| {
            json!({ "name": measure.name, "unit": measure.unit, "values": values,
            "median": Figures::of(values).map(|figures| figures.median) })
        })
        .collect();
    let ratios: Vec<Value> = GOALS
        .iter()
        .map(|goal| {
            let ratio = median_of(goal.of, series).zip(median_of(goal.to, series)).map(|(of, to)| of / to);
            json!({ "of": goal.of, "to": goal.to, "ratio": ratio })
        })
        .collect();
    json!({ "measures": measures, "ratios": ratios })
}

fn iperf3(_: &Workspace) -> Result<f64, Trouble> {
    let path = program("iperf3")?;
    let command = |port: u16, role: [&str; 2], more: &[&str]| {
        let mut command = Command::new(&path);
        command.args(role).args(["-p", &port.to_string()]).args(more);
        command
    };
    let (server, client) = serve_and_connect(
        "iperf3",
        |port| command(port, ["-s", "-1"], &["-B", "127.0.0.1"]),
        |port| command(port, ["-c", "127.0.0.1"], &["-t", "2", "-J"]),
    )?;
    let done = client.finish(Instant::now() + TIMEOUT);
    drop(server);
    let value: Value = serde_json::from_str(&done.output).map_err(|_| Trouble::Fail(done.to_string()))?;
    let bits = value["end"]["sum_received"]["bits_per_second"].as_f64();
    bits.map(|bits| bits / 1e9).ok_or_else(|| Trouble::Fail(done.to_string()))
}

fn blast(workspace: &Workspace) -> Result<f64, Trouble> {
    yardstick(workspace, &["blast", "--json"], "gbps")
}

fn udp_pingpong(workspace: &Workspace) -> Result<f64, Trouble> {
    yardstick(workspace, &["udp-pingpong", "--json"], "one_way_us")
}

/// One run of our own plain-UDP bench program.
fn yardstick(workspace: &Workspace, arguments: &[&str], field: &str) -> Result<f64, Trouble> {
    let path =
        workspace.program("metaroce-bench").ok_or_else(|| Trouble::fail("metaroce-bench is not built"))?;
    let done = exec::run("metaroce-bench", Command::new(path).args(arguments), TIMEOUT)?;
    let value: Option<Value> = done.output.lines().find_map(|line| serde_json::from_str(line).ok());
    value.and_then(|value| value[field].as_f64()).ok_or_else(|| Trouble::Fail(done.to_string()))
}

/// Average of a bandwidth test, Gb/s.
fn bandwidth(workspace: &Workspace, program: &'static str) -> Result<f64, Trouble> {
    perftest(workspace, program, &["-s", "65536", "-n", "30000", "--report_gbits"], 3)
}

/// What some pairs of processes reach together that write the same amount at the same time, Gb/s: all of it by the time
/// of the slowest.
fn pairs_together(workspace: &Workspace, pairs: usize) -> Result<f64, Trouble> {
    let arguments = ["-s", "65536", "-n", "100000", "--report_gbits"];
    let rates: Vec<Result<f64, Trouble>> = std::thread::scope(|scope| {
        let one = || scope.spawn(|| perftest(workspace, "ib_write_bw", &arguments, 3));
        let running: Vec<_> = (0..pairs).map(|_| one()).collect();
        let broken = || Err(Trouble::fail("a measuring thread panicked"));
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| broken())).collect()
    });
    let slowest = rates.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().fold(f64::MAX, f64::min);
    Ok(slowest * pairs as f64)
}

/// Typical half round trip of a latency test, microseconds.
fn latency(workspace: &Workspace, program: &'static str) -> Result<f64, Trouble> {
    perftest(workspace, program, &["-s", "2", "-n", "30000"], 4)
}

fn perftest(
    workspace: &Workspace,
    program: &'static str,
    arguments: &[&str],
    column: usize,
) -> Result<f64, Trouble> {
    let fixed = ["-d", "metaroce0", "-x", "0", "-F"];
    let arguments = fixed.iter().chain(arguments).map(|word| word.to_string()).collect();
    let ended = Pair { program, arguments, circumstances: Circumstances::default(), timeout: TIMEOUT }
        .run(workspace)?;
    let row = result_rows(&ended.client.output).pop();
    row.and_then(|row| row.get(column)?.parse().ok()).ok_or_else(|| Trouble::Fail(ended.text("no results")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals__name_measures() {
        let known = |name: &str| MEASURES.iter().any(|measure| measure.name == name);
        assert!(GOALS.iter().all(|goal| known(goal.of) && known(goal.to)));
    }

    #[test]
    fn figures__median_of_even_and_odd_counts() {
        let figures = Figures::of(&[3.0, 1.0, 2.0]).unwrap();
        assert_eq!((figures.median, figures.min, figures.max), (2.0, 1.0, 3.0));
        assert_eq!(Figures::of(&[4.0, 1.0]).unwrap().median, 2.5);
        assert!(Figures::of(&[]).is_none());
    }
}
