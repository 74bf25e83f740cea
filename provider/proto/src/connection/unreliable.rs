//! Unreliable connections (UC) at the receiver: packets come in order on one path; a message with a packet missing
//! is dropped whole, and so is one that meets no receive or breaks a rule. Nobody is told.

use super::Conn;
use super::deliver::{deliver, fail};
use super::packet::scatter;
use super::responder::{Denied, key_good, operation_allowed};
use crate::memory::Memory;
use crate::parts::Parts;
use crate::qp::{Fatal, RxMsg};
use crate::seq::unwrap32;
use crate::types::*;
use crate::wire::{RefuseCode, Request};

/// Takes a packet of an unreliable stream in: the beginning of a later message, or the next bytes of this one
/// (MR-UC-3).
pub fn accept<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    index: u16,
    f: &Request<'_>,
    mem: &mut impl Memory,
) {
    let Some(qp) = p.qps.at(index) else { return };
    let msn = unwrap32(f.msn, qp.rx.next_msn);
    // What invalidates must be reliable: a stream that cannot repair it does not have it.
    let reliable_only = f.opcode.has_response() || matches!(f.opcode, Opcode::SendInv | Opcode::AtomicWrite);
    if msn < qp.rx.next_msn || reliable_only {
        p.stats.uc_dropped += 1;
        return;
    }
    let expected = qp.rx.partial.take();
    let continues = f.offset > 0 && expected == Some((msn, f.offset));
    if !continues && f.offset > 0 {
        // Something before it is missing: the rest of the message is worth nothing.
        p.stats.uc_dropped += 1;
        return;
    }
    match check(p, index, f).and_then(|()| place(p, index, f, mem)) {
        Ok(()) => {}
        Err(Denied::Fatal(code, Some(WcStatus::LocProtErr))) => {
            let fatal = Fatal { msn, code, recv_status: Some(WcStatus::LocProtErr) };
            return fail(p, index, fatal);
        }
        Err(_) => {
            p.stats.uc_dropped += 1;
            return;
        }
    }
    let Some(qp) = p.qps.at(index) else { return };
    let received = f.offset + f.payload.len() as u32;
    if received < f.total {
        qp.rx.partial = Some((msn, received));
        return;
    }
    qp.rx.next_msn = msn + 1;
    if f.opcode.consumes_recv() {
        let mut msg = RxMsg::EMPTY;
        msg.begin(f, qp.init.pd);
        deliver(p, conn, index, &msg);
    }
}

fn check<S: Sink>(p: &mut Parts<'_, S>, index: u16, f: &Request<'_>) -> Result<(), Denied> {
    let Some(qp) = p.qps.at(index) else { return Ok(()) };
    operation_allowed(qp, f)?;
    if f.srq.is_some() {
        return Err(Denied::Fatal(RefuseCode::InvalidRequest, None));
    }
    let pd = qp.init.pd;
    if f.opcode.consumes_recv() {
        // The oldest one: what was lost took none, so the sender's count is ahead (MR-UC-4).
        if qp.rq.len() == 0 {
            p.bind_receive(index);
        }
        let Some(qp) = p.qps.at(index) else { return Ok(()) };
        let base = qp.rq.base();
        let entry = qp.rq.get(base).ok_or(Denied::NoReceive(base))?;
        if f.opcode.is_send() && u64::from(f.total) > entry.capacity {
            return Err(Denied::Fatal(RefuseCode::InvalidRequest, None));
        }
    }
    key_good(p, index, pd, f)
}

fn place<S: Sink>(
    p: &mut Parts<'_, S>,
    index: u16,
    f: &Request<'_>,
    mem: &mut impl Memory,
) -> Result<(), Denied> {
    let denied = Denied::Fatal(RefuseCode::Operation, Some(WcStatus::LocProtErr));
    let Some(qp) = p.qps.at(index) else { return Ok(()) };
    let len = f.payload.len() as u32;
    if f.opcode.is_send() {
        let pd = qp.init.srq.and_then(|s| p.srqs.get_mut(s)).map_or(qp.init.pd, |s| s.pd);
        let Some(entry) = qp.rq.get(qp.rq.base()) else { return Ok(()) };
        let placed = scatter(p.mrs, pd, qp.rq.sges(entry), f.offset, f.payload, mem);
        qp.rq.touch(qp.rq.base());
        return placed.ok_or(denied);
    }
    if len == 0 {
        return Ok(());
    }
    let addr = f.raddr.wrapping_add(u64::from(f.offset));
    let unreachable = Denied::Fatal(RefuseCode::Access, None);
    let who = (qp.init.pd, qp.qpn);
    let target = p.mrs.check_remote(f.rkey, who, addr, u64::from(len), access::REMOTE_WRITE);
    let Some((va, _)) = target else {
        return Err(unreachable);
    };
    let last = f.offset + len == f.total;
    let placed = if last { mem.place_last(va, f.payload) } else { mem.place(va, f.payload) };
    placed.map_err(|_| unreachable)
}
