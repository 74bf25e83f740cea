//! Identity and liveness of processes: a pid alone is reused, a pid with its start time is not.

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::sys;

/// Bits of a packed identity that hold the pid (Linux's pid_max is at most 2^22).
const PID_BITS: u32 = 22;
const PID_MASK: u64 = (1 << PID_BITS) - 1;

/// A process: pid and start time in clock ticks since boot, packed into one word that is never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProcessId(pub(crate) u64);

impl ProcessId {
    pub(crate) fn new(pid: u32, start_ticks: u64) -> ProcessId {
        ProcessId((start_ticks << PID_BITS) | (u64::from(pid) & PID_MASK))
    }

    /// This process. Without a readable /proc the start time is 0 and the pid alone identifies it.
    pub(crate) fn current() -> ProcessId {
        let pid = std::process::id();
        ProcessId::new(pid, read_stat(pid).map_or(0, |stat| stat.start_ticks))
    }

    pub(crate) fn pid(self) -> u32 {
        (self.0 & PID_MASK) as u32
    }

    /// Whether the process still runs; a zombie does not.
    pub(crate) fn is_alive(self) -> bool {
        if !sys::process_exists(self.pid()) {
            return false;
        }
        match read_stat(self.pid()) {
            Some(stat) => {
                let start_known = self.0 >> PID_BITS != 0;
                !matches!(stat.state, b'Z' | b'X')
                    && (!start_known || ProcessId::new(self.pid(), stat.start_ticks) == self)
            }
            // It exists but /proc hides it: assume the best.
            None => true,
        }
    }
}

struct Stat {
    state: u8,
    start_ticks: u64,
}

/// Fields 3 and 22 of `/proc/PID/stat`; the name in field 2 may hold spaces and parentheses.
fn read_stat(pid: u32) -> Option<Stat> {
    parse_stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse_stat(text: &str) -> Option<Stat> {
    let mut fields = text[text.rfind(')')? + 1..].split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    let start_ticks = fields.nth(18)?.parse().ok()?;
    Some(Stat { state, start_ticks })
}

/// Inode of this process's pid namespace: pids of other namespaces mean nothing here. 0 when unknown.
pub(crate) fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |meta| meta.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_id__packs_pid_and_start_time() {
        let id = ProcessId::new(4_194_303, 123_456_789);
        assert_eq!(id.pid(), 4_194_303);
        assert_ne!(id, ProcessId::new(4_194_303, 123_456_790));
    }

    #[test]
    fn process_id__current_is_alive_and_another_start_time_is_not() {
        let me = ProcessId::current();
        assert!(me.is_alive());
        assert!(!ProcessId(me.0 + (1 << PID_BITS)).is_alive());
    }

    #[test]
    fn process_id__exited_child_is_not_alive() {
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", "read x"])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let stat = read_stat(child.id()).unwrap();
        let id = ProcessId::new(child.id(), stat.start_ticks);
        assert!(id.is_alive());
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(!id.is_alive());
    }

    #[test]
    fn parse_stat__survives_odd_names() {
        let stat = parse_stat("7 (a) b) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20\n").unwrap();
        assert_eq!((stat.state, stat.start_ticks), (b'S', 4242));
        assert!(parse_stat("7 (x) S").is_none());
    }
}
