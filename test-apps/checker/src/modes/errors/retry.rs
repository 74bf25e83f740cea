//! Peers that do not answer, and receivers that are not ready: how long it takes and how it ends.

use std::thread::sleep;
use std::time::{Duration, Instant};

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{Attr, Buffer, Mr, Opcode, RecvWr, SendWr, state};

use crate::Outcome;
use crate::expect::{check_no_event, check_state, check_statuses, check_time, collect_good};
use crate::link::{End, Setup, retry_time};
use crate::modes::Case;
use crate::session::Session;

/// All completions of a case are there by then, whatever the attributes say.
const LIMIT: Duration = Duration::from_secs(20);
/// What a loaded machine may add to four times the retry time.
const SCHEDULING: Duration = Duration::from_millis(30);
/// How much longer than their delays together RNR retries may take, and a constant for the round trips.
const RNR_SLACK: u32 = 4;

/// Why nobody answers.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Silence {
    /// The process that had the QP number has been dead for a while, and we never talked to it.
    NeverExisted,
    /// The process is there, the QP is not any more.
    Destroyed,
    /// The QP is still in RESET.
    Reset,
    /// The QP is still in INIT.
    Init,
    /// The QP is in ERR.
    Err,
    /// The QP is connected to another QP.
    OtherPeer,
}

/// The cases.
pub fn cases() -> Vec<Case> {
    let quick = Attr { timeout: 14, retry_cnt: 2, ..Attr::default() };
    let silent = |name: &'static str, why: Silence, attr: Attr| {
        let case = Case::new(name, 60, move |session| silence(session, why, attr));
        if why == Silence::NeverExisted { case.kills_peer() } else { case }
    };
    let mut cases = vec![
        silent("retry-absent", Silence::NeverExisted, quick),
        silent("retry-absent-short", Silence::NeverExisted, Attr { timeout: 10, retry_cnt: 7, ..quick }),
        silent("retry-absent-once", Silence::NeverExisted, Attr { timeout: 16, retry_cnt: 0, ..quick }),
        silent("retry-destroyed", Silence::Destroyed, quick),
        silent("retry-peer-in-reset", Silence::Reset, quick),
        silent("retry-peer-in-init", Silence::Init, quick),
        silent("retry-peer-in-err", Silence::Err, quick),
        silent("retry-peer-of-another", Silence::OtherPeer, quick),
        Case::new("rnr-then-posted", 60, rnr_then_posted),
        Case::new("late-rtr", 60, late_rtr),
        Case::new("reset-and-again", 60, reset_and_again),
    ];
    for (retries, opcode) in [(0, Opcode::Send), (3, Opcode::Send), (3, Opcode::WriteImm(1))] {
        let name = format!("rnr-{retries}-{}", if opcode == Opcode::Send { "send" } else { "write-imm" });
        cases.push(Case::new(name, 60, move |session| rnr(session, retries, opcode)));
    }
    cases
}

fn buffer(end: &End) -> Outcome<Mr> {
    Ok(Mr::whole(&end.pd, &Buffer::new(1 << 16)?, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)?)
}

fn silence(session: &mut Session, why: Silence, attr: Attr) -> Outcome {
    let mut end = End::new(session, &Setup { qps: 2, attr, ..Setup::default() })?;
    let memory = buffer(&end)?;
    let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
    end.exchange(session)?;
    if session.is_a() {
        end.to_rts()?;
        if why == Silence::NeverExisted {
            session.wait_peer_gone()?;
        } else {
            session.barrier()?;
        }
        give_up(session, &end, &memory, remote, &attr)?;
        return if why == Silence::NeverExisted { Ok(()) } else { session.barrier() };
    }
    match why {
        Silence::NeverExisted => crate::process::kill_self(),
        Silence::Destroyed => drop(end.qps.remove(0)),
        Silence::Reset => {}
        Silence::Init => end.qps[0].to_init(&end.attr)?,
        Silence::Err => {
            end.to_rts()?;
            end.qps[0].to_state(state::ERR)?;
        }
        Silence::OtherPeer => {
            end.remotes.swap(0, 1);
            end.to_rts()?;
        }
    }
    session.barrier()?;
    session.barrier()?;
    if why != Silence::Destroyed {
        check_no_event(session, &end.context, "silent peer's events")?;
    }
    Ok(())
}

/// Posts into silence and checks how it ends.
pub fn give_up(session: &mut Session, end: &End, memory: &Mr, remote: (u64, u32), attr: &Attr) -> Outcome {
    let qp = &end.qps[0];
    let recvs: Vec<RecvWr> = (11..=12).map(|wr_id| RecvWr { wr_id, sges: vec![memory.sge(0, 64)] }).collect();
    qp.post_recv(&recvs)?;
    let write = |id| SendWr::new(id, Opcode::Write).sges([memory.sge(0, 5000)]).remote(remote.0, remote.1);
    let begin = Instant::now();
    qp.post_send(&[write(1), write(2).unsignaled(), SendWr::new(3, Opcode::Send).sges([memory.sge(0, 1)])])?;
    let first = crate::expect::collect(&end.send_cq, 1, LIMIT)?;
    let spent = begin.elapsed();
    let ended = first[0].wr_id == 1 && first[0].status == IBV_WC_RETRY_EXC_ERR;
    session.check("first completion", ended, crate::expect::describe(&first));
    let least = retry_time(attr);
    check_time(session, "time to RETRY_EXC_ERR", spent, least, 4 * least + SCHEDULING);
    let flushed = [(2, IBV_WC_WR_FLUSH_ERR), (3, IBV_WC_WR_FLUSH_ERR)];
    check_statuses(session, "the rest is flushed", &end.send_cq, &flushed, LIMIT)?;
    let recvs = [(11, IBV_WC_WR_FLUSH_ERR), (12, IBV_WC_WR_FLUSH_ERR)];
    check_statuses(session, "receives are flushed", &end.recv_cq, &recvs, LIMIT)?;
    check_state(session, "requester state", qp, state::ERR)?;
    check_no_event(session, &end.context, "requester events")
}

/// RNR timer code 20: 10.24 ms.
const RNR_TIMER: (u8, Duration) = (20, Duration::from_micros(10_240));

fn rnr(session: &mut Session, retries: u8, opcode: Opcode) -> Outcome {
    let attr = Attr { rnr_retry: retries, min_rnr_timer: RNR_TIMER.0, timeout: 17, ..Attr::default() };
    let mut end = End::new(session, &Setup { attr, ..Setup::default() })?;
    let memory = buffer(&end)?;
    let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
    end.connect(session)?;
    if session.is_a() {
        let begin = Instant::now();
        let wr = SendWr::new(1, opcode).sges([memory.sge(0, 3000)]).remote(remote.0, remote.1);
        end.qps[0].post_send(&[wr, SendWr::new(2, Opcode::Send)])?;
        let first = crate::expect::collect(&end.send_cq, 1, LIMIT)?;
        let spent = begin.elapsed();
        let ended = first[0].wr_id == 1 && first[0].status == IBV_WC_RNR_RETRY_EXC_ERR;
        session.check("first completion", ended, crate::expect::describe(&first));
        let least = RNR_TIMER.1 * u32::from(retries);
        check_time(
            session,
            "time to RNR_RETRY_EXC_ERR",
            spent,
            least,
            RNR_SLACK * least + Duration::from_millis(100),
        );
        let flushed = [(2, IBV_WC_WR_FLUSH_ERR)];
        check_statuses(session, "the rest is flushed", &end.send_cq, &flushed, LIMIT)?;
        check_state(session, "requester state", &end.qps[0], state::ERR)?;
    }
    session.barrier()?;
    if !session.is_a() {
        check_statuses(session, "responder completions", &end.recv_cq, &[], LIMIT)?;
        check_state(session, "responder state", &end.qps[0], state::RTS)?;
    }
    check_no_event(session, &end.context, "events")?;
    session.barrier()
}

/// `rnr_retry` 7 waits for ever; other traffic of the connection is not held up by the wait.
fn rnr_then_posted(session: &mut Session) -> Outcome {
    let wait = Duration::from_millis(700);
    let attr = Attr { rnr_retry: 7, min_rnr_timer: 1, timeout: 14, retry_cnt: 1, ..Attr::default() };
    let mut end = End::new(session, &Setup { qps: 2, attr, ..Setup::default() })?;
    let memory = buffer(&end)?;
    let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
    end.connect(session)?;
    if session.is_a() {
        end.qps[0].post_send(&[SendWr::new(1, Opcode::Send).sges([memory.sge(0, 9000)])])?;
        let begin = Instant::now();
        let write = SendWr::new(2, Opcode::Write).sges([memory.sge(0, 9000)]).remote(remote.0, remote.1);
        end.qps[1].post_send(&[write])?;
        let first = collect_good(&end.send_cq, 1, LIMIT)?;
        let passed = first[0].wr_id == 2 && begin.elapsed() < wait / 2;
        session.check("another QP passes the waiting one", passed, format!("{:.1?}", begin.elapsed()));
        session.barrier()?;
        check_statuses(
            session,
            "completes once a receive is there",
            &end.send_cq,
            &[(1, IBV_WC_SUCCESS)],
            LIMIT,
        )?;
    } else {
        session.barrier()?;
        // Much longer than the transport's own timeout: an RNR wait is no silence.
        sleep(wait);
        end.qps[0].post_recv(&[RecvWr { wr_id: 1, sges: vec![memory.sge(0, 9000)] }])?;
        check_statuses(session, "received", &end.recv_cq, &[(1, IBV_WC_SUCCESS)], LIMIT)?;
    }
    session.barrier()
}

/// A peer that comes to RTR only after the first request has been sent: the usual race of connecting
/// programs.
fn late_rtr(session: &mut Session) -> Outcome {
    let attr = Attr { timeout: 14, retry_cnt: 7, ..Attr::default() };
    let mut end = End::new(session, &Setup { attr, ..Setup::default() })?;
    let memory = buffer(&end)?;
    end.exchange(session)?;
    let attr = end.attr_for(0);
    end.qps[0].to_init(&attr)?;
    if session.is_a() {
        end.qps[0].to_rtr(&attr)?;
        end.qps[0].to_rts(&attr)?;
        end.qps[0].post_send(&[SendWr::new(1, Opcode::Send).sges([memory.sge(0, 5000)])])?;
        session.barrier()?;
        check_statuses(session, "completes", &end.send_cq, &[(1, IBV_WC_SUCCESS)], LIMIT)?;
    } else {
        session.barrier()?;
        sleep(Duration::from_millis(60));
        end.qps[0].post_recv(&[RecvWr { wr_id: 1, sges: vec![memory.sge(0, 5000)] }])?;
        end.qps[0].to_rtr(&attr)?;
        end.qps[0].to_rts(&attr)?;
        check_statuses(session, "received", &end.recv_cq, &[(1, IBV_WC_SUCCESS)], LIMIT)?;
    }
    session.barrier()
}

/// Error, RESET at both ends, connect again with other PSNs: a new life that knows nothing of the former one.
fn reset_and_again(session: &mut Session) -> Outcome {
    let mut end = End::new(session, &Setup::default())?;
    let memory = buffer(&end)?;
    end.connect(session)?;
    for life in 0..20u32 {
        let qp = &end.qps[0];
        qp.post_recv(&[RecvWr { wr_id: 100, sges: vec![memory.sge(0, 64)] }])?;
        session.barrier()?;
        let send = |id| SendWr::new(id, Opcode::Send).sges([memory.sge(64, 64)]);
        qp.post_send(&[send(1)])?;
        collect_good(&end.send_cq, 1, LIMIT)?;
        collect_good(&end.recv_cq, 1, LIMIT)?;
        session.barrier()?;
        // Left behind on purpose: RESET drops them, and their completions.
        qp.post_recv(&[RecvWr { wr_id: 200 + u64::from(life), sges: vec![memory.sge(0, 64)] }])?;
        qp.to_state(state::ERR)?;
        qp.post_send(&[send(300 + u64::from(life))])?;
        qp.to_state(state::RESET)?;
        let mut left = Vec::new();
        end.send_cq.poll(&mut left)?;
        end.recv_cq.poll(&mut left)?;
        if !left.is_empty() {
            session.check("RESET drops completions", false, crate::expect::describe(&left));
            break;
        }
        session.barrier()?;
        let psns = Attr { rq_psn: life, sq_psn: life, ..end.attr_for(0) };
        qp.to_init(&psns)?;
        qp.to_rtr(&psns)?;
        qp.to_rts(&psns)?;
    }
    session.check("lives", true, "20 lives of one QP");
    session.barrier()
}
