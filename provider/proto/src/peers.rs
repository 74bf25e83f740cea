//! Which connection belongs to whom: finding, making, merging and ending connections; answers that need none.

use crate::burst::{Piece, TxBurst};
use crate::config::limits;
use crate::connection::{Conn, ConnState};
use crate::endpoint::Endpoint;
use crate::types::*;
use crate::wire::{Frame, Frames, HEADER_BYTES, Header, Hello, PacketType};
use std::net::{IpAddr, SocketAddr};

/// A small answer outside any connection.
#[derive(Debug, Clone, Copy)]
pub struct Stray {
    /// RESET or (Control with CLOSE_ACK).
    kind: PacketType,
    /// Id to put into the header.
    dcid: u64,
    /// Where to.
    dst: SocketAddr,
}

/// Low bits of a connection id that are the index; bits 20..24 are kept for a shard number.
const INDEX_MASK: u64 = (1 << 20) - 1;
/// Strays queued at most.
const STRAYS_MAX: usize = 16;

impl Endpoint {
    /// The connection a packet's id means.
    pub(crate) fn resolve(&self, cid: u64) -> Option<u32> {
        let conn = self.conns.get((cid & INDEX_MASK) as usize)?.as_ref().filter(|c| c.cid == cid)?;
        Some(match conn.state {
            ConnState::Alias(target) => {
                let target =
                    self.conns.get((target & INDEX_MASK) as usize)?.as_ref().filter(|c| c.cid == target)?;
                target.index
            }
            _ => conn.index,
        })
    }

    /// The same, unless that connection is over.
    fn resolve_living(&self, cid: u64) -> Option<u32> {
        let index = self.resolve(cid)?;
        let conn = self.conns[index as usize].as_ref()?;
        (!matches!(conn.state, ConnState::Dead | ConnState::Alias(_))).then_some(index)
    }

    /// Binds a QP to the connection to its peer, which is made if there is none. The slot in the peer's QPN says which
    /// process of the host that is (MR-ADDR-1).
    pub(crate) fn attach(&mut self, now: Nanos, qpn: Qpn, remote: IpAddr) -> Result<(), Refused> {
        let slot = self.qps.get(qpn).ok_or(Refused::NotFound)?.attrs.dest_qpn.slot();
        let index = self.find_or_make(remote, slot)?;
        if let Some(conn) = self.conn_mut(index) {
            conn.users += 1;
            conn.connect(now);
        }
        if let Some(qp) = self.qps.get(qpn) {
            qp.tx.conn = Some(index);
        }
        self.activate(now, index);
        Ok(())
    }

    fn find_or_make(&mut self, ip: IpAddr, slot: u16) -> Result<u32, Refused> {
        let live = |c: &&Conn| {
            matches!(c.state, ConnState::Connecting | ConnState::Established)
                && !c.self_accepting
                && c.peer_slot == slot
                && c.peer_ips.contains(&ip)
        };
        // The newest one: an older one may belong to a former process on that slot.
        if let Some(conn) = self.each_conn().rev().find(live) {
            return Ok(conn.index);
        }
        self.make(ip, slot)
    }

    /// A connection that a HELLO from outside asks for: few may wait to be established, and not for ever (MR-HELLO-10).
    fn make_for_stranger(&mut self, now: Nanos, ip: IpAddr, slot: u16) -> Option<u32> {
        if self.each_conn().filter(|c| c.expires != Nanos::MAX).count() >= limits::STRANGERS_MAX {
            return None;
        }
        let index = self.make(ip, slot).ok()?;
        self.conn_mut(index)?.expires = now + limits::STRANGER_PATIENCE_NS;
        Some(index)
    }

    fn make(&mut self, ip: IpAddr, slot: u16) -> Result<u32, Refused> {
        let free = self
            .conns
            .iter()
            .position(|c| c.as_ref().is_none_or(|c| c.state == ConnState::Dead && c.users == 0));
        let index = free.unwrap_or(self.conns.len());
        if index >= limits::CONNECTIONS_MAX {
            return Err(Refused::Full);
        }
        let nonce = loop {
            let nonce = crate::random(&mut self.rng) & !((1 << 24) - 1);
            if nonce != 0 {
                break nonce;
            }
        };
        let cid = nonce | index as u64;
        let conn = Box::new(Conn::new(index as u32, cid, ip, slot, &self.config));
        if index == self.conns.len() {
            self.conns.push(Some(conn));
        } else if let Some(mut old) = self.conns[index].replace(conn) {
            self.inbound.forget(&mut old.demand);
        }
        self.stats.connections_opened += 1;
        self.inbound.set_peers(self.conns.len());
        Ok(index as u32)
    }

    /// Makes sure a QP with work has a living connection. False: there is none for it, and its work ends in error.
    pub(crate) fn ensure_conn(&mut self, now: Nanos, qpn: Qpn, sink: &mut impl Sink) -> bool {
        let Some(qp) = self.qps.get(qpn) else { return false };
        let (Some(index), Some(remote)) = (qp.tx.conn, qp.attrs.remote) else { return false };
        let accepted = qp.tx.accepted;
        let state = self.conn_mut(index).map(|c| c.state);
        if let Some(ConnState::Alias(target)) = state
            && let Some(target) = self.resolve_living(target)
        {
            self.repoint(qpn, index, target);
            return true;
        }
        if state.is_some_and(|s| !matches!(s, ConnState::Dead | ConnState::Alias(_))) {
            return true;
        }
        if accepted {
            self.await_end(now, qpn, sink);
            return false;
        }
        if let Some(conn) = self.conn_mut(index) {
            conn.users = conn.users.saturating_sub(1);
        }
        if let Some(qp) = self.qps.get(qpn) {
            qp.tx.in_round = false;
            let base = qp.tx.sq.base_msn();
            if qp.tx.outstanding_sent() {
                qp.tx.rewind(base, qp.tx.attempt);
            }
        }
        self.attach(now, qpn, remote).is_ok()
    }

    fn repoint(&mut self, qpn: Qpn, from: u32, to: u32) {
        if let Some(qp) = self.qps.get(qpn) {
            qp.tx.conn = Some(to);
            qp.tx.in_round = false;
            // What the former connection had in flight is gone with it.
            if qp.tx.outstanding_sent() {
                let base = qp.tx.sq.base_msn();
                qp.tx.rewind(base, qp.tx.attempt);
            }
        }
        if let Some(conn) = self.conn_mut(from) {
            conn.users = conn.users.saturating_sub(1);
        }
        if let Some(conn) = self.conn_mut(to) {
            conn.users += 1;
        }
    }

    /// A HELLO: learn who it is, answer, and notice when a connection becomes usable by it.
    pub(crate) fn on_hello(
        &mut self,
        now: Nanos,
        meta: &RxMeta,
        header: &Header,
        body: &[u8],
        sink: &mut impl Sink,
    ) {
        // As long as the segment it proposes: an answer of that length is then no amplification (MR-HELLO-1).
        let long_enough = |h: &Hello| HEADER_BYTES + body.len() >= usize::from(h.segment);
        let Some(hello) = Hello::parse(body).filter(long_enough) else {
            self.stats.rx_malformed += 1;
            return;
        };
        let src = meta.src.ip();
        let addressed = self.resolve_living(header.dcid);
        if header.dcid != 0 && addressed.is_none() {
            // It asks a former life of ours, or a connection that is over (MR-HELLO-3).
            self.stats.rx_unknown += 1;
            return self.stray_reset(now, meta, header);
        }
        let index = match addressed {
            Some(index) => index,
            None => match self.find_for_hello(now, src, header.src_slot, &hello) {
                Some(index) => index,
                None => return,
            },
        };
        if addressed.is_some() && hello.bound != header.dcid && hello.bound != 0 {
            // The peer is bound to another connection of ours: the two are one, if we still know that one (MR-HELLO-5).
            match self.resolve_living(hello.bound).filter(|other| *other != index) {
                Some(other) => self.merge(now, index, other, sink),
                None => self.push_stray(PacketType::Reset, hello.bound, meta, header),
            }
            return;
        }
        // One connection of the peer's belongs to one of ours; it says to which (MR-HELLO-4).
        let twin = |c: &&Conn| {
            c.index != index
                && c.peer_cid == hello.scid
                && !matches!(c.state, ConnState::Dead | ConnState::Alias(_))
        };
        let twin = self.each_conn().find(twin).map(|c| c.index);
        if let Some(twin) = twin {
            let ours = self.conn_mut(index).is_some_and(|c| c.cid == hello.bound);
            let (from, to) = if ours { (twin, index) } else { (index, twin) };
            self.merge(now, from, to, sink);
            if !ours {
                return;
            }
        }
        let config = self.config.clone();
        let Some(conn) = self.conn_mut(index) else { return };
        if conn.state == ConnState::Dead {
            return;
        }
        let restarted = conn.peer_incarnation != 0 && conn.peer_incarnation != hello.incarnation;
        if restarted {
            return;
        }
        conn.last_heard = now;
        let answer = header.dcid != 0;
        if answer && !conn.peer_ips.contains(&src) && conn.peer_ips.len() < limits::PEER_IPS_MAX {
            conn.peer_ips.push(src);
        }
        let pathless = conn.paths.is_empty();
        conn.learn(&hello, answer, &config);
        let has_paths = pathless && !conn.paths.is_empty();
        if answer && !hello.wants_answer {
            conn.first_rtt(now);
        }
        if hello.wants_answer {
            // The asking id, which need not be the one we are bound to: the peer sees that it has two (MR-HELLO-5).
            conn.hello.answer_to = Some(hello.scid);
        }
        if header.dcid != 0 {
            // The peer echoes our id: it is where it says it is.
            conn.establish(now);
        }
        let established = conn.state == ConnState::Established;
        if has_paths {
            self.steer_new(now, index, sink);
        }
        self.activate(now, index);
        if established && header.dcid != 0 {
            self.retire_predecessors(now, index, sink);
        }
    }

    /// The connection a first HELLO (no id of ours in it) belongs to.
    fn find_for_hello(&mut self, now: Nanos, src: IpAddr, slot: u16, hello: &Hello) -> Option<u32> {
        if hello.incarnation == self.config.incarnation {
            return self.accepting_end(now, src, slot, hello);
        }
        let alive = |c: &&Conn| !matches!(c.state, ConnState::Dead | ConnState::Alias(_));
        // One life, one connection, whatever address it speaks from (MR-ADDR-3).
        let known = self.each_conn().filter(alive).find(|c| c.peer_incarnation == hello.incarnation);
        if let Some(conn) = known {
            return Some(conn.index);
        }
        let expected = self.each_conn().filter(alive).find(|c| {
            c.peer_incarnation == 0 && c.peer_slot == slot && c.peer_ips.contains(&src) && !c.self_accepting
        });
        match expected {
            Some(conn) => Some(conn.index),
            None => self.make_for_stranger(now, src, slot),
        }
    }

    /// An endpoint that talks to itself holds both ends: the accepting one pairs with the id that asks (MR-ADDR-4).
    fn accepting_end(&mut self, now: Nanos, src: IpAddr, slot: u16, hello: &Hello) -> Option<u32> {
        let paired = self
            .conns
            .iter()
            .flatten()
            .find(|c| c.self_accepting && c.peer_cid == hello.scid && c.state != ConnState::Dead);
        if let Some(conn) = paired {
            return Some(conn.index);
        }
        let index = self.make_for_stranger(now, src, slot)?;
        self.conn_mut(index)?.self_accepting = true;
        Some(index)
    }

    /// `index` turned out to be `other`: its streams move there.
    fn merge(&mut self, now: Nanos, index: u32, other: u32, sink: &mut impl Sink) {
        let ip = self.conn_mut(index).map(|c| c.peer_ip);
        let Some(cid) = self.conn_mut(other).map(|c| c.cid) else { return };
        if let Some(conn) = self.conn_mut(index) {
            conn.abandon();
            conn.state = ConnState::Alias(cid);
        }
        self.settle(index);
        if let (Some(conn), Some(ip)) = (self.conn_mut(other), ip)
            && !conn.peer_ips.contains(&ip)
        {
            conn.peer_ips.push(ip);
        }
        for qpn in self.qps_on(index) {
            self.wake(now, qpn, sink);
        }
    }

    fn qps_on(&mut self, index: u32) -> Vec<Qpn> {
        self.qps.iter_mut().filter(|q| q.tx.conn == Some(index)).map(|q| q.qpn).collect()
    }

    /// The peer has proved a new life on its slot: connections to a former one are over (MR-HELLO-9).
    fn retire_predecessors(&mut self, now: Nanos, index: u32, sink: &mut impl Sink) {
        let Some(conn) = self.conns.get(index as usize).and_then(Option::as_ref) else { return };
        let (slot, ips, incarnation) = (conn.peer_slot, conn.peer_ips.clone(), conn.peer_incarnation);
        let former = |c: &&Conn| {
            c.index != index
                && c.peer_slot == slot
                && ips.contains(&c.peer_ip)
                && c.peer_incarnation != 0
                && c.peer_incarnation != incarnation
                && matches!(c.state, ConnState::Established | ConnState::Connecting)
        };
        let former: Vec<u32> = self.each_conn().filter(former).map(|c| c.index).collect();
        for old in former {
            self.kill(now, old, sink);
        }
    }

    /// The connection is over. Streams that had something accepted end in error, the others look for the peer again
    /// (MR-CLOSE-2).
    pub(crate) fn kill(&mut self, now: Nanos, index: u32, sink: &mut impl Sink) {
        let Some(conn) = self.conn_mut(index) else { return };
        conn.abandon();
        self.settle(index);
        for qpn in self.qps_on(index) {
            if let Some(qp) = self.qps.get(qpn) {
                qp.tx.in_round = false;
                if qp.tx.outstanding() {
                    self.wake(now, qpn, sink);
                }
            }
        }
    }

    /// A RESET: the peer does not know an id we used. Believed only if it names that id and comes from an address the
    /// peer is known by (MR-RESET-2).
    pub(crate) fn on_reset(&mut self, now: Nanos, meta: &RxMeta, header: &Header, sink: &mut impl Sink) {
        let src = meta.src.ip();
        let ours =
            |c: &&Conn| c.peer_cid == header.dcid && c.peer_ips.contains(&src) && c.state != ConnState::Dead;
        let Some(index) = self.each_conn().find(ours).map(|c| c.index) else { return };
        let Some(conn) = self.conn_mut(index) else { return };
        if conn.state == ConnState::Connecting {
            conn.unlearn();
        } else {
            self.kill(now, index, sink);
        }
    }

    /// Answers a packet for an unknown id with a RESET, at a bounded rate (MR-RESET-1).
    pub(crate) fn stray_reset(&mut self, now: Nanos, meta: &RxMeta, header: &Header) {
        if now >= self.strays_since.0 + 1_000_000 {
            self.strays_since = (now, 0);
        }
        if self.strays_since.1 >= limits::RESETS_PER_MS || self.strays.len() >= STRAYS_MAX {
            return;
        }
        self.strays_since.1 += 1;
        self.stats.resets_sent += 1;
        self.push_stray(PacketType::Reset, header.dcid, meta, header);
    }

    /// The peer said CLOSE: confirm it.
    pub(crate) fn answer_close(&mut self, meta: &RxMeta, header: &Header, conn: &Conn) {
        if self.strays.len() < STRAYS_MAX {
            self.push_stray(PacketType::Control, conn.peer_cid, meta, header);
        }
    }

    /// A packet for a connection that is over: a repeated CLOSE is confirmed again, data is told so (MR-CLOSE-3).
    pub(crate) fn answer_for_dead(
        &mut self,
        now: Nanos,
        meta: &RxMeta,
        header: &Header,
        conn: &Conn,
        bytes: &[u8],
    ) {
        let mut frames = Frames::new(&bytes[HEADER_BYTES..]);
        if frames.any(|f| f == Frame::Close) {
            self.answer_close(meta, header, conn);
        } else if header.kind == PacketType::Data {
            self.stray_reset(now, meta, header);
        }
    }

    /// Answers go where the sender's slot receives; the port a packet came from is path entropy only (MR-ADDR-2).
    fn push_stray(&mut self, kind: PacketType, dcid: u64, meta: &RxMeta, header: &Header) {
        let dst = SocketAddr::new(meta.src.ip(), self.config.base_port + header.src_slot);
        self.strays.push_back(Stray { kind, dcid, dst });
    }

    /// Fills `burst` with the oldest stray answer: a header, or four bytes more in answer to a CLOSE, which has them too
    /// (MR-RESET-3).
    pub(crate) fn poll_stray(&mut self, burst: &mut TxBurst) -> bool {
        let Some(stray) = self.strays.pop_front() else { return false };
        burst.clear();
        let header = Header {
            kind: stray.kind,
            flags: 0,
            path: 0,
            generation: 0,
            dcid: stray.dcid,
            psn: 0,
            src_slot: self.config.slot,
            backlog: 0,
        };
        header.write(&mut burst.bytes);
        if stray.kind == PacketType::Control {
            Frame::CloseAck.write(&mut burst.bytes);
        }
        let fits = |a: &IpAddr| a.is_ipv4() == stray.dst.is_ipv4();
        burst.plane = self.config.planes.iter().position(|x| x.addrs.iter().any(fits)).unwrap_or(0) as u8;
        burst.entropy = 0;
        burst.dst = stray.dst;
        let len = burst.bytes.len() as u32;
        burst.pieces.push(Piece::Bytes { start: 0, len });
        burst.packets.push((1, len));
        true
    }
}
