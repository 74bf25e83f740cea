//! Running child processes: output collected, hard timeout, and only our own children are ever ended.

use std::fmt;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a child is looked at while it runs.
const LOOK_EVERY: Duration = Duration::from_millis(5);
/// The kernel's unit of processor time towards programs, the same on every Linux.
const MS_PER_TICK: u64 = 10;
/// A child whose own children keep its output open is read for this long after its end.
const OUTPUT_GRACE: Duration = Duration::from_secs(2);

/// A child with its own process group; its stdout and stderr are read into one text while it runs.
#[derive(Debug)]
pub struct Running {
    name: String,
    child: Child,
    text: Arc<Mutex<Vec<u8>>>,
    readers: Vec<JoinHandle<()>>,
    status: Option<ExitStatus>,
    cpu: Cpu,
}

/// Processor time a process used, to the hundredth of a second the kernel counts in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cpu {
    /// By all its threads.
    pub own: Duration,
    /// By children of its that have ended and been waited for.
    pub children: Duration,
}

impl Cpu {
    /// From `/proc/PID/stat`, and whether the process is one that has ended and was not waited for.
    fn of(stat: &str) -> Option<(Cpu, bool)> {
        // The name in parentheses may contain anything; the state follows it.
        let fields: Vec<&str> = stat.rsplit_once(") ")?.1.split_ascii_whitespace().collect();
        let ticks = |index: usize| fields.get(index)?.parse::<u64>().ok();
        let time = |user: usize| Some(Duration::from_millis((ticks(user)? + ticks(user + 1)?) * MS_PER_TICK));
        Some((Cpu { own: time(11)?, children: time(13)? }, *fields.first()? == "Z"))
    }
}

/// How a child ended.
#[derive(Debug, Clone)]
pub struct Finished {
    /// Name given at the start.
    pub name: String,
    /// Process id it had.
    pub pid: u32,
    /// Exit status; `None` when the timeout ended it.
    pub status: Option<ExitStatus>,
    /// stdout and stderr in order of arrival.
    pub output: String,
    /// Processor time it used.
    pub cpu: Cpu,
}

impl Finished {
    /// Exit code 0.
    pub fn success(&self) -> bool {
        self.status.is_some_and(|status| status.success())
    }
}

impl fmt::Display for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status {
            None => writeln!(f, "--- {}: ended by timeout; its output:", self.name)?,
            Some(status) => writeln!(f, "--- {}: {status}; its output:", self.name)?,
        }
        f.write_str(self.output.trim_end())
    }
}

impl Running {
    /// Starts `command` in a process group of its own, without stdin.
    pub fn start(name: impl Into<String>, command: &mut Command) -> std::io::Result<Running> {
        let name = name.into();
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| std::io::Error::new(error.kind(), format!("{name} does not start: {error}")))?;
        let text = Arc::new(Mutex::new(Vec::new()));
        let mut readers = Vec::new();
        readers.extend(child.stdout.take().map(|pipe| read_into(pipe, &text)));
        readers.extend(child.stderr.take().map(|pipe| read_into(pipe, &text)));
        Ok(Running { name, child, text, readers, status: None, cpu: Cpu::default() })
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has ended by itself.
    pub fn has_ended(&mut self) -> bool {
        if self.status.is_none() {
            // What it used can be read until it is waited for: so it is waited for only when it has ended.
            let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
            let (cpu, ended) = Cpu::of(&stat).unwrap_or((self.cpu, true));
            self.cpu = cpu;
            if ended {
                self.status = self.child.try_wait().ok().flatten();
            }
        }
        self.status.is_some()
    }

    /// What it has printed so far.
    pub fn output_so_far(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().unwrap_or_else(|e| e.into_inner())).into_owned()
    }

    /// Waits until it ends or `deadline` passes; then it is killed.
    pub fn finish(mut self, deadline: Instant) -> Finished {
        while !self.has_ended() && Instant::now() < deadline {
            std::thread::sleep(LOOK_EVERY);
        }
        let (status, cpu) = (self.status, self.cpu);
        self.kill();
        let grace = Instant::now() + OUTPUT_GRACE;
        while self.readers.iter().any(|reader| !reader.is_finished()) && Instant::now() < grace {
            std::thread::sleep(LOOK_EVERY);
        }
        Finished { name: self.name.clone(), pid: self.pid(), status, output: self.output_so_far(), cpu }
    }

    /// Ends it and whatever it started in its process group, and reaps it.
    fn kill(&mut self) {
        if self.has_ended() {
            return;
        }
        // The child is not reaped yet, so its group id cannot belong to anybody else. std has no killpg.
        let group = format!("-{}", self.pid());
        let _ = Command::new("/bin/sh").args(["-c", "kill -9 \"$1\"", "sh", &group]).status();
        let _ = self.child.kill();
        self.status = self.child.wait().ok();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

fn read_into(mut pipe: impl Read + Send + 'static, text: &Arc<Mutex<Vec<u8>>>) -> JoinHandle<()> {
    let text = Arc::clone(text);
    std::thread::spawn(move || {
        let mut chunk = [0; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut chunk) {
            text.lock().unwrap_or_else(|e| e.into_inner()).extend_from_slice(&chunk[..count]);
        }
    })
}

/// Runs `command` to its end or for at most `timeout`.
pub fn run(name: &str, command: &mut Command, timeout: Duration) -> std::io::Result<Finished> {
    Ok(Running::start(name, command)?.finish(Instant::now() + timeout))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn run__collects_both_streams_and_the_exit_code() {
        let done = run("sh", &mut shell("echo out; echo err >&2; exit 3"), Duration::from_secs(10)).unwrap();
        assert!(done.output.contains("out") && done.output.contains("err"));
        assert_eq!(done.status.and_then(|status| status.code()), Some(3));
        assert!(!done.success());
    }

    #[test]
    fn cpu__is_read_after_a_name_with_blanks_and_parentheses() {
        let stat = "7 (a ) (b) Z 1 7 7 0 -1 4 0 0 0 0 123 45 6 7 20 0 1 0 99";
        let cpu = Cpu { own: Duration::from_millis(1680), children: Duration::from_millis(130) };
        assert_eq!(Cpu::of(stat), Some((cpu, true)));
        assert_eq!(Cpu::of(""), None);
    }

    #[test]
    fn run__counts_what_a_child_used() {
        let script = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done";
        let done = run("sh", &mut shell(script), Duration::from_secs(60)).unwrap();
        assert!(done.success() && done.cpu.own > Duration::ZERO, "{:?}", done.cpu);
    }

    #[test]
    fn run__timeout_ends_the_whole_group_and_says_so() {
        let started = Instant::now();
        let script = "echo begun; sleep 600 & wait";
        let done = run("sh", &mut shell(script), Duration::from_millis(300)).unwrap();
        assert!(done.status.is_none());
        // A surviving grandchild would keep the output open for the whole grace.
        assert!(started.elapsed() < OUTPUT_GRACE);
        assert!(done.to_string().contains("ended by timeout") && done.output.contains("begun"));
    }
}
