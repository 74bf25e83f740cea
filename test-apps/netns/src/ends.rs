//! Programs inside a host: none outlives its owner, and servers are waited for until they listen.

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::Failure;

/// A server is ready by then.
pub const READY_LIMIT: Duration = Duration::from_secs(20);
/// State of a listening socket in /proc/PID/net/tcp.
const LISTEN: &str = "0A";

/// A child that does not outlive its owner.
#[derive(Debug)]
pub struct Ended(pub Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // Both fail only when it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What shows that a server is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listens {
    /// Something listens on TCP in its namespace.
    Tcp,
    /// Something listens on this TCP port there.
    TcpPort(u16),
    /// Something has this UDP port there.
    UdpPort(u16),
}

impl Listens {
    /// Whether it shows in a line of the kernel's table of sockets.
    fn shows_in(self, line: &str) -> bool {
        let mut fields = line.split_whitespace().skip(1);
        let (local, state) = (fields.next().unwrap_or_default(), fields.nth(1));
        let has = |port: u16| local.ends_with(&format!(":{port:04X}"));
        match self {
            Listens::Tcp => state == Some(LISTEN),
            Listens::TcpPort(port) => state == Some(LISTEN) && has(port),
            Listens::UdpPort(port) => has(port),
        }
    }

    /// Waits until it shows where the server is.
    ///
    /// # Errors
    /// The server has ended, or does not listen in time.
    pub fn wait(self, server: &mut Child) -> Result<(), Failure> {
        let deadline = Instant::now() + READY_LIMIT;
        let tables = if matches!(self, Listens::UdpPort(_)) { ["udp", "udp6"] } else { ["tcp", "tcp6"] };
        loop {
            if let Some(status) = server.try_wait()? {
                return Err(Failure::Broken(format!("the server ended with {status}")));
            }
            for table in tables {
                let text =
                    fs::read_to_string(format!("/proc/{}/net/{table}", server.id())).unwrap_or_default();
                if text.lines().skip(1).any(|line| self.shows_in(line)) {
                    return Ok(());
                }
            }
            if Instant::now() > deadline {
                return Err(Failure::Broken("the server does not listen".into()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_shows_by_state_and_port() {
        let listening = "   0: 0100007F:5DC0 00000000:0000 0A 00000000:00000000 00:00000000";
        let connected = "   1: 0100007F:5DC0 0100007F:1234 01 00000000:00000000 00:00000000";
        assert!(Listens::Tcp.shows_in(listening) && !Listens::Tcp.shows_in(connected));
        assert!(Listens::TcpPort(24000).shows_in(listening) && !Listens::TcpPort(24000).shows_in(connected));
        assert!(!Listens::TcpPort(24001).shows_in(listening));
        assert!(Listens::UdpPort(24000).shows_in("5: 00000000:5DC0 00000000:0000 07 0 0"));
        assert!(!Listens::UdpPort(4660).shows_in(connected));
    }
}
