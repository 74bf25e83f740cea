//! The endpoint: all connections, queue pairs and memory regions of one process.

use crate::burst::TxBurst;
use crate::config::{Config, limits};
use crate::connection::{Conn, ConnState, completer, requester, responder, response};
use crate::memory::Memory;
use crate::mr::MrTable;
use crate::parts::{self, Parts};
use crate::path::TxFrame;
use crate::path::rx_window::Arrival;
use crate::qp::{Qp, RecvQueue, Srq};
use crate::stats::{EndpointStats, PathStats};
use crate::tables::{QpTable, SrqTable, Timer, Timers};
use crate::types::*;
use crate::wire::{self, Frame, Frames, HEADER_BYTES, Header, PacketType};
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
    srqs: SrqTable,
    mrs: MrTable,
    pub(crate) timers: Timers,
    pub(crate) active: VecDeque<u32>,
    /// Small answers that need no connection: RESET and CLOSE_ACK.
    pub(crate) strays: VecDeque<crate::peers::Stray>,
    pub(crate) strays_since: (Nanos, u32),
    acked: Vec<TxFrame>,
    unsent: Vec<TxFrame>,
    pub(crate) stats: EndpointStats,
    path_stats: Vec<PathStats>,
    senders: u32,
    senders_at: Nanos,
    pub(crate) rng: u64,
    pub(crate) next_life: u32,
}

/// Borrows everything but the connections.
macro_rules! parts {
    ($self:ident, $now:expr, $sink:expr) => {
        Parts {
            now: $now,
            config: &$self.config,
            qps: &mut $self.qps,
            srqs: &mut $self.srqs,
            mrs: &$self.mrs,
            timers: &mut $self.timers,
            active: &mut $self.active,
            acked: &mut $self.acked,
            stats: &mut $self.stats,
            path_stats: &mut $self.path_stats,
            senders: $self.senders,
            faults: 0,
            sink: $sink,
        }
    };
}

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
            strays: VecDeque::new(),
            strays_since: (0, 0),
            acked: Vec::new(),
            unsent: Vec::new(),
            stats: EndpointStats::default(),
            path_stats: vec![PathStats::default(); slots],
            senders: 0,
            senders_at: 0,
            rng,
            config,
        }
    }
    /// Registers `len` bytes at `va`, reachable as `iova..iova + len`; gives the key (lkey == rkey), unpredictable
    /// and not soon reused.
    pub fn register_mr(
        &mut self,
        pd: u32,
        va: u64,
        iova: u64,
        len: u64,
        access: u32,
    ) -> Result<u32, Refused> {
        self.mrs.add(pd, va, iova, len, access)
    }
    /// Kills a key; when it returns no byte passes any more.
    pub fn deregister_mr(&mut self, key: u32) -> Result<(), Refused> {
        self.mrs.remove(key)
    }
    /// Makes a shared receive queue.
    pub fn create_srq(&mut self, pd: u32, max_wr: u32) -> Result<SrqId, Refused> {
        Ok(self.srqs.insert(Srq { pd, max_wr, limit: 0, users: 0, queue: RecvQueue::default() }))
    }
    /// Changes depth and limit (0 disarms) of an SRQ.
    pub fn modify_srq(&mut self, srq: SrqId, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), Refused> {
        let srq = self.srqs.get_mut(srq).ok_or(Refused::NotFound)?;
        if max_wr.is_some_and(|m| (m as usize) < srq.queue.len()) {
            return Err(Refused::Invalid);
        }
        let depth = max_wr.unwrap_or(srq.max_wr);
        if limit.is_some_and(|l| l > depth) {
            return Err(Refused::Invalid);
        }
        srq.max_wr = depth;
        srq.limit = limit.unwrap_or(srq.limit);
        Ok(())
    }
    /// The armed limit of an SRQ (0: none).
    pub fn srq_limit(&self, srq: SrqId) -> Result<u32, Refused> {
        self.srqs.get(srq).map(|s| s.limit).ok_or(Refused::NotFound)
    }
    /// Destroys an SRQ that no QP uses (else Busy).
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), Refused> {
        self.srqs.remove(srq)
    }
    /// Makes a QP in RESET.
    pub fn create_qp(&mut self, init: &QpInit) -> Result<Qpn, Refused> {
        if init.qp_type != QpType::Rc {
            return Err(Refused::Unsupported);
        }
        if let Some(id) = init.srq {
            self.srqs.get_mut(id).ok_or(Refused::NotFound)?.users += 1;
        }
        let index = self.qps.claim().ok_or(Refused::Full)?;
        let qpn = Qpn::new(self.config.slot, index);
        self.qps.insert(index, Qp::new(qpn, *init));
        Ok(qpn)
    }
    /// Current state (the core moves a QP to ERR, SQE or from SQD-draining by itself).
    pub fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.qps.peek(qpn).map(|q| q.state)
    }
    /// Changes attributes and state. Flushes go to `sink`.
    pub fn modify_qp(
        &mut self,
        now: Nanos,
        qpn: Qpn,
        change: &QpModify,
        sink: &mut impl Sink,
    ) -> Result<(), Refused> {
        let qp = self.qps.get(qpn).ok_or(Refused::NotFound)?;
        let was = qp.state;
        let to = change.state.unwrap_or(was);
        let a = &mut qp.attrs;
        a.access = change.access.unwrap_or(a.access);
        a.dest_qpn = change.dest_qpn.unwrap_or(a.dest_qpn);
        a.remote = change.remote.or(a.remote);
        a.timeout = change.timeout.unwrap_or(a.timeout);
        a.retry_cnt = change.retry_cnt.unwrap_or(a.retry_cnt);
        a.rnr_retry = change.rnr_retry.unwrap_or(a.rnr_retry);
        a.min_rnr_timer = change.min_rnr_timer.unwrap_or(a.min_rnr_timer);
        a.max_rd_atomic = change.max_rd_atomic.unwrap_or(a.max_rd_atomic);
        a.max_dest_rd_atomic = change.max_dest_rd_atomic.unwrap_or(a.max_dest_rd_atomic);
        match to {
            QpState::Reset => self.reset_qp(now, qpn),
            QpState::Err => {
                let mut p = parts!(self, now, sink);
                p.enter_error(qpn.index() as u16);
            }
            QpState::Rtr if was == QpState::Init => {
                let remote = self.qps.get(qpn).and_then(|q| q.attrs.remote).ok_or(Refused::Invalid)?;
                self.attach(now, qpn, remote)?;
                self.set_state(qpn, to);
            }
            QpState::Rts if was == QpState::Rtr => {
                let life = self.next_life;
                self.next_life = self.next_life.wrapping_add(1);
                if let Some(qp) = self.qps.get(qpn) {
                    qp.tx.life = life;
                }
                self.set_state(qpn, to);
            }
            QpState::Rts => {
                if let Some(qp) = self.qps.get(qpn) {
                    qp.tx.drained = false;
                }
                self.set_state(qpn, to);
                self.wake(now, qpn, sink);
            }
            QpState::Sqd => {
                self.set_state(qpn, to);
                let Some(qp) = self.qps.get(qpn) else { return Ok(()) };
                if !qp.tx.outstanding_sent() && !std::mem::replace(&mut qp.tx.drained, true) {
                    sink.event(Event::SqDrained(qpn));
                }
            }
            _ => self.set_state(qpn, to),
        }
        Ok(())
    }

    fn set_state(&mut self, qpn: Qpn, state: QpState) {
        if let Some(qp) = self.qps.get(qpn) {
            qp.state = state;
        }
    }

    /// RESET: both streams end, what is queued is dropped without completions.
    fn reset_qp(&mut self, now: Nanos, qpn: Qpn) {
        let Some(qp) = self.qps.get(qpn) else { return };
        let conn = qp.tx.conn.take();
        qp.state = QpState::Reset;
        let unanswered = qp.rx.jobs.front().map(|j| (j.msn, j.attempt));
        let (rx_conn, life, src) = (qp.rx.conn, qp.rx.life, qp.attrs.dest_qpn);
        qp.tx = Default::default();
        qp.rx.reset();
        qp.rq = RecvQueue::default();
        // Whoever waits for the answer of a Read must hear that none will come.
        if let (Some((msn, attempt)), Some(rx_conn), Some(life)) = (unanswered, rx_conn, life)
            && let Some(conn) = self.conn_mut(rx_conn)
        {
            let refuse = wire::Refuse {
                code: wire::RefuseCode::NotReady,
                attempt,
                qpn: src,
                life,
                number: msn as u32,
                timer: 0,
            };
            responder::refuse(conn, qpn, refuse);
        }
        for index in [conn, rx_conn].into_iter().flatten() {
            self.flush_acks_of(now, index);
        }
        if let Some(conn) = conn.and_then(|i| self.conn_mut(i)) {
            conn.users = conn.users.saturating_sub(1);
        }
    }

    /// Destroys a QP; nothing of it completes afterwards. Owed acknowledgements leave with the next bursts.
    pub fn destroy_qp(&mut self, now: Nanos, qpn: Qpn) -> Result<(), Refused> {
        self.qps.get(qpn).ok_or(Refused::NotFound)?;
        self.reset_qp(now, qpn);
        let qp = self.qps.remove(qpn).ok_or(Refused::NotFound)?;
        if let Some(srq) = qp.init.srq.and_then(|s| self.srqs.get_mut(s)) {
            srq.users -= 1;
        }
        Ok(())
    }
    /// Takes posted sends over; the batch is emptied. The caller guarantees the queue's depth.
    pub fn post_sends(&mut self, now: Nanos, qpn: Qpn, batch: &mut SendBatch, sink: &mut impl Sink) {
        let Some(qp) = self.qps.get(qpn) else {
            batch.wqes.clear();
            batch.sges.clear();
            batch.inline.clear();
            return;
        };
        if qp.tx.sq.is_empty() {
            qp.tx.stalled_since = now;
        }
        let mut recv_index = qp.tx.post_recv_index;
        qp.tx.sq.push_batch(batch, &mut recv_index);
        qp.tx.post_recv_index = recv_index;
        if qp.state == QpState::Err {
            return parts::flush(qp, sink);
        }
        self.wake(now, qpn, sink);
    }
    /// Takes posted receives over; the batch is emptied.
    pub fn post_recvs(&mut self, now: Nanos, qpn: Qpn, batch: &mut RecvBatch, sink: &mut impl Sink) {
        let Some(qp) = self.qps.get(qpn) else {
            batch.wqes.clear();
            batch.sges.clear();
            return;
        };
        qp.rq.push_batch(batch);
        if qp.state == QpState::Err {
            return parts::flush(qp, sink);
        }
        // A sender that was refused, or has used up what it was told, waits for this.
        let starving = qp.rx.starved || qp.rx.told_limit == qp.rq.base();
        let conn = qp.rx.conn.filter(|_| qp.rx.life.is_some() && starving);
        if let Some(mut conn) = conn.and_then(|i| self.conns.get_mut(i as usize)?.take()) {
            if let Some(qp) = self.qps.get(qpn) {
                qp.rx.starved = false;
                conn.enqueue_credit(qp);
                conn.ack.now = true;
            }
            let mut p = parts!(self, now, sink);
            p.activate(&mut conn);
            self.put(conn);
        }
    }
    /// Takes receives posted to an SRQ over; the batch is emptied.
    pub fn post_srq_recvs(&mut self, now: Nanos, srq: SrqId, batch: &mut RecvBatch, sink: &mut impl Sink) {
        let _ = (now, sink);
        match self.srqs.get_mut(srq) {
            Some(srq) => srq.queue.push_batch(batch),
            None => {
                batch.wqes.clear();
                batch.sges.clear();
            }
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
        match header.kind {
            PacketType::Hello => return self.on_hello(now, meta, &header, &bytes[HEADER_BYTES..], sink),
            PacketType::Reset => return self.on_reset(now, meta, &header, sink),
            PacketType::Data | PacketType::Control => {}
        }
        let Some(index) = self.resolve(header.dcid) else {
            self.stats.rx_unknown += 1;
            return self.stray_reset(now, meta, &header);
        };
        self.count_senders(now);
        let Some(mut conn) = self.conns[index as usize].take() else { return };
        if conn.state == ConnState::Dead {
            self.answer_for_dead(now, meta, &header, &conn, bytes);
            return self.put(conn);
        }
        let mut p = parts!(self, now, sink);
        let closed = take_packet(&mut p, &mut conn, meta, &header, bytes, mem);
        p.activate(&mut conn);
        p.arm_conn(&mut conn);
        if closed {
            self.answer_close(meta, &header, &conn);
            let index = conn.index;
            self.put(conn);
            self.kill(now, index, sink);
        } else {
            self.put(conn);
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
        if conn.usable() && conn.paths.iter().any(|x| x.pto_count >= limits::PTO_BACKOFF_MAX) {
            let silent = conn.last_heard + limits::DEAD_AFTER_NS < now;
            let wanted = self.qps.iter_mut().any(|q| q.tx.conn == Some(index) && q.tx.outstanding());
            if silent && !wanted {
                self.put(conn);
                return self.kill(now, index, sink);
            }
        }
        let mut p = parts!(self, now, sink);
        if conn.close_at <= now {
            conn.close_due = true;
            conn.close_at = now + limits::CLOSE_EVERY_NS;
        }
        if conn.state == ConnState::Connecting && conn.hello.tries > 10 {
            let wanted = p.qps.iter_mut().any(|q| q.tx.conn == Some(index) && q.tx.outstanding());
            if !wanted {
                // Nobody waits for the peer: the next post looks for it again.
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
        // While data waits for a window nobody is to blame: the clock runs from the first sending.
        if conn.usable() && !qp.tx.outstanding_sent() && !not_ready {
            qp.tx.stalled_since = now;
        }
        let heard = if not_ready { 0 } else { conn.last_progress };
        let since = qp.tx.stalled_since.max(heard);
        let waiting_reads = qp.tx.outstanding_reads > 0;
        if let Some(patience) = qp.patience_ns() {
            if now >= since + patience && matches!(qp.state, QpState::Rts | QpState::Sqd) {
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
    pub fn next_timeout(&self) -> Option<Nanos> {
        self.timers.next()
    }

    /// Fills `burst` with packets for one path; `false` if there is nothing to send now. Local errors found while
    /// gathering (bad lkey) complete into `sink`.
    pub fn poll_burst(&mut self, now: Nanos, burst: &mut TxBurst, sink: &mut impl Sink) -> bool {
        if self.poll_stray(burst) {
            return true;
        }
        while let Some(index) = self.active.pop_front() {
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
        false
    }
    /// The driver could not send packets `from..` of the burst just polled (EAGAIN): they burn no numbers and come
    /// again. Call it before the next `poll_burst`.
    pub fn unsend(&mut self, burst: &TxBurst, from: usize) {
        let Some((index, path)) = burst.origin else { return };
        let Some(conn) = self.conns.get_mut(index as usize).and_then(Option::as_mut) else { return };
        conn.untell_acks();
        if path == requester::NO_PATH {
            return;
        }
        for _ in from..burst.packets.len() {
            let Some(tx) = conn.paths.get_mut(usize::from(path)) else { return };
            self.unsent.clear();
            conn.in_flight_bytes -= u32::from(tx.pop_packet(&mut self.unsent));
            for frame in self.unsent.drain(..).rev() {
                conn.retransmits.push_front(crate::connection::Retransmit { frame, path, left: false });
            }
        }
    }
    /// The driver got EFAULT for the burst just polled: nothing was sent. Packets come again one by one; the WQE of
    /// a single faulting packet ends with LOC_PROT_ERR.
    pub fn fault(&mut self, now: Nanos, burst: &TxBurst, sink: &mut impl Sink) {
        self.unsend(burst, 0);
        let Some((index, _)) = burst.origin else { return };
        let Some(mut conn) = self.conns.get_mut(index as usize).and_then(Option::take) else { return };
        if burst.packets.len() > 1 {
            conn.singly = burst.packets.len() as u32;
        } else if let Some(again) = conn.retransmits.front().copied() {
            let mut p = parts!(self, now, sink);
            requester::fault(&mut p, &mut conn, &again.frame);
        }
        self.put(conn);
    }
    /// Begins an orderly end: CLOSE with the final acknowledgement state to every peer.
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
            self.activate(now, index);
        }
    }
    /// Every peer has confirmed the CLOSE (or there is none).
    pub fn closed(&self) -> bool {
        !self.conns.iter().flatten().any(|c| c.state == ConnState::Closing)
    }
    /// Acknowledgements wait for a packet to ride on; `poll_burst` after this sends them at once.
    pub fn flush_acks(&mut self) {
        for index in 0..self.conns.len() as u32 {
            self.flush_acks_of(0, index);
        }
    }
    /// Counters of the endpoint.
    pub fn stats(&self) -> EndpointStats {
        let alive = |c: &&Box<Conn>| !matches!(c.state, ConnState::Dead | ConnState::Alias(_));
        EndpointStats {
            connections: self.conns.iter().flatten().filter(alive).count() as u64,
            transport_bytes: self.conns.iter().flatten().filter(alive).map(|c| c.bytes() as u64).sum(),
            ..self.stats
        }
    }
    /// Counters per path slot (plane-major: plane * paths_per_plane + path).
    pub fn path_stats(&self, out: &mut Vec<PathStats>) {
        out.clear();
        out.extend_from_slice(&self.path_stats);
        for conn in self.conns.iter().flatten() {
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

    pub(crate) fn conn_mut(&mut self, index: u32) -> Option<&mut Conn> {
        self.conns.get_mut(index as usize)?.as_deref_mut()
    }
    pub(crate) fn put(&mut self, conn: Box<Conn>) {
        let index = conn.index as usize;
        self.conns[index] = Some(conn);
    }
    pub(crate) fn activate(&mut self, now: Nanos, index: u32) {
        let _ = now;
        if let Some(conn) = self.conns.get_mut(index as usize).and_then(Option::as_mut) {
            if !conn.active {
                conn.active = true;
                self.active.push_back(index);
            }
            let at = conn.deadline();
            if at < conn.timer_at {
                conn.timer_at = at;
                self.timers.push(at, Timer::Conn(index));
            }
        }
    }
    fn flush_acks_of(&mut self, now: Nanos, index: u32) {
        let Some(conn) = self.conn_mut(index) else { return };
        let owes = conn.ack.deadline.is_some()
            || conn.rx_paths.iter().any(|r| r.untold)
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
    /// Ends what is outstanding on a QP with RETRY_EXC_ERR.
    pub(crate) fn fail_stream(&mut self, now: Nanos, qpn: Qpn, sink: &mut impl Sink) {
        let Some(qp) = self.qps.get(qpn).filter(|q| q.tx.outstanding()) else { return };
        let (Some(index), msn) = (qp.tx.conn, qp.tx.sq.base_msn()) else { return };
        let Some(mut conn) = self.conns[index as usize].take() else { return };
        let mut p = parts!(self, now, sink);
        p.fail_local(&mut conn, qpn.index() as u16, msn, WcStatus::RetryExcErr);
        self.put(conn);
    }
    fn count_senders(&mut self, now: Nanos) {
        if now < self.senders_at + 1_000_000 {
            return;
        }
        self.senders_at = now;
        let active = |c: &&Box<Conn>| c.last_data + limits::SENDER_ACTIVE_NS > now && c.last_data > 0;
        self.senders = self.conns.iter().flatten().filter(active).count() as u32;
    }
}

/// Takes a Data or Control packet in; true if the peer closed the connection.
fn take_packet<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    meta: &RxMeta,
    header: &Header,
    bytes: &[u8],
    mem: &mut impl Memory,
) -> bool {
    conn.last_heard = p.now;
    conn.establish(p.now);
    let data = header.kind == PacketType::Data;
    let path = usize::from(header.path);
    let ce = meta.ecn == 3;
    let arrival =
        if data { conn.rx_paths.get(path).map(|r| r.classify(header.generation, header.psn)) } else { None };
    count_rx(p, path, bytes.len(), data, ce, arrival.flatten());
    match arrival {
        // A path we were not told of, or an earlier generation of one.
        Some(None) => return false,
        None if data => return false,
        Some(Some(Arrival::Duplicate)) => {
            conn.rx_paths[path].untold = true;
            conn.ack.now = true;
            return false;
        }
        _ => {}
    }
    let (mut received, mut closed) = (true, false);
    let mut frames = Frames::new(&bytes[HEADER_BYTES..]);
    for frame in frames.by_ref() {
        match frame {
            Frame::Request(f) => received &= responder::on_request(p, conn, &f, mem),
            Frame::Response(f) => received &= response::on_response(p, conn, &f, mem),
            Frame::Void(f) => received &= responder::on_void(conn, &f),
            Frame::Ack(f) => completer::on_ack(p, conn, &f),
            Frame::Refuse(f) => completer::on_refuse(p, conn, &f),
            Frame::Credit { qpn, life, limit } => completer::on_credit(p, conn, qpn, life, limit),
            Frame::Hint { budget, .. } => conn.budget = budget.max(limits::BUDGET_MIN),
            Frame::Close => closed = true,
            Frame::CloseAck => {
                if conn.state == ConnState::Closing {
                    conn.abandon();
                    return false;
                }
            }
            Frame::Ping => conn.ack.now = true,
        }
    }
    if frames.broken {
        p.stats.rx_malformed += 1;
        return false;
    }
    if data && received {
        let ancient = arrival == Some(Some(Arrival::Ancient));
        if !ancient {
            conn.rx_paths[path].record(p.now, header.generation, header.psn, ce);
        }
        conn.last_data = p.now;
        conn.ack.packets += 1;
        let gap = arrival == Some(Some(Arrival::InOrder { gap: true }));
        let asked = header.flags & wire::FLAG_ACK_REQUEST != 0;
        conn.ack.now |= gap || asked || ancient || conn.ack.packets >= limits::ACK_EVERY;
        conn.owe_ack(p.now);
    }
    closed
}

fn count_rx<S: Sink>(
    p: &mut Parts<'_, S>,
    path: usize,
    bytes: usize,
    data: bool,
    ce: bool,
    arrival: Option<Arrival>,
) {
    let slots = p.path_stats.len().max(1);
    let Some(s) = p.path_stats.get_mut(path % slots) else { return };
    s.rx_packets += 1;
    s.rx_bytes += bytes as u64;
    s.rx_data_packets += u64::from(data);
    s.rx_ce += u64::from(ce);
    s.rx_duplicates += u64::from(arrival == Some(Arrival::Duplicate));
    s.rx_reordered += u64::from(matches!(arrival, Some(Arrival::Late | Arrival::Ancient)));
}
