//! What the passing of time does: retransmission, giving up, waiting, and asking whether peers are alive.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::ops::Bound;

use super::super::wire::{self, Connections, Header, Message, PING_CONNECTIONS_MAX};
use super::{Event, Key, Machine, Output, State};

/// First retransmission; each further one waits twice as long, up to the maximum. A loaded host answers in tens of ms.
pub(super) const RETRY_FIRST_US: u64 = 100_000;
const RETRY_MAX_US: u64 = 800_000;
/// Between probes while the peer says that its application has not decided.
pub(super) const RETRY_DEFERRED_US: u64 = 1_000_000;
/// Silence after which a peer is unreachable: ten transmissions, so 20 % loss each way still gets through.
pub(super) const PATIENCE_US: u64 = 6_000_000;
/// A request that finds no listener is sent again for this long. A server between two listeners, or one that was
/// started together with its client, is a matter of scheduling here, which it is not with hardware.
pub(super) const GRACE_US: u64 = 400_000;
pub(super) const RETRY_REFUSED_US: u64 = 40_000;
/// What a peer's application gets to decide in, as the kernel's MRA gives about a minute.
pub(super) const DECISION_US: u64 = 60_000_000;
/// After the end of a connection, for late duplicates.
pub(super) const TIMEWAIT_US: u64 = 1_000_000;
/// Longer than a peer retransmits.
pub(super) const LINGER_US: u64 = PATIENCE_US + 2_000_000;
/// Between two PINGs to a peer. A killed peer's host refuses the next one, which bounds the time to notice.
pub(super) const PING_US: u64 = 1_000_000;
/// PINGs without any answer after which a peer is dead. Many, because a stopped process (a debugger's) is not.
const PINGS_UNANSWERED_MAX: u32 = 30;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    Conn(Key),
    Peer(SocketAddr),
}

/// A connection manager that established connections lead to.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub incarnation: u64,
    pub conns: BTreeSet<Key>,
    /// What a PONG must echo.
    pub token: u64,
    pub unanswered: u32,
    timer: u64,
    /// The last connection that a PING asked after.
    cursor: Key,
}

impl Machine {
    /// When [`Machine::on_timeout`] has something to do; `None`: never.
    pub(in super::super) fn next_timeout(&self) -> Option<u64> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Does what is due. Packets that have arrived should be handed in before.
    pub(in super::super) fn on_timeout(&mut self, now: u64) {
        while let Some(&(at, timer)) = self.timers.first() {
            if at > now {
                break;
            }
            self.timers.pop_first();
            match timer {
                Timer::Conn(key) => self.on_conn_timeout(now, key),
                Timer::Peer(address) => self.on_peer_timeout(now, address),
            }
        }
    }

    pub(super) fn set_timer(&mut self, key: Key, at: Option<u64>) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if let Some(old) = std::mem::replace(&mut conn.timer, at) {
            self.timers.remove(&(old, Timer::Conn(key)));
        }
        if let Some(at) = at {
            self.timers.insert((at, Timer::Conn(key)));
        }
    }

    fn on_conn_timeout(&mut self, now: u64, key: Key) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.timer = None;
        let over = now >= conn.give_up.min(conn.decide_by);
        match conn.state {
            State::ReqSent | State::RepSent if over => {
                self.fail(key, Event::Unreachable { status: -libc::ETIMEDOUT });
            }
            State::DreqSent if over => self.end(now, key, -libc::ETIMEDOUT),
            State::ReqSent | State::RepSent | State::DreqSent => {
                conn.retry_us = (conn.retry_us * 2).min(RETRY_MAX_US.max(conn.retry_us));
                let wait = conn.retry_us;
                self.send_again(key);
                let jitter = self.random() % (wait / 8 + 1);
                self.set_timer(key, Some(now + wait + jitter));
            }
            State::TimeWait => {
                self.tell(key, Event::TimewaitExit);
                self.retire(key);
            }
            State::Linger => self.retire(key),
            State::ReqRcvd | State::RepRcvd | State::Established | State::Closed => {}
        }
    }

    /// A request found no listener: true when that is final, else it is sent again shortly.
    pub(super) fn is_refused_for_good(&mut self, now: u64, key: Key) -> bool {
        let Some(conn) = self.conns.get_mut(&key) else { return true };
        if now >= conn.grace_until {
            return true;
        }
        conn.retry_us = RETRY_REFUSED_US;
        self.set_timer(key, Some(now + RETRY_REFUSED_US));
        false
    }

    /// Closes a connection whose packets are all gone.
    fn retire(&mut self, key: Key) {
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.state = State::Closed;
            self.remove_if_unowned(key);
        }
    }

    /// Watches over the peer of a connection.
    pub(super) fn watch(&mut self, now: u64, key: Key) {
        let Some(conn) = self.conns.get(&key) else { return };
        let (address, incarnation) = (conn.manager, conn.remote_incarnation);
        if let Some(peer) = self.peers.get_mut(&address) {
            peer.conns.insert(key);
            return;
        }
        let (token, at) = (self.random(), now + PING_US);
        let conns = BTreeSet::from([key]);
        self.peers.insert(address, Peer { incarnation, conns, token, unanswered: 0, timer: at, cursor: 0 });
        self.timers.insert((at, Timer::Peer(address)));
    }

    pub(super) fn unwatch(&mut self, key: Key) {
        let Some(address) = self.conns.get(&key).map(|conn| conn.manager) else { return };
        if let Some(peer) = self.peers.get_mut(&address) {
            peer.conns.remove(&key);
            if peer.conns.is_empty() {
                self.timers.remove(&(peer.timer, Timer::Peer(address)));
                self.peers.remove(&address);
            }
        }
    }

    fn on_peer_timeout(&mut self, now: u64, address: SocketAddr) {
        let token = self.random();
        let Some(peer) = self.peers.get_mut(&address) else { return };
        if peer.unanswered >= PINGS_UNANSWERED_MAX {
            self.peer_is_dead(now, address);
            return;
        }
        peer.unanswered += 1;
        peer.token = token;
        peer.timer = now + PING_US;
        self.timers.insert((peer.timer, Timer::Peer(address)));
        // Round robin over the connections, however many there are.
        let after = peer.conns.range((Bound::Excluded(peer.cursor), Bound::Unbounded));
        let asked: Vec<Key> =
            after.chain(peer.conns.range(..=peer.cursor)).copied().take(PING_CONNECTIONS_MAX).collect();
        peer.cursor = asked.last().copied().unwrap_or(0);
        let known = |key: &Key| self.conns.get(key).map(|conn| conn.remote_id.to_be_bytes());
        let list: Vec<u8> = asked.iter().filter_map(known).flatten().collect();
        let Some(from) = asked.first().and_then(|key| self.conns.get(key)).map(|conn| conn.local) else {
            return;
        };
        let header = Header { src: token, dst: 0, incarnation: self.incarnation };
        let packet = wire::write(&header, &Message::Ping(Connections(&list)));
        self.output.push_back(Output::Send { from, to: address, packet });
    }

    pub(super) fn peer_is_dead(&mut self, now: u64, address: SocketAddr) {
        let conns = self.peers.get(&address).map(|peer| peer.conns.clone()).unwrap_or_default();
        for key in conns {
            self.lost(now, key);
        }
    }

    /// The peer of a watched connection is gone.
    pub(super) fn lost(&mut self, now: u64, key: Key) {
        match self.conns.get(&key).map(|conn| conn.state) {
            Some(State::Established) => self.end(now, key, -libc::ETIMEDOUT),
            Some(State::RepRcvd) => self.fail(key, Event::Unreachable { status: -libc::ETIMEDOUT }),
            _ => self.unwatch(key),
        }
    }
}
