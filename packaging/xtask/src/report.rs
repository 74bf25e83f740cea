//! One line per check, and the count that ends every run.

use std::time::{Duration, Instant};

/// How a check ended when it did not pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trouble {
    /// Something is wrong; the text is shown below the FAIL line.
    Fail(String),
    /// This machine cannot do it; the reason, one line.
    Skip(String),
}

impl Trouble {
    /// A failure with its text.
    pub fn fail(text: impl Into<String>) -> Trouble {
        Trouble::Fail(text.into())
    }
}

impl From<String> for Trouble {
    fn from(text: String) -> Trouble {
        Trouble::Fail(text)
    }
}

impl From<std::io::Error> for Trouble {
    fn from(error: std::io::Error) -> Trouble {
        Trouble::Fail(error.to_string())
    }
}

/// What a check hands back: a remark for its line, or why it did not pass.
pub type Outcome = Result<String, Trouble>;

/// Counts and prints checks. Passing ones are quiet: one line each.
#[derive(Debug)]
pub struct Report {
    filter: Option<String>,
    started: Instant,
    passed: u64,
    failed: u64,
    skipped: u64,
    failures: Vec<String>,
}

impl Report {
    /// A report that runs only checks whose name contains `filter`.
    pub fn new(filter: Option<String>) -> Report {
        Report { filter, started: Instant::now(), passed: 0, failed: 0, skipped: 0, failures: Vec::new() }
    }

    /// Whether a check of this name is asked for.
    pub fn wants(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()))
    }

    /// Whether only some checks are asked for.
    pub fn is_filtered(&self) -> bool {
        self.filter.is_some()
    }

    /// Whether any check of a group may be asked for: the filter names one of its checks or a part of the group.
    pub fn wants_any(&self, names: impl IntoIterator<Item = impl AsRef<str>>) -> bool {
        self.filter.is_none() || names.into_iter().any(|name| self.wants(name.as_ref()))
    }

    /// Runs a check when asked for, prints its line and counts it; true unless it failed.
    pub fn check(&mut self, name: &str, run: impl FnOnce() -> Outcome) -> bool {
        if !self.wants(name) {
            return true;
        }
        let started = Instant::now();
        let outcome = run();
        self.record(name, started.elapsed(), outcome)
    }

    /// Counts and prints a check that was run elsewhere; true unless it failed.
    pub fn record(&mut self, name: &str, took: Duration, outcome: Outcome) -> bool {
        let (text, good) = self.count(name, took, outcome);
        println!("{text}");
        good
    }

    /// Counts a check; its line, with the reason below a failure, and whether it did not fail.
    fn count(&mut self, name: &str, took: Duration, outcome: Outcome) -> (String, bool) {
        let took = took.as_secs_f64();
        match outcome {
            Ok(remark) => {
                self.passed += 1;
                (format!("PASS  {name} ({took:.1} s)  {remark}").trim_end().to_owned(), true)
            }
            Err(Trouble::Skip(reason)) => {
                self.skipped += 1;
                (format!("SKIP  {name}: {reason}"), true)
            }
            Err(Trouble::Fail(text)) => {
                self.failed += 1;
                self.failures.push(name.to_owned());
                let reason: String = text.trim_end().lines().map(|line| format!("\n      {line}")).collect();
                (format!("FAIL  {name} ({took:.1} s){reason}"), false)
            }
        }
    }

    /// Adds checks that another program counted (cargo test, pytests).
    pub fn add(&mut self, passed: u64, failed: u64, skipped: u64) {
        self.passed += passed;
        self.failed += failed;
        self.skipped += skipped;
    }

    /// Prints what failed and, as the very last line, the count; true when nothing failed and something ran.
    pub fn finish(self) -> bool {
        let minutes = self.started.elapsed().as_secs_f64() / 60.0;
        println!("\n{minutes:.1} minutes");
        if !self.failures.is_empty() {
            println!("failed: {}", self.failures.join(", "));
        }
        if !self.ran_any() {
            println!("nothing matches the filter {:?}", self.filter.as_deref().unwrap_or(""));
        }
        println!("{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped);
        self.is_success()
    }

    fn ran_any(&self) -> bool {
        self.passed + self.failed + self.skipped > 0
    }

    fn is_success(&self) -> bool {
        self.failed == 0 && self.ran_any()
    }
}

/// Prints a line that says what is going on now.
pub fn progress(text: &str) {
    println!("....  {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    // Nothing is printed here: whoever runs these tests counts lines that begin with SKIP.

    #[test]
    fn report__counts_every_kind() {
        let mut report = Report::new(None);
        let mut count = |outcome| report.count("check", Duration::ZERO, outcome);
        assert_eq!(count(Ok("fast".to_owned())), ("PASS  check (0.0 s)  fast".to_owned(), true));
        assert_eq!(count(Err(Trouble::Skip("no".to_owned()))), ("SKIP  check: no".to_owned(), true));
        assert_eq!(
            count(Err(Trouble::fail("a\nb"))),
            ("FAIL  check (0.0 s)\n      a\n      b".to_owned(), false)
        );
        report.add(10, 0, 2);
        assert_eq!((report.passed, report.failed, report.skipped), (11, 1, 3));
        assert!(!report.is_success());
    }

    #[test]
    fn report__filter_asks_for_matching_checks_only() {
        let mut report = Report::new(Some("ib_".to_owned()));
        assert!(report.check("fmt", || Err(Trouble::fail("must not run"))));
        assert!(report.wants("ib_write_bw") && report.is_filtered());
        assert!(report.wants_any(["fmt", "ib_read_lat"]) && !report.wants_any(["fmt", "clippy"]));
        // A filter that matches nothing is no success.
        assert!(!report.is_success());
    }
}
