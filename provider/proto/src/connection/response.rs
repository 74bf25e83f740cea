//! Responses: executing Reads and atomics at the responder, placing their answers at the requester.

use super::overlap::YoungerAnswers;
use super::packet::scatter_below;
use super::{Conn, RESPONSES};
use crate::memory::Memory;
use crate::parts::Parts;
use crate::qp::{Fatal, RespJob, RespWork, RxMsg};
use crate::seq::{RangeState, later16, unwrap32};
use crate::types::*;
use crate::wire::{RefuseCode, RespKind, Response};

/// Executes a Read or atomic whose turn has come (MR-ORDER-4); the answer is queued. An error ends the stream at this
/// message.
pub fn execute<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    index: u16,
    msn: u64,
    msg: &RxMsg,
    mem: &mut impl Memory,
) -> Result<(), Fatal> {
    let access_error = Fatal { msn, code: RefuseCode::Access, recv_status: None };
    let Some(qp) = p.qps.at(index) else { return Err(access_error) };
    let who = (msg.pd, qp.qpn);
    let work = if msg.opcode == Opcode::Read {
        if msg.total > 0 {
            let len = u64::from(msg.total);
            p.mrs.check_remote(msg.rkey, who, msg.raddr, len, access::REMOTE_READ).ok_or(access_error)?;
        }
        RespWork::Read { raddr: msg.raddr, rkey: msg.rkey }
    } else {
        let target = p.mrs.check_remote(msg.rkey, who, msg.raddr, 8, access::REMOTE_ATOMIC);
        let (va, _) = target.ok_or(access_error)?;
        let old = match msg.opcode {
            Opcode::CompareSwap => mem.compare_swap(va, msg.compare_add, msg.swap),
            _ => mem.fetch_add(va, msg.compare_add),
        };
        RespWork::Atomic(old.map_err(|_| access_error)?)
    };
    let job = RespJob {
        conn: conn.index,
        msn,
        attempt: msg.attempt,
        pd: msg.pd,
        work,
        sent: 0,
        acked: 0,
        total: msg.total,
        begun: false,
        done: false,
    };
    qp.rx.jobs.push_back(job);
    conn.enqueue_responder(qp);
    Ok(())
}

/// A request whose answer is still owed came again, because the connection it came by before is gone: the whole answer
/// goes by this one, for this attempt. It was executed once and is not again.
pub fn answer_again(conn: &mut Conn, qp: &mut crate::qp::Qp, msn: u64, attempt: u16) {
    let again = |j: &RespJob| j.conn != conn.index || later16(attempt, j.attempt);
    let Some(at) = qp.rx.jobs.iter().position(|j| j.msn == msn && !j.done && again(j)) else {
        return;
    };
    let job = &mut qp.rx.jobs[at];
    (job.conn, job.attempt, job.sent, job.acked, job.begun) = (conn.index, attempt, 0, 0, false);
    qp.rx.cursor_job = qp.rx.cursor_job.min(qp.rx.base_job + at as u64);
    conn.enqueue_responder(qp);
}

/// A Read's memory may not be read any more (deregistered under way): the stream ends at that message.
pub fn read_denied<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, index: u16, job: u64) {
    let Some(qp) = p.qps.at(index) else { return };
    let Some(j) = qp.rx.job_mut(job) else { return };
    j.done = true;
    let fatal = Fatal { msn: j.msn, code: RefuseCode::Access, recv_status: None };
    let attempt = j.attempt;
    qp.rx.cursor_job = qp.rx.cursor_job.max(job + 1);
    qp.rx.retire_jobs();
    super::responder::refuse_fatal(p, conn, index, fatal, attempt);
    super::deliver::fail(p, index, fatal);
}

/// Takes a response packet in; false: it counts as not received. One that nobody waits for is dropped for good
/// (MR-RESP-2).
pub fn on_response<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    f: &Response<'_>,
    mem: &mut impl Memory,
) -> bool {
    let window = &conn.rx_windows[RESPONSES];
    let cpn = unwrap32(f.cpn, window.base());
    match window.state(cpn, u64::from(f.units)) {
        RangeState::New => {}
        RangeState::Old => {
            conn.repeats = conn.repeats.wrapping_add(1);
            return true;
        }
        RangeState::Mixed | RangeState::Beyond => return false,
    }
    conn.rx_windows[RESPONSES].mark(cpn, u64::from(f.units));
    let now = p.now;
    let Some(qp) = p.qps.get(f.qpn).filter(|q| q.tx.life == f.life && q.state != QpState::Err) else {
        return true;
    };
    let index = f.qpn.index() as u16;
    let msn = unwrap32(f.msn, qp.tx.sq.base_msn());
    let Some(wqe) = qp.tx.sq.get(msn).copied() else { return true };
    let read = wqe.wr.opcode == Opcode::Read;
    let asked = wqe.wr.opcode.has_response() && read == (f.kind == RespKind::Read);
    if !asked || (wqe.wr.length, wqe.attempt) != (f.total, f.attempt) || wqe.done {
        return true;
    }
    let pd = qp.init.pd;
    let native;
    let payload = if read {
        f.payload
    } else {
        // The value travels big-endian; the application reads it as its own u64.
        let Some(value) = f.payload.first_chunk::<8>() else { return true };
        native = u64::from_be_bytes(*value).to_ne_bytes();
        &native
    };
    let younger = YoungerAnswers::than(p.mrs, qp, msn);
    let placed = scatter_below(younger, p.mrs, pd, qp.tx.sq.sges(&wqe), (f.offset, payload), mem);
    qp.tx.stalled_since = now;
    qp.tx.not_ready_tries = 0;
    qp.tx.accepted = true;
    if placed.is_none() {
        p.fail_local(conn, index, msn, WcStatus::LocProtErr);
        return true;
    }
    let Some(wqe) = qp.tx.sq.get_mut(msn) else { return true };
    // The answer completes the request; that the request was accepted does not (MR-RESP-3).
    wqe.answered += payload.len() as u32;
    qp.tx.last_answered = qp.tx.last_answered.max(msn);
    if wqe.answered == wqe.wr.length {
        wqe.done = true;
        qp.tx.outstanding_reads = qp.tx.outstanding_reads.saturating_sub(1);
        conn.enqueue(qp);
        p.retire(conn, index);
    }
    true
}
