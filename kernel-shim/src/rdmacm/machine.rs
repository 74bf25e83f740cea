//! Connection management as a state machine without sockets, clock or randomness of its own.
//!
//! One [`Machine`] holds all connections of a process, from the first request to the end of their time of waiting.
//! Time (microseconds, any origin) and a seed come in as arguments; packets and events go out through
//! [`Machine::pop_output`]. `receive` is what packets do to it, `timer` what the passing of time does.
//!
//! | state | entered by | left by |
//! |---|---|---|
//! | ReqSent | connect | REP: RepRcvd (UD: Closed); REJ, silence: Closed |
//! | ReqRcvd | REQ | accept: RepSent (UD: Linger); reject: Linger; REJ: Closed |
//! | RepSent | accept | RTU: Established; DREQ: TimeWait; REJ, silence: Closed |
//! | RepRcvd | REP | accept: Established; DREQ: TimeWait; REJ: Closed; reject: Linger |
//! | Established | RTU, accept | DREQ, death of the peer: TimeWait; disconnect: DreqSent |
//! | DreqSent | disconnect | DREP, DREQ, silence: TimeWait |
//! | TimeWait, Linger | | time: Closed; both answer duplicates meanwhile |

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::c_int;
use std::net::SocketAddr;

use super::wire::{self, Header, Message, Service, Terms};

mod receive;
mod timer;

#[cfg(test)]
mod tests;

pub(super) use receive::Arrival;
use timer::{Peer, Timer};

/// InfiniBand's reject reasons (enum ib_cm_rej_reason), as events report them.
pub(super) mod reason {
    pub(crate) const TIMEOUT: u16 = 4;
    pub(crate) const INVALID_COMM_ID: u16 = 6;
    pub(crate) const INVALID_SERVICE_ID: u16 = 8;
    pub(crate) const CONSUMER_DEFINED: u16 = 28;
    pub(crate) const UNSUPPORTED_VERSION: u16 = 31;
    /// IB_SIDR_UNSUPPORTED and IB_SIDR_REJECT: what a datagram service says instead.
    pub(crate) const SIDR_UNSUPPORTED: u16 = 1;
    pub(crate) const SIDR_REJECT: u16 = 2;
}

/// Connections that a process can have at once, lingering ones included; requests beyond it are dropped.
pub(super) const CONNECTIONS_MAX: usize = 1 << 17;

/// How often a process that ends says so; one of the packets will arrive.
const FAREWELLS: u32 = 3;

/// Names a connection within its machine.
pub(super) type Key = u32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    ReqSent,
    ReqRcvd,
    RepSent,
    RepRcvd,
    Established,
    DreqSent,
    TimeWait,
    /// A refusal or a datagram service's answer was sent, and is sent again when the request is.
    Linger,
    /// Nothing happens any more.
    Closed,
}

/// What happened to a connection that has an owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    /// The peer accepted: accept or reject now. For datagram services this is all, and no answer is expected.
    Response,
    Established,
    Rejected {
        reason: u16,
        data: Vec<u8>,
    },
    /// A negative errno, or a datagram service's positive status.
    Unreachable {
        status: c_int,
    },
    /// 0, or a negative errno when the peer did not say so itself.
    Disconnected {
        status: c_int,
    },
    TimewaitExit,
}

/// What the machine wants done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Output {
    /// Send this datagram from a local address.
    Send {
        from: SocketAddr,
        to: SocketAddr,
        packet: Vec<u8>,
    },
    /// A listener got a request. The new connection has no owner until [`Machine::adopt`].
    Request {
        listener: u32,
        key: Key,
    },
    Event {
        owner: u32,
        event: Event,
    },
}

/// One side of a connection.
#[derive(Debug, Clone)]
pub(super) struct Conn {
    pub state: State,
    /// Our name for the connection, which the peer puts into its packets.
    pub id: u64,
    pub owner: Option<u32>,
    pub is_datagram: bool,
    /// It began with the peer's request.
    pub passive: bool,
    /// Addresses as the application sees them; the ports are those of the port space.
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub local_gid: [u8; 16],
    pub remote_gid: [u8; 16],
    pub ours: Terms,
    pub theirs: Terms,
    /// Private data of the peer's REQ or REP.
    pub data: Vec<u8>,
    /// Where the peer's connection manager is.
    manager: SocketAddr,
    remote_id: u64,
    remote_incarnation: u64,
    /// The packet to send again.
    last_packet: Vec<u8>,
    timer: Option<u64>,
    retry_us: u64,
    /// Until when the absence of a listener is not final.
    grace_until: u64,
    /// When to give up on an answer.
    give_up: u64,
    /// When to stop waiting for the peer's application.
    decide_by: u64,
    /// The peer withdrew before our application decided; told when it does.
    withdrawn: Option<Event>,
}

impl Conn {
    /// Whether the peer has said what its QP is.
    pub(super) fn has_terms(&self) -> bool {
        self.remote_id != 0
    }
}

#[derive(Debug, Clone, Copy)]
struct Listener {
    port_space: u16,
    port: u16,
    backlog_max: u32,
    backlog: u32,
}

/// Packets that were dropped, by cause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Dropped {
    pub malformed: u64,
    /// For no connection of ours, or out of place in its state.
    pub stray: u64,
    /// A request beyond a listener's backlog or [`CONNECTIONS_MAX`].
    pub excess: u64,
}

/// What [`Machine::connect`] needs to know.
#[derive(Debug, Clone)]
pub(super) struct Connect<'a> {
    pub owner: u32,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    pub port_space: u16,
    pub qp_type: u8,
    pub is_datagram: bool,
    pub local_gid: [u8; 16],
    pub terms: Terms,
    pub data: &'a [u8],
}

/// All connections of a process.
#[derive(Debug)]
pub(super) struct Machine {
    incarnation: u64,
    random: u64,
    next_key: Key,
    conns: BTreeMap<Key, Conn>,
    by_remote: BTreeMap<(u64, u64), Key>,
    listeners: BTreeMap<u32, Listener>,
    peers: BTreeMap<SocketAddr, Peer>,
    timers: BTreeSet<(u64, Timer)>,
    output: VecDeque<Output>,
    pub dropped: Dropped,
}

impl Machine {
    /// `seed` must be unpredictable to others: names of connections follow from it.
    pub(super) fn new(seed: u64) -> Machine {
        let mut machine = Machine {
            incarnation: 0,
            random: seed,
            next_key: 0,
            conns: BTreeMap::new(),
            by_remote: BTreeMap::new(),
            listeners: BTreeMap::new(),
            peers: BTreeMap::new(),
            timers: BTreeSet::new(),
            output: VecDeque::new(),
            dropped: Dropped::default(),
        };
        machine.incarnation = machine.random() | 1;
        machine
    }

    /// The next thing to do; call until `None` after every other call.
    pub(super) fn pop_output(&mut self) -> Option<Output> {
        self.output.pop_front()
    }

    /// A connection that has not been destroyed.
    pub(super) fn conn(&self, key: Key) -> Option<&Conn> {
        self.conns.get(&key)
    }

    /// Starts to take requests that arrive for `token`.
    pub(super) fn listen(&mut self, token: u32, port_space: u16, port: u16, backlog_max: u32) {
        self.listeners.insert(token, Listener { port_space, port, backlog_max, backlog: 0 });
    }

    pub(super) fn unlisten(&mut self, token: u32) {
        self.listeners.remove(&token);
    }

    /// A request of this listener has left its queue.
    pub(super) fn request_taken(&mut self, token: u32) {
        if let Some(listener) = self.listeners.get_mut(&token) {
            listener.backlog = listener.backlog.saturating_sub(1);
        }
    }

    /// Gives a requested connection its owner.
    pub(super) fn adopt(&mut self, key: Key, owner: u32) {
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.owner = Some(owner);
        }
    }

    /// Sends a request.
    ///
    /// # Errors
    /// ENOMEM when there are too many connections.
    pub(super) fn connect(&mut self, now: u64, connect: &Connect) -> Result<Key, c_int> {
        let service = Service {
            port_space: connect.port_space,
            port: connect.remote.port(),
            source_port: connect.local.port(),
            qp_type: connect.qp_type,
        };
        let psn = self.random() as u32 & 0xff_ffff;
        let conn = Conn {
            state: State::ReqSent,
            id: 0,
            owner: Some(connect.owner),
            is_datagram: connect.is_datagram,
            passive: false,
            local: connect.local,
            remote: connect.remote,
            local_gid: connect.local_gid,
            remote_gid: [0; 16],
            ours: Terms { psn, ..connect.terms },
            theirs: Terms::default(),
            data: Vec::new(),
            manager: connect.remote,
            remote_id: 0,
            remote_incarnation: 0,
            last_packet: Vec::new(),
            timer: None,
            retry_us: 0,
            grace_until: now + timer::GRACE_US,
            give_up: 0,
            decide_by: 0,
            withdrawn: None,
        };
        let key = self.insert(conn).ok_or(libc::ENOMEM)?;
        let (gid, terms) = (connect.local_gid, self.conns[&key].ours);
        self.send_until_answered(now, key, &Message::Req { service, gid, terms, data: connect.data });
        Ok(key)
    }

    /// Answers a request, or confirms a response (`terms` of no account then).
    ///
    /// # Errors
    /// EINVAL when there is nothing to accept.
    pub(super) fn accept(&mut self, now: u64, key: Key, terms: &Terms, data: &[u8]) -> Result<(), c_int> {
        let conn = self.conns.get_mut(&key).ok_or(libc::EINVAL)?;
        match conn.state {
            State::ReqRcvd => {
                conn.ours = Terms { psn: conn.ours.psn, mtu: terms.mtu.min(conn.theirs.mtu), ..*terms };
                let message = Message::Rep { gid: conn.local_gid, terms: conn.ours, data };
                if conn.is_datagram {
                    self.send_and_linger(now, key, &message);
                } else {
                    conn.state = State::RepSent;
                    self.send_until_answered(now, key, &message);
                }
                Ok(())
            }
            State::RepRcvd => {
                conn.state = State::Established;
                self.send(key, &Message::Rtu);
                Ok(())
            }
            // The peer was faster: what it did is told by an event, as it would be a moment later.
            State::Closed => {
                let event = conn.withdrawn.take().ok_or(libc::EINVAL)?;
                self.tell(key, event);
                Ok(())
            }
            State::TimeWait if conn.has_terms() => Ok(()),
            _ => Err(libc::EINVAL),
        }
    }

    /// Refuses a request or a response.
    ///
    /// # Errors
    /// EINVAL when there is nothing to refuse.
    pub(super) fn reject(&mut self, now: u64, key: Key, reason: u16, data: &[u8]) -> Result<(), c_int> {
        let conn = self.conns.get(&key).ok_or(libc::EINVAL)?;
        match conn.state {
            State::ReqRcvd | State::RepRcvd => {
                let reason = if conn.is_datagram { reason::SIDR_REJECT } else { reason };
                self.send_and_linger(now, key, &Message::Rej { reason, data });
                // Who refuses may end the moment after, and nobody else knows why it did.
                for _ in 1..FAREWELLS {
                    self.send_again(key);
                }
                Ok(())
            }
            State::Closed if conn.withdrawn.is_some() => Ok(()),
            _ => Err(libc::EINVAL),
        }
    }

    /// Ends a connection; does nothing to one that has already ended, as the kernel does.
    pub(super) fn disconnect(&mut self, now: u64, key: Key) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if matches!(conn.state, State::Established | State::RepSent | State::RepRcvd) {
            conn.state = State::DreqSent;
            self.unwatch(key);
            self.send_until_answered(now, key, &Message::Dreq);
        }
    }

    /// The application knows by other means that the peer is ready (IBV_EVENT_COMM_EST).
    pub(super) fn communication_established(&mut self, now: u64, key: Key) {
        if self.conns.get(&key).is_some_and(|conn| conn.state == State::RepSent) {
            self.establish(now, key);
        }
    }

    /// Takes a connection from its owner; what has to be said to the peer is said.
    pub(super) fn destroy(&mut self, now: u64, key: Key) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.owner = None;
        let consumer_defined = Message::Rej { reason: reason::CONSUMER_DEFINED, data: &[] };
        match conn.state {
            State::ReqSent => {
                self.send(key, &Message::Rej { reason: reason::TIMEOUT, data: &[] });
                self.remove(key);
            }
            State::ReqRcvd if conn.is_datagram => {
                let _ = self.reject(now, key, reason::SIDR_REJECT, &[]);
            }
            State::ReqRcvd | State::RepSent | State::RepRcvd => {
                self.send_and_linger(now, key, &consumer_defined);
            }
            State::Established => self.disconnect(now, key),
            State::DreqSent | State::TimeWait | State::Linger => {}
            State::Closed => self.remove(key),
        }
    }

    /// Tells every peer that its connection has ended: this process is about to go, and will not hear an answer.
    pub(super) fn farewell(&mut self) {
        let keys: Vec<Key> = self.conns.keys().copied().collect();
        for _ in 0..FAREWELLS {
            for &key in &keys {
                match self.conns[&key].state {
                    State::Established | State::DreqSent => self.send(key, &Message::Dreq),
                    State::ReqSent => self.send(key, &Message::Rej { reason: reason::TIMEOUT, data: &[] }),
                    State::ReqRcvd | State::RepSent | State::RepRcvd => {
                        self.send(key, &Message::Rej { reason: reason::CONSUMER_DEFINED, data: &[] });
                    }
                    // The peer may not have it yet, and would find nobody to ask again.
                    State::Linger => self.send_again(key),
                    State::TimeWait | State::Closed => {}
                }
            }
        }
    }

    fn establish(&mut self, now: u64, key: Key) {
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.state = State::Established;
            self.set_timer(key, None);
            self.watch(now, key);
            self.tell(key, Event::Established);
        }
    }

    /// Enters TimeWait with an event.
    fn end(&mut self, now: u64, key: Key, status: c_int) {
        self.unwatch(key);
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.state = State::TimeWait;
            self.set_timer(key, Some(now + timer::TIMEWAIT_US));
            self.tell(key, Event::Disconnected { status });
        }
    }

    /// Closes a connection that never was one, with an event; while the application has not decided, that waits.
    fn fail(&mut self, key: Key, event: Event) {
        self.unwatch(key);
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let undecided = conn.state == State::ReqRcvd;
        conn.state = State::Closed;
        if undecided {
            conn.withdrawn = Some(event);
        } else {
            self.tell(key, event);
        }
        self.set_timer(key, None);
        self.remove_if_unowned(key);
    }

    fn tell(&mut self, key: Key, event: Event) {
        if let Some(owner) = self.conns.get(&key).and_then(|conn| conn.owner) {
            self.output.push_back(Output::Event { owner, event });
        }
    }

    fn insert(&mut self, mut conn: Conn) -> Option<Key> {
        if self.conns.len() >= CONNECTIONS_MAX {
            return None;
        }
        while self.conns.contains_key(&self.next_key) {
            self.next_key = self.next_key.wrapping_add(1);
        }
        let key = self.next_key;
        self.next_key = self.next_key.wrapping_add(1);
        // Never 0, which means that the name is not known.
        conn.id = u64::from(self.random() as u32 | 1) << 32 | u64::from(key);
        self.conns.insert(key, conn);
        Some(key)
    }

    fn remove(&mut self, key: Key) {
        self.set_timer(key, None);
        self.unwatch(key);
        if let Some(conn) = self.conns.remove(&key) {
            let remote = (conn.remote_incarnation, conn.remote_id);
            if self.by_remote.get(&remote) == Some(&key) {
                self.by_remote.remove(&remote);
            }
        }
    }

    fn remove_if_unowned(&mut self, key: Key) {
        if self.conns.get(&key).is_some_and(|conn| conn.owner.is_none() && conn.withdrawn.is_none()) {
            self.remove(key);
        }
    }

    /// The connection that a packet names as ours.
    fn find(&self, id: u64) -> Option<Key> {
        let key = id as u32;
        self.conns.get(&key).is_some_and(|conn| conn.id == id).then_some(key)
    }

    fn packet(&self, conn: &Conn, message: &Message) -> Vec<u8> {
        let header = Header { src: conn.id, dst: conn.remote_id, incarnation: self.incarnation };
        wire::write(&header, message)
    }

    /// Sends once; the answer, if any, is the peer's concern.
    fn send(&mut self, key: Key, message: &Message) {
        if let Some(conn) = self.conns.get(&key) {
            let packet = self.packet(conn, message);
            self.output.push_back(Output::Send { from: conn.local, to: conn.manager, packet });
        }
    }

    fn send_again(&mut self, key: Key) {
        if let Some(conn) = self.conns.get(&key) {
            let packet = conn.last_packet.clone();
            self.output.push_back(Output::Send { from: conn.local, to: conn.manager, packet });
        }
    }

    /// Sends, again and again until the state changes.
    fn send_until_answered(&mut self, now: u64, key: Key, message: &Message) {
        self.send(key, message);
        let Some(Output::Send { packet, .. }) = self.output.back() else { return };
        let packet = packet.clone();
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.last_packet = packet;
            conn.retry_us = timer::RETRY_FIRST_US;
            conn.give_up = now + timer::PATIENCE_US;
            conn.decide_by = now + timer::DECISION_US;
            self.set_timer(key, Some(now + timer::RETRY_FIRST_US));
        }
    }

    /// Sends, and again whenever the peer asks again, for as long as it may.
    fn send_and_linger(&mut self, now: u64, key: Key, message: &Message) {
        self.send_until_answered(now, key, message);
        self.unwatch(key);
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.state = State::Linger;
            self.set_timer(key, Some(now + timer::LINGER_US));
        }
    }

    /// SplitMix64.
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
