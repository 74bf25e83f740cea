//! Filling bursts: what a connection sends next, on which path, in which packets.
//!
//! [`fill`] is the order of precedence: handshake, data (retransmissions, responses, requests), acknowledgements.

use super::completer;
use super::packet::build_packet;
use super::{Conn, ConnState, REQUESTS, RESPONSES, Retransmit};
use crate::burst::{Piece, TxBurst};
use crate::config::limits;
use crate::parts::Parts;
use crate::path::select::{self, Shut};
use crate::path::{FrameKind, PathRx, PathTx, PktState, TxFrame};
use crate::qp::{Qp, Wqe};
use crate::rate_hint::Allowance;
use crate::seq::RangeState;
use crate::types::*;
use crate::wire::{self, Frame, HEADER_BYTES, Header, PacketType, frame};

/// Path number of bursts that belong to no path.
pub const NO_PATH: u8 = 255;

/// Something to put into a packet.
#[derive(Debug, Clone, Copy)]
pub enum Item {
    /// Front of the retransmit queue.
    Again,
    /// Next part of a request: QP index.
    Request(u16),
    /// Next part of a response: QP index.
    Response(u16),
    /// A PING.
    Ping,
}

/// An item and the bytes its frame takes. Small enough to be passed in registers: it is handed on for every packet.
#[derive(Debug, Clone, Copy)]
pub struct Next {
    /// What.
    pub item: Item,
    /// Bytes of the frame's header.
    pub header: u16,
    /// Payload bytes.
    pub len: u32,
    /// The frame ends its message and began it: further small messages may share the packet.
    pub whole: bool,
    /// The last part of a message of several packets, or a repair of one.
    pub last: bool,
    /// It must take this path: an unreliable stream keeps its order by keeping to one.
    pub pin: Option<u8>,
}

const _: () = assert!(size_of::<Option<Next>>() <= 16);

impl Next {
    /// Bytes of the frame.
    pub fn bytes(&self) -> u32 {
        u32::from(self.header) + self.len
    }
}

/// Fills `burst` with packets for one path; false if there is nothing to send now.
pub fn fill<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, burst: &mut TxBurst) -> bool {
    burst.clear();
    if fill_hello(p, conn, burst) {
        return true;
    }
    if !conn.usable() {
        return false;
    }
    if fill_probe(p, conn, burst) {
        return true;
    }
    let overdue = conn.ack.now || conn.ack.deadline.is_some_and(|at| at <= p.now);
    let mut next = peek(p, conn);
    conn.allowance.holds &= next.is_some();
    if next.is_none() && conn.in_flight_bytes > 0 && p.loss.share() >= p.config.tuning.tail_copies_from {
        copy_tail(conn, limits::TAIL_COPIES + p.loss.share() / limits::TAIL_COPIES_SHARE);
        next = peek(p, conn);
    }
    // An overdue acknowledgement rides on a small packet, but does not wait behind a burst of large ones.
    let rides = next.is_some_and(|n| n.whole && conn.refusals.is_empty());
    if (overdue || conn.close_due || conn.close_ack_due) && !rides {
        fill_control(p, conn, burst);
        return true;
    }
    if let Some(next) = next
        && fill_data(p, conn, burst, next)
    {
        return true;
    }
    if overdue || conn.close_due || conn.close_ack_due {
        fill_control(p, conn, burst);
        return true;
    }
    false
}

/// Nothing is left to send, and packets get lost: the last packets of each path go a second time, on another, because
/// their loss would show by silence only (MR-LOSS-9). Each packet once.
fn copy_tail(conn: &mut Conn, per_path: u32) {
    let second = std::mem::replace(&mut conn.copying, false);
    let count = conn.paths.len();
    for index in 0..count {
        let path = &mut conn.paths[index];
        let newest = path.next_psn().saturating_sub(u64::from(per_path));
        let from = path.copied_to.max(path.base_psn()).max(newest);
        path.copied_to = path.next_psn();
        if second || !path.health.is_active() {
            continue;
        }
        for psn in from..path.next_psn() {
            let Some(pkt) = path.packet(psn).copied().filter(|x| x.state == PktState::InFlight) else {
                continue;
            };
            for frame in (0..pkt.frames).map(|i| path.frame(&pkt, i)).filter(|f| f.kind != FrameKind::Ping) {
                let path = ((index + 1) % count) as u8;
                conn.retransmits.push_back(Retransmit { frame, path, left: true });
                conn.copying = true;
            }
        }
    }
}

fn fill_hello<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, burst: &mut TxBurst) -> bool {
    let asks = conn.state == ConnState::Connecting && conn.hello.due.is_some_and(|at| at <= p.now);
    if !asks && conn.hello.answer_to.is_none() {
        return false;
    }
    // A question of ours that knows the peer's id answers the peer's as well.
    let dcid = conn.hello.answer_to.take().unwrap_or(conn.peer_cid);
    let budget = p.budget_for_new();
    let hello = conn.make_hello(p.now, p.config, budget, p.inbound.is_known(), asks);
    Conn::hello_header(dcid, p.config).write(&mut burst.bytes);
    hello.write(0, &mut burst.bytes);
    let len = burst.bytes.len() as u32;
    burst.pieces.push(Piece::Bytes { start: 0, len });
    burst.packets.push((1, len));
    address_control(p, conn, burst);
    true
}

/// The path of control packets: one of the plane that data last arrived on, for that plane lives; another one when the
/// peer repeats what it should know we have, because then they do not arrive (MR-SACK-6).
fn control_path(conn: &Conn) -> Option<&PathTx> {
    let active = || conn.paths.iter().filter(|x| x.in_use());
    let first = active().position(|x| x.plane == conn.heard_plane).unwrap_or(0);
    let count = active().count().max(1);
    active().nth((first + conn.ack_turn as usize) % count).or(conn.paths.first())
}

/// Control packets go to a path in use, or where the connection was made for.
fn address_control<S: Sink>(p: &mut Parts<'_, S>, conn: &Conn, burst: &mut TxBurst) {
    match control_path(conn) {
        Some(path) => {
            burst.plane = path.plane;
            burst.entropy = path.entropy;
            burst.dst = path.dst;
        }
        None => {
            let fits = |a: &std::net::IpAddr| a.is_ipv4() == conn.peer_ip.is_ipv4();
            burst.plane = p.config.planes.iter().position(|x| x.addrs.iter().any(fits)).unwrap_or(0) as u8;
            burst.entropy = 0;
            burst.dst = (conn.peer_ip, p.config.base_port + conn.peer_slot).into();
        }
    }
    burst.origin = Some((conn.index, NO_PATH));
    p.pace.sent(p.now, burst.plane, burst.total_bytes());
    let slot = usize::from(burst.plane) * usize::from(p.config.paths_per_plane);
    p.count_tx(slot, burst.total_bytes(), false, false);
}

pub fn header<S: Sink>(p: &Parts<'_, S>, conn: &Conn, kind: PacketType) -> Header {
    Header {
        kind,
        flags: 0,
        path: 0,
        generation: 0,
        dcid: conn.peer_cid,
        psn: 0,
        src_slot: p.config.slot,
        backlog: match conn.allowance {
            Allowance { expected: false, .. } => 0,
            Allowance { holds: true, .. } => wire::HUNGRY,
            _ => wire::WAITING,
        },
    }
}

/// A PING on a path that was left and is due to be tried.
fn fill_probe<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, burst: &mut TxBurst) -> bool {
    let now = p.now;
    let Some(path) = conn.paths.iter_mut().position(|x| x.health.take_probe(now)) else { return false };
    // The last probe is as good as lost; it carried nothing.
    completer::presume_lost(p, conn, path);
    let tx = &conn.paths[path];
    (burst.plane, burst.entropy, burst.dst) = (tx.plane, tx.entropy, tx.dst);
    burst.origin = Some((conn.index, path as u8));
    let ping = Next { item: Item::Ping, header: 4, len: 0, whole: false, last: false, pin: None };
    build_packet(p, conn, burst, path, ping, u32::MAX).is_some()
}

/// A packet of acknowledgements and other things that want none themselves.
fn fill_control<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, burst: &mut TxBurst) {
    header(p, conn, PacketType::Control).write(&mut burst.bytes);
    write_acks(p, conn, &mut burst.bytes);
    if std::mem::take(&mut conn.close_due) {
        Frame::Close.write(&mut burst.bytes);
    }
    if std::mem::take(&mut conn.close_ack_due) {
        Frame::CloseAck.write(&mut burst.bytes);
    }
    let len = burst.bytes.len() as u32;
    burst.pieces.push(Piece::Bytes { start: 0, len });
    burst.packets.push((1, len));
    address_control(p, conn, burst);
}

/// Bytes `write_acks` may need now.
pub fn acks_bytes(conn: &Conn) -> usize {
    conn.refusals.len() * frame::REFUSE_BYTES
        + conn.rx_paths.iter().filter(|r| r.untold > 0).count().min(limits::ACKS_PER_PACKET)
            * frame::ACK_BYTES
        + conn.credits.len().min(limits::CREDITS_PER_ACK) * frame::CREDIT_BYTES
        + frame::HINT_BYTES
        + if conn.takes_status { frame::PLANES_BYTES } else { 0 }
}

/// Acknowledgements are owed, or were told once only, and may share a packet with data.
pub fn acks_ride(conn: &Conn) -> bool {
    let owed = conn.ack.now || conn.ack.deadline.is_some() || conn.rx_paths.iter().any(|rx| rx.untold > 0);
    owed && conn.refusals.is_empty()
}

/// Refusals first: an acknowledgement must not be read before the refusal that qualifies it (MR-SACK-5). The hint ends
/// them, so that every acknowledgement steers its receiver (MR-HINT-1).
pub fn write_acks<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, out: &mut Vec<u8>) {
    for pending in &conn.refusals {
        Frame::Refuse(pending.refuse).write(out);
    }
    let mut told = 0;
    for (i, rx) in conn.rx_paths.iter_mut().enumerate() {
        if rx.untold > 0 && told < limits::ACKS_PER_PACKET {
            if let Some(ack) = rx.ack(p.now, i as u8) {
                Frame::Ack(ack).write(out);
            }
            rx.untold -= 1;
            told += 1;
        }
    }
    for _ in 0..conn.credits.len().min(limits::CREDITS_PER_ACK) {
        let Some(index) = conn.credits.pop_front() else { break };
        let Some(qp) = p.qps.at(index) else { continue };
        qp.rx.credit_due = false;
        let Some(life) = qp.rx.life else { continue };
        qp.rx.told_limit = qp.recv_limit(p.srqs);
        Frame::Credit { qpn: qp.attrs.dest_qpn, life, limit: qp.rx.told_limit }.write(out);
    }
    let status = p.plane_status;
    if conn.takes_status && status.epoch != 0 {
        Frame::Planes { epoch: status.epoch, down: status.down }.write(out);
    }
    let (rate, epoch) = p.inbound.hint(&mut conn.demand);
    Frame::Hint { epoch, rate, budget: p.budget_share() }.write(out);
    let left = conn.rx_paths.iter().any(PathRx::is_fresh) || !conn.credits.is_empty();
    conn.ack.packets = 0;
    conn.ack.now = left;
    conn.ack.deadline = None;
}

/// The next thing to send, without taking it. Skips and drops what has become void.
pub fn peek<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn) -> Option<Next> {
    while let Some(mut again) = conn.retransmits.front().copied() {
        let f = &mut again.frame;
        let space = match f.kind {
            FrameKind::Request | FrameKind::VoidRequest => Some(REQUESTS),
            FrameKind::Response | FrameKind::VoidResponse => Some(RESPONSES),
            FrameKind::Ping => None,
        };
        let resolved =
            space.is_none_or(|s| conn.tx_windows[s].state(f.cpn, u64::from(f.units)) == RangeState::Old);
        if resolved {
            conn.take_retransmit();
            continue;
        }
        let header = retransmit_header(p, f);
        let len = if matches!(f.kind, FrameKind::Request | FrameKind::Response) { f.len } else { 0 };
        let whole = len < conn.payload_max / 2;
        return Some(Next { item: Item::Again, header, len, whole, last: !whole, pin: None });
    }
    if conn.ping_due {
        return Some(Next { item: Item::Ping, header: 4, len: 0, whole: true, last: false, pin: None });
    }
    // Neither a host's own Writes nor what others read from it may starve (MR-CC-11).
    match conn.requests_first {
        true => peek_request(p, conn).or_else(|| peek_response(p, conn)),
        false => peek_response(p, conn).or_else(|| peek_request(p, conn)),
    }
}

/// Header bytes of a frame to send again; turns it into a VOID when its message is no more.
pub fn retransmit_header<S: Sink>(p: &mut Parts<'_, S>, f: &mut TxFrame) -> u16 {
    let qp = p.qps.at(f.qp);
    match f.kind {
        FrameKind::Request => {
            // What an unreliable stream lost stays lost: only its numbers are filled (MR-UC-2).
            let live = |q: &&mut Qp| q.tx.life == f.life && q.init.qp_type.is_reliable();
            let qp = qp.filter(live);
            let xrc = qp.as_ref().is_some_and(|q| q.is_xrc());
            let wqe = qp.and_then(|q| q.tx.sq.get(f.msn));
            match wqe.filter(|w| w.attempt == f.attempt) {
                Some(wqe) => return frame::request_header_bytes(wqe.wr.opcode, xrc) as u16,
                None => f.become_void(FrameKind::VoidRequest),
            }
        }
        FrameKind::Response => {
            let job = qp.filter(|q| q.rx.epoch == f.life).and_then(|q| q.rx.job_mut(f.msn));
            if job.is_some() {
                return frame::RESPONSE_BYTES as u16;
            }
            f.become_void(FrameKind::VoidResponse);
        }
        _ => {}
    }
    frame::VOID_BYTES as u16
}

#[inline(always)]
fn peek_response<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn) -> Option<Next> {
    if !cpn_room(conn, RESPONSES) {
        return None;
    }
    while let Some(&index) = conn.responders.front() {
        if let Some(qp) = p.qps.at(index) {
            let cursor = qp.rx.cursor_job;
            if let Some(job) = qp.rx.job_mut(cursor) {
                let len = (job.total - job.sent).min(conn.payload_max);
                let whole = job.total <= conn.payload_max / 2;
                let last = job.sent > 0 && job.sent + len == job.total;
                let header = frame::RESPONSE_BYTES as u16;
                return Some(Next { item: Item::Response(index), header, len, whole, last, pin: None });
            }
            qp.rx.in_round = false;
        }
        conn.responders.pop_front();
    }
    None
}

#[inline(always)]
fn peek_request<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn) -> Option<Next> {
    if !cpn_room(conn, REQUESTS) {
        return None;
    }
    let mut waiting = 0;
    while waiting < conn.round.len() {
        let Some(&index) = conn.round.front() else { break };
        let qp = p.qps.at(index).filter(|q| q.tx.conn == Some(conn.index));
        if let Some(qp) = qp
            && let Some(wqe) = sendable(p.now, qp, conn.message_window)
        {
            // Of XRC messages the receiver must know the SRQs in order, so as to bind receives in order (MR-XRC-4).
            let pinned = (qp.init.qp_type == QpType::Uc || qp.is_xrc()) && !conn.paths.is_empty();
            let pin = if pinned { Some(pin_of(conn, index)) } else { None };
            if pin.is_some_and(|i| conn.paths[usize::from(i)].room() == 0) {
                // Its path is full: others need not wait for that.
                conn.round.rotate_left(1);
                waiting += 1;
                continue;
            }
            let (header, mut len) = segment(conn, wqe, qp.is_xrc(), qp.tx.cursor_offset);
            if qp.tx.cursor_offset == 0 && qp.tx.cursor_msn == qp.tx.sq.base_msn() && acks_ride(conn) {
                // A stream at rest answers: its first packet has room for the acknowledgement of what it answers, so
                // that the peer learns of its own message's end before it learns of the answer (MR-SACK-10).
                len = len.min(conn.payload_max.saturating_sub(acks_bytes(conn) as u32));
            }
            let whole = wqe.wr.length <= conn.payload_max / 2 || wqe.wr.opcode.has_response();
            let (offset, total) = (qp.tx.cursor_offset, wqe.wr.length);
            let last = offset > 0 && offset + len == total;
            return Some(Next { item: Item::Request(index), header, len, whole, last, pin });
        }
        if let Some(qp) = p.qps.at(index) {
            qp.tx.in_round = false;
        }
        conn.round.pop_front();
    }
    None
}

/// The path an unreliable stream keeps to (MR-UC-1): its own, or the next one in use while that one is not.
fn pin_of(conn: &Conn, index: u16) -> u8 {
    let count = conn.paths.len();
    let own = usize::from(index) % count;
    let turn = (0..count).map(|step| (own + step) % count);
    turn.clone().find(|i| conn.paths[*i].in_use()).unwrap_or(own) as u8
}

/// Another full packet stays within the peer's window of numbers, with room for the VOIDs that confirm (MR-CPN-6).
fn cpn_room(conn: &Conn, space: usize) -> bool {
    let units = u64::from(conn.payload_max / conn.unit) + 64;
    conn.next_cpn[space] + units - conn.tx_windows[space].base() < limits::CPN_WINDOW - 64
}

/// Header and payload bytes of the part of a request that begins at `offset`: messages are cut at full payloads, and
/// each part says all that is needed to place it (MR-REQ-3).
fn segment(conn: &Conn, wqe: &Wqe, xrc: bool, offset: u32) -> (u16, u32) {
    let header = frame::request_header_bytes(wqe.wr.opcode, xrc) as u16;
    let len = if wqe.wr.opcode.has_response() { 0 } else { (wqe.wr.length - offset).min(conn.payload_max) };
    (header, len)
}

/// The work request at the cursor if it may be sent now: the visible list of what can hold a stream back.
fn sendable(now: Nanos, qp: &Qp, message_window: u64) -> Option<&Wqe> {
    let tx = &qp.tx;
    let starting = tx.cursor_offset == 0;
    let in_state = qp.state == QpState::Rts || qp.state == QpState::Sqd && tx.cursor_msn < tx.first_fresh();
    if !in_state || tx.paused_until > now {
        return None;
    }
    if tx.error.is_some_and(|(msn, _)| tx.cursor_msn >= msn) {
        return None;
    }
    let wqe = tx.sq.get(tx.cursor_msn)?;
    let head = tx.cursor_msn == tx.sq.base_msn();
    if starting {
        // Further ahead the peer has no place for what arrives (MR-REQ-2).
        let far = tx.cursor_msn - tx.sq.base_msn() >= message_window;
        // What is fenced may use what those Reads bring (MR-RESP-4).
        let fenced = wqe.wr.flags & send_flags::FENCE != 0 && tx.outstanding_reads > 0;
        let reads_full =
            wqe.wr.opcode.has_response() && tx.outstanding_reads >= u32::from(qp.attrs.max_rd_atomic.max(1));
        if far || fenced || reads_full {
            return None;
        }
    }
    // What an unreliable stream loses takes no receive, so both ends do not count alike: it has no limit (MR-UC-4).
    let limit = tx.credit.filter(|_| qp.init.qp_type.is_reliable());
    let unposted = limit.is_some_and(|limit| (wqe.recv_index.wrapping_sub(limit) as i32) >= 0);
    // The head message's first packet may always ask: a lost credit cannot hang a stream (MR-CREDIT-2).
    if wqe.wr.opcode.consumes_recv() && unposted && !(head && starting) {
        return None;
    }
    Some(wqe)
}

/// Builds packets for one path, beginning with `next`; false if no window is open.
fn fill_data<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, burst: &mut TxBurst, mut next: Next) -> bool {
    let bulk = next.len + acks_bytes(conn) as u32 >= conn.payload_max;
    let singly = conn.singly > 0;
    let grant = grant(p, conn);
    let most = if bulk && !singly { p.burst_packets(conn.segment).min(grant.burst) } else { 1 };
    let (path, room) = match choose_path(p, conn, &next, most, grant.per_path) {
        Ok(chosen) => chosen,
        Err(shut) => {
            conn.allowance.holds = false;
            if let Shut::Link(plane) = shut
                && !std::mem::replace(&mut conn.waits_for_link, true)
            {
                p.pace.wait(plane, conn.index);
            }
            return false;
        }
    };
    let repair = matches!(next.item, Item::Again);
    let mut most = most.min(room).min(grant.packets);
    if repair && conn.probes_due > 0 {
        conn.probes_due -= 1;
        most = most.max(1);
    }
    if most == 0 {
        conn.allowance.holds = grant.by_hint;
        conn.allowance_at = grant.open_at;
        return false;
    }
    let tx = &conn.paths[path];
    (burst.plane, burst.entropy, burst.dst) = (tx.plane, tx.entropy, tx.dst);
    burst.origin = Some((conn.index, path as u8));
    let first_bytes = loop {
        match build_packet(p, conn, burst, path, next, u32::MAX) {
            Some(bytes) => break bytes,
            // The request turned out to be in error: something else is next.
            None => match peek(p, conn) {
                Some(other) => next = other,
                None => return false,
            },
        }
    };
    let mut last = next.last;
    while (burst.packets.len() as u32) < most && bulk {
        let Some(next) = peek(p, conn) else { break };
        let size = HEADER_BYTES as u32 + next.bytes();
        // One GSO datagram: equal sizes, only the last may be smaller.
        let elsewhere = next.pin.is_some_and(|pin| usize::from(pin) != path);
        if elsewhere || size > first_bytes || burst.packets.last().is_some_and(|l| l.1 < first_bytes) {
            break;
        }
        if build_packet(p, conn, burst, path, next, first_bytes).is_none() {
            break;
        }
        last = next.last;
    }
    conn.singly = conn.singly.saturating_sub(1);
    conn.requests_first = !conn.requests_first;
    let ends = (conn.allowance.expected || last) && peek(p, conn).is_none();
    if conn.allowance.expected && ends {
        // Nothing waits any more: the peer need not keep a share for us.
        conn.allowance.holds = false;
        patch_last(burst, BACKLOG_AT, &[0, 0]);
    }
    // Nothing more leaves until the peer answers (MR-CC-5, MR-SACK-11).
    if burst.packets.len() as u32 >= grant.packets || last && ends && !conn.copying {
        patch_last(burst, FLAGS_AT, &[wire::FLAG_ACK_REQUEST]);
    }
    true
}

/// Offsets in the header.
const FLAGS_AT: usize = 1;
/// Offset of the backlog field.
const BACKLOG_AT: usize = 18;

/// Changes the header of a burst's last packet: only when it is built one knows whether the window is used up (then it
/// asks for an acknowledgement at once) and whether more waits.
fn patch_last(burst: &mut TxBurst, offset: usize, with: &[u8]) {
    if let Some(Piece::Bytes { start, .. }) = first_piece_of_last(burst) {
        let at = start as usize + offset;
        burst.bytes[at..at + with.len()].copy_from_slice(with);
    }
}

fn first_piece_of_last(burst: &TxBurst) -> Option<Piece> {
    let count = burst.packets.len();
    let first = if count >= 2 { burst.packets[count - 2].0 as usize } else { 0 };
    burst.pieces.get(first).copied()
}

/// What the connection as a whole may send now.
struct Grant {
    /// Packets.
    packets: u32,
    /// Packets per burst, so that a slow sender's bursts do not stand in others' way.
    burst: u32,
    /// Packets that may be in flight on one path: a path that does not answer must not hold the whole window.
    per_path: u32,
    /// The rate hint is what says no.
    by_hint: bool,
    /// When it will say yes; `Nanos::MAX`: with an acknowledgement.
    open_at: Nanos,
}

/// The connection's window: what the peer's buffer, the settings and the peer's rate hint allow (MR-CC-4, MR-CC-8).
fn grant<S: Sink>(p: &Parts<'_, S>, conn: &Conn) -> Grant {
    let (a, now) = (&conn.allowance, p.now);
    let (known, slack) = (conn.min_rtt_ns != Nanos::MAX, p.config.tuning.host_slack_ns);
    let rtt =
        if known { conn.min_rtt_ns + p.config.tuning.ack_delay_ns + slack } else { limits::PTO_INITIAL_NS };
    let hint = a.window(now, rtt, conn.is_delayed(slack), conn.segment);
    // What is lost fills the window for longer than what arrives, until a gap or silence shows it: up to twice as much.
    let spare = u64::from(hint) * u64::from(p.loss.share().min(1 << 14)) / (1 << 14);
    let hint = hint.saturating_add(spare as u32);
    let others = conn.budget.min(p.config.tuning.connection_bytes_max);
    let left = |limit: u32| {
        let packets = limit.saturating_sub(conn.in_flight_bytes) / conn.segment;
        if conn.in_flight_bytes == 0 { packets.max(1) } else { packets }
    };
    let paced = a.rate_bps > 0 && a.is_fresh(now, rtt, conn.segment) && a.open_at() > now;
    let adaptive = p.config.burst_packets_max == 0;
    // An acknowledgement stands behind a whole burst in the link's queue: that is an eighth of a round trip at most.
    let burst = if adaptive && a.expected { (hint / 16 / conn.segment).max(1) } else { u32::MAX };
    Grant {
        packets: if paced { 0 } else { left(others.min(hint)) },
        burst,
        per_path: per_path(conn, hint, others),
        by_hint: left(others) > 0,
        open_at: if paced { a.open_at() } else { Nanos::MAX },
    }
}

/// Packets that one path may have in flight: twice its part of the window the hint grants, and where there are several
/// planes one and a half even parts of the connection's window: one that has fallen silent must leave enough of it for
/// packets on others to prove it silent (MR-CC-10).
fn per_path(conn: &Conn, hint: u32, window: u32) -> u32 {
    let active = conn.paths.iter().filter(|x| x.in_use()).count() as u32;
    if active < 2 {
        return u32::MAX;
    }
    let hinted = match hint {
        u32::MAX => u32::MAX,
        _ => (hint / conn.segment * 2).div_ceil(active).max(2),
    };
    let plane = conn.paths[0].plane;
    if conn.paths.iter().all(|x| x.plane == plane) {
        return hinted;
    }
    hinted.min((window / conn.segment * 3).div_ceil(2 * active).max(limits::CWND_MIN))
}

fn choose_path<S: Sink>(
    p: &Parts<'_, S>,
    conn: &mut Conn,
    next: &Next,
    most: u32,
    per_path: u32,
) -> Result<(usize, u32), Shut> {
    let again = match next.item {
        // Repair on the path that lost it, unless that path is in trouble (MR-LOSS-3).
        Item::Again => conn.retransmits.front().map(|again| again.path),
        _ => None,
    };
    if let Some(own) = next.pin.or(again).map(usize::from)
        && let Some(path) = conn.paths.get_mut(own)
    {
        let room = path.room();
        if room > 0 {
            let busy = p.pace.open_at(path.plane) > p.now;
            return if busy { Err(Shut::Link(path.plane)) } else { Ok((own, room)) };
        }
        if next.pin.is_some() {
            return Err(Shut::Windows);
        }
    }
    let mut turn = conn.turn;
    let chosen =
        select::select(&mut conn.paths, &mut turn, select::Wanted { burst: most, per_path }, p.pace, p.now);
    conn.turn = turn;
    chosen
}

/// The memory of this frame's request cannot be read (EFAULT): its message ends in error.
pub fn fault<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, frame: &TxFrame) {
    match frame.kind {
        FrameKind::Request => p.fail_local(conn, frame.qp, frame.msn, WcStatus::LocProtErr),
        FrameKind::Response => super::response::read_denied(p, conn, frame.qp, frame.msn),
        _ => {}
    }
}
