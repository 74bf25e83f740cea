//! One end of one case as a process of its own, so that a crash, a hang or a kill stays inside the case.

use std::net::TcpStream;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::control::{Check, Control};
use crate::modes::Mode;
use crate::options::Options;
use crate::session::{More, Role, Session, print_check};
use crate::{Outcome, pattern};

/// An assignment: which case, with which chance.
#[derive(Serialize, Deserialize, Debug, Clone)]
pub struct Spec {
    /// The mode.
    pub mode: Mode,
    /// The case of the mode.
    pub case: String,
    /// The run's seed; the case's is derived from it and the case's name.
    pub seed: u64,
    /// The run's options.
    pub options: Options,
}

/// Seconds between a case's soft limit (control connection) and the kernel's SIGALRM.
const GRACE_S: u64 = 5;

/// Runs one end; false when a check failed or the case ended early.
pub fn run_case(spec: Option<&str>, server: Option<&str>) -> Outcome<bool> {
    die_with_parent();
    let connect = Duration::from_secs(10);
    let (role, spec, stream) = match (spec, server) {
        (Some(spec), Some(server)) => {
            let spec: Spec = serde_json::from_str(spec)?;
            let stream = begin(server, &spec)?;
            (Role::A, spec, stream)
        }
        _ => {
            // SAFETY: the server made stdin the accepted connection, and nothing else here uses stdin.
            let stream = TcpStream::from(unsafe { OwnedFd::from_raw_fd(0) });
            (Role::B, read_spec(&stream, connect)?, stream)
        }
    };
    let case = spec.mode.case(&spec.options, &spec.case)?;
    let limit = case.limit * u32::try_from(spec.options.patience).unwrap_or(1);
    alarm(limit.as_secs() + GRACE_S);
    let seed = spec.case.bytes().fold(spec.seed, |seed, byte| pattern::derive(seed, &[u64::from(byte)]));
    let mut session = Session::new(role, seed, spec.options.clone(), Control::new(stream, limit)?);
    if let Some(server) = server {
        session = session.with_more(More { server: server.to_owned(), spec: spec.clone() });
    }
    let ended = (case.run)(&mut session).and_then(|()| session.finish(!case.kills_peer));
    if let Err(error) = &ended {
        let why = session.abort(&error.to_string());
        if role == Role::A {
            print_check(&Check { name: "ran to its end".into(), ok: false, detail: why });
        }
    }
    if role == Role::B {
        // Keeps the control connection open until the process has really ended: the near end waits for that.
        std::mem::forget(session);
    } else if ended.is_ok() && session.wait_peer_gone().is_err() {
        let detail = "still there long after its case has ended".into();
        print_check(&Check { name: "far end exits".into(), ok: false, detail });
    }
    Ok(ended.is_ok())
}

/// Connects to the far end's server and tells the process it starts what to do.
fn begin(server: &str, spec: &Spec) -> Outcome<TcpStream> {
    let stream = TcpStream::connect(server).map_err(|e| format!("far end {server}: {e}"))?;
    Control::new(stream.try_clone()?, Duration::from_secs(10))?.tell(spec)?;
    Ok(stream)
}

/// The same for a further far end; no answer for `limit` is an error.
pub fn connect(server: &str, spec: &Spec, limit: Duration) -> Outcome<Control> {
    Control::new(begin(server, spec)?, limit)
}

/// Reads the assignment byte by byte: whatever follows it belongs to the session's own reader.
fn read_spec(mut stream: &TcpStream, limit: Duration) -> Outcome<Spec> {
    use std::io::Read;
    stream.set_read_timeout(Some(limit))?;
    let mut line = Vec::new();
    let mut byte = [0];
    while line.last() != Some(&b'\n') {
        if stream.read(&mut byte)? == 0 {
            return Err("the near end went away before it said what to do".into());
        }
        line.extend(byte);
    }
    let message: serde_json::Value = serde_json::from_slice(&line)?;
    Ok(serde_json::from_value(message["value"].clone())?)
}

/// The process dies with the one that started it: nothing is left when a run is killed.
pub fn die_with_parent() {
    // SAFETY: prctl with PR_SET_PDEATHSIG takes a signal number and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Sets an environment variable for what is opened from now on. While no other thread runs: the callers call it before
/// a device is opened, or after the last one is closed.
pub fn set_variable(name: &str, value: &str) {
    // SAFETY: by the promise above nobody else reads or writes the environment now.
    unsafe { std::env::set_var(name, value) };
}

/// Raises the limit of open descriptors to at least `count`.
pub fn allow_descriptors(count: u64) -> std::io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls get one valid struct.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        limit.rlim_cur = limit.rlim_cur.max(count.min(limit.rlim_max));
        if libc::setrlimit(libc::RLIMIT_NOFILE, &limit) != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(())
}

/// The kernel ends the process after `seconds`, whatever it hangs in.
fn alarm(seconds: u64) {
    // SAFETY: alarm takes a number; SIGALRM's default action ends the process.
    unsafe { libc::alarm(u32::try_from(seconds).unwrap_or(u32::MAX)) };
}

/// Forks a child that ends at once, as programs that use `fork` do, and waits for it.
pub fn fork_and_wait() -> std::io::Result<()> {
    // SAFETY: the child calls only _exit, which is safe after fork in a process with threads; waitpid writes
    // one int.
    unsafe {
        match libc::fork() {
            -1 => Err(std::io::Error::last_os_error()),
            0 => libc::_exit(0),
            child => {
                let mut status = 0;
                libc::waitpid(child, &mut status, 0);
                if status == 0 {
                    Ok(())
                } else {
                    Err(std::io::Error::other(format!("a forked child ended with {status}")))
                }
            }
        }
    }
}

/// Forks a child that does nothing for three seconds and ends. It leaves the control connection (stdin) to us.
pub fn fork_sleeper() -> std::io::Result<()> {
    // SAFETY: the child calls only close, alarm and pause, which are safe after fork in a process with threads.
    unsafe {
        match libc::fork() {
            -1 => Err(std::io::Error::last_os_error()),
            0 => {
                libc::close(0);
                libc::alarm(3);
                loop {
                    libc::pause();
                }
            }
            _ => Ok(()),
        }
    }
}

/// Another process of ours that stands still until this is dropped.
#[derive(Debug)]
pub struct Stopped(libc::pid_t);

impl Stopped {
    /// Stops it and waits until every thread of it stands still.
    pub fn new(pid: u32) -> crate::Outcome<Self> {
        let pid = libc::pid_t::try_from(pid)?;
        // SAFETY: kill takes numbers; the pid is that of the far end, which lives as long as its case.
        if unsafe { libc::kill(pid, libc::SIGSTOP) } != 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        let stopped = Self(pid);
        while !stopped.stands_still()? {
            std::thread::yield_now();
        }
        Ok(stopped)
    }

    fn stands_still(&self) -> crate::Outcome<bool> {
        for task in std::fs::read_dir(format!("/proc/{}/task", self.0))? {
            let status = std::fs::read_to_string(task?.path().join("status"))?;
            if !status.lines().any(|line| line.starts_with("State:\tT")) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // SAFETY: as in `new`.
        unsafe { libc::kill(self.0, libc::SIGCONT) };
    }
}

/// Kills this process as `kill -9` would: no destructor runs, no goodbye is sent.
pub fn kill_self() -> ! {
    // SAFETY: getpid and kill touch no memory; SIGKILL cannot be handled.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    unreachable!("SIGKILL returns to nobody")
}
