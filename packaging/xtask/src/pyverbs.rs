//! rdma-core's own test suite, module by module, on `metaroce0`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::exec::{self, Finished};
use crate::report::{Outcome, Report, Trouble};
use crate::workspace::Workspace;

/// Longest time for one module.
const TIMEOUT: Duration = Duration::from_secs(180);
/// Where Debian's rdma-core package has the suite (slim images leave it out).
const INSTALLED: &str = "/usr/share/doc/rdma-core/tests";

/// A module: its tests, how many of them pass on the kernel's soft RoCE, and how many must pass here. None may fail.
struct Module {
    name: &'static str,
    tests: u32,
    soft_roce: u32,
    must_pass: u32,
}

const fn module(name: &'static str, tests: u32, soft_roce: u32, must_pass: u32) -> Module {
    Module { name, tests, soft_roce, must_pass }
}

/// The modules that are not a vendor's, as of rdma-core 44. A test of something the device does not offer skips.
const MODULES: [Module; 19] = [
    module("test_addr", 3, 3, 3),
    module("test_atomic", 9, 7, 9),
    module("test_cq", 4, 4, 4),
    module("test_cq_events", 2, 2, 2),
    module("test_cqex", 5, 4, 5),
    module("test_device", 22, 13, 22),
    module("test_flow", 5, 0, 5),
    module("test_fork", 1, 1, 1),
    module("test_mr", 27, 8, 17),
    module("test_odp", 17, 0, 15),
    module("test_parent_domain", 6, 0, 5),
    module("test_pd", 4, 4, 4),
    module("test_qp", 26, 21, 26),
    module("test_qpex", 20, 17, 20),
    module("test_rdmacm", 10, 10, 10),
    module("test_relaxed_ordering", 3, 2, 3),
    module("test_rss_traffic", 1, 0, 1),
    module("test_shared_pd", 1, 0, 1),
    module("test_tag_matching", 4, 0, 4),
];

/// Names of all checks of this module, for filters.
pub fn names() -> impl Iterator<Item = String> {
    MODULES.iter().map(name)
}

fn name(module: &Module) -> String {
    format!("pyverbs {}", module.name)
}

/// Runs every module asked for.
pub fn run(workspace: &Workspace, report: &mut Report) {
    if !report.wants_any(names()) {
        return;
    }
    match Suite::prepare() {
        Err(reason) => {
            report.record("pyverbs", Duration::ZERO, Err(Trouble::Skip(reason)));
        }
        Ok(suite) => {
            for module in &MODULES {
                report.check(&name(module), || check(&suite, workspace, module));
            }
        }
    }
}

fn check(suite: &Suite, workspace: &Workspace, module: &Module) -> Outcome {
    let done = suite.run(workspace, module.name)?;
    let counts = count(&done.output);
    let remark = remark(module, counts.as_ref());
    let enough = counts.is_some_and(|counts| counts.failed == 0 && counts.passed() >= module.must_pass);
    if done.success() && enough {
        Ok(remark)
    } else {
        Err(Trouble::Fail(format!("{remark}, {} must pass\n{done}", module.must_pass)))
    }
}

fn remark(module: &Module, counts: Option<&Counts>) -> String {
    let here = match counts {
        Some(counts) => {
            format!("{} ok, {} failed, {} skipped", counts.passed(), counts.failed, counts.skipped)
        }
        None => "did not run to its end".to_owned(),
    };
    format!("{here} (soft RoCE: {} ok of {})", module.soft_roce, module.tests)
}

/// What unittest counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Counts {
    run: u32,
    failed: u32,
    skipped: u32,
}

impl Counts {
    fn passed(&self) -> u32 {
        self.run.saturating_sub(self.failed + self.skipped)
    }
}

/// Reads `Ran N tests`, `OK (skipped=K)` and `FAILED (failures=A, errors=B, skipped=C)`; tests print into the lines
/// of single results, so those are not counted.
fn count(output: &str) -> Option<Counts> {
    let run = output.lines().rev().find_map(|line| {
        let mut words = line.strip_prefix("Ran ")?.split(' ');
        words.next()?.parse().ok()
    })?;
    let result = output.lines().rev().find(|line| line.starts_with("OK") || line.starts_with("FAILED"))?;
    let number = |key: &str| {
        let rest = result.split_once(&format!("{key}="))?.1;
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().ok()
    };
    let failed = number("failures").unwrap_or(0) + number("errors").unwrap_or(0);
    Some(Counts { run, failed, skipped: number("skipped").unwrap_or(0) })
}

/// A private, unpacked copy of the suite; removed when dropped.
struct Suite {
    dir: PathBuf,
}

impl Suite {
    /// Copies and unpacks it; the reason when this machine cannot have it.
    fn prepare() -> Result<Suite, String> {
        if !Path::new("/usr/bin/python3").is_file() {
            return Err("/usr/bin/python3 is not installed".to_owned());
        }
        let dir = std::env::temp_dir().join(format!("metaroce-pytests-{}", std::process::id()));
        fs::create_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let suite = Suite { dir };
        let dir = &suite.dir;
        let source = if Path::new(INSTALLED).join("run_tests.py").is_file() {
            PathBuf::from(INSTALLED)
        } else {
            quiet(Command::new("apt-get").args(["-q", "download", "rdma-core"]).current_dir(dir))?;
            quiet(
                Command::new("/bin/sh").args(["-c", "dpkg-deb -x rdma-core_*.deb unpacked"]).current_dir(dir),
            )?;
            dir.join("unpacked").join(INSTALLED.trim_start_matches('/'))
        };
        quiet(Command::new("cp").arg("-rL").arg(&source).arg(dir.join("tests")))?;
        let unpack = "find . -name '*.gz' -exec gzip -df {} +";
        quiet(Command::new("/bin/sh").args(["-c", unpack]).current_dir(dir.join("tests")))?;
        Ok(suite)
    }

    fn run(&self, workspace: &Workspace, module: &str) -> std::io::Result<Finished> {
        let mut command = workspace.under_metaroce(Path::new("/usr/bin/python3"), &[], None);
        let arguments = ["run_tests.py", "--dev", "metaroce0", "--gid", "0", "-v", module];
        exec::run(module, command.args(arguments).current_dir(self.dir.join("tests")), TIMEOUT)
    }
}

impl Drop for Suite {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// Runs a preparing command; its output is the reason when it fails.
fn quiet(command: &mut Command) -> Result<(), String> {
    let out = command.output().map_err(|error| format!("{:?}: {error}", command.get_program()))?;
    if out.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&out.stderr);
    Err(format!("rdma-core's tests are not to be had: {}", text.lines().last().unwrap_or("no message")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count__reads_unittests_last_lines() {
        let counts = |text: &str| count(text).map(|c| (c.run, c.failed, c.skipped, c.passed()));
        assert_eq!(counts("x ... ok\nRan 4 tests in 0.1s\n\nOK\n"), Some((4, 0, 0, 4)));
        assert_eq!(counts("Ran 22 tests in 1s\n\nOK (skipped=9)\n"), Some((22, 0, 9, 13)));
        assert_eq!(
            counts("Ran 9 tests in 1s\n\nFAILED (failures=1, errors=2, skipped=3)\n"),
            Some((9, 3, 3, 3))
        );
        assert_eq!(counts("Segmentation fault\n"), None);
    }

    #[test]
    fn modules__are_listed_once() {
        let mut all: Vec<String> = names().collect();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), MODULES.len());
    }
}
