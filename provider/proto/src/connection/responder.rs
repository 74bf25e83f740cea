//! Taking requests in: one visible list of checks in fixed order ([`on_request`]), placement, and what completes.

use super::deliver::{deliver, fail};
use super::overlap::Younger;
use super::packet::{scatter, slices};
use super::{Conn, PendingRefusal, REQUESTS, response, tags};
use crate::config::limits;
use crate::memory::Memory;
use crate::parts::Parts;
use crate::qp::{Fatal, Qp, RxMsg};
use crate::seq::{RangeState, later16, unwrap32};
use crate::types::*;
use crate::wire::frame::{CONFIRMS_FATAL, CONFIRMS_RETRY};
use crate::wire::{Refuse, RefuseCode, Request, Void};

/// What became of a request packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Accepted, or dropped for good: its connection packet numbers are resolved either way (MR-CPN-4).
    Resolved,
    /// Accepted before.
    Duplicate,
    /// Neither taken nor covered by a refusal we tell of: must not count as received, it will come again (MR-SACK-8).
    NotReceived,
}

/// Takes a request packet in; false: it counts as not received.
pub fn on_request<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    f: &Request<'_>,
    mem: &mut impl Memory,
) -> bool {
    // Before anything else is looked at: what was taken once must not be placed again (MR-CPN-3).
    let window = &conn.rx_windows[REQUESTS];
    let cpn = unwrap32(f.cpn, window.base());
    let outcome = match window.state(cpn, u64::from(f.units)) {
        RangeState::New => accept(p, conn, f, mem),
        RangeState::Old => Outcome::Duplicate,
        RangeState::Mixed | RangeState::Beyond => Outcome::NotReceived,
    };
    conn.repeats = conn.repeats.wrapping_add(u32::from(outcome == Outcome::Duplicate));
    if outcome == Outcome::Resolved {
        conn.rx_windows[REQUESTS].mark(cpn, u64::from(f.units));
    }
    outcome != Outcome::NotReceived
}

/// The checks, in order (MR-REQ-4): refusal in force, queue pair, binding, complete already, error in force, operation,
/// receive resource, length, key and rights, number of Reads, message window, attempt; then placement and completion.
fn accept<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, f: &Request<'_>, mem: &mut impl Memory) -> Outcome {
    let index = f.dst_qpn.index() as u16;
    // 1. A refusal in force drops what it covers (MR-REFUSE-3); a later attempt confirms it.
    if !conn.refusals.is_empty() && refused(conn, f) {
        return Outcome::Resolved;
    }
    // 2. The queue pair exists, receives, and expects this peer.
    let Some(qp) = p.qps.get(f.dst_qpn).filter(|q| expects(q, conn, f)) else {
        return not_ready(conn, f, f.attempt);
    };
    // 3. The stream is the one bound, or may be bound now.
    match bind(qp, conn, f) {
        Binding::Bound => qp.rx.conn = Some(conn.index),
        // Of a former stream: whoever still sends it must hear that nothing of it is taken any more.
        Binding::Other => return not_ready(conn, f, f.attempt),
        Binding::Unproven(attempt) => return not_ready(conn, f, attempt),
    }
    let unreliable = qp.init.qp_type == QpType::Uc;
    if qp.state == QpState::Rtr && !std::mem::replace(&mut qp.rx.established, true) {
        p.sink.event(Event::CommEst(f.dst_qpn));
    }
    // Unreliable streams have their own, shorter list from here on (MR-UC-5).
    if unreliable {
        super::unreliable::accept(p, conn, index, f, mem);
        return Outcome::Resolved;
    }
    // 4. The message is not complete yet and within the window.
    let msn = unwrap32(f.msn, qp.rx.next_msn);
    if msn < qp.rx.next_msn {
        if f.opcode.has_response() {
            response::answer_again(conn, qp, msn, f.attempt);
        }
        return Outcome::Resolved;
    }
    if f.opcode.has_response() && qp.rx.jobs.len() >= limits::JOBS_MAX {
        return Outcome::NotReceived;
    }
    // 5. An error ends the stream at its message; later ones take no effect.
    if qp.rx.fatal.is_some_and(|fatal| msn >= fatal.msn) {
        return Outcome::Resolved;
    }
    // 6. The operation is enabled and well formed; of XRC it names an SRQ of the domain.
    // 7. A receive is there for it, large enough and writable.
    // 8. The key is good for it.
    // 9. It is not a Read or atomic more than promised.
    let checked = operation_allowed(qp, f).and_then(|()| domain(p, index, f)).and_then(|pd| {
        receive_ready(p, index, pd, f)?;
        key_good(p, index, pd, f)?;
        reads_within_limit(p, conn, index, msn, f)?;
        Ok(pd)
    });
    let pd = match checked {
        Ok(pd) => pd,
        Err(Denied::Later) => return Outcome::NotReceived,
        Err(Denied::NoReceive(first_missing)) => return no_receive(p, conn, f, first_missing),
        Err(Denied::Fatal(code, status)) => return end(p, conn, index, f.attempt, (msn, code, status), mem),
    };
    // 10. Progress of a refused attempt is forgotten when a later one arrives; an earlier one is ignored.
    let Some(qp) = p.qps.at(index) else { return Outcome::Resolved };
    let Some(msg) = qp.rx.entry(msn) else { return Outcome::NotReceived };
    if msg.seen && msg.attempt != f.attempt {
        if later16(msg.attempt, f.attempt) {
            return Outcome::Resolved;
        }
        qp.rx.forget(msn);
    }
    let Some(msg) = qp.rx.entry(msn) else { return Outcome::NotReceived };
    if !msg.seen {
        msg.begin(f, pd);
        qp.rx.open_reads += u32::from(f.opcode.has_response());
    } else if msg.total != f.total || msg.opcode != f.opcode {
        p.stats.rx_malformed += 1;
        return Outcome::NotReceived;
    }
    if let Err((code, status)) = place(p, index, pd, msn, f, mem) {
        return end(p, conn, index, f.attempt, (msn, code, status), mem);
    }
    advance(p, conn, index, mem);
    Outcome::Resolved
}

/// The stream ends at a message, when its turn has come.
fn end<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    index: u16,
    attempt: u16,
    (msn, code, recv_status): (u64, RefuseCode, Option<WcStatus>),
    mem: &mut impl Memory,
) -> Outcome {
    if !refuse_fatal(p, conn, index, Fatal { msn, code, recv_status }, attempt) {
        return Outcome::NotReceived;
    }
    advance(p, conn, index, mem);
    Outcome::Resolved
}

/// A refusal of the stream covers this packet. A packet of a later attempt confirms refusals that may be tried again
/// (MR-REFUSE-4).
fn refused(conn: &mut Conn, f: &Request<'_>) -> bool {
    let mut covered = false;
    conn.refusals.retain(|r| {
        let ours = r.refuse.qpn == f.src_qpn && r.refuse.life == f.life && r.local == f.dst_qpn;
        let confirmed = later16(f.attempt, r.refuse.attempt) && !r.refuse.code.is_fatal();
        covered |= ours && !confirmed && covers(&r.refuse, f);
        !(ours && confirmed)
    });
    covered
}

/// What follows the refused message is refused with it: the stream goes on there or nowhere (MR-REFUSE-1).
fn covers(refuse: &Refuse, f: &Request<'_>) -> bool {
    match refuse.code {
        RefuseCode::Rnr => {
            let past = f.recv_index.wrapping_sub(refuse.number) as i32;
            past > 0 || past == 0 && f.opcode.consumes_recv()
        }
        _ => (f.msn.wrapping_sub(refuse.number) as i32) >= 0,
    }
}

/// A VOID: numbers filled, refusals confirmed. False: it counts as not received. One that comes again confirms nothing:
/// a refusal may have come into force since (MR-VOID-1).
pub fn on_void(conn: &mut Conn, f: &Void) -> bool {
    let window = &mut conn.rx_windows[usize::from(f.response)];
    let cpn = unwrap32(f.cpn, window.base());
    match window.state(cpn, u64::from(f.units)) {
        RangeState::Beyond => return false,
        RangeState::Old => return true,
        // A VOID may cover numbers of which some were accepted: the rest is filled (MR-CPN-5).
        RangeState::New | RangeState::Mixed => window.mark(cpn, u64::from(f.units)),
    }
    conn.refusals.retain(|r| {
        let ours = r.refuse.qpn == f.src_qpn && r.refuse.life == f.life;
        let confirmed = if r.refuse.code.is_fatal() {
            f.confirms & CONFIRMS_FATAL != 0
        } else {
            f.confirms & CONFIRMS_RETRY != 0 && later16(f.attempt, r.refuse.attempt)
        };
        !(ours && confirmed)
    });
    true
}

fn expects(qp: &Qp, conn: &Conn, f: &Request<'_>) -> bool {
    let known = |ip| conn.peer_ips.contains(&ip);
    qp.receives()
        && qp.init.qp_type != QpType::XrcSend
        && qp.attrs.dest_qpn == f.src_qpn
        && (conn.self_accepting || qp.attrs.remote.is_some_and(known))
}

enum Binding {
    Bound,
    /// Another stream is bound, or this one ended before.
    Other,
    /// Its requester must show that it still lives: by an attempt later than this one.
    Unproven(u16),
}

/// Binds the stream to the QP on its first packet. Ids grow per peer endpoint, so an older one is history; a newer
/// one takes over only from a stream that has achieved nothing (an unreliable one always: nobody waits for the former)
/// (MR-REQ-5).
fn bind(qp: &mut Qp, conn: &Conn, f: &Request<'_>) -> Binding {
    let newer = |a: u32, b: u32| (a.wrapping_sub(b) as i32) > 0;
    let peer = conn.peer_incarnation;
    let reliable = qp.init.qp_type.is_reliable();
    let achieved = reliable && qp.rx.next_msn > 0;
    match qp.rx.life {
        Some(life) if life == f.life && qp.rx.peer == peer => return Binding::Bound,
        Some(life) if qp.rx.peer == peer && newer(life, f.life) => return Binding::Other,
        Some(_) if achieved => return Binding::Other,
        _ => {}
    }
    if qp.rx.floor.is_some_and(|(known, life)| known == peer && !newer(f.life, life)) {
        return Binding::Other;
    }
    if reliable && let Some(attempt) = qp.rx.unproven(peer, f.life, f.attempt) {
        return Binding::Unproven(attempt);
    }
    if qp.rx.life.is_some() {
        qp.rx.reset();
    }
    qp.rx.life = Some(f.life);
    qp.rx.peer = peer;
    qp.rx.conn = Some(conn.index);
    qp.rx.told_limit = qp.rq.limit();
    Binding::Bound
}

/// The reason a request is denied.
#[derive(Clone, Copy)]
pub enum Denied {
    /// The first receive index that is missing.
    NoReceive(u32),
    /// The stream ends at this message.
    Fatal(RefuseCode, Option<WcStatus>),
    /// It came too early to be judged, or there is no room to say what has to be said of it.
    Later,
}

/// The protection domain a request acts in: the QP's, or of XRC that of the SRQ it names (MR-XRC-2), which must be one
/// of the responder's domain (MR-XRC-1).
fn domain<S: Sink>(p: &mut Parts<'_, S>, index: u16, f: &Request<'_>) -> Result<u32, Denied> {
    let invalid = Denied::Fatal(RefuseCode::InvalidRequest, None);
    let Some(qp) = p.qps.at(index) else { return Err(Denied::Later) };
    match (qp.init.qp_type, f.srq) {
        (QpType::XrcRecv, Some(id)) => {
            let srq = p.srqs.get(id).ok_or(invalid)?;
            let ours = srq.xrcd.is_some() && srq.xrcd == qp.init.xrcd;
            ours.then_some(srq.pd).ok_or(invalid)
        }
        (QpType::XrcRecv, None) | (_, Some(_)) => Err(invalid),
        _ => Ok(qp.init.pd),
    }
}

pub fn operation_allowed(qp: &Qp, f: &Request<'_>) -> Result<(), Denied> {
    let invalid = Err(Denied::Fatal(RefuseCode::InvalidRequest, None));
    let needed = match f.opcode {
        Opcode::Write | Opcode::WriteImm | Opcode::AtomicWrite => access::REMOTE_WRITE,
        Opcode::Read => access::REMOTE_READ,
        Opcode::CompareSwap | Opcode::FetchAdd => access::REMOTE_ATOMIC,
        _ => return Ok(()),
    };
    if qp.attrs.access & needed == 0 {
        return invalid;
    }
    if f.opcode.has_response() && qp.attrs.max_dest_rd_atomic == 0 {
        return invalid;
    }
    let aligned = needed == access::REMOTE_ATOMIC || f.opcode == Opcode::AtomicWrite;
    if aligned && !f.raddr.is_multiple_of(8) {
        return invalid;
    }
    Ok(())
}

fn receive_ready<S: Sink>(p: &mut Parts<'_, S>, index: u16, pd: u32, f: &Request<'_>) -> Result<(), Denied> {
    let srq = p.qps.at(index).and_then(|qp| qp.init.srq);
    match srq.filter(|id| p.srqs.get(*id).is_some_and(|srq| srq.tags.is_some())) {
        Some(id) => tags::bind(p, index, id, f)?,
        None if f.srq.is_some() => super::xrc::bind(p, index, f)?,
        None => bind_receives(p, index, f)?,
    }
    if !f.opcode.is_send() {
        return Ok(());
    }
    let Some(qp) = p.qps.at(index) else { return Ok(()) };
    let Some(entry) = qp.rq.get(f.recv_index) else { return Ok(()) };
    if u64::from(f.total.saturating_sub(entry.tags.skip())) > entry.capacity {
        return Err(Denied::Fatal(RefuseCode::InvalidRequest, Some(WcStatus::LocLenErr)));
    }
    let pd = qp.init.srq.and_then(|s| p.srqs.get_mut(s)).map_or(pd, |s| s.pd);
    let (offset, payload) = entry.part(f.offset, f.payload);
    let writable = slices(qp.rq.sges(entry), offset, payload.len() as u32, |s| {
        p.mrs.check(s.lkey, pd, s.addr, u64::from(s.len), access::LOCAL_WRITE).map(|_| ())
    });
    writable.ok_or(Denied::Fatal(RefuseCode::Operation, Some(WcStatus::LocProtErr)))
}

/// Has the receives up to the one a request needs; an SRQ's are bound to the QP, in order (MR-CREDIT-4).
fn bind_receives<S: Sink>(p: &mut Parts<'_, S>, index: u16, f: &Request<'_>) -> Result<(), Denied> {
    let Some(mut qp) = p.qps.at(index) else { return Ok(()) };
    // Messages behind a missing receive are refused with it, whatever they are: they follow it in order.
    let first_needed = if f.opcode.consumes_recv() { f.recv_index.wrapping_add(1) } else { f.recv_index };
    while (first_needed.wrapping_sub(qp.rq.limit()) as i32) > 0 {
        // No honest stream is further ahead than its messages: a forged index must not empty the SRQ.
        let ahead = first_needed.wrapping_sub(qp.rq.base());
        if ahead > u32::from(limits::MESSAGE_WINDOW) {
            return Err(Denied::NoReceive(qp.rq.limit()));
        }
        let missing = qp.rq.limit();
        if !p.bind_receive(index) {
            return Err(Denied::NoReceive(missing));
        }
        match p.qps.at(index) {
            Some(same) => qp = same,
            None => return Ok(()),
        }
    }
    Ok(())
}

pub fn key_good<S: Sink>(p: &mut Parts<'_, S>, index: u16, pd: u32, f: &Request<'_>) -> Result<(), Denied> {
    let Some(qp) = p.qps.at(index) else { return Ok(()) };
    let rights = match f.opcode {
        Opcode::Write | Opcode::WriteImm | Opcode::AtomicWrite => access::REMOTE_WRITE,
        Opcode::Read => access::REMOTE_READ,
        Opcode::CompareSwap | Opcode::FetchAdd => access::REMOTE_ATOMIC,
        _ => return Ok(()),
    };
    // An empty Read or Write touches no memory: its key is not looked at (IBTA o9-? and common practice).
    if f.total == 0 {
        return Ok(());
    }
    let who = (pd, qp.qpn);
    let good = p.mrs.check_remote(f.rkey, who, f.raddr, u64::from(f.total), rights).is_some();
    good.then_some(()).ok_or(Denied::Fatal(RefuseCode::Access, None))
}

/// A requester may have `max_dest_rd_atomic` Reads and atomics outstanding. Certainly outstanding are those that wait
/// for their turn and those whose response has not left whole; others may be complete, and do not count. The one too
/// many is the last of them, not the one that happened to arrive last.
fn reads_within_limit<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    index: u16,
    msn: u64,
    f: &Request<'_>,
) -> Result<(), Denied> {
    let Some(qp) = p.qps.at(index) else { return Ok(()) };
    if !f.opcode.has_response() || !qp.rx.exceeds(msn, u32::from(qp.attrs.max_dest_rd_atomic)) {
        return Ok(());
    }
    let last = qp.rx.last_read().filter(|last| *last > msn);
    let Some(last) = last else { return Err(Denied::Fatal(RefuseCode::InvalidRequest, None)) };
    let attempt = qp.rx.entry(last).map_or(f.attempt, |msg| msg.attempt);
    let fatal = Fatal { msn: last, code: RefuseCode::InvalidRequest, recv_status: None };
    if !refuse_fatal(p, conn, index, fatal, attempt) {
        return Err(Denied::Later);
    }
    if let Some(qp) = p.qps.at(index) {
        qp.rx.forget(last);
    }
    Ok(())
}

fn not_ready(conn: &mut Conn, f: &Request<'_>, attempt: u16) -> Outcome {
    refuse(
        conn,
        f.dst_qpn,
        Refuse { code: RefuseCode::NotReady, attempt, qpn: f.src_qpn, life: f.life, number: f.msn, timer: 0 },
    )
}

fn no_receive<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    f: &Request<'_>,
    first_missing: u32,
) -> Outcome {
    let Some(qp) = p.qps.get(f.dst_qpn) else { return Outcome::Resolved };
    let timer = qp.attrs.min_rnr_timer;
    qp.rx.starved = true;
    qp.rx.short_of = f.srq;
    p.stats.rnr_sent += 1;
    refuse(
        conn,
        f.dst_qpn,
        Refuse {
            code: RefuseCode::Rnr,
            attempt: f.attempt,
            qpn: f.src_qpn,
            life: f.life,
            number: first_missing,
            timer,
        },
    )
}

/// Puts a refusal in force; it leaves with the acknowledgement of the packet that met it. A stream may have several:
/// each covers what the others do not (MR-REFUSE-2). One too many, and the packet comes again (MR-REFUSE-10).
pub fn refuse(conn: &mut Conn, local: Qpn, refuse: Refuse) -> Outcome {
    let same = conn.refusals.iter().position(|r| {
        r.local == local
            && (r.refuse.code, r.refuse.attempt) == (refuse.code, refuse.attempt)
            && (r.refuse.qpn, r.refuse.life) == (refuse.qpn, refuse.life)
    });
    match same {
        Some(at) => {
            let known = &mut conn.refusals[at].refuse;
            if (refuse.number.wrapping_sub(known.number) as i32) < 0 {
                *known = refuse;
            }
        }
        None if conn.refusals.len() >= limits::REFUSALS_MAX => return Outcome::NotReceived,
        None => conn.refusals.push(PendingRefusal { refuse, local }),
    }
    conn.ack.now = true;
    Outcome::Resolved
}

/// Ends the stream at a message: later ones take no effect, the requester is told. False: no room to say so.
pub fn refuse_fatal<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    index: u16,
    fatal: Fatal,
    attempt: u16,
) -> bool {
    let Some(qp) = p.qps.at(index) else { return true };
    let (local, src, Some(life)) = (qp.qpn, qp.attrs.dest_qpn, qp.rx.life) else { return true };
    if qp.rx.fatal.is_some_and(|old| old.msn <= fatal.msn) {
        return true;
    }
    let former = |r: &PendingRefusal| {
        r.local == local && r.refuse.code.is_fatal() && r.refuse.qpn == src && r.refuse.life == life
    };
    if conn.refusals.len() >= limits::REFUSALS_MAX && !conn.refusals.iter().any(former) {
        return false;
    }
    qp.rx.fatal = Some(fatal);
    conn.refusals.retain(|r| !former(r));
    let number = fatal.msn as u32;
    let refuse = Refuse { code: fatal.code, attempt, qpn: src, life, number, timer: 0 };
    conn.refusals.push(PendingRefusal { refuse, local });
    conn.ack.now = true;
    true
}

/// Copies the payload to where it belongs, in whatever order it comes (MR-ORDER-1). The tail of a Write is held back
/// until everything before it is placed (MR-ORDER-2). An error says how the stream ends: the memory is registered, and not
/// there.
fn place<S: Sink>(
    p: &mut Parts<'_, S>,
    index: u16,
    pd: u32,
    msn: u64,
    f: &Request<'_>,
    mem: &mut impl Memory,
) -> Result<(), (RefuseCode, Option<WcStatus>)> {
    let Some(qp) = p.qps.at(index) else { return Ok(()) };
    let in_order = msn == qp.rx.next_msn;
    let len = f.payload.len() as u32;
    match f.opcode {
        _ if f.opcode.is_send() => {
            let pd = qp.init.srq.and_then(|s| p.srqs.get_mut(s)).map_or(pd, |s| s.pd);
            let Some(entry) = qp.rq.get(f.recv_index) else { return Ok(()) };
            let (offset, payload) = entry.part(f.offset, f.payload);
            let placed = scatter(p.mrs, pd, qp.rq.sges(entry), offset, payload, mem);
            qp.rq.touch(f.recv_index);
            placed.ok_or((RefuseCode::Operation, Some(WcStatus::LocProtErr)))?;
        }
        Opcode::Write | Opcode::WriteImm | Opcode::AtomicWrite if len > 0 => {
            let addr = f.raddr.wrapping_add(u64::from(f.offset));
            let target = p.mrs.check_remote(f.rkey, (pd, qp.qpn), addr, u64::from(len), access::REMOTE_WRITE);
            let Some((va, mr)) = target else { return Ok(()) };
            // An atomic Write keeps its order also where Writes need not (MR-ORDER-8).
            let relaxed = mr.relaxed() && f.opcode != Opcode::AtomicWrite;
            let whole = in_order && len == f.total;
            let held = match qp.rx.entry(msn) {
                Some(msg) if !relaxed && !whole => hold(msg, f),
                _ => 0,
            };
            let payload = &f.payload[..len as usize - held];
            let younger = Younger::than(p.mrs, qp, msn);
            let result = if !relaxed && !younger.is_empty() {
                younger.place_last(va, payload, mem)
            } else if whole && !relaxed {
                mem.place_last(va, payload)
            } else {
                mem.place(va, payload)
            };
            result.map_err(|_| (RefuseCode::Access, None))?;
        }
        _ => {}
    }
    if let Some(msg) = qp.rx.entry(msn) {
        msg.received = msg.received.saturating_add(len);
    }
    Ok(())
}

/// Keeps the part of the payload that lies in the last bytes of the message; gives how many bytes that are.
fn hold(msg: &mut RxMsg, f: &Request<'_>) -> usize {
    let tail = (limits::HOLD_BYTES as u32).min(f.total);
    let tail_at = f.total - tail;
    let end = f.offset + f.payload.len() as u32;
    if end <= tail_at {
        return 0;
    }
    let from = f.offset.max(tail_at);
    let count = (end - from) as usize;
    // `hold` is aligned to its end: byte i of the tail is at HOLD_BYTES - tail + i.
    let at = limits::HOLD_BYTES - tail as usize + (from - tail_at) as usize;
    msg.hold[at..at + count].copy_from_slice(&f.payload[f.payload.len() - count..]);
    msg.held = tail as u8;
    count
}

/// Completes messages in order as far as they are all there (MR-ORDER-3).
fn advance<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, index: u16, mem: &mut impl Memory) {
    loop {
        let Some(qp) = p.qps.at(index) else { return };
        let msn = qp.rx.next_msn;
        if let Some(fatal) = qp.rx.fatal.filter(|fatal| fatal.msn == msn) {
            return fail(p, index, fatal);
        }
        let Some(msg) = qp.rx.msgs.front().copied().filter(RxMsg::complete) else { return };
        if msg.held > 0 && !release(p, index, &msg, mem) {
            let fatal = Fatal { msn, code: RefuseCode::Access, recv_status: None };
            refuse_fatal(p, conn, index, fatal, msg.attempt);
            return fail(p, index, fatal);
        }
        if msg.opcode.has_response()
            && let Err(fatal) = response::execute(p, conn, index, msn, &msg, mem)
        {
            refuse_fatal(p, conn, index, fatal, msg.attempt);
            return fail(p, index, fatal);
        }
        let Some(qp) = p.qps.at(index) else { return };
        // Whoever sees the receive complete may rely on the key being dead (MR-ORDER-6).
        if msg.opcode == Opcode::SendInv && !p.mrs.invalidate(msg.imm, (msg.pd, qp.qpn)) {
            let recv_status = Some(WcStatus::LocAccessErr);
            let fatal = Fatal { msn, code: RefuseCode::Access, recv_status };
            refuse_fatal(p, conn, index, fatal, msg.attempt);
            return fail(p, index, fatal);
        }
        qp.rx.msgs.pop_front();
        qp.rx.next_msn += 1;
        qp.rx.open_reads -= u32::from(msg.opcode.has_response());
        if msg.opcode.consumes_recv() {
            deliver(p, conn, index, &msg);
        }
    }
}

/// Places the held-back tail of a Write, last byte last (MR-ORDER-2). False: the memory is not there.
fn release<S: Sink>(p: &mut Parts<'_, S>, index: u16, msg: &RxMsg, mem: &mut impl Memory) -> bool {
    let Some(qp) = p.qps.at(index) else { return true };
    let held = usize::from(msg.held);
    let addr = msg.raddr.wrapping_add(u64::from(msg.total) - held as u64);
    // The key may have been deregistered meanwhile: then not a byte passes.
    let who = (msg.pd, qp.qpn);
    let target = p.mrs.check_remote(msg.rkey, who, addr, held as u64, access::REMOTE_WRITE);
    let Some((va, _)) = target else { return true };
    let tail = &msg.hold[limits::HOLD_BYTES - held..];
    let younger = Younger::than(p.mrs, qp, qp.rx.next_msn);
    let placed =
        if younger.is_empty() { mem.place_last(va, tail) } else { younger.place_last(va, tail, mem) };
    placed.is_ok()
}
