//! What the functions of a connection need besides the connection itself: the endpoint's other parts, borrowed at
//! once, and the things a queue pair can go through whatever connection it is on.

use crate::config::{Config, limits};
use crate::connection::{Conn, tags};
use crate::journal::Journal;
use crate::mr::MrTable;
use crate::pace::Pace;
use crate::path::TxFrame;
use crate::plane_status::PlaneStatus;
use crate::qp::{Qp, Wqe};
use crate::rate_hint::Inbound;
use crate::stats::{EndpointStats, PathStats};
use crate::steering::PlaneState;
use crate::tables::{QpTable, SrqTable, Timer, Timers};
use crate::types::*;
use std::collections::VecDeque;

/// A share of packets lost, averaged over some thousands.
#[derive(Debug, Clone, Copy, Default)]
pub struct LossRate(u64);

impl LossRate {
    /// One more packet's fate.
    pub fn count(&mut self, lost: bool) {
        // Fixed point: 1 << 28 is all of them; each packet weighs 1/4096.
        let target = if lost { 1 << 28 } else { 0 };
        self.0 = self.0 - (self.0 >> 12) + (target >> 12);
    }
    /// The share in 1/65536.
    pub fn share(self) -> u32 {
        (self.0 >> 12) as u32
    }
}

/// The endpoint without the connection at work.
pub struct Parts<'a, S> {
    /// Time of this batch.
    pub now: Nanos,
    /// Settings.
    pub config: &'a Config,
    /// Queue pairs.
    pub qps: &'a mut QpTable,
    /// Shared receive queues.
    pub srqs: &'a mut SrqTable,
    /// Memory regions.
    pub mrs: &'a mut MrTable,
    /// Deadlines.
    pub timers: &'a mut Timers,
    /// Connections with something to send.
    pub active: &'a mut VecDeque<u32>,
    /// Scratch for frames acknowledged.
    pub acked: &'a mut Vec<TxFrame>,
    /// Counters.
    pub stats: &'a mut EndpointStats,
    /// Counters per path slot.
    pub path_stats: &'a mut Vec<PathStats>,
    /// The host's own links.
    pub pace: &'a mut Pace,
    /// Who shares what comes in.
    pub inbound: &'a mut Inbound,
    /// Share of packets lost lately, on all paths.
    pub loss: &'a mut LossRate,
    /// Peers that sent data lately.
    pub senders: u32,
    /// Which planes and ports are to be used.
    pub planes: &'a [PlaneState],
    /// What peers are told of that.
    pub plane_status: PlaneStatus,
    /// What has happened to them and to paths.
    pub journal: &'a mut Journal,
    /// QPs to which requests were posted within this call.
    pub woken: &'a mut Vec<Qpn>,
    /// Completions and events.
    pub sink: &'a mut S,
}

impl<S: Sink> Parts<'_, S> {
    /// Bytes each active sender may have in flight towards us (MR-HINT-1).
    pub fn budget_share(&self) -> u32 {
        (self.config.receive_budget_bytes / self.senders.max(1)).max(limits::BUDGET_MIN)
    }
    /// The same for one that is about to join.
    pub fn budget_for_new(&self) -> u32 {
        (self.config.receive_budget_bytes / (self.senders + 1)).max(limits::BUDGET_MIN)
    }
    /// Packets per burst for this packet size: a GSO datagram holds at most 64 segments and 65,507 bytes (MR-CC-5).
    pub fn burst_packets(&self, segment: u32) -> u32 {
        let most = match self.config.burst_packets_max {
            0 => limits::BURST_ADAPTIVE,
            packets => u32::from(packets),
        };
        most.min(65_000 / segment).clamp(1, 64)
    }
    /// Index of a connection's path in the counters: plane-major.
    pub fn path_slot(&self, plane: u8, path: usize, paths: usize) -> usize {
        let per_plane = usize::from(self.config.paths_per_plane);
        let planes = (paths / per_plane).max(1);
        usize::from(plane) * per_plane + path / planes
    }
    /// Counts a packet sent.
    pub fn count_tx(&mut self, slot: usize, bytes: u32, data: bool, retransmit: bool) {
        let Some(s) = self.path_stats.get_mut(slot) else { return };
        s.tx_packets += 1;
        s.tx_bytes += u64::from(bytes);
        s.tx_data_packets += u64::from(data);
        s.retransmits += u64::from(retransmit);
    }
    /// Puts a connection into the list of those with something to send.
    pub fn activate(&mut self, conn: &mut Conn) {
        if !conn.active {
            conn.active = true;
            self.active.push_back(conn.index);
        }
    }
    /// Arms the connection's timer if its deadline came nearer.
    pub fn arm_conn(&mut self, conn: &mut Conn) {
        let at = conn.deadline(&self.config.tuning);
        if at < conn.timer_at {
            conn.timer_at = at;
            self.timers.push(at, Timer::Conn(conn.index));
        }
    }
    /// Arms the QP's timer if its deadline came nearer.
    pub fn arm_qp(&mut self, index: u16) {
        let now = self.now;
        let Some(at) = self.qps.at(index).and_then(|qp| qp_deadline(qp, now)) else { return };
        if let Some(armed) = self.qps.armed(index)
            && at < *armed
        {
            *armed = at;
            self.timers.push(at, Timer::Qp(index));
        }
    }
    /// A work request cannot be sent: it ends in error when all before it are complete.
    pub fn fail_local(&mut self, conn: &mut Conn, index: u16, msn: u64, status: WcStatus) {
        let Some(qp) = self.qps.at(index) else { return };
        qp.tx.fail_at(msn, status);
        self.retire(conn, index);
    }
    /// Completes work requests in order as far as they are done (MR-ORDER-3); an error takes its turn among them.
    pub fn retire(&mut self, conn: &mut Conn, index: u16) {
        let Some(qp) = self.qps.at(index) else { return };
        loop {
            if let Some((_, status)) = qp.tx.error.filter(|e| e.0 <= qp.tx.sq.base_msn()) {
                // An error of its own stops only the send queue of an unreliable QP.
                let rc = qp.init.qp_type.is_reliable();
                let state = if rc { QpState::Err } else { QpState::Sqe };
                self.sink.event(Event::State(qp.qpn, state));
                if let Some(wqe) = qp.tx.sq.pop() {
                    complete_send(qp, &wqe, status, self.sink);
                }
                if rc {
                    return self.enter_error(index);
                }
                qp.state = state;
                return flush_sends(qp, self.sink);
            }
            if !qp.tx.sq.get(qp.tx.sq.base_msn()).is_some_and(|w| w.done) {
                break;
            }
            if let Some(wqe) = qp.tx.sq.pop() {
                complete_send(qp, &wqe, WcStatus::Success, self.sink);
            }
        }
        if qp.state == QpState::Sqd && qp.tx.is_drained() && !std::mem::replace(&mut qp.tx.drained, true) {
            self.sink.event(Event::SqDrained(qp.qpn));
        }
        if qp.tx.conn == Some(conn.index) {
            conn.enqueue(qp);
        }
    }
    /// Everything an unreliable QP has posted counts as sent into the void: its peer cannot be found.
    pub fn drop_sends(&mut self, index: u16) {
        let Some(qp) = self.qps.at(index) else { return };
        while let Some(wqe) = qp.tx.sq.pop() {
            complete_send(qp, &wqe, WcStatus::Success, self.sink);
        }
        qp.tx.cursor_msn = qp.tx.sq.base_msn();
        qp.tx.cursor_offset = 0;
    }
    /// Binds the SRQ's oldest receive to the QP; false: there is none (or no SRQ). Tells of the SRQ's limit.
    pub fn bind_receive(&mut self, index: u16) -> bool {
        let Some(qp) = self.qps.at(index) else { return false };
        let Some(id) = qp.init.srq else { return false };
        let bound = self.srqs.get_mut(id).is_some_and(|srq| qp.rq.take_from(&mut srq.queue, None));
        // Also when nothing was left: a limit armed on an empty queue would never be reached by taking.
        if self.srqs.limit_reached(id) {
            self.sink.event(Event::SrqLimit(id));
        }
        bound
    }
    /// The QP goes to ERR: everything posted completes flushed, in order. What it has of an SRQ goes back there,
    /// except receives that bytes were placed into.
    pub fn enter_error(&mut self, index: u16) {
        let Some(qp) = self.qps.at(index) else { return };
        let was = std::mem::replace(&mut qp.state, QpState::Err);
        self.sink.event(Event::State(qp.qpn, QpState::Err));
        qp.rq.give_back(self.srqs, qp.init.srq, false);
        flush(qp, self.sink);
        if was != QpState::Err && qp.init.srq.is_some() {
            self.sink.event(Event::LastWqeReached(qp.qpn));
        }
    }
}

/// Completes everything posted with WR_FLUSH_ERR.
pub fn flush(qp: &mut Qp, sink: &mut impl Sink) {
    flush_sends(qp, sink);
    while let Some(entry) = qp.rq.pop() {
        let cq = entry.home.map_or(qp.init.recv_cq, |home| home.1);
        let matched = entry.tags.matched();
        let completion = Completion {
            status: WcStatus::WrFlushErr,
            src_qp: qp.attrs.dest_qpn,
            rq_release: u32::from(!matched),
            srq: entry.home.map(|home| home.0).filter(|_| !matched),
            solicited: true,
            ..Completion::new(entry.wr_id, if matched { WcOpcode::TmRecv } else { WcOpcode::Recv }, qp.qpn)
        };
        sink.complete(cq, &completion);
    }
}

/// Completes the posted sends with WR_FLUSH_ERR.
pub fn flush_sends(qp: &mut Qp, sink: &mut impl Sink) {
    while let Some(wqe) = qp.tx.sq.pop() {
        complete_send(qp, &wqe, WcStatus::WrFlushErr, sink);
    }
    qp.tx.cursor_msn = qp.tx.sq.base_msn();
    qp.tx.cursor_offset = 0;
    qp.tx.outstanding_reads = 0;
    qp.tx.error = None;
}

/// The completion of a work request, if it is to have one: errors always, successes when signaled.
pub fn complete_send(qp: &mut Qp, wqe: &Wqe, status: WcStatus, sink: &mut impl Sink) {
    if wqe.wr.flags & send_flags::INTERNAL != 0 {
        if let Some((cq, completion)) = tags::fetched(&wqe.wr, status, qp.qpn) {
            sink.complete(cq, &completion);
        }
        return;
    }
    qp.tx.release += 1;
    if status == WcStatus::Success && wqe.wr.flags & send_flags::SIGNALED == 0 {
        return;
    }
    let opcode = match wqe.wr.opcode {
        Opcode::Write | Opcode::WriteImm => WcOpcode::RdmaWrite,
        Opcode::Send | Opcode::SendImm | Opcode::SendInv => WcOpcode::Send,
        Opcode::Read => WcOpcode::RdmaRead,
        Opcode::CompareSwap => WcOpcode::CompSwap,
        Opcode::FetchAdd => WcOpcode::FetchAdd,
        Opcode::AtomicWrite => WcOpcode::AtomicWrite,
        Opcode::BindWindow => WcOpcode::BindWindow,
        Opcode::LocalInv | Opcode::Nop => WcOpcode::LocalInv,
    };
    let completion = Completion {
        status,
        byte_len: wqe.wr.length,
        src_qp: qp.attrs.dest_qpn,
        sq_release: std::mem::take(&mut qp.tx.release),
        solicited: status != WcStatus::Success,
        ..Completion::new(wqe.wr.wr_id, opcode, qp.qpn)
    };
    sink.complete(qp.init.send_cq, &completion);
}

/// When a QP wants to be looked at: end of a pause, or a quarter of its patience with a silent peer.
pub fn qp_deadline(qp: &Qp, now: Nanos) -> Option<Nanos> {
    if !qp.tx.outstanding() || !matches!(qp.state, QpState::Rts | QpState::Sqd) {
        return None;
    }
    let pause = Some(qp.tx.paused_until).filter(|at| *at > now);
    let check = qp.patience_ns().map(|patience| now + patience / 4);
    match (pause, check) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
