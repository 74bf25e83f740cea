//! What has happened to planes and paths, for those who want to hear of it: a bounded list, written only while
//! somebody does.

use crate::connection::Conn;
use crate::parts::Parts;
use crate::snapshot;
use crate::stats::Cause;
use crate::steering::Admin;
use crate::types::*;
use std::collections::VecDeque;
use std::net::IpAddr;

/// Events kept for readers that are behind.
const KEPT: usize = 1024;

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Happened {
    /// A path has changed its state, or the cause of it.
    Path(PathNews),
    /// The link of a plane went up (true) or down.
    Link(bool),
    /// An operator wants this of a plane.
    Admin(Admin),
}

/// What became of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PathNews {
    /// The connection it belongs to.
    pub connection: u32,
    /// Its number within.
    pub path: u8,
    /// Its source port now.
    pub entropy: u8,
    /// Its generation now.
    pub generation: u8,
    /// Its state, as [`snapshot::PathView::state`].
    pub state: &'static str,
    /// Why.
    pub cause: Cause,
    /// The peer's address, and slot.
    pub peer: (IpAddr, u16),
    /// Queue pairs that use the connection.
    pub users: u32,
    /// One of them that sends on it.
    pub qpn: Option<Qpn>,
}

/// An event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneEvent {
    /// When it was noticed.
    pub at: Nanos,
    /// The plane.
    pub plane: u8,
    /// What.
    pub what: Happened,
}

/// The events, numbered from 0.
#[derive(Debug, Default)]
pub struct Journal {
    /// Somebody reads.
    pub wanted: bool,
    events: VecDeque<PlaneEvent>,
    next: u64,
}

impl Journal {
    /// The number the next event will have.
    pub fn next(&self) -> u64 {
        self.next
    }
    /// The first event from number `from` on that is still there, and its number.
    pub fn read(&self, from: u64) -> Option<(u64, &PlaneEvent)> {
        let first = self.next - self.events.len() as u64;
        let number = from.max(first);
        let at = usize::try_from(number - first).ok()?;
        self.events.get(at).map(|event| (number, event))
    }
    /// Writes an event down.
    pub(crate) fn add(&mut self, at: Nanos, plane: u8, what: Happened) {
        if !self.wanted {
            return;
        }
        if self.events.len() == KEPT {
            self.events.pop_front();
        }
        self.events.push_back(PlaneEvent { at, plane, what });
        self.next += 1;
    }
}

impl<S: Sink> Parts<'_, S> {
    /// A path has changed: who wants to hear of it does.
    pub(crate) fn note_path(&mut self, conn: &Conn, index: usize) {
        if !self.journal.wanted {
            return;
        }
        let path = &conn.paths[index];
        let mut qps = self.qps.iter_from(0).map(|(_, qp)| qp);
        let news = PathNews {
            connection: conn.index,
            path: index as u8,
            entropy: path.entropy,
            generation: path.generation,
            state: snapshot::path_state(path),
            cause: path.changed.1,
            peer: (conn.peer_ip, conn.peer_slot),
            users: conn.users,
            qpn: qps.find(|qp| qp.tx.conn == Some(conn.index)).map(|qp| qp.qpn),
        };
        self.journal.add(self.now, path.plane, Happened::Path(news));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read__gives_what_is_still_there_in_order() {
        let mut journal = Journal::default();
        journal.add(1, 0, Happened::Link(true));
        assert_eq!((journal.next(), journal.read(0)), (0, None), "nobody wants it");
        journal.wanted = true;
        let all = KEPT as u64 + 10;
        for at in 0..all {
            journal.add(at, 0, Happened::Link(false));
        }
        assert_eq!(journal.read(0).map(|(number, event)| (number, event.at)), Some((10, 10)));
        assert_eq!(journal.read(all - 1).map(|(number, _)| number), Some(all - 1));
        assert_eq!(journal.read(all), None);
    }
}
