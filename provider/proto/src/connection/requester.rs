//! Filling bursts: what a connection sends next, on which path, in which packets.
//!
//! [`fill`] is the order of precedence: handshake, data (retransmissions, responses, requests), acknowledgements.

use super::{Conn, ConnState, REQUESTS, RESPONSES, Retransmit};
use crate::burst::{Piece, TxBurst};
use crate::config::limits;
use crate::parts::Parts;
use crate::path::{FrameKind, TxFrame, select};
use crate::qp::{Qp, RespWork, Wqe};
use crate::seq::RangeState;
use crate::types::*;
use crate::wire::{self, Frame, HEADER_BYTES, Header, PacketType, Request, RespKind, Response, Void, frame};

/// Path number of bursts that belong to no path.
pub const NO_PATH: u8 = 255;

/// Something to put into a packet.
#[derive(Debug, Clone, Copy)]
enum Item {
    /// Front of the retransmit queue.
    Again(Retransmit),
    /// Next part of a request: QP index.
    Request(u16),
    /// Next part of a response: QP index.
    Response(u16),
    /// A PING.
    Ping,
}

/// An item and the bytes its frame takes.
#[derive(Debug, Clone, Copy)]
struct Next {
    item: Item,
    header: u32,
    len: u32,
    /// The frame ends its message and began it: further small messages may share the packet.
    whole: bool,
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
    let overdue = conn.ack.now || conn.ack.deadline.is_some_and(|at| at <= p.now);
    let next = peek(p, conn);
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

fn fill_hello<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, burst: &mut TxBurst) -> bool {
    let asks = conn.state == ConnState::Connecting && conn.hello.due.is_some_and(|at| at <= p.now);
    if !asks && !conn.hello.answer_due {
        return false;
    }
    let budget = p.budget_for_new();
    let hello = conn.make_hello(p.now, p.config, budget, asks);
    conn.hello_header(p.config).write(&mut burst.bytes);
    hello.write(0, &mut burst.bytes);
    let len = burst.bytes.len() as u32;
    burst.pieces.push(Piece::Bytes { start: 0, len });
    burst.packets.push((1, len));
    address_control(p, conn, burst);
    true
}

/// Control packets go to the peer's first path, or where the connection was made for.
fn address_control<S: Sink>(p: &mut Parts<'_, S>, conn: &Conn, burst: &mut TxBurst) {
    let path = conn.paths.iter().find(|x| x.health == crate::path::Health::Active).or(conn.paths.first());
    match path {
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
    let slot = usize::from(burst.plane) * usize::from(p.config.paths_per_plane);
    p.count_tx(slot, burst.total_bytes(), false, false);
}

fn header<S: Sink>(p: &Parts<'_, S>, conn: &Conn, kind: PacketType) -> Header {
    Header {
        kind,
        flags: 0,
        path: 0,
        generation: 0,
        dcid: conn.peer_cid,
        psn: 0,
        src_slot: p.config.slot,
        backlog: 0,
    }
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
fn acks_bytes(conn: &Conn) -> usize {
    conn.refusals.len() * frame::REFUSE_BYTES
        + conn.rx_paths.iter().filter(|r| r.untold).count().min(limits::ACKS_PER_PACKET) * frame::ACK_BYTES
        + conn.credits.len().min(limits::CREDITS_PER_ACK) * frame::CREDIT_BYTES
        + frame::HINT_BYTES
}

/// Refusals first: an acknowledgement must not be read before the refusal that qualifies it.
fn write_acks<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, out: &mut Vec<u8>) {
    for pending in &conn.refusals {
        Frame::Refuse(pending.refuse).write(out);
    }
    let mut told = 0;
    for (i, rx) in conn.rx_paths.iter_mut().enumerate() {
        if rx.untold && told < limits::ACKS_PER_PACKET {
            if let Some(ack) = rx.ack(p.now, i as u8) {
                Frame::Ack(ack).write(out);
            }
            rx.untold = false;
            told += 1;
        }
    }
    for _ in 0..conn.credits.len().min(limits::CREDITS_PER_ACK) {
        let Some(index) = conn.credits.pop_front() else { break };
        let Some(qp) = p.qps.at(index) else { continue };
        qp.rx.credit_due = false;
        let Some(life) = qp.rx.life else { continue };
        qp.rx.told_limit = qp.rq.limit();
        Frame::Credit { qpn: qp.attrs.dest_qpn, life, limit: qp.rq.limit() }.write(out);
    }
    Frame::Hint { epoch: 0, rate: 0xffff, budget: p.budget_share() }.write(out);
    let left = conn.rx_paths.iter().any(|r| r.untold) || !conn.credits.is_empty();
    conn.ack.packets = 0;
    conn.ack.now = left;
    conn.ack.deadline = None;
}

/// The next thing to send, without taking it. Skips and drops what has become void.
fn peek<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn) -> Option<Next> {
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
            conn.retransmits.pop_front();
            continue;
        }
        let header = retransmit_header(p, f);
        let len = if matches!(f.kind, FrameKind::Request | FrameKind::Response) { f.len } else { 0 };
        let whole = len < conn.payload_max / 2;
        return Some(Next { item: Item::Again(again), header, len, whole });
    }
    if conn.ping_due {
        return Some(Next { item: Item::Ping, header: 4, len: 0, whole: true });
    }
    peek_response(p, conn).or_else(|| peek_request(p, conn))
}

/// Header bytes of a frame to send again; turns it into a VOID when its message is no more.
fn retransmit_header<S: Sink>(p: &mut Parts<'_, S>, f: &mut TxFrame) -> u32 {
    let qp = p.qps.at(f.qp);
    match f.kind {
        FrameKind::Request => {
            let wqe = qp.filter(|q| q.tx.life == f.life).and_then(|q| q.tx.sq.get(f.msn));
            match wqe.filter(|w| w.attempt == f.attempt) {
                Some(wqe) => return frame::request_header_bytes(wqe.wr.opcode) as u32,
                None => f.kind = FrameKind::VoidRequest,
            }
        }
        FrameKind::Response => {
            let job = qp.filter(|q| q.rx.epoch == f.life).and_then(|q| q.rx.job_mut(f.msn));
            if job.is_some() {
                return frame::RESPONSE_BYTES as u32;
            }
            f.kind = FrameKind::VoidResponse;
        }
        _ => {}
    }
    frame::VOID_BYTES as u32
}

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
                let header = frame::RESPONSE_BYTES as u32;
                return Some(Next { item: Item::Response(index), header, len, whole });
            }
            qp.rx.in_round = false;
        }
        conn.responders.pop_front();
    }
    None
}

fn peek_request<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn) -> Option<Next> {
    if !cpn_room(conn, REQUESTS) {
        return None;
    }
    while let Some(&index) = conn.round.front() {
        if let Some(qp) = p.qps.at(index) {
            if qp.tx.conn == Some(conn.index)
                && let Some(wqe) = sendable(p.now, qp, conn.message_window)
            {
                let (header, len) = segment(conn, wqe, qp.tx.cursor_offset);
                let whole = wqe.wr.length <= conn.payload_max / 2 || wqe.wr.opcode.has_response();
                return Some(Next { item: Item::Request(index), header, len, whole });
            }
            qp.tx.in_round = false;
        }
        conn.round.pop_front();
    }
    None
}

fn cpn_room(conn: &Conn, space: usize) -> bool {
    let units = u64::from(conn.payload_max / conn.unit) + 64;
    conn.next_cpn[space] + units - conn.tx_windows[space].base() < limits::CPN_WINDOW - 64
}

/// Header and payload bytes of the part of a request that begins at `offset`.
fn segment(conn: &Conn, wqe: &Wqe, offset: u32) -> (u32, u32) {
    let header = frame::request_header_bytes(wqe.wr.opcode) as u32;
    let len = if wqe.wr.opcode.has_response() { 0 } else { (wqe.wr.length - offset).min(conn.payload_max) };
    (header, len)
}

/// The work request at the cursor if it may be sent now: the visible list of what can hold a stream back.
fn sendable(now: Nanos, qp: &Qp, message_window: u64) -> Option<&Wqe> {
    let tx = &qp.tx;
    let starting = tx.cursor_offset == 0;
    let in_state = qp.state == QpState::Rts || qp.state == QpState::Sqd && !starting;
    if !in_state || tx.paused_until > now {
        return None;
    }
    if tx.error.is_some_and(|(msn, _)| tx.cursor_msn >= msn) {
        return None;
    }
    let wqe = tx.sq.get(tx.cursor_msn)?;
    let head = tx.cursor_msn == tx.sq.base_msn();
    if starting {
        let far = tx.cursor_msn - tx.sq.base_msn() >= message_window;
        let fenced = wqe.wr.flags & send_flags::FENCE != 0 && tx.outstanding_reads > 0;
        let reads_full =
            wqe.wr.opcode.has_response() && tx.outstanding_reads >= u32::from(qp.attrs.max_rd_atomic.max(1));
        if far || fenced || reads_full {
            return None;
        }
    }
    let unposted = tx.credit.is_some_and(|limit| (wqe.recv_index.wrapping_sub(limit) as i32) >= 0);
    // The head message's first packet may always ask: a lost credit cannot hang a stream.
    if wqe.wr.opcode.consumes_recv() && unposted && !(head && starting) {
        return None;
    }
    Some(wqe)
}

/// Builds packets for one path, beginning with `next`; false if no window is open.
fn fill_data<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, burst: &mut TxBurst, mut next: Next) -> bool {
    let bulk = next.len == conn.payload_max;
    let singly = conn.singly > 0;
    let most = if bulk && !singly { p.burst_packets(conn.segment) } else { 1 };
    let Some((path, room)) = choose_path(conn, &next, most) else { return false };
    let budget = conn.budget.min(limits::CONN_BYTES_MAX).saturating_sub(conn.in_flight_bytes) / conn.segment;
    let budget = if conn.in_flight_bytes == 0 { budget.max(1) } else { budget };
    let most = most.min(room).min(budget);
    if most == 0 {
        conn.paths.iter_mut().for_each(|x| x.limited = false);
        return false;
    }
    conn.singly = conn.singly.saturating_sub(1);
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
    while (burst.packets.len() as u32) < most && bulk {
        let Some(next) = peek(p, conn) else { break };
        let size = HEADER_BYTES as u32 + next.header + next.len;
        // One GSO datagram: equal sizes, only the last may be smaller.
        if size > first_bytes || burst.packets.last().is_some_and(|l| l.1 < first_bytes) {
            break;
        }
        if build_packet(p, conn, burst, path, next, first_bytes).is_none() {
            break;
        }
    }
    if burst.packets.len() as u32 == budget {
        request_ack(burst);
    }
    true
}

/// The last packet of a burst that exhausted the window asks for an acknowledgement at once.
fn request_ack(burst: &mut TxBurst) {
    if let Some(Piece::Bytes { start, .. }) = first_piece_of_last(burst) {
        burst.bytes[start as usize + 1] |= wire::FLAG_ACK_REQUEST;
    }
}

fn first_piece_of_last(burst: &TxBurst) -> Option<Piece> {
    let count = burst.packets.len();
    let first = if count >= 2 { burst.packets[count - 2].0 as usize } else { 0 };
    burst.pieces.get(first).copied()
}

fn choose_path(conn: &mut Conn, next: &Next, most: u32) -> Option<(usize, u32)> {
    if let Item::Again(again) = next.item {
        // Repair on the path that lost it, unless that path is in trouble (design D9).
        let path = usize::from(again.path);
        if let Some(room) = conn.paths.get(path).map(|x| x.room()).filter(|r| *r > 0) {
            return Some((path, room));
        }
    }
    let mut turn = conn.turn;
    let chosen = select::select(&mut conn.paths, &mut turn, most);
    conn.turn = turn;
    chosen
}

/// Builds one packet of at most `limit` bytes; gives its size, or nothing if the only item failed.
fn build_packet<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    burst: &mut TxBurst,
    path: usize,
    first: Next,
    limit: u32,
) -> Option<u32> {
    let limit = limit.min(conn.segment);
    let (start, pieces) = (burst.bytes.len(), burst.pieces.len());
    let tx = &conn.paths[path];
    let (psn, generation) = (tx.next_psn() as u32, tx.generation);
    let mut head = header(p, conn, PacketType::Data);
    (head.psn, head.path, head.generation) = (psn, path as u8, generation);
    head.write(&mut burst.bytes);
    let mut b = Builder { start: start as u32, size: HEADER_BYTES as u32, frames: 0, retransmit: false };
    let mut next = first;
    loop {
        if !b.emit(p, conn, burst, path, next) && b.frames == 0 {
            burst.bytes.truncate(start);
            burst.pieces.truncate(pieces);
            return None;
        }
        if !next.whole || b.frames >= limits::FRAMES_PER_PACKET {
            break;
        }
        match peek(p, conn) {
            Some(n) if n.whole && b.size + n.header + n.len <= limit => next = n,
            _ => break,
        }
    }
    let owed = conn.ack.now || conn.ack.deadline.is_some();
    if owed && conn.refusals.is_empty() && b.size as usize + acks_bytes(conn) <= limit as usize {
        write_acks(p, conn, &mut burst.bytes);
    }
    b.flush(burst);
    burst.packets.push((burst.pieces.len() as u32, b.size));
    let tx = &mut conn.paths[path];
    tx.push_packet(p.now, b.frames, b.size as u16);
    conn.in_flight_bytes += b.size;
    let slot = p.path_slot(tx.plane, path, conn.paths.len());
    p.count_tx(slot, b.size, true, b.retransmit);
    Some(b.size)
}

/// A packet under construction.
struct Builder {
    /// First byte in `burst.bytes` not yet in a piece.
    start: u32,
    size: u32,
    frames: u8,
    retransmit: bool,
}

impl Builder {
    /// Puts bytes written since the last flush into a piece.
    fn flush(&mut self, burst: &mut TxBurst) {
        let end = burst.bytes.len() as u32;
        if end > self.start {
            burst.pieces.push(Piece::Bytes { start: self.start, len: end - self.start });
            self.start = end;
        }
        // Sizes are counted from pieces, so that header, frames and acknowledgements need no bookkeeping.
        let first = burst.packets.last().map_or(0, |l| l.0 as usize);
        self.size = burst.pieces[first..]
            .iter()
            .map(|x| match x {
                Piece::Bytes { len, .. } | Piece::Memory { len, .. } => *len,
            })
            .sum();
    }

    /// Takes the item and appends its frame; false if it failed (its work request is in error now).
    fn emit<S: Sink>(
        &mut self,
        p: &mut Parts<'_, S>,
        conn: &mut Conn,
        burst: &mut TxBurst,
        path: usize,
        next: Next,
    ) -> bool {
        let frame = match next.item {
            Item::Again(again) => {
                conn.retransmits.pop_front();
                let mut f = again.frame;
                retransmit_header(p, &mut f);
                self.retransmit |= again.left;
                if !self.emit_frame(p, conn, burst, &mut f) {
                    // Its memory is gone: the numbers are filled, the message ends in error.
                    if f.kind == FrameKind::Response {
                        super::response::read_denied(p, conn, f.qp, f.msn);
                        f.kind = FrameKind::VoidResponse;
                    } else {
                        f.kind = FrameKind::VoidRequest;
                    }
                    self.emit_frame(p, conn, burst, &mut f);
                }
                Some(f)
            }
            Item::Ping => {
                conn.ping_due = false;
                Frame::Ping.write(&mut burst.bytes);
                let idle = TxFrame {
                    kind: FrameKind::Ping,
                    qp: 0,
                    life: 0,
                    msn: 0,
                    offset: 0,
                    len: 0,
                    cpn: 0,
                    units: 0,
                    attempt: 0,
                };
                Some(idle)
            }
            Item::Request(index) => self.emit_request(p, conn, burst, index, next.len),
            Item::Response(index) => self.emit_response(p, conn, burst, index, next.len),
        };
        self.flush(burst);
        let Some(frame) = frame else { return false };
        conn.paths[path].push_frame(frame);
        self.frames += 1;
        true
    }

    /// A new part of the request at the QP's cursor.
    fn emit_request<S: Sink>(
        &mut self,
        p: &mut Parts<'_, S>,
        conn: &mut Conn,
        burst: &mut TxBurst,
        index: u16,
        len: u32,
    ) -> Option<TxFrame> {
        let qp = p.qps.at(index)?;
        let (msn, offset, attempt) = (qp.tx.cursor_msn, qp.tx.cursor_offset, qp.tx.attempt);
        if offset == 0 {
            let wqe = qp.tx.sq.get_mut(msn)?;
            wqe.attempt = attempt;
            let rights = if wqe.wr.opcode.has_response() { access::LOCAL_WRITE } else { 0 };
            let wqe = *wqe;
            let pd = qp.init.pd;
            let good =
                qp.tx.sq.sges(&wqe).all(|s| {
                    s.len == 0 || p.mrs.check(s.lkey, pd, s.addr, u64::from(s.len), rights).is_some()
                });
            if !good {
                p.fail_local(conn, index, msn, WcStatus::LocProtErr);
                return None;
            }
        }
        let mut f = TxFrame {
            kind: FrameKind::Request,
            qp: index,
            life: qp.tx.life,
            msn,
            offset,
            len,
            cpn: conn.next_cpn[REQUESTS],
            units: len.div_ceil(conn.unit).max(1) as u16,
            attempt,
        };
        if !self.emit_frame(p, conn, burst, &mut f) {
            return None;
        }
        conn.next_cpn[REQUESTS] += u64::from(f.units);
        let now = p.now;
        let qp = p.qps.at(index)?;
        let (response, length) = qp.tx.sq.get(msn).map(|w| (w.wr.opcode.has_response(), w.wr.length))?;
        qp.tx.outstanding_reads += u32::from(response);
        if msn == qp.tx.sq.base_msn() && offset == 0 && qp.tx.not_ready_tries == 0 {
            qp.tx.stalled_since = now;
        }
        qp.tx.cursor_offset += len;
        if response || qp.tx.cursor_offset == length {
            qp.tx.cursor_msn += 1;
            qp.tx.cursor_offset = 0;
        }
        p.arm_qp(index);
        Some(f)
    }

    /// A new part of the response at the QP's job cursor.
    fn emit_response<S: Sink>(
        &mut self,
        p: &mut Parts<'_, S>,
        conn: &mut Conn,
        burst: &mut TxBurst,
        index: u16,
        len: u32,
    ) -> Option<TxFrame> {
        let qp = p.qps.at(index)?;
        let (cursor, life) = (qp.rx.cursor_job, qp.rx.epoch);
        let job = qp.rx.job_mut(cursor)?;
        let mut f = TxFrame {
            kind: FrameKind::Response,
            qp: index,
            life,
            msn: cursor,
            offset: job.sent,
            len,
            cpn: conn.next_cpn[RESPONSES],
            units: len.div_ceil(conn.unit).max(1) as u16,
            attempt: job.attempt,
        };
        if !self.emit_frame(p, conn, burst, &mut f) {
            super::response::read_denied(p, conn, index, cursor);
            return None;
        }
        conn.next_cpn[RESPONSES] += u64::from(f.units);
        let qp = p.qps.at(index)?;
        let job = qp.rx.job_mut(cursor)?;
        job.sent += len;
        job.begun = true;
        if job.sent == job.total {
            qp.rx.cursor_job += 1;
        }
        Some(f)
    }

    /// Writes the frame and references its payload; false if the memory may not be read any more.
    fn emit_frame<S: Sink>(
        &mut self,
        p: &mut Parts<'_, S>,
        conn: &mut Conn,
        burst: &mut TxBurst,
        f: &mut TxFrame,
    ) -> bool {
        let (bytes, pieces, start) = (burst.bytes.len(), burst.pieces.len(), self.start);
        let written = match f.kind {
            FrameKind::Request => self.write_request(p, burst, f),
            FrameKind::Response => self.write_response(p, burst, f),
            FrameKind::VoidRequest | FrameKind::VoidResponse => {
                write_void(p, burst, f);
                Some(())
            }
            FrameKind::Ping => {
                Frame::Ping.write(&mut burst.bytes);
                Some(())
            }
        };
        if written.is_none() {
            burst.bytes.truncate(bytes);
            burst.pieces.truncate(pieces);
            self.start = start;
            if f.kind == FrameKind::Request {
                p.fail_local(conn, f.qp, f.msn, WcStatus::LocProtErr);
            }
        }
        written.is_some()
    }

    fn write_request<S: Sink>(
        &mut self,
        p: &mut Parts<'_, S>,
        burst: &mut TxBurst,
        f: &TxFrame,
    ) -> Option<()> {
        let qp = p.qps.at(f.qp)?;
        let wqe = qp.tx.sq.get(f.msn)?;
        let wr = &wqe.wr;
        let request = Request {
            opcode: wr.opcode,
            solicited: wr.flags & send_flags::SOLICITED != 0,
            dst_qpn: qp.attrs.dest_qpn,
            src_qpn: qp.qpn,
            life: f.life,
            cpn: f.cpn as u32,
            units: f.units,
            attempt: f.attempt,
            msn: f.msn as u32,
            total: wr.length,
            offset: f.offset,
            recv_index: wqe.recv_index,
            raddr: wr.remote_addr,
            rkey: wr.rkey,
            imm: wr.imm,
            compare_add: wr.compare_add,
            swap: wr.swap,
            payload: &[],
        };
        request.write_header(f.len as u16, &mut burst.bytes);
        if wr.flags & send_flags::INLINE != 0 {
            qp.tx.sq.copy_inline(wqe, f.offset, f.len, &mut burst.bytes);
            return Some(());
        }
        if f.len == 0 {
            return Some(());
        }
        self.flush(burst);
        let pd = qp.init.pd;
        slices(qp.tx.sq.sges(wqe), f.offset, f.len, |s| {
            let (va, _) = p.mrs.check(s.lkey, pd, s.addr, u64::from(s.len), 0)?;
            burst.pieces.push(Piece::Memory { va, len: s.len });
            Some(())
        })
    }

    fn write_response<S: Sink>(
        &mut self,
        p: &mut Parts<'_, S>,
        burst: &mut TxBurst,
        f: &TxFrame,
    ) -> Option<()> {
        let qp = p.qps.at(f.qp)?;
        let (pd, qpn, life) = (qp.init.pd, qp.attrs.dest_qpn, qp.rx.life?);
        let job = *qp.rx.job_mut(f.msn)?;
        let kind = match job.work {
            RespWork::Read { .. } => RespKind::Read,
            RespWork::Atomic(_) => RespKind::Atomic,
        };
        let response = Response {
            kind,
            qpn,
            life,
            cpn: f.cpn as u32,
            units: f.units,
            attempt: job.attempt,
            msn: job.msn as u32,
            offset: f.offset,
            total: job.total,
            payload: &[],
        };
        response.write_header(f.len as u16, &mut burst.bytes);
        match job.work {
            RespWork::Atomic(old) => burst.bytes.extend_from_slice(&old.to_be_bytes()),
            RespWork::Read { raddr, rkey } if f.len > 0 => {
                self.flush(burst);
                let addr = raddr.wrapping_add(u64::from(f.offset));
                let (va, _) = p.mrs.check(rkey, pd, addr, u64::from(f.len), access::REMOTE_READ)?;
                burst.pieces.push(Piece::Memory { va, len: f.len });
            }
            RespWork::Read { .. } => {}
        }
        Some(())
    }
}

fn write_void<S: Sink>(p: &Parts<'_, S>, burst: &mut TxBurst, f: &TxFrame) {
    let void = Void {
        response: f.kind == FrameKind::VoidResponse,
        cpn: f.cpn as u32,
        units: f.units,
        src_qpn: Qpn::new(p.config.slot, u32::from(f.qp)),
        life: f.life,
        attempt: f.attempt,
    };
    Frame::Void(void).write(&mut burst.bytes);
}

/// Calls `f` for the parts of `sges` that make up `offset..offset + len`.
pub fn slices(
    sges: impl Iterator<Item = Sge>,
    offset: u32,
    len: u32,
    mut f: impl FnMut(Sge) -> Option<()>,
) -> Option<()> {
    let (mut skip, mut left) = (offset, len);
    for sge in sges {
        if left == 0 {
            break;
        }
        if skip >= sge.len {
            skip -= sge.len;
            continue;
        }
        let take = (sge.len - skip).min(left);
        f(Sge { addr: sge.addr.wrapping_add(u64::from(skip)), len: take, lkey: sge.lkey })?;
        skip = 0;
        left -= take;
    }
    (left == 0).then_some(())
}

/// The memory of this frame's request cannot be read (EFAULT): its message ends in error.
pub fn fault<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, frame: &TxFrame) {
    match frame.kind {
        FrameKind::Request => p.fail_local(conn, frame.qp, frame.msn, WcStatus::LocProtErr),
        FrameKind::Response => super::response::read_denied(p, conn, frame.qp, frame.msn),
        _ => {}
    }
}
