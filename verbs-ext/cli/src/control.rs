//! The operator's end of the control sockets: finding the processes that have the device open, and asking them.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde_json::{Value, json};

/// Longest wait for an answer: a process that is stopped does not give one.
const PATIENCE: Duration = Duration::from_secs(3);
/// Pages that are asked for at most: more than a process can have objects.
const PAGES_MAX: usize = 1 << 17;
const NAME_PREFIX: &str = "@metaroce-ctl-";

/// A process that has the device open and lets us ask.
#[derive(Debug)]
pub struct Process {
    /// As this process's namespace knows it.
    pub pid: i32,
    /// Its owner.
    pub uid: u32,
    /// Of its socket; tells several devices of one process apart.
    pub name: String,
    stream: BufReader<UnixStream>,
}

/// Opens the sockets of this user's processes (root: everybody's) in this network namespace, by pid; `only` of one.
pub fn processes(only: Option<i32>) -> std::io::Result<Vec<Process>> {
    let table = std::fs::read_to_string("/proc/self/net/unix")?;
    let me = crate::user::effective_uid();
    let mut names: Vec<(u32, &str)> = table.lines().filter_map(socket_name).collect();
    names.sort_unstable();
    // The table has a line per connection beside the one that listens.
    names.dedup();
    let mine = names.into_iter().filter(|(uid, _)| me == 0 || *uid == me);
    let mut found: Vec<Process> = mine.filter_map(|(uid, name)| Process::open(uid, name).ok()).collect();
    found.retain(|process| only.is_none_or(|pid| pid == process.pid));
    found.sort_by(|a, b| (a.pid, &a.name).cmp(&(b.pid, &b.name)));
    Ok(found)
}

/// Owner and name of a control socket in a line of /proc/net/unix.
fn socket_name(line: &str) -> Option<(u32, &str)> {
    let name = line.split_ascii_whitespace().nth(7)?;
    let uid = name.strip_prefix(NAME_PREFIX)?.split('-').next()?.parse().ok()?;
    Some((uid, name.strip_prefix('@')?))
}

impl Process {
    /// Connects, and makes sure that the name is not taken by somebody else.
    fn open(uid: u32, name: &str) -> std::io::Result<Process> {
        let stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?)?;
        let peer = getsockopt(&stream, PeerCredentials)?;
        if peer.uid() != uid {
            return Err(ErrorKind::PermissionDenied.into());
        }
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Process { pid: peer.pid(), uid, name: name.to_owned(), stream: BufReader::new(stream) })
    }

    /// Asks one question. The error says what the process said, or that it said nothing.
    pub fn ask(&mut self, question: &Value) -> Result<Value, String> {
        let line = format!("{question}\n");
        let mut answer = String::new();
        let told = self.stream.get_mut().write_all(line.as_bytes());
        match told.and_then(|()| self.stream.read_line(&mut answer)) {
            Ok(count) if count > 0 => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(format!("process {} does not answer", self.pid));
            }
            _ => return Err(format!("process {} has hung up", self.pid)),
        }
        let answer: Value = serde_json::from_str(&answer)
            .map_err(|error| format!("process {} gave no sensible answer: {error}", self.pid))?;
        match answer["error"].as_str() {
            Some(error) => Err(format!("process {}: {error}", self.pid)),
            None => Ok(answer),
        }
    }

    /// Everything of a kind, page by page, as one answer.
    pub fn show(&mut self, what: &str) -> Result<Value, String> {
        let mut whole = self.ask(&json!({ "show": what }))?;
        for _ in 0..PAGES_MAX {
            let next = whole["next"].take();
            if next.is_null() {
                break;
            }
            let mut page = self.ask(&json!({ "show": what, "from": next }))?;
            whole["next"] = page["next"].take();
            if let (Some(all), Some(more)) = (whole["items"].as_array_mut(), page["items"].as_array_mut()) {
                all.append(more);
            }
        }
        // As its own namespace and ours know it may differ.
        whole["pid"] = self.pid.into();
        whole["uid"] = self.uid.into();
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_name__finds_only_ours() {
        let line = |name: &str| format!("0000000000000000: 00000002 00000000 00010000 0001 01 1234 {name}");
        let found = |name: &str| socket_name(&line(name)).map(|(uid, name)| (uid, name.to_owned()));
        assert_eq!(found("@metaroce-ctl-1000-7-1"), Some((1000, "metaroce-ctl-1000-7-1".to_owned())));
        assert_eq!(found("/tmp/metaroce-ctl-0-1"), None);
        assert_eq!(found("@metaroce-ctl-x-1"), None);
        assert_eq!(socket_name("Num       RefCount Protocol Flags    Type St Inode Path"), None);
    }
}
