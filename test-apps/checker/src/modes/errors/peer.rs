//! Peers that die by `kill -9`: idle, in the middle of traffic, and while we only receive.

use std::time::{Duration, Instant};

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{Attr, Buffer, Mr, Opcode, RecvWr, SendWr, state};

use super::retry::give_up;
use crate::Outcome;
use crate::expect::{check_no_event, check_state, check_time, collect, collect_good, describe};
use crate::link::{End, Setup, retry_time};
use crate::modes::Case;
use crate::session::Session;

/// Bytes of each Write in the middle of traffic.
const WRITE: usize = 64 << 10;
/// Cookie of the Write to a peer that is not there.
const ABSENT: u64 = u64::MAX;
/// Writes outstanding.
const DEPTH: usize = 32;

/// The cases.
pub fn cases() -> Vec<Case> {
    vec![
        Case::new("killed-idle", 60, killed_idle).kills_peer(),
        Case::new("killed-in-traffic", 60, |session| killed_in_traffic(session, Opcode::Write)).kills_peer(),
        Case::new("killed-in-reads", 60, |session| killed_in_traffic(session, Opcode::Read)).kills_peer(),
        Case::new("killed-after-fork", 60, killed_after_fork).kills_peer(),
        Case::new("killed-many-qps", 60, killed_many).kills_peer(),
        Case::new("stopped-and-continued", 60, stopped_and_continued),
        Case::new("absent-beside-good", 60, absent_beside_good),
    ]
}

fn setup() -> (Attr, Setup) {
    let attr = Attr { timeout: 14, retry_cnt: 2, ..Attr::default() };
    (attr, Setup { qps: 2, attr, ..Setup::default() })
}

fn memory(end: &End) -> Outcome<Mr> {
    let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    Ok(Mr::whole(&end.pd, &Buffer::new(WRITE)?, access)?)
}

/// An end connected to the peer, memory of ours, and address and key of the peer's.
fn connected(session: &mut Session, setup: &Setup) -> Outcome<(End, Mr, (u64, u32))> {
    let mut end = End::new(session, setup)?;
    let memory = memory(&end)?;
    let remote = session.swap(&(memory.address(), memory.rkey()))?;
    end.connect(session)?;
    Ok((end, memory, remote))
}

/// A connection that worked, then the peer dies, then we post.
fn killed_idle(session: &mut Session) -> Outcome {
    let (attr, setup) = setup();
    let (end, memory, remote) = connected(session, &setup)?;
    if session.is_a() {
        let write = SendWr::new(9, Opcode::Write).sges([memory.sge(0, 64)]).remote(remote.0, remote.1);
        end.qps[0].post_send(&[write])?;
        collect_good(&end.send_cq, 1, session.stall())?;
        session.tell(&"die")?;
        session.wait_peer_gone()?;
        return give_up(session, &end, &memory, remote, &attr);
    }
    let _: String = session.hear()?;
    crate::process::kill_self()
}

/// The peer forks a child that lives on without exec, and is killed: the child keeps neither the connection alive nor
/// the device's port taken.
fn killed_after_fork(session: &mut Session) -> Outcome {
    let (attr, setup) = setup();
    let (end, memory, remote) = connected(session, &setup)?;
    if !session.is_a() {
        let _: String = session.hear()?;
        crate::process::fork_sleeper()?;
        crate::process::kill_self()
    }
    let write = SendWr::new(9, Opcode::Write).sges([memory.sge(0, 64)]).remote(remote.0, remote.1);
    end.qps[0].post_send(&[write])?;
    collect_good(&end.send_cq, 1, session.stall())?;
    session.tell(&"fork and die")?;
    session.wait_peer_gone()?;
    if session.options.metaroce.is_some() && std::env::var_os("METAROCE_BASE_PORT").is_none() {
        // The slot stands in the upper bits of the QP number; its port is what a process owns of the device.
        let port = 24_576 + (end.remotes[0].qpn >> 14) as u16;
        let free = std::net::UdpSocket::bind((std::net::Ipv6Addr::UNSPECIFIED, port));
        session.check("its port is free", free.is_ok(), format!("{port}: {:?}", free.err()));
    }
    give_up(session, &end, &memory, remote, &attr)
}

/// The peer dies while the send queue is full of requests.
fn killed_in_traffic(session: &mut Session, opcode: Opcode) -> Outcome {
    let (attr, setup) = setup();
    let (end, memory, remote) = connected(session, &setup)?;
    if !session.is_a() {
        let _: String = session.hear()?;
        crate::process::kill_self()
    }
    let wr = |id| SendWr::new(id, opcode).sges([memory.sge(0, WRITE)]).remote(remote.0, remote.1);
    let qp = &end.qps[0];
    let (mut posted, mut next, mut flushed) = (0u64, 0u64, 0);
    let mut wrong = None;
    let begin = Instant::now();
    let (mut killed, mut failed) = (None, None);
    while failed.is_none() || next < posted {
        while failed.is_none() && posted - next < DEPTH as u64 {
            if let Err(bad) = qp.post_send(&[wr(posted)]) {
                return Err(format!("post: {bad}").into());
            }
            posted += 1;
        }
        if killed.is_none() && begin.elapsed() > Duration::from_millis(200) {
            session.tell(&"die")?;
            session.wait_peer_gone()?;
            killed = Some(Instant::now());
        }
        let wcs = collect(&end.send_cq, 1, session.stall())?;
        for wc in &wcs {
            let status_fits = match (wc.status, failed.is_some()) {
                (IBV_WC_SUCCESS, false) => true,
                (IBV_WC_RETRY_EXC_ERR, false) => {
                    failed = Some(Instant::now());
                    true
                }
                (IBV_WC_WR_FLUSH_ERR, true) => {
                    flushed += 1;
                    true
                }
                _ => false,
            };
            if !status_fits || wc.wr_id != next {
                wrong.get_or_insert(format!("{} (want wr_id {next:#x})", describe(&[*wc])));
            }
            next += 1;
        }
    }
    let detail = wrong.clone().unwrap_or_else(|| format!("{next} completions, {flushed} flushed"));
    session.check("order: good ones, RETRY_EXC_ERR, flushed ones", wrong.is_none(), detail);
    if let (Some(killed), Some(failed)) = (killed, failed) {
        let most = 4 * retry_time(&attr) + Duration::from_millis(30);
        // The kill itself is a little older than our knowledge of it.
        let least = retry_time(&attr).saturating_sub(Duration::from_millis(20));
        check_time(session, "time from kill to RETRY_EXC_ERR", failed.duration_since(killed), least, most);
    }
    check_state(session, "requester state", qp, state::ERR)?;
    check_no_event(session, &end.context, "requester events")
}

/// Many QPs share the connection to the dead peer: each of them fails in its time and flushes in order.
fn killed_many(session: &mut Session) -> Outcome {
    const QPS: usize = 64;
    const EACH: u64 = 4;
    let (attr, setup) = setup();
    let (end, memory, remote) = connected(session, &Setup { qps: QPS, ..setup })?;
    if !session.is_a() {
        let _: String = session.hear()?;
        crate::process::kill_self()
    }
    let wr = |id| SendWr::new(id, Opcode::Write).sges([memory.sge(0, 10_000)]).remote(remote.0, remote.1);
    for qp in &end.qps {
        qp.post_send(&[wr(0)])?;
    }
    collect_good(&end.send_cq, QPS, session.stall())?;
    session.tell(&"die")?;
    session.wait_peer_gone()?;
    let begin = Instant::now();
    for qp in &end.qps {
        qp.post_send(&(1..=EACH).map(wr).collect::<Vec<_>>())?;
        qp.post_recv(&[RecvWr { wr_id: 0, sges: vec![memory.sge(0, 64)] }])?;
    }
    let wcs = collect(&end.send_cq, QPS * EACH as usize, session.stall())?;
    let spent = begin.elapsed();
    let wrong = end.qps.iter().find_map(|qp| {
        let mine: Vec<_> = wcs.iter().filter(|wc| wc.qpn == qp.qpn()).copied().collect();
        let ids = mine.iter().map(|wc| wc.wr_id).eq(1..=EACH);
        let first = mine.first().is_some_and(|wc| wc.status == IBV_WC_RETRY_EXC_ERR);
        let rest = mine.iter().skip(1).all(|wc| wc.status == IBV_WC_WR_FLUSH_ERR);
        (!ids || !first || !rest).then(|| describe(&mine))
    });
    let detail = wrong.clone().unwrap_or_else(|| format!("{} completions", wcs.len()));
    session.check("each QP: RETRY_EXC_ERR, then flushed", wrong.is_none(), detail);
    let least = retry_time(&attr);
    check_time(session, "time until all have failed", spent, least, 4 * least + Duration::from_millis(60));
    let recvs = collect(&end.recv_cq, QPS, session.stall())?;
    let flushed = recvs.iter().all(|wc| wc.status == IBV_WC_WR_FLUSH_ERR);
    session.check("receives are flushed", flushed, recvs.len());
    check_no_event(session, &end.context, "requester events")
}

/// The peer process stands still for less than the retry time (a debugger, a loaded machine): nothing fails,
/// and afterwards everything is as fast as before.
fn stopped_and_continued(session: &mut Session) -> Outcome {
    let attr = Attr { timeout: 15, retry_cnt: 7, ..Attr::default() };
    let mut end = End::new(session, &Setup { attr, ..Setup::default() })?;
    let memory = memory(&end)?;
    let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
    let peer: u32 = session.swap(&std::process::id())?;
    end.connect(session)?;
    if session.is_a() {
        let wr = |id| SendWr::new(id, Opcode::Write).sges([memory.sge(0, WRITE)]).remote(remote.0, remote.1);
        for round in 0..3u64 {
            let stopped = crate::process::Stopped::new(peer)?;
            end.qps[0].post_send(&(0..DEPTH as u64).map(wr).collect::<Vec<_>>())?;
            let begin = Instant::now();
            let mut early = Vec::new();
            while begin.elapsed() < Duration::from_millis(250) {
                end.send_cq.poll(&mut early)?;
                std::thread::yield_now();
            }
            let begin = Instant::now();
            drop(stopped);
            let wcs = collect(&end.send_cq, DEPTH - early.len(), session.stall())?;
            let spent = begin.elapsed();
            let good = early.iter().chain(&wcs).all(|wc| wc.status == IBV_WC_SUCCESS);
            let name = format!("round {round}: all complete once it goes on");
            let text =
                if good { format!("after {spent:.1?}, {} before", early.len()) } else { describe(&wcs) };
            session.check(name, good && spent < Duration::from_secs(1), text);
        }
    }
    session.barrier()
}

/// While one QP waits for a peer that is not there, another works undisturbed.
fn absent_beside_good(session: &mut Session) -> Outcome {
    let (_, setup) = setup();
    let mut end = End::new(session, &setup)?;
    let memory = memory(&end)?;
    let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
    end.exchange(session)?;
    // QP 0 talks to the peer; QP 1 of the near end to a QP number nobody has.
    if session.is_a() {
        end.remotes[1].qpn ^= 0x2a_a000;
    }
    end.to_rts()?;
    end.qps[0].post_recv(&[RecvWr { wr_id: 50, sges: vec![memory.sge(0, 64)] }])?;
    session.barrier()?;
    if session.is_a() {
        let write =
            |id| SendWr::new(id, Opcode::Write).sges([memory.sge(0, 4096)]).remote(remote.0, remote.1);
        end.qps[1].post_send(&[write(ABSENT)])?;
        let begin = Instant::now();
        let (mut done, mut slowest, mut failure) = (0u64, Duration::ZERO, None);
        while failure.is_none() {
            let posted = Instant::now();
            end.qps[0].post_send(&[write(done)])?;
            loop {
                let wc = collect(&end.send_cq, 1, session.stall()).map_err(|e| {
                    let failed = failure.map(|(_, after): (_, Duration)| after);
                    format!("good QP, Write {done}, the other failed after {failed:?}: {e}")
                })?[0];
                if wc.wr_id == ABSENT {
                    failure = Some((wc, begin.elapsed()));
                    continue;
                }
                if wc.status != IBV_WC_SUCCESS || wc.wr_id != done {
                    return Err(format!("the good QP got {}", describe(&[wc])).into());
                }
                break;
            }
            slowest = slowest.max(posted.elapsed());
            done += 1;
        }
        if let Some((wc, after)) = failure {
            session.check(
                "the absent peer's QP fails alone",
                wc.status == IBV_WC_RETRY_EXC_ERR,
                describe(&[wc]),
            );
            let detail = format!("{done} Writes beside it in {after:.1?}, slowest {slowest:.1?}");
            session.check("the other QP works on", done > 10, detail);
        }
    }
    session.barrier()
}
