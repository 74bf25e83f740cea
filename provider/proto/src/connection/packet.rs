//! Building one packet: header, frames from retransmissions, requests and responses, acknowledgements that ride along.

use super::overlap::{Covered, YoungerAnswers};
use super::requester::{Item, Next, acks_bytes, acks_ride, header, peek, retransmit_header, write_acks};
use super::{Conn, REQUESTS, RESPONSES};
use crate::burst::{Piece, TxBurst};
use crate::config::limits;
use crate::memory::Memory;
use crate::mr::MrTable;
use crate::parts::Parts;
use crate::path::{FrameKind, TxFrame};
use crate::qp::RespWork;
use crate::types::*;
use crate::wire::{Frame, HEADER_BYTES, PacketType, Request, RespKind, Response, Void};

/// Builds one packet of at most `limit` bytes; gives its size, or nothing if the only item failed.
pub fn build_packet<S: Sink>(
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
    if matches!(first.item, Item::Again) {
        // What the lost packet told is as lost as its data (MR-SACK-9).
        conn.rx_paths.iter_mut().for_each(|rx| rx.untold = rx.untold.max(1));
    }
    // Acknowledgements come first: what a message answers is complete before the message itself is (MR-FRAME-4).
    let told = acks_ride(conn) && HEADER_BYTES as u32 + first.bytes() + acks_bytes(conn) as u32 <= limit;
    if told {
        write_acks(p, conn, &mut burst.bytes);
    }
    let mut b = Builder { start: start as u32, size: 0, frames: 0, retransmit: false };
    b.flush(burst);
    let mut next = first;
    loop {
        if !b.emit(p, conn, burst, path, next) && b.frames == 0 {
            burst.bytes.truncate(start);
            burst.pieces.truncate(pieces);
            conn.ack.now |= told;
            return None;
        }
        // After a memory fault each packet holds one frame, so that the faulting one shows.
        if !next.whole || conn.singly > 0 || b.frames >= limits::FRAMES_PER_PACKET {
            break;
        }
        match peek(p, conn) {
            Some(n) if n.whole && b.size + n.bytes() <= limit && fits(&n, path) => next = n,
            _ => break,
        }
    }
    b.flush(burst);
    burst.packets.push((burst.pieces.len() as u32, b.size));
    let tx = &mut conn.paths[path];
    tx.push_packet(p.now, b.frames, b.size as u16);
    tx.tally.retransmitted += u64::from(b.retransmit);
    conn.in_flight_bytes += b.size;
    let plane = tx.plane;
    let slot = p.path_slot(plane, path, conn.paths.len());
    p.pace.sent(p.now, plane, b.size);
    conn.allowance.sent(p.now, b.size, p.config.tuning.host_slack_ns);
    p.count_tx(slot, b.size, true, b.retransmit);
    Some(b.size)
}

/// The item may go on this path.
fn fits(next: &Next, path: usize) -> bool {
    next.pin.is_none_or(|pin| usize::from(pin) == path)
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
                Piece::Bytes { len, .. } | Piece::Memory { len, .. } | Piece::Zeros { len } => *len,
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
            Item::Again => {
                let Some(again) = conn.take_retransmit() else { return false };
                let mut f = again.frame;
                retransmit_header(p, &mut f);
                f.repair |= again.left;
                self.retransmit |= again.left;
                if !self.emit_frame(p, conn, burst, &mut f) {
                    // Its memory is gone: the numbers are filled, the message ends in error.
                    if f.kind == FrameKind::Response {
                        super::response::read_denied(p, conn, f.qp, f.msn);
                        f.become_void(FrameKind::VoidResponse);
                    } else {
                        f.become_void(FrameKind::VoidRequest);
                    }
                    self.emit_frame(p, conn, burst, &mut f);
                }
                Some(f)
            }
            Item::Ping => {
                conn.ping_due = false;
                Frame::Ping.write(&mut burst.bytes);
                let idle = TxFrame {
                    repair: false,
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
            let first = !std::mem::replace(&mut wqe.executed, true);
            let wqe = *wqe;
            let pd = qp.init.pd;
            let who = (pd, qp.qpn);
            if first && let Err(status) = execute(p.mrs, &wqe.wr, who) {
                p.fail_local(conn, index, msn, status);
                return None;
            }
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
            repair: false,
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
        let (response, length, answered) =
            qp.tx.sq.get(msn).map(|w| (w.wr.opcode.has_response(), w.wr.length, w.done))?;
        qp.tx.outstanding_reads += u32::from(response && !answered);
        if msn == qp.tx.sq.base_msn() && offset == 0 && qp.tx.not_ready_tries == 0 {
            qp.tx.stalled_since = now;
        }
        qp.tx.cursor_offset += len;
        if response || qp.tx.cursor_offset == length {
            qp.tx.cursor_msn += 1;
            qp.tx.cursor_offset = 0;
        }
        let sent = qp.tx.cursor_offset == 0;
        if qp.init.qp_type == QpType::Uc {
            // Nobody confirms an unreliable message: it is complete when it has left.
            if sent && let Some(wqe) = qp.tx.sq.get_mut(msn) {
                wqe.done = true;
                p.retire(conn, index);
            }
        } else {
            p.arm_qp(index);
        }
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
            repair: false,
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
            opcode: if wr.opcode.is_local() { Opcode::Nop } else { wr.opcode },
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
            srq: qp.is_xrc().then_some(wr.remote_srq),
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
            burst.pieces.push(piece(p.mrs, pd, s)?);
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
        let (qpn, life) = (qp.attrs.dest_qpn, qp.rx.life?);
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
                let who = (job.pd, qp.qpn);
                // The key may be gone since the Read was executed (MR-ORDER-4).
                let (va, _) = p.mrs.check_remote(rkey, who, addr, u64::from(f.len), access::REMOTE_READ)?;
                burst.pieces.push(Piece::Memory { va, len: f.len });
            }
            RespWork::Read { .. } => {}
        }
        Some(())
    }
}

/// Does what a request is to its requester alone, when its turn to be sent has come (MR-ORDER-7).
fn execute(mrs: &mut MrTable, wr: &SendWqe, who: (u32, Qpn)) -> Result<(), WcStatus> {
    match wr.opcode {
        Opcode::BindWindow if !mrs.bind(&wr.bind(), who) => Err(WcStatus::MwBindErr),
        Opcode::LocalInv if !mrs.invalidate(wr.imm, who) => Err(WcStatus::LocQpOpErr),
        _ => Ok(()),
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
        // Only VOIDs made to confirm carry bits here; those of lost data were cleared when they became VOIDs.
        confirms: f.offset as u16,
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

/// The piece of a packet that an SGE names; `None` if it may not be read.
#[inline(always)]
pub fn piece(mrs: &MrTable, pd: u32, s: Sge) -> Option<Piece> {
    let (va, mr) = mrs.check(s.lkey, pd, s.addr, u64::from(s.len), 0)?;
    Some(if mr.is_null() { Piece::Zeros { len: s.len } } else { Piece::Memory { va, len: s.len } })
}

/// Copies `bytes` into the parts of `sges` that begin at `offset`; `None` if one may not be written.
pub fn scatter(
    mrs: &MrTable,
    pd: u32,
    sges: impl Iterator<Item = Sge>,
    offset: u32,
    bytes: &[u8],
    mem: &mut impl Memory,
) -> Option<()> {
    scatter_below(None::<YoungerAnswers<'_>>, mrs, pd, sges, (offset, bytes), mem)
}

/// As [`scatter`], but for the bytes that `younger` covers.
pub fn scatter_below(
    younger: Option<impl Covered>,
    mrs: &MrTable,
    pd: u32,
    sges: impl Iterator<Item = Sge>,
    (offset, bytes): (u32, &[u8]),
    mem: &mut impl Memory,
) -> Option<()> {
    let mut rest = bytes;
    slices(sges, offset, bytes.len() as u32, |s| {
        let (head, tail) = rest.split_at(s.len as usize);
        rest = tail;
        let (va, mr) = mrs.check(s.lkey, pd, s.addr, u64::from(s.len), access::LOCAL_WRITE)?;
        match younger {
            _ if mr.is_null() => Some(()),
            None => mem.place(va, head).ok(),
            Some(younger) => younger.place_below(va, head, |va, part| mem.place(va, part)).ok(),
        }
    })
}
