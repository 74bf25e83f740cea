//! `cargo xtask test`: every test there is, cheapest first.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::exec::{self, Finished};
use crate::report::{Outcome, Report, Trouble, progress};
use crate::workspace::{Workspace, cargo};
use crate::{packages, pyverbs, requirements, stock, tidy};

/// Longest time for one cargo step.
const STEP_TIMEOUT: Duration = Duration::from_secs(25 * 60);
/// Lines of a failing step's output that are shown.
const LINES_SHOWN: usize = 200;

/// What to run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// A smaller sample of stock programs.
    pub quick: bool,
    /// Seed of the sample.
    pub seed: u64,
}

/// Runs the ladder; true when nothing failed.
pub fn run(workspace: &Workspace, options: Options, mut report: Report) -> Result<bool, String> {
    packages::ensure(&[packages::BUILD, packages::TEST])?;
    println!("seed {} (repeat with: cargo xtask test --seed {})", options.seed, options.seed);
    static_checks(workspace, &mut report);
    cargo_test(workspace, &mut report);
    if report.wants_any(stock::names().chain(pyverbs::names())) {
        if let Err(text) = release_build(workspace) {
            report.record("release build", Duration::ZERO, Err(Trouble::Fail(text)));
            return Ok(report.finish());
        }
        stock::sample(workspace, options, &mut report);
        pyverbs::run(workspace, &mut report);
    }
    Ok(report.finish())
}

fn static_checks(workspace: &Workspace, report: &mut Report) {
    report.check("fmt", || step(workspace, cargo().args(["fmt", "--all", "--check"])));
    report.check("tidy", || {
        let found = tidy::breaches(workspace);
        if found.is_empty() { Ok(String::new()) } else { Err(Trouble::Fail(found.join("\n"))) }
    });
    report.check("requirements", || requirements::check(workspace));
    let lint = ["clippy", "--quiet", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
    report.check("clippy", || step(workspace, cargo().args(lint)));
    report.check("rustdoc", || {
        let mut command = cargo();
        step(
            workspace,
            command.args(["doc", "--quiet", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "-D warnings"),
        )
    });
}

/// Runs all unit and integration tests and adds their counts.
fn cargo_test(workspace: &Workspace, report: &mut Report) {
    if !report.wants("cargo test") {
        return;
    }
    progress("cargo test --workspace");
    let started = Instant::now();
    // Cargo does not build a cdylib for its package's integration tests; the shim's preload it into programs.
    let shim = ["build", "--quiet", "--package", "metaroce-shim"];
    if let Err(trouble) = finished(workspace, cargo().args(shim)) {
        report.record("cargo test", started.elapsed(), Err(trouble));
        return;
    }
    let arguments = ["test", "--quiet", "--workspace", "--no-fail-fast", "--", "--show-output"];
    let outcome = match finished(workspace, cargo().args(arguments).env("METAROCE_PLANES", "lo")) {
        Err(trouble) => Err(trouble),
        Ok(done) => {
            let counts = count_tests(&done.output);
            report.add(counts.passed, counts.failed, counts.skipped);
            let remark =
                format!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, counts.skipped);
            if done.success() { Ok(remark) } else { Err(Trouble::Fail(test_failures(&done))) }
        }
    };
    report.record("cargo test", started.elapsed(), outcome);
}

/// A test that a soak runs for longer: its name, package and filter, and what makes it long.
type LongTest =
    (&'static str, &'static str, &'static [&'static str], &'static [(&'static str, &'static str)]);

/// What `cargo test` runs shortly: a million rounds of arming and waiting, a minute of each storm, a thousand rounds of
/// each identity case.
const LONG_TESTS: [LongTest; 5] = [
    (
        "long: loom's models of rings, arming, doorbells and deregistration",
        "metaroce-engine",
        &["models"],
        // A target directory of its own: everything is built differently, and the rest need not be built again.
        &[("RUSTFLAGS", "--cfg loom"), ("CARGO_TARGET_DIR", "target/loom")],
    ),
    (
        "long: 1,000,000 arm, poll and event rounds, level- and edge-triggered",
        "metaroce-provider",
        &["no_event_is_lost"],
        &[("METAROCE_TEST_ROUNDS", "1000000")],
    ),
    (
        "long: objects and memory that go beside traffic, cancelled threads",
        "metaroce-provider",
        &["storms", "many_threads"],
        &[("METAROCE_TEST_STORM_MS", "60000")],
    ),
    (
        "long: 1,000 rounds of each identity case",
        "metaroce-proto",
        &["--test", "identity"],
        &[("METAROCE_ROUNDS", "1000")],
    ),
    (
        "long: 20,000 connections of rdma_cm leave nothing behind",
        "metaroce-shim",
        &["--test", "programs", "cycles"],
        &[("METAROCE_ROUNDS", "20000")],
    ),
];

/// Runs the long ones.
pub fn long_tests(workspace: &Workspace, seed: u64, report: &mut Report) {
    for (name, package, filter, variables) in LONG_TESTS {
        report.check(name, || {
            let mut command = cargo();
            command.args(["test", "--quiet", "--release", "--package", package]);
            // Filters of tests are for the test programs, options for cargo.
            if !filter.iter().any(|word| word.starts_with("--")) {
                command.args(["--lib", "--"]);
            }
            command.args(filter).envs(variables.iter().copied()).env("METAROCE_PLANES", "lo");
            step(workspace, command.env("METAROCE_SEED", seed.to_string()))
        });
    }
}

/// Builds everything that programs use, as a user would.
pub fn release_build(workspace: &Workspace) -> Result<(), String> {
    progress("cargo build --release --workspace");
    match finished(workspace, cargo().args(["build", "--release", "--workspace"])) {
        Ok(done) if done.success() => Ok(()),
        Ok(done) => Err(tail(&done)),
        Err(Trouble::Fail(text) | Trouble::Skip(text)) => Err(text),
    }
}

fn step(workspace: &Workspace, command: &mut Command) -> Outcome {
    let done = finished(workspace, command)?;
    if done.success() { Ok(String::new()) } else { Err(Trouble::Fail(tail(&done))) }
}

fn finished(workspace: &Workspace, command: &mut Command) -> Result<Finished, Trouble> {
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    let name = format!("cargo {}", words.join(" "));
    Ok(exec::run(&name, command.current_dir(&workspace.root), STEP_TIMEOUT)?)
}

/// The end of a failing step's output: that is where the reason stands.
fn tail(done: &Finished) -> String {
    let text = done.to_string();
    let lines: Vec<&str> = text.lines().collect();
    match lines.len().checked_sub(LINES_SHOWN) {
        None | Some(0) => text,
        Some(cut) => format!("{}\n({cut} lines before)\n{}", lines[0], lines[cut..].join("\n")),
    }
}

/// What libtest says of failures, without the output of tests that passed; all of it when it is something else.
fn test_failures(done: &Finished) -> String {
    let mut shown = Vec::new();
    let mut inside = false;
    for line in done.output.lines() {
        inside = (inside || line == "failures:") && line != "successes:";
        if inside || line.starts_with("error") || line.starts_with("     Running") {
            shown.push(line);
        }
        inside = inside && !line.starts_with("test result:");
    }
    if shown.iter().any(|line| line.starts_with("test result: FAILED")) {
        shown.join("\n")
    } else {
        tail(done)
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
}

/// Sums libtest's result lines. A test that cannot run on this machine prints a line beginning with `SKIP` and
/// returns: libtest calls it passed, we do not.
fn count_tests(output: &str) -> Counts {
    let mut counts = Counts::default();
    let mut moved = 0;
    for line in output.lines() {
        if let Some(result) = line.strip_prefix("test result: ") {
            let number = |what: &str| {
                let before = result.split(what).next().unwrap_or_default().trim_end();
                before.rsplit(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0)
            };
            counts.passed += number(" passed;");
            counts.failed += number(" failed;");
            counts.skipped += number(" ignored;");
        } else if line.starts_with("SKIP") {
            moved += 1;
        }
    }
    counts.skipped += moved;
    counts.passed = counts.passed.saturating_sub(moved);
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_tests__sums_all_binaries_and_moves_skips() {
        let output = "running 3 tests\n...\nsuccesses:\n\n---- a stdout ----\nSKIP no namespaces here\n\n\
            test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.05s\n\n\
            test result: FAILED. 10 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s\n";
        assert_eq!(count_tests(output), Counts { passed: 12, failed: 2, skipped: 2 });
    }
}
