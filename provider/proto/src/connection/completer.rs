//! Digesting acknowledgements: what arrived, what is lost, what that completes; probes when there is silence.

use super::{Conn, REQUESTS, RESPONSES, Retransmit};
use crate::config::limits;
use crate::parts::Parts;
use crate::path::{AckNews, FrameKind, Health, PathTx, PktState, TxFrame};
use crate::plane_status;
use crate::qp::rnr_timer_ns;
use crate::seq::{RangeState, later16, unwrap32};
use crate::stats::Cause;
use crate::steering;
use crate::types::*;
use crate::wire::frame::{CONFIRMS_FATAL, CONFIRMS_RETRY};
use crate::wire::{Ack, Refuse, RefuseCode};

/// Takes an ACK frame in. Of a path or generation that is no more it says nothing; of a number that was never sent it
/// cannot be true (MR-SACK-2).
pub fn on_ack<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, ack: &Ack) {
    let Some(path) = conn.paths.get_mut(usize::from(ack.path)) else { return };
    if path.generation != ack.generation {
        return;
    }
    let highest = unwrap32(ack.highest, path.next_psn() - 1);
    if highest >= path.next_psn() {
        p.stats.rx_malformed += 1;
        return;
    }
    let (mut newly, mut spurious, mut lateness) = (0, 0, 0);
    let (mut ended, mut bytes) = (0, 0);
    let mut answered = false;
    for psn in path.base_psn().max(highest.saturating_sub(255))..=highest {
        let back = highest - psn;
        let received = ack.sack[(back / 64) as usize] >> (back % 64) & 1 == 1;
        let Some(pkt) = path.packet(psn).copied() else { continue };
        if !received || pkt.state == PktState::Acked {
            continue;
        }
        if pkt.state == PktState::Lost {
            spurious += 1;
            lateness = lateness.max(p.now.saturating_sub(pkt.sent));
        } else if pkt.state == PktState::Presumed {
            // Silence that ended: the repair was not needed, but nothing was out of order.
            ended += 1;
            answered = true;
        } else {
            newly += 1;
            p.loss.count(false);
            conn.answered_sent = conn.answered_sent.max(pkt.sent);
            // Its delay is the only one told; of others it is not known how long the peer kept them (MR-LOSS-5).
            if psn == highest {
                let delay = Nanos::from(ack.delay_us) * 1000;
                path.rtt.sample(p.now.saturating_sub(pkt.sent).saturating_sub(delay));
                conn.rtt.sample(path.rtt.latest_ns);
                conn.min_rtt_ns = conn.min_rtt_ns.min(path.rtt.latest_ns);
            }
            bytes += u64::from(pkt.bytes);
            conn.in_flight_bytes -= u32::from(pkt.bytes);
        }
        p.acked.extend((0..pkt.frames).map(|i| path.frame(&pkt, i)));
        path.resolve(psn, PktState::Acked);
    }
    path.largest_acked = path.largest_acked.max(highest);
    p.stats.spurious_retransmits += ended;
    path.tally.on_ack(u64::from(newly), bytes, spurious, ended);
    path.tally.on_marks(ack.ce);
    note_spurious(p, path, spurious, lateness);
    let index = usize::from(ack.path);
    if (newly > 0 || answered) && !plane_status::stays_left(conn, index) {
        let path = &mut conn.paths[index];
        let returned = !path.health.is_active();
        path.absolve(p.now);
        let plane = path.plane;
        let of_plane = |x: &&PathTx| x.plane == plane && x.in_use();
        let plane_window = conn.paths.iter().filter(of_plane).map(|x| x.congestion.window()).sum();
        let plane_target = plane_target(p, conn);
        let path = &mut conn.paths[usize::from(ack.path)];
        let news = AckNews { acked: newly, ce: ack.ce, peak: path.peak(highest), plane_window, plane_target };
        path.congestion.on_ack(news);
        decay_tolerance(path, newly);
        if returned {
            p.note_path(conn, usize::from(ack.path));
            steering::enforce(p, conn);
        }
    }
    if newly > 0 || answered {
        // The answer to a PING proves life, not that anything of a stream gets on.
        if p.acked.iter().any(|f| f.kind != FrameKind::Ping) {
            conn.last_progress = p.now;
        }
        shun_silent_siblings(p, conn, index);
    }
    find_losses(p, conn, index);
    conn.paths[index].forget(highest);
    let mut acked = std::mem::take(p.acked);
    for frame in acked.drain(..) {
        on_accepted(p, conn, &frame);
    }
    *p.acked = acked;
    if conn.in_flight_bytes == 0 {
        conn.paths.iter_mut().for_each(PathTx::rest);
    }
}

/// The part of the window granted by the peer's hint that falls to each plane in use, in packets; 0 without a hint.
fn plane_target<S: Sink>(p: &Parts<'_, S>, conn: &Conn) -> u32 {
    let slack = p.config.tuning.host_slack_ns;
    let rtt = conn.min_rtt_ns.saturating_add(p.config.tuning.ack_delay_ns + slack);
    if !conn.allowance.is_fresh(p.now, rtt, conn.segment) {
        return 0;
    }
    let mut planes = 0u64;
    conn.paths.iter().filter(|x| x.in_use()).for_each(|x| planes |= 1 << (x.plane % 64));
    conn.allowance.window(p.now, rtt, conn.is_delayed(slack), conn.segment)
        / conn.segment
        / planes.count_ones().max(1)
}

/// A repair was not needed: the path reorders, and by how much is known now (MR-LOSS-2).
fn note_spurious<S: Sink>(p: &mut Parts<'_, S>, path: &mut PathTx, spurious: u64, lateness: Nanos) {
    if spurious == 0 {
        return;
    }
    p.stats.spurious_retransmits += spurious;
    path.clean_acks = 0;
    let late = lateness.saturating_sub(path.rtt.srtt_ns).max(limits::REORDER_TOLERANCE_MIN_NS);
    path.reorder_tolerance_ns = late.max(path.reorder_tolerance_ns * 2).min(limits::REORDER_TOLERANCE_MAX_NS);
}

fn decay_tolerance(path: &mut PathTx, newly: u32) {
    path.clean_acks += newly;
    if path.clean_acks >= limits::REORDER_DECAY_ACKS {
        path.clean_acks = 0;
        path.reorder_tolerance_ns /= 2;
        if path.reorder_tolerance_ns < limits::REORDER_TOLERANCE_MIN_NS {
            path.reorder_tolerance_ns = 0;
        }
    }
}

/// When the oldest gap of a path that tolerates reordering becomes a loss.
pub fn gap_at(path: &PathTx) -> Nanos {
    match path.oldest_in_flight() {
        Some((psn, pkt)) if psn < path.largest_acked && path.reorder_tolerance_ns > 0 => {
            pkt.sent + path.rtt.srtt_ns + path.reorder_tolerance_ns
        }
        _ => Nanos::MAX,
    }
}

/// Declares gaps lost: at once on an ordered path, after the tolerance on one that reorders (MR-LOSS-1). Everything
/// below the highest PSN reported was covered by that report's SACK or by one of the many before it.
pub fn find_losses<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, index: usize) {
    let path = &conn.paths[index];
    let tolerance = path.reorder_tolerance_ns;
    let patience = if tolerance == 0 { 0 } else { path.rtt.srtt_ns + tolerance };
    for psn in path.base_psn()..path.largest_acked {
        let Some(pkt) = conn.paths[index].packet(psn).copied() else { continue };
        if pkt.state == PktState::InFlight && (tolerance == 0 || pkt.sent + patience <= p.now) {
            let path = &mut conn.paths[index];
            if path.rtt.is_risen(&p.config.tuning) {
                path.congestion.on_congestive_loss(p.now, path.rtt.srtt_ns);
            }
            lose(p, conn, index, psn, PktState::Lost);
        }
    }
}

/// Moves a packet's frames to the retransmit queue.
fn lose<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, index: usize, psn: u64, how: PktState) {
    let count = conn.paths.len();
    let path = &mut conn.paths[index];
    let Some(pkt) = path.packet(psn).copied() else { return };
    path.resolve(psn, how);
    path.tally.lost += 1;
    p.loss.count(true);
    conn.in_flight_bytes -= u32::from(pkt.bytes);
    let plane = path.plane;
    for i in 0..pkt.frames {
        let frame = conn.paths[index].frame(&pkt, i);
        if frame.kind != FrameKind::Ping {
            let again = if frame.repair && how == PktState::Lost { elsewhere(conn, index) } else { index };
            conn.retransmits.push_back(Retransmit { frame, path: again as u8, left: true });
        }
    }
    let slot = p.path_slot(plane, index, count);
    if let Some(s) = p.path_stats.get_mut(slot) {
        s.lost += 1;
    }
}

/// Where what a path has lost twice goes: to the next path in use that loses less than half as much, on another plane or else
/// on its own; without one it stays where it was.
fn elsewhere(conn: &Conn, index: usize) -> usize {
    let (count, own) = (conn.paths.len(), &conn.paths[index]);
    let loses_less =
        |x: &PathTx| 2 * x.tally.lost * own.tally.sent.max(1) < own.tally.lost * x.tally.sent.max(1);
    let fits = |i: &usize| conn.paths[*i].in_use() && loses_less(&conn.paths[*i]);
    let others = || (1..count).map(|step| (index + step) % count).filter(fits);
    others().find(|i| conn.paths[*i].plane != own.plane).or(others().next()).unwrap_or(index)
}

/// Silence on a path: its oldest packet goes again as a probe, the second time on another path. If packets sent later on
/// siblings are answered meanwhile, that is a strike against the path: with the second, all that is in flight on it goes
/// again elsewhere and it carries probes only; if they are not answered either, it is left (MR-PATH-1). When no path of
/// the peer progresses, nothing is concluded about any.
pub fn on_silence<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn) {
    for index in 0..conn.paths.len() {
        let path = &mut conn.paths[index];
        if path.shunned && path.struck_at + p.config.tuning.leave_after_ns <= p.now {
            let plane = path.plane;
            leave_path(p, conn, index, Cause::Silence);
            leave_plane_if_down(p, conn, plane);
            continue;
        }
        if path.probe_at(&p.config.tuning, &conn.rtt, conn.answered_sent).is_none_or(|at| at > p.now) {
            continue;
        }
        let Some((oldest, sent)) = path.oldest_in_flight().map(|(psn, pkt)| (psn, pkt.sent)) else {
            continue;
        };
        path.strikes += u32::from(conn.answered_sent > sent.max(path.last_probe));
        path.pto_count += 1;
        path.last_probe = p.now;
        if path.struck_at == 0 {
            path.struck_at = p.now;
        }
        let (elsewhere, shun) = (path.pto_count >= 2, path.strikes >= limits::STRIKES_TO_SHUN);
        lose(p, conn, index, oldest, PktState::Presumed);
        conn.probes_due += 1;
        if shun {
            shun_path(p, conn, index);
        } else if elsewhere {
            retarget(conn, index);
        }
    }
    p.activate(conn);
}

/// Everything in flight on a path goes again elsewhere; from now on it carries probes only. It keeps its numbers, so that
/// an answer that is merely late is recognised and brings it back as it was.
fn shun_path<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, index: usize) {
    if !(0..conn.paths.len()).any(|i| i != index && conn.paths[i].in_use()) {
        return;
    }
    presume_lost(p, conn, index);
    retarget(conn, index);
    let path = &mut conn.paths[index];
    path.shunned = true;
    path.changed = (p.now, Cause::Silence);
    path.health = match path.barred {
        true => Health::PARKED,
        false => Health::Suspect { probe_at: p.now, pause: path.rtt.probe_timeout(&p.config.tuning) },
    };
    p.note_path(conn, index);
}

/// A path has answered: siblings whose probes were not, while what was sent elsewhere in their stead was, are in trouble of
/// their own. Those with something in flight have their timer.
fn shun_silent_siblings<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, answered: usize) {
    for index in 0..conn.paths.len() {
        let path = &conn.paths[index];
        let silent = path.pto_count >= 2 && path.in_flight() == 0 && conn.answered_sent > path.last_sent;
        if index != answered && silent && path.health.is_active() {
            shun_path(p, conn, index);
        }
    }
}

/// Nothing in flight on a path is waited for any longer.
pub fn presume_lost<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, index: usize) {
    while let Some((psn, _)) = conn.paths[index].oldest_in_flight() {
        lose(p, conn, index, psn, PktState::Presumed);
    }
}

/// What is to be repaired on a path goes to the next active one instead. Gives that one, if there is another.
fn retarget(conn: &mut Conn, index: usize) -> Option<usize> {
    let count = conn.paths.len();
    let mut others = (1..count).map(|step| (index + step) % count);
    let elsewhere = others.find(|i| conn.paths[*i].in_use())?;
    for again in conn.retransmits.iter_mut().filter(|r| usize::from(r.path) == index) {
        again.path = elsewhere as u8;
    }
    Some(elsewhere)
}

/// Leaves a path: what is unresolved on it goes to the others, it changes its source port and is probed until it
/// answers. The last active path is never left.
pub fn leave_path<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, index: usize, cause: Cause) {
    let Some(elsewhere) = retarget(conn, index) else { return };
    let path = &mut conn.paths[index];
    let retransmits = &mut conn.retransmits;
    let mut moved = |frame: TxFrame| {
        if frame.kind != FrameKind::Ping {
            retransmits.push_back(Retransmit { frame, path: elsewhere as u8, left: true });
        }
    };
    conn.in_flight_bytes -= path.give_up(&mut moved);
    path.health = if path.barred { Health::PARKED } else { Health::suspect(p.now) };
    path.changed = (p.now, cause);
    (path.pto_count, path.strikes, path.struck_at, path.shunned) = (0, 0, 0, false);
    path.change_port(p.config.entropies_per_plane, denied(p, path.plane));
    p.stats.paths_left += 1;
    p.note_path(conn, index);
}

/// Source ports of a plane that are not to be used, a bit each.
fn denied<S: Sink>(p: &Parts<'_, S>, plane: u8) -> u64 {
    p.planes.get(usize::from(plane)).map_or(0, |state| state.denied)
}

/// Changes a path's source port where it stands: what is unresolved on it goes again, on the new port first. While nothing
/// of the generation was acknowledged it stays, and what is unresolved with it: the peer must not lose count (MR-PSN-4).
pub fn rehash<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, index: usize) {
    let path = &mut conn.paths[index];
    if !path.has_answered() {
        path.change_entropy(p.config.entropies_per_plane, denied(p, path.plane));
        path.changed = (p.now, Cause::Operator);
        p.note_path(conn, index);
        return;
    }
    let retransmits = &mut conn.retransmits;
    let mut again = |frame: TxFrame| {
        if frame.kind != FrameKind::Ping {
            retransmits.push_back(Retransmit { frame, path: index as u8, left: true });
        }
    };
    conn.in_flight_bytes -= path.give_up(&mut again);
    path.change_port(p.config.entropies_per_plane, denied(p, path.plane));
    path.changed = (p.now, Cause::Operator);
    (path.pto_count, path.strikes, path.struck_at) = (0, 0, 0);
    if !path.health.is_active() && !path.barred {
        path.health = Health::Suspect { probe_at: p.now, pause: limits::PROBE_FIRST_NS };
        path.shunned = false;
    }
    p.note_path(conn, index);
}

/// Half the paths of a plane in trouble means the plane is: the others are left without waiting for each (MR-PATH-2).
fn leave_plane_if_down<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, plane: u8) {
    let of_plane = conn.paths.iter().filter(|x| x.plane == plane);
    let (all, left) =
        of_plane.fold((0, 0), |(all, left), x| (all + 1, left + usize::from(!x.health.is_active())));
    let elsewhere = conn.paths.iter().any(|x| x.plane != plane && x.in_use());
    if all > 1 && 2 * left >= all && elsewhere {
        leave_plane(p, conn, plane, Cause::Plane);
    }
}

/// Leaves every path of a plane.
pub fn leave_plane<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, plane: u8, cause: Cause) {
    for index in 0..conn.paths.len() {
        let path = &mut conn.paths[index];
        if path.plane != plane {
            continue;
        }
        if path.health.is_active() {
            leave_path(p, conn, index, cause);
        } else if cause == Cause::Link && !path.barred {
            // Left before the event came: the link is why, silence was only its sign.
            path.changed.1 = cause;
            p.note_path(conn, index);
        }
    }
}

/// The peer has this frame: what does that complete?
fn on_accepted<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, frame: &TxFrame) {
    let space = match frame.kind {
        FrameKind::Request | FrameKind::VoidRequest => REQUESTS,
        FrameKind::Response | FrameKind::VoidResponse => RESPONSES,
        FrameKind::Ping => return,
    };
    let units = u64::from(frame.units);
    if conn.tx_windows[space].state(frame.cpn, units) == RangeState::Old {
        return;
    }
    conn.tx_windows[space].mark(frame.cpn, units);
    match frame.kind {
        FrameKind::Request => on_request_accepted(p, conn, frame),
        FrameKind::Response => {
            let Some(qp) = p.qps.at(frame.qp).filter(|q| q.rx.epoch == frame.life) else { return };
            // One that was begun anew waits for what is sent since.
            if let Some(job) = qp.rx.job_mut(frame.msn).filter(|job| job.attempt == frame.attempt) {
                job.acked += frame.len;
                job.done = job.acked == job.total;
            }
            qp.rx.retire_jobs();
            conn.enqueue_responder(qp);
        }
        _ => {}
    }
}

fn on_request_accepted<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, frame: &TxFrame) {
    let now = p.now;
    let Some(qp) = p.qps.at(frame.qp).filter(|q| q.tx.life == frame.life) else { return };
    if !qp.init.qp_type.is_reliable() {
        return;
    }
    let Some(wqe) = qp.tx.sq.get_mut(frame.msn).filter(|w| w.attempt == frame.attempt) else { return };
    // Acknowledged and not refused in this attempt is accepted: no other answer comes (MR-SACK-7).
    wqe.acked += frame.len;
    let consumes = wqe.wr.opcode.consumes_recv();
    let next_receive = wqe.recv_index.wrapping_add(1);
    if !wqe.wr.opcode.has_response() && wqe.acked == wqe.wr.length {
        wqe.done = true;
        qp.tx.rnr_tries = 0;
    }
    qp.tx.accepted = true;
    qp.tx.not_ready_tries = 0;
    qp.tx.stalled_since = now;
    // What was accepted proves that its receive was there (MR-CREDIT-1).
    if consumes
        && let Some(limit) = &mut qp.tx.credit
        && (next_receive.wrapping_sub(*limit) as i32) > 0
    {
        *limit = next_receive;
    }
    conn.enqueue(qp);
    p.retire(conn, frame.qp);
}

/// The responder refused a message of ours. Every refusal is confirmed at once, whatever becomes of it here: the
/// responder holds it until then (MR-REFUSE-4).
pub fn on_refuse<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, refuse: &Refuse) {
    confirm(conn, refuse);
    let now = p.now;
    let index = refuse.qpn.index() as u16;
    let Some(qp) = p.qps.get(refuse.qpn).filter(|q| q.tx.life == refuse.life) else { return };
    if qp.state == QpState::Err || !qp.init.qp_type.is_reliable() {
        return;
    }
    let tx = &mut qp.tx;
    if refuse.code.is_fatal() {
        // It has its turn when all before it are complete; of several the lowest counts (MR-REFUSE-8).
        let msn = unwrap32(refuse.number, tx.sq.base_msn());
        let status = match refuse.code {
            RefuseCode::Access => WcStatus::RemAccessErr,
            RefuseCode::Operation => WcStatus::RemOpErr,
            _ => WcStatus::RemInvReqErr,
        };
        if msn >= tx.sq.base_msn() && msn < tx.sq.next_msn() {
            tx.fail_at(msn, status);
        }
        return p.retire(conn, index);
    }
    let Some(msn) = refused_message(tx, refuse) else { return };
    tx.rewind(msn, refuse.attempt);
    if refuse.code == RefuseCode::Rnr {
        // The number is the limit, and the responder says how long to wait for more (MR-REFUSE-6, MR-CREDIT-1).
        tx.credit = Some(refuse.number);
        tx.paused_until = now + rnr_timer_ns(refuse.timer);
        tx.stalled_since = now;
        tx.not_ready_tries = 0;
        if qp.attrs.rnr_retry != 7 {
            if qp.tx.rnr_tries >= qp.attrs.rnr_retry {
                qp.tx.fail_at(msn, WcStatus::RnrRetryExcErr);
            }
            qp.tx.rnr_tries += 1;
        }
    } else {
        // Only time ends this: the QP's patience runs on as if the peer were silent (MR-REFUSE-7).
        let wait = limits::NOT_READY_FIRST_NS << tx.not_ready_tries.min(10);
        tx.paused_until = now + wait.min(limits::NOT_READY_MAX_NS);
        tx.not_ready_tries += 1;
    }
    p.arm_qp(index);
    p.retire(conn, index);
}

/// The message a refusal that may be tried again means; `None` if that attempt of it is history, or if it was never
/// sent. It is the message's own attempt that counts: the stream's may have moved on for a later message (MR-REFUSE-5).
fn refused_message(tx: &crate::qp::TxStream, refuse: &Refuse) -> Option<u64> {
    let msn = if refuse.code == RefuseCode::Rnr {
        (tx.sq.base_msn()..tx.sq.next_msn()).find(|m| {
            tx.sq.get(*m).is_some_and(|w| w.wr.opcode.consumes_recv() && w.recv_index == refuse.number)
        })?
    } else {
        unwrap32(refuse.number, tx.sq.base_msn()).max(tx.sq.base_msn())
    };
    let sent = msn < tx.cursor_msn + u64::from(tx.cursor_offset > 0);
    let current = tx.sq.get(msn).is_some_and(|w| !later16(w.attempt, refuse.attempt));
    (sent && current).then_some(msn)
}

/// Sends a VOID that tells the responder its refusal was heard.
fn confirm(conn: &mut Conn, refuse: &Refuse) {
    let (attempt, life) = (refuse.attempt.wrapping_add(1), refuse.life);
    let confirms = if refuse.code.is_fatal() { CONFIRMS_FATAL } else { CONFIRMS_RETRY };
    let same = |f: &TxFrame| {
        f.kind == FrameKind::VoidRequest
            && f.life == life
            && f.attempt == attempt
            && f.offset == u32::from(confirms)
    };
    if conn.retransmits.iter().any(|r| same(&r.frame)) {
        return;
    }
    let frame = TxFrame {
        repair: false,
        kind: FrameKind::VoidRequest,
        qp: refuse.qpn.index() as u16,
        life,
        msn: 0,
        offset: u32::from(confirms),
        len: 0,
        cpn: conn.next_cpn[REQUESTS],
        units: 1,
        attempt,
    };
    conn.next_cpn[REQUESTS] += 1;
    conn.retransmits.push_back(Retransmit { frame, path: 0, left: false });
}

/// A CREDIT frame: the responder has posted more receives.
pub fn on_credit<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, qpn: Qpn, life: u32, limit: u32) {
    let Some(qp) = p.qps.get(qpn).filter(|q| q.tx.life == life && q.tx.conn == Some(conn.index)) else {
        return;
    };
    let newer = qp.tx.credit.is_none_or(|old| (limit.wrapping_sub(old) as i32) > 0);
    if newer {
        qp.tx.credit = Some(limit);
        // A receive is there now: waiting out the RNR timer would only lose time.
        if qp.tx.not_ready_tries == 0 {
            qp.tx.paused_until = 0;
        }
        conn.enqueue(qp);
    }
}
