//! What packets do: each is checked against the connection it names, and one that is out of place is counted and dropped.

use std::ffi::c_int;
use std::net::SocketAddr;

use super::super::wire::{self, Connections, Header, Message, Service, Terms, WireError};
use super::timer::{PATIENCE_US, RETRY_DEFERRED_US};
use super::{Conn, Event, Key, Machine, Output, State, reason};
use crate::rdmacm::abi;

/// How a datagram came.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Arrival {
    /// The address it was sent to.
    pub local: SocketAddr,
    pub from: SocketAddr,
    /// The listener on whose port it arrived.
    pub listener: Option<u32>,
    /// GID of the local address, if the device has it.
    pub local_gid: Option<[u8; 16]>,
    /// Largest path MTU of the device.
    pub mtu: u8,
}

impl Machine {
    /// Takes a datagram.
    pub(in super::super) fn on_packet(&mut self, now: u64, arrival: &Arrival, bytes: &[u8]) {
        match wire::parse(bytes) {
            Err(WireError::Malformed) => self.dropped.malformed += 1,
            Err(WireError::Version(header)) => {
                self.answer(
                    arrival,
                    &header,
                    &Message::Rej { reason: reason::UNSUPPORTED_VERSION, data: &[] },
                );
            }
            Ok((header, message)) => self.on_message(now, arrival, &header, &message),
        }
    }

    fn on_message(&mut self, now: u64, arrival: &Arrival, header: &Header, message: &Message) {
        match message {
            Message::Req { service, gid, terms, data } => {
                self.on_req(arrival, header, service, gid, terms, data);
            }
            Message::Ping(list) => self.on_ping(arrival, header, list),
            Message::Pong(list) => self.on_pong(now, arrival, header, list),
            _ => match self.addressed(header) {
                Some(key) => self.on_conn_message(now, key, arrival, header, message),
                None => self.on_stray(arrival, header, message),
            },
        }
    }

    /// The connection that a packet is for: by our name for it, or by the peer's as long as it does not know ours.
    fn addressed(&self, header: &Header) -> Option<Key> {
        if header.dst == 0 {
            return self.by_remote.get(&(header.incarnation, header.src)).copied();
        }
        let key = self.find(header.dst)?;
        let conn = &self.conns[&key];
        // Only the first answer to a request may introduce the peer.
        let introduces = conn.remote_id == 0 && conn.state == State::ReqSent;
        let known = (conn.remote_incarnation, conn.remote_id) == (header.incarnation, header.src);
        (introduces || known).then_some(key)
    }

    fn on_req(
        &mut self,
        arrival: &Arrival,
        header: &Header,
        service: &Service,
        gid: &[u8; 16],
        terms: &Terms,
        data: &[u8],
    ) {
        if header.src == 0 || header.dst != 0 {
            self.dropped.malformed += 1;
            return;
        }
        if let Some(&key) = self.by_remote.get(&(header.incarnation, header.src)) {
            self.on_repeated_req(key);
            return;
        }
        let is_datagram = service.port_space == abi::RDMA_PS_UDP;
        let entry =
            arrival.listener.and_then(|token| self.listeners.get(&token).map(|found| (token, *found)));
        let serves = |(_, found): &(u32, super::Listener)| {
            found.port == service.port && found.port_space == service.port_space
        };
        let (Some((token, listener)), Some(local_gid)) = (entry.filter(serves), arrival.local_gid) else {
            let reason = if is_datagram { reason::SIDR_UNSUPPORTED } else { reason::INVALID_SERVICE_ID };
            self.answer(arrival, header, &Message::Rej { reason, data: &[] });
            return;
        };
        if listener.backlog >= listener.backlog_max {
            // The peer asks again; there may be room then.
            self.dropped.excess += 1;
            return;
        }
        let psn = self.random() as u32 & 0xff_ffff;
        let mtu = terms.mtu.min(arrival.mtu);
        let conn = Conn {
            state: State::ReqRcvd,
            id: 0,
            owner: None,
            is_datagram,
            passive: true,
            local: SocketAddr::new(arrival.local.ip(), service.port),
            remote: SocketAddr::new(arrival.from.ip(), service.source_port),
            local_gid,
            remote_gid: *gid,
            ours: Terms { psn, mtu, ..Terms::default() },
            theirs: Terms { mtu, ..*terms },
            data: data.to_vec(),
            manager: arrival.from,
            remote_id: header.src,
            remote_incarnation: header.incarnation,
            last_packet: Vec::new(),
            timer: None,
            retry_us: 0,
            grace_until: 0,
            give_up: 0,
            decide_by: 0,
            withdrawn: None,
        };
        let conn = Conn { local: with_scope(conn.local, &arrival.local), ..conn };
        let conn = Conn { remote: with_scope(conn.remote, &arrival.from), ..conn };
        let Some(key) = self.insert(conn) else {
            self.dropped.excess += 1;
            return;
        };
        self.by_remote.insert((header.incarnation, header.src), key);
        if let Some(listener) = self.listeners.get_mut(&token) {
            listener.backlog += 1;
        }
        self.output.push_back(Output::Request { listener: token, key });
    }

    fn on_repeated_req(&mut self, key: Key) {
        match self.conns.get(&key).map(|conn| conn.state) {
            Some(State::ReqRcvd) => self.send(key, &Message::Mra),
            Some(State::RepSent | State::Linger) => self.send_again(key),
            // Older than what the peer has said since.
            _ => self.dropped.stray += 1,
        }
    }

    fn on_conn_message(&mut self, now: u64, key: Key, arrival: &Arrival, header: &Header, message: &Message) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let state = conn.state;
        match (message, state) {
            (Message::Mra, State::ReqSent | State::RepSent) => {
                conn.give_up = now + PATIENCE_US;
                conn.retry_us = RETRY_DEFERRED_US;
                self.set_timer(key, Some(now + RETRY_DEFERRED_US));
            }
            (Message::Rep { gid, terms, data }, State::ReqSent) => {
                conn.remote_gid = *gid;
                conn.theirs = *terms;
                conn.ours.mtu = conn.ours.mtu.min(terms.mtu);
                conn.data = data.to_vec();
                conn.manager = arrival.from;
                conn.remote_id = header.src;
                conn.remote_incarnation = header.incarnation;
                self.on_response(now, key);
            }
            (Message::Rep { .. }, State::RepRcvd) => self.send(key, &Message::Mra),
            (Message::Rep { .. }, State::Established) => self.send(key, &Message::Rtu),
            (Message::Rep { .. }, State::Linger) => self.send_again(key),
            // Our DREQ is on its way and says all there is to say.
            (Message::Rep { .. }, State::DreqSent | State::TimeWait) => {}
            (Message::Rtu, State::RepSent) => self.establish(now, key),
            (Message::Rtu, State::Established | State::DreqSent | State::TimeWait) => {}
            (Message::Rej { reason, data }, _) => self.on_rej(now, key, *reason, data),
            (Message::Dreq, _) => self.on_dreq(now, key),
            (Message::Drep, State::DreqSent) => self.end(now, key, 0),
            _ => self.dropped.stray += 1,
        }
    }

    fn on_response(&mut self, now: u64, key: Key) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.is_datagram {
            conn.state = State::Closed;
            self.set_timer(key, None);
        } else {
            conn.state = State::RepRcvd;
            self.by_remote.insert((conn.remote_incarnation, conn.remote_id), key);
            self.set_timer(key, None);
            self.watch(now, key);
        }
        self.tell(key, Event::Response);
    }

    fn on_rej(&mut self, now: u64, key: Key, reason: u16, data: &[u8]) {
        let Some(conn) = self.conns.get(&key) else { return };
        let (state, is_datagram) = (conn.state, conn.is_datagram);
        let nobody = if is_datagram { reason::SIDR_UNSUPPORTED } else { reason::INVALID_SERVICE_ID };
        match state {
            State::ReqSent if reason == nobody && !self.is_refused_for_good(now, key) => {}
            State::ReqSent if is_datagram => {
                self.fail(key, Event::Unreachable { status: reason.into() });
            }
            State::ReqSent | State::ReqRcvd | State::RepSent | State::RepRcvd => {
                self.fail(key, Event::Rejected { reason, data: data.to_vec() });
            }
            // The peer forgot a connection that we believe to have.
            State::Established if reason == reason::INVALID_COMM_ID => self.end(now, key, -libc::ETIMEDOUT),
            State::DreqSent => self.end(now, key, 0),
            _ => self.dropped.stray += 1,
        }
    }

    fn on_dreq(&mut self, now: u64, key: Key) {
        let Some(conn) = self.conns.get(&key) else { return };
        let state = conn.state;
        if state != State::ReqSent && state != State::ReqRcvd {
            self.send(key, &Message::Drep);
        }
        match state {
            State::RepSent => {
                // The confirmation was lost or overtaken, but without it the peer would not disconnect.
                self.establish(now, key);
                self.end(now, key, 0);
            }
            State::RepRcvd | State::Established | State::DreqSent => self.end(now, key, 0),
            _ => self.dropped.stray += 1,
        }
    }

    /// A packet for a connection that we do not have, or no longer.
    fn on_stray(&mut self, arrival: &Arrival, header: &Header, message: &Message) {
        self.dropped.stray += 1;
        match message {
            Message::Dreq => self.answer(arrival, header, &Message::Drep),
            Message::Rep { .. } => {
                self.answer(arrival, header, &Message::Rej { reason: reason::INVALID_COMM_ID, data: &[] });
            }
            _ => {}
        }
    }

    fn on_ping(&mut self, arrival: &Arrival, header: &Header, list: &Connections) {
        let is_dead = |id: &u64| {
            let conn = self.find(*id).map(|key| &self.conns[&key]);
            !conn.is_some_and(|conn| {
                matches!(conn.state, State::RepSent | State::RepRcvd | State::Established | State::DreqSent)
                    && conn.remote_incarnation == header.incarnation
            })
        };
        let dead: Vec<u8> = list.iter().filter(is_dead).flat_map(u64::to_be_bytes).collect();
        self.answer(arrival, header, &Message::Pong(Connections(&dead)));
    }

    fn on_pong(&mut self, now: u64, arrival: &Arrival, header: &Header, list: &Connections) {
        let Some(peer) = self.peers.get_mut(&arrival.from).filter(|peer| peer.token == header.dst) else {
            self.dropped.stray += 1;
            return;
        };
        peer.unanswered = 0;
        if peer.incarnation != header.incarnation {
            self.peer_is_dead(now, arrival.from);
            return;
        }
        let dead: Vec<u64> = list.iter().collect();
        for id in dead {
            if let Some(&key) = self.by_remote.get(&(header.incarnation, id)) {
                self.lost(now, key);
            }
        }
    }

    /// Answers a packet without regard to any connection; never with more bytes than it had.
    fn answer(&mut self, arrival: &Arrival, header: &Header, message: &Message) {
        let back = Header { src: header.dst, dst: header.src, incarnation: self.incarnation };
        let packet = wire::write(&back, message);
        self.output.push_back(Output::Send { from: arrival.local, to: arrival.from, packet });
    }

    /// The network returned one of our packets: nobody listens there, or there is no way.
    ///
    /// `returned` is what the network says we sent; it counts only if it names a connection as only we could.
    pub(in super::super) fn on_undeliverable(
        &mut self,
        now: u64,
        to: SocketAddr,
        returned: &[u8],
        errno: c_int,
    ) {
        let Ok((header, message)) = wire::parse(returned) else { return };
        if header.incarnation != self.incarnation {
            return;
        }
        let refused = errno == libc::ECONNREFUSED;
        if let Message::Ping(_) = message {
            // Only a refusal is certain; a missing route may come back.
            if refused && self.peers.get(&to).is_some_and(|peer| peer.token == header.src) {
                self.peer_is_dead(now, to);
            }
            return;
        }
        let Some(key) = self.find(header.src) else { return };
        let (state, is_datagram) = (self.conns[&key].state, self.conns[&key].is_datagram);
        match state {
            State::ReqSent if refused && !self.is_refused_for_good(now, key) => {}
            State::ReqSent if refused && is_datagram => {
                self.fail(key, Event::Unreachable { status: reason::SIDR_UNSUPPORTED.into() });
            }
            State::ReqSent if refused => {
                self.fail(key, Event::Rejected { reason: reason::INVALID_SERVICE_ID, data: Vec::new() });
            }
            State::ReqSent => self.fail(key, Event::Unreachable { status: -errno }),
            State::RepSent if refused => self.fail(key, Event::Unreachable { status: -libc::ETIMEDOUT }),
            State::Established if refused => self.end(now, key, -libc::ETIMEDOUT),
            State::DreqSent if refused => self.end(now, key, 0),
            _ => {}
        }
    }
}

/// A link-local address is complete only with its interface.
fn with_scope(mut address: SocketAddr, seen: &SocketAddr) -> SocketAddr {
    if let (SocketAddr::V6(address), SocketAddr::V6(seen)) = (&mut address, seen) {
        address.set_scope_id(seen.scope_id());
    }
    address
}
