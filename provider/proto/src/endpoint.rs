//! The endpoint: all connections, queue pairs and memory regions of one process.

use crate::burst::TxBurst;
use crate::config::{Config, limits};
use crate::connection::{Conn, ConnState, completer, requester};
use crate::groups::GroupTable;
use crate::intake;
use crate::journal::Journal;
use crate::memory::Memory;
use crate::mr::MrTable;
use crate::pace::Pace;
use crate::parts::{LossRate, Parts};
use crate::path::TxFrame;
use crate::plane_status::PlaneStatus;
use crate::rate_hint::Inbound;
use crate::stats::{EndpointStats, PathStats};
use crate::steer::FlowTable;
use crate::steering::PlaneState;
use crate::tables::{QpTable, SrqTable, Timer, Timers};
use crate::types::*;
use crate::wire::{HEADER_BYTES, Header, PacketType};
use std::collections::VecDeque;

/// All protocol state of one process (one slot). Owned by the driver behind one lock.
///
/// Contract: inputs are the `post_*`, `on_datagram`, `on_timeout` and control calls; outputs are bursts, completions
/// into the [`Sink`] and `next_timeout`. After any input: call [`Endpoint::poll_burst`] until it gives `false`, then
/// [`Endpoint::next_timeout`]. One `now` per batch of inputs; it never decreases. A step that ran late feeds its
/// received datagrams before it calls `on_timeout`.
#[derive(Debug)]
pub struct Endpoint {
    pub(crate) config: Config,
    pub(crate) conns: Vec<Option<Box<Conn>>>,
    pub(crate) qps: QpTable,
    pub(crate) srqs: SrqTable,
    pub(crate) mrs: MrTable,
    pub(crate) timers: Timers,
    pub(crate) active: VecDeque<u32>,
    datagrams_first: bool,
    /// UD QPs with something to send, in turn.
    pub(crate) datagrams: VecDeque<u16>,
    /// Raw packet QPs with something to send, in turn; their rules and scratch space.
    pub(crate) raw: VecDeque<u16>,
    pub(crate) flows: FlowTable,
    /// Multicast groups and the QPs attached to them.
    pub(crate) groups: GroupTable,
    pub(crate) frame: Vec<u8>,
    pub(crate) targets: Vec<Qpn>,
    /// Small answers that need no connection: RESET and CLOSE_ACK.
    pub(crate) strays: VecDeque<crate::peers::Stray>,
    pub(crate) strays_since: (Nanos, u32),
    pub(crate) acked: Vec<TxFrame>,
    pub(crate) unsent: Vec<TxFrame>,
    pub(crate) woken: Vec<Qpn>,
    pub(crate) stats: EndpointStats,
    pub(crate) path_stats: Vec<PathStats>,
    pub(crate) pace: Pace,
    pub(crate) inbound: Inbound,
    pub(crate) loss: LossRate,
    /// Which planes and ports are to be used.
    pub(crate) planes: Vec<PlaneState>,
    pub(crate) plane_status: PlaneStatus,
    /// What has happened to them and to paths. Public: drivers read it.
    pub journal: Journal,
    pub(crate) senders: u32,
    pub(crate) senders_at: Nanos,
    in_flight_bytes: u64,
    pub(crate) rng: u64,
    pub(crate) next_life: u32,
}

/// Borrows everything but the connections: `parts!(endpoint, now, sink)`.
macro_rules! parts {
    ($self:ident, $now:expr, $sink:expr) => {
        Parts {
            now: $now,
            config: &$self.config,
            qps: &mut $self.qps,
            srqs: &mut $self.srqs,
            mrs: &mut $self.mrs,
            timers: &mut $self.timers,
            active: &mut $self.active,
            acked: &mut $self.acked,
            stats: &mut $self.stats,
            path_stats: &mut $self.path_stats,
            pace: &mut $self.pace,
            inbound: &mut $self.inbound,
            loss: &mut $self.loss,
            senders: $self.senders,
            planes: &$self.planes,
            plane_status: $self.plane_status,
            journal: &mut $self.journal,
            woken: &mut $self.woken,
            sink: $sink,
        }
    };
}

pub(crate) use parts;

impl Endpoint {
    /// A fresh endpoint.
    pub fn new(config: Config) -> Self {
        let slots = config.planes.len() * usize::from(config.paths_per_plane);
        let mut rng = config.seed;
        Endpoint {
            mrs: MrTable::new(crate::random(&mut rng)),
            next_life: 1,
            conns: Vec::new(),
            qps: QpTable::default(),
            srqs: SrqTable::default(),
            timers: Timers::default(),
            active: VecDeque::new(),
            datagrams_first: false,
            datagrams: VecDeque::new(),
            raw: VecDeque::new(),
            flows: FlowTable::default(),
            groups: GroupTable::default(),
            frame: Vec::new(),
            targets: Vec::new(),
            strays: VecDeque::new(),
            strays_since: (0, 0),
            acked: Vec::new(),
            unsent: Vec::new(),
            woken: Vec::new(),
            stats: EndpointStats::default(),
            path_stats: vec![PathStats::default(); slots],
            pace: Pace::new(&config.planes, &config.tuning),
            inbound: Inbound::new(&config.planes, config.tuning.host_slack_ns),
            loss: LossRate::default(),
            planes: vec![PlaneState::default(); config.planes.len()],
            plane_status: PlaneStatus::default(),
            journal: Journal::default(),
            senders: 0,
            senders_at: 0,
            in_flight_bytes: 0,
            rng,
            config,
        }
    }
    /// A received datagram.
    pub fn on_datagram(
        &mut self,
        now: Nanos,
        meta: &RxMeta,
        bytes: &[u8],
        mem: &mut impl Memory,
        sink: &mut impl Sink,
    ) {
        let Some(header) = Header::parse(bytes) else {
            self.stats.rx_malformed += 1;
            return;
        };
        // Only datagrams are for many (MR-MC-6).
        if meta.dst_ip.is_multicast() && header.kind != PacketType::Datagram {
            self.stats.rx_malformed += 1;
            return;
        }
        match header.kind {
            PacketType::Hello => return self.on_hello(now, meta, &header, &bytes[HEADER_BYTES..], sink),
            PacketType::Reset => return self.on_reset(now, meta, &header, sink),
            PacketType::Datagram => return self.on_ud(meta, &header, &bytes[HEADER_BYTES..], mem, sink),
            PacketType::Data | PacketType::Control => {}
        }
        // Whoever does not know one of our ids gets nothing but a Reset; who does need not show an address (MR-ADDR-6).
        let Some(index) = self.resolve(header.dcid) else {
            self.stats.rx_unknown += 1;
            return self.stray_reset(now, meta, &header);
        };
        self.count_senders(now);
        self.count_demand(now);
        let Some(mut conn) = self.conns[index as usize].take() else { return };
        if conn.state == ConnState::Dead {
            self.answer_for_dead(now, meta, &header, &conn, bytes);
            return self.put(conn);
        }
        let mut p = parts!(self, now, sink);
        let closed = intake::take_packet(&mut p, &mut conn, meta, &header, bytes, mem);
        // The poll that follows arms its timer as well, once for all the packets of a step.
        p.activate(&mut conn);
        if closed {
            self.answer_close(meta, &header, &conn);
            let index = conn.index;
            self.put(conn);
            self.kill(now, index, sink);
        } else {
            self.put(conn);
        }
        while let Some(qpn) = self.woken.pop() {
            self.wake(now, qpn, sink);
        }
    }

    /// Runs what is due. Call it when `next_timeout` has passed, after the received datagrams.
    pub fn on_timeout(&mut self, now: Nanos, mem: &mut impl Memory, sink: &mut impl Sink) {
        let _ = mem;
        while let Some((at, timer)) = self.timers.pop_due(now) {
            match timer {
                Timer::Conn(index) => self.on_conn_timer(now, at, index, sink),
                Timer::Qp(index) => self.on_qp_timer(now, at, index, sink),
            }
        }
    }

    fn on_conn_timer(&mut self, now: Nanos, at: Nanos, index: u32, sink: &mut impl Sink) {
        let Some(mut conn) = self.conns.get_mut(index as usize).and_then(Option::take) else { return };
        if conn.timer_at != at {
            return self.put(conn);
        }
        conn.timer_at = Nanos::MAX;
        if conn.usable() && conn.paths.iter().any(|x| x.pto_count >= limits::PTO_HOPELESS) {
            // Nobody's work would end otherwise, and probes would go on for ever (MR-LOSS-7).
            let silent = conn.last_heard + limits::DEAD_AFTER_NS < now;
            let wanted = self.qps.iter_mut().any(|q| q.tx.conn == Some(index) && q.tx.outstanding());
            if silent && !wanted {
                self.put(conn);
                return self.kill(now, index, sink);
            }
        }
        if conn.expires <= now {
            conn.expires = Nanos::MAX;
            if conn.users == 0 && conn.state == ConnState::Connecting {
                self.put(conn);
                return self.kill(now, index, sink);
            }
        }
        let mut p = parts!(self, now, sink);
        if conn.close_at <= now {
            conn.close_due = true;
            conn.close_at = now + limits::CLOSE_EVERY_NS;
            conn.untell_acks();
        }
        if conn.state == ConnState::Connecting && conn.hello.tries > 10 {
            let wanted = p.qps.iter_mut().any(|q| q.tx.conn == Some(index) && q.tx.outstanding());
            if !wanted {
                // Nobody waits for the peer: the next post looks for it again (MR-HELLO-2).
                conn.hello.due = None;
            }
        }
        if conn.usable() {
            for i in 0..conn.paths.len() {
                if completer::gap_at(&conn.paths[i]) <= now {
                    completer::find_losses(&mut p, &mut conn, i);
                }
            }
            completer::on_silence(&mut p, &mut conn);
        }
        // Not armed here: what is due now is done by `poll_burst`, which arms for what comes after.
        p.activate(&mut conn);
        self.put(conn);
    }

    fn on_qp_timer(&mut self, now: Nanos, at: Nanos, index: u16, sink: &mut impl Sink) {
        match self.qps.armed(index) {
            Some(armed) if *armed == at => *armed = Nanos::MAX,
            _ => return,
        }
        let Some(qp) = self.qps.at(index).filter(|q| q.tx.outstanding()) else { return };
        let Some(conn) = qp.tx.conn else { return };
        let Some(mut conn) = self.conns[conn as usize].take() else { return };
        let mut p = parts!(self, now, sink);
        let Some(qp) = p.qps.at(index) else { return self.put(conn) };
        let not_ready = qp.tx.not_ready_tries > 0;
        // While data waits for a window its clock runs from the peer's last life sign: behind a dead peer all end together.
        if conn.usable() && !qp.tx.outstanding_sent() && !not_ready {
            qp.tx.stalled_since = qp.tx.stalled_since.max(conn.last_heard);
        }
        // Its patience is with the peer, not with one message: news of any stream counts (MR-LOSS-6).
        let heard = if not_ready { 0 } else { conn.last_progress };
        // Time in which this process did not run is nobody's silence: a timer that comes late moves the origin.
        let since = (qp.tx.stalled_since.max(heard) + (now - at)).min(now);
        qp.tx.stalled_since = since;
        let waiting_reads = qp.tx.outstanding_reads > 0;
        // A peer that shows life may take its time with an answer, but not for ever.
        let alive = waiting_reads && qp.patience_ns().is_some_and(|p| conn.last_heard + p / 2 > now);
        let grace = if alive { 4 } else { 1 };
        if let Some(patience) = qp.patience_ns() {
            if qp.init.qp_type == QpType::Uc {
                if !conn.usable() && now >= qp.tx.stalled_since + patience {
                    p.drop_sends(index);
                    return self.put(conn);
                }
            } else if now >= since + grace * patience && matches!(qp.state, QpState::Rts | QpState::Sqd) {
                let msn = qp.tx.sq.base_msn();
                p.fail_local(&mut conn, index, msn, WcStatus::RetryExcErr);
                return self.put(conn);
            }
            conn.ping_due |= waiting_reads && conn.usable() && conn.last_heard + patience / 4 <= now;
        }
        conn.enqueue(qp);
        p.arm_qp(index);
        p.activate(&mut conn);
        self.put(conn);
    }

    /// When `on_timeout` wants to be called next.
    pub fn next_timeout(&mut self) -> Option<Nanos> {
        if self.in_flight_bytes == 0 {
            self.drop_stale_timers();
        }
        [self.timers.next(), self.pace.next_at()].into_iter().flatten().min()
    }
    /// Deadlines stay in the heap when what they were for is done. Nothing is in flight: find out which of the nearest
    /// ones still mean something, so that an idle endpoint sleeps for good.
    fn drop_stale_timers(&mut self) {
        while let Some((at, timer)) = self.timers.peek() {
            match timer {
                Timer::Conn(index) => {
                    let conn = self.conns.get_mut(index as usize).and_then(Option::as_mut);
                    let Some(conn) = conn.filter(|c| c.timer_at == at) else {
                        self.timers.pop_due(at);
                        continue;
                    };
                    let due = conn.deadline(&self.config.tuning);
                    if due <= at {
                        return;
                    }
                    conn.timer_at = due;
                    self.timers.pop_due(at);
                    if due != Nanos::MAX {
                        self.timers.push(due, timer);
                    }
                }
                Timer::Qp(index) => {
                    let wanted = self.qps.at(index).is_some_and(|q| q.tx.outstanding());
                    match self.qps.armed(index) {
                        Some(armed) if *armed == at && wanted => return,
                        Some(armed) if *armed == at => *armed = Nanos::MAX,
                        _ => {}
                    }
                    self.timers.pop_due(at);
                }
            }
        }
    }

    /// Fills `burst` with packets for one path; `false` if there is nothing to send now. Local errors found while
    /// gathering (bad lkey) complete into `sink`.
    pub fn poll_burst(&mut self, now: Nanos, burst: &mut TxBurst, sink: &mut impl Sink) -> bool {
        // Datagrams and connections take turns: neither starves the other.
        self.datagrams_first = !self.datagrams_first;
        if self.poll_stray(burst) || self.datagrams_first && self.poll_datagrams(now, burst, sink) {
            return true;
        }
        while let Some(index) = self.next_active(now) {
            let Some(mut conn) = self.conns.get_mut(index as usize).and_then(Option::take) else { continue };
            let mut p = parts!(self, now, sink);
            let filled = requester::fill(&mut p, &mut conn, burst);
            conn.active = filled;
            p.arm_conn(&mut conn);
            if filled {
                // The next stream and the next connection have their turn before this one again.
                if conn.round.len() > 1 {
                    conn.round.rotate_left(1);
                }
                self.active.push_back(index);
            }
            self.put(conn);
            if filled {
                return true;
            }
        }
        self.poll_datagrams(now, burst, sink)
    }
    /// The next connection that may have something to send: one that was active, or one whose link has become free.
    fn next_active(&mut self, now: Nanos) -> Option<u32> {
        if let Some(index) = self.active.pop_front() {
            return Some(index);
        }
        let index = self.pace.next_waiting(now)?;
        if let Some(conn) = self.conn_mut(index) {
            conn.waits_for_link = false;
        }
        Some(index)
    }
    /// The driver could not send packets `from..` of the burst just polled (EAGAIN): they burn no numbers and come
    /// again. Call it before the next `poll_burst`. Gives the number of frames taken back.
    pub fn unsend(&mut self, burst: &TxBurst, from: usize) -> u32 {
        let mut frames = 0;
        let Some((index, path)) = burst.origin else { return 0 };
        let Some(conn) = self.conns.get_mut(index as usize).and_then(Option::as_mut) else { return 0 };
        conn.untell_acks();
        if path == requester::NO_PATH {
            return 0;
        }
        for _ in from..burst.packets.len() {
            let Some(tx) = conn.paths.get_mut(usize::from(path)) else { break };
            self.unsent.clear();
            conn.in_flight_bytes -= u32::from(tx.pop_packet(&mut self.unsent));
            frames += self.unsent.len() as u32;
            for frame in self.unsent.drain(..).rev() {
                conn.retransmits.push_front(crate::connection::Retransmit { frame, path, left: false });
            }
        }
        self.settle(index);
        frames
    }
    /// The driver got EFAULT for the burst just polled: nothing was sent. Packets come again one by one; the WQE of
    /// a single faulting packet ends with LOC_PROT_ERR.
    pub fn fault(&mut self, now: Nanos, burst: &TxBurst, sink: &mut impl Sink) {
        let frames = self.unsend(burst, 0);
        let Some((index, _)) = burst.origin else { return };
        let Some(mut conn) = self.conns.get_mut(index as usize).and_then(Option::take) else { return };
        if frames > 1 {
            conn.singly = frames;
        } else if let Some(again) = conn.retransmits.front().copied() {
            let mut p = parts!(self, now, sink);
            requester::fault(&mut p, &mut conn, &again.frame);
        }
        self.put(conn);
    }
    /// The rate of a plane's link, bits per second both ways, is now this (0: not known). Known rates pace what is sent.
    pub fn set_plane_rate(&mut self, plane: u8, bps: u64) {
        self.pace.set_rate(plane, bps);
    }
    /// What may come in through all planes together, bits per second (0: not known, no rate hints are given): our part of
    /// the host's links, lowered by what the driver knows better, such as how fast its socket is drained.
    pub fn set_inbound_capacity(&mut self, bps: u64) {
        self.inbound.set_capacity(bps);
    }
    /// Begins an orderly end: CLOSE with the final acknowledgement state to every peer (MR-CLOSE-1).
    pub fn close(&mut self, now: Nanos) {
        for index in 0..self.conns.len() as u32 {
            let Some(conn) = self.conn_mut(index) else { continue };
            match conn.state {
                ConnState::Established => {
                    conn.state = ConnState::Closing;
                    conn.close_due = true;
                    conn.close_at = now + limits::CLOSE_EVERY_NS;
                    conn.untell_acks();
                }
                ConnState::Connecting => conn.abandon(),
                _ => {}
            }
            self.settle(index);
            self.activate(now, index);
        }
    }
    /// Every peer has confirmed the CLOSE (or there is none).
    pub fn closed(&self) -> bool {
        !self.each_conn().any(|c| c.state == ConnState::Closing)
    }
    /// Acknowledgements wait for a packet to ride on; `poll_burst` after this sends them at once.
    pub fn flush_acks(&mut self) {
        for index in 0..self.conns.len() as u32 {
            self.flush_acks_of(0, index);
        }
    }
    /// Bytes sent that no acknowledgement has covered. While there are any, something of a peer's is on its way, and
    /// a driver may let small posts wait for it and go together.
    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes
    }
    /// Counters of the endpoint.
    pub fn stats(&self) -> EndpointStats {
        let alive = |c: &&Conn| !matches!(c.state, ConnState::Dead | ConnState::Alias(_));
        EndpointStats {
            connections: self.each_conn().filter(alive).count() as u64,
            transport_bytes: self.each_conn().filter(alive).map(|c| c.bytes() as u64).sum(),
            ..self.stats
        }
    }
    /// Counters per path slot (plane-major: plane * paths_per_plane + path).
    pub fn path_stats(&self, out: &mut Vec<PathStats>) {
        out.clear();
        out.extend_from_slice(&self.path_stats);
        for conn in self.each_conn() {
            for (i, path) in conn.paths.iter().enumerate() {
                let per_plane = usize::from(self.config.paths_per_plane);
                let planes = (conn.paths.len() / per_plane).max(1);
                let slot = usize::from(path.plane) * per_plane + i / planes;
                if let Some(s) = out.get_mut(slot) {
                    s.srtt_ns = path.rtt.srtt_ns;
                    s.cwnd_packets = u64::from(path.congestion.window());
                }
            }
        }
    }

    pub(crate) fn each_conn(&self) -> impl DoubleEndedIterator<Item = &Conn> {
        self.conns.iter().flatten().map(Box::as_ref)
    }
    pub(crate) fn conn_mut(&mut self, index: u32) -> Option<&mut Conn> {
        self.conns.get_mut(index as usize)?.as_deref_mut()
    }
    pub(crate) fn put(&mut self, conn: Box<Conn>) {
        let index = conn.index;
        self.conns[index as usize] = Some(conn);
        self.settle(index);
    }
    /// Brings the total of bytes in flight up to date with one connection's.
    pub(crate) fn settle(&mut self, index: u32) {
        if let Some(conn) = self.conns.get_mut(index as usize).and_then(Option::as_mut) {
            self.in_flight_bytes += u64::from(conn.in_flight_bytes);
            self.in_flight_bytes -= u64::from(conn.settled_bytes);
            conn.settled_bytes = conn.in_flight_bytes;
        }
    }
    pub(crate) fn activate(&mut self, now: Nanos, index: u32) {
        let _ = now;
        if let Some(conn) = self.conns.get_mut(index as usize).and_then(Option::as_mut) {
            if !conn.active {
                conn.active = true;
                self.active.push_back(index);
            }
            let at = conn.deadline(&self.config.tuning);
            if at < conn.timer_at {
                conn.timer_at = at;
                self.timers.push(at, Timer::Conn(index));
            }
        }
    }
    pub(crate) fn flush_acks_of(&mut self, now: Nanos, index: u32) {
        let Some(conn) = self.conn_mut(index) else { return };
        let owes = conn.ack.deadline.is_some()
            || conn.rx_paths.iter().any(|r| r.untold > 0)
            || !conn.refusals.is_empty();
        if owes {
            conn.ack.now = true;
            self.activate(now, index);
        }
    }
    /// Posted work looks for its connection and gets into its round.
    pub(crate) fn wake(&mut self, now: Nanos, qpn: Qpn, sink: &mut impl Sink) {
        if !self.ensure_conn(now, qpn, sink) {
            return;
        }
        let Some(index) = self.qps.get(qpn).and_then(|q| q.tx.conn) else { return };
        let Some(mut conn) = self.conns[index as usize].take() else { return };
        conn.connect(now);
        if let Some(qp) = self.qps.get(qpn) {
            conn.enqueue(qp);
        }
        let mut p = parts!(self, now, sink);
        p.arm_qp(qpn.index() as u16);
        p.activate(&mut conn);
        p.arm_conn(&mut conn);
        self.put(conn);
    }
    /// Whoever took the first part of this stream is gone, and nobody else may take the rest (MR-CLOSE-2). What is
    /// outstanding ends with RETRY_EXC_ERR when its own retries are over, not before: a program that counts its
    /// completions may be content with those that came with the farewell. Without a timeout it ends now.
    pub(crate) fn await_end(&mut self, now: Nanos, qpn: Qpn, sink: &mut impl Sink) {
        let Some(qp) = self.qps.get(qpn).filter(|q| q.tx.outstanding()) else { return };
        let (Some(conn), msn, index) = (qp.tx.conn, qp.tx.sq.base_msn(), qpn.index() as u16) else { return };
        if qp.patience_ns().is_some() {
            return parts!(self, now, sink).arm_qp(index);
        }
        let Some(mut conn) = self.conns[conn as usize].take() else { return };
        let mut p = parts!(self, now, sink);
        p.fail_local(&mut conn, index, msn, WcStatus::RetryExcErr);
        self.put(conn);
    }
    /// Who of the senders has fallen silent leaves its share to the others.
    fn count_demand(&mut self, now: Nanos) {
        if self.inbound.is_due(now) {
            for conn in self.conns.iter_mut().flatten() {
                self.inbound.expire(now, &mut conn.demand);
            }
        }
    }
    fn count_senders(&mut self, now: Nanos) {
        if now < self.senders_at + 1_000_000 {
            return;
        }
        self.senders_at = now;
        let active = |c: &&Conn| c.last_data + limits::SENDER_ACTIVE_NS > now && c.last_data > 0;
        self.senders = self.each_conn().filter(active).count() as u32;
    }
}
