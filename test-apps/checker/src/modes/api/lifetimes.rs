//! Objects that go away, and processes that fork, in the middle of traffic; QPs that talk to their own
//! process; a connection used again after a long pause.

use std::time::{Duration, Instant};

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{Attr, Buffer, Mr, Opcode, QpCaps, RecvWr, SendWr, state};

use crate::Outcome;
use crate::expect::{check_statuses, collect, collect_good, describe};
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::pattern;
use crate::session::Session;

/// Bytes of the Writes and Reads that are interrupted.
const LARGE: usize = 1 << 20;
/// Every right.
const ALL: u32 =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

/// The cases.
pub fn cases() -> Vec<Case> {
    vec![
        Case::new("deregister-under-writes", 60, deregister_under_writes),
        Case::new("destroy-under-reads", 60, destroy_under_reads),
        Case::new("error-under-writes", 60, error_under_writes),
        Case::new("same-process", 60, same_process),
        Case::new("fork-and-exec", 60, fork_and_exec),
        Case::new("reopen", 60, reopen),
    ]
}

/// True when `mr` still holds `value` everywhere after a while.
fn stays(mr: &Mr, value: u8) -> bool {
    let begin = Instant::now();
    let mut bytes = vec![0; LARGE];
    while begin.elapsed() < Duration::from_millis(150) {
        mr.buffer().read(0, &mut bytes);
        if bytes.iter().any(|b| *b != value) {
            return false;
        }
    }
    true
}

/// The peer writes without pause; from the moment `ibv_dereg_mr` returns nothing lands any more.
fn deregister_under_writes(session: &mut Session) -> Outcome {
    for round in 0..8u8 {
        let mut end = End::new(session, &Setup::default())?;
        let source = Mr::whole(&end.pd, &Buffer::new(LARGE)?, ALL)?;
        let buffer = Buffer::new(LARGE)?;
        let target = Mr::whole(&end.pd, &buffer, ALL)?;
        let keeper = Mr::whole(&end.pd, &buffer, 0)?;
        let remote: (u64, u32) = session.swap(&(target.address(), target.rkey()))?;
        end.connect(session)?;
        if session.is_a() {
            source.buffer().fill(0, LARGE, 0xaa);
            let write =
                |id| SendWr::new(id, Opcode::Write).sges([source.sge(0, LARGE)]).remote(remote.0, remote.1);
            let mut id = 0;
            let mut posted = 0;
            let status = loop {
                while posted < id + 8 {
                    if end.qps[0].post_send(&[write(posted)]).is_err() {
                        break;
                    }
                    posted += 1;
                }
                let wc = collect(&end.send_cq, 1, session.stall())?[0];
                if wc.status != IBV_WC_SUCCESS {
                    break wc.status;
                }
                id += 1;
            };
            let name = metaroce_test_verbs::status_name(status);
            session.check("writer ends in REM_ACCESS_ERR", status == IBV_WC_REM_ACCESS_ERR, name);
        } else {
            while buffer.load(LARGE / 2) != 0xaa {
                std::thread::yield_now();
            }
            drop(target);
            buffer.fill(0, LARGE, round);
            session.check("nothing lands after dereg_mr", stays(&keeper, round), format!("round {round}"));
        }
        session.barrier()?;
    }
    Ok(())
}

/// Reads are in flight when their QP is destroyed; afterwards their memory is ours.
fn destroy_under_reads(session: &mut Session) -> Outcome {
    for round in 0..8u8 {
        let mut end = End::new(session, &Setup::default())?;
        let memory = Mr::whole(&end.pd, &Buffer::new(LARGE)?, ALL)?;
        let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
        memory.buffer().fill(0, LARGE, 0xbb);
        end.connect(session)?;
        if session.is_a() {
            memory.buffer().fill(0, LARGE, 0);
            let read =
                |id| SendWr::new(id, Opcode::Read).sges([memory.sge(0, LARGE)]).remote(remote.0, remote.1);
            end.qps[0].post_send(&(0..8).map(read).collect::<Vec<_>>())?;
            // After a while that differs from round to round.
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_micros(100 * u64::from(round)) {
                std::thread::yield_now();
            }
            end.qps.clear();
            memory.buffer().fill(0, LARGE, round);
            session.check("nothing lands after destroy_qp", stays(&memory, round), format!("round {round}"));
            let mut wcs = Vec::new();
            end.send_cq.poll(&mut wcs)?;
            session.check("its completions are gone", wcs.is_empty(), describe(&wcs));
        }
        session.barrier()?;
    }
    Ok(())
}

/// The requester moves its own QP to ERR with Writes in flight: everything is flushed in order, nothing lands
/// later.
fn error_under_writes(session: &mut Session) -> Outcome {
    for round in 0..8u64 {
        let mut end = End::new(session, &Setup::default())?;
        let memory = Mr::whole(&end.pd, &Buffer::new(LARGE)?, ALL)?;
        let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
        end.connect(session)?;
        if session.is_a() {
            let write =
                |id| SendWr::new(id, Opcode::Write).sges([memory.sge(0, LARGE)]).remote(remote.0, remote.1);
            end.qps[0].post_send(&(0..16).map(write).collect::<Vec<_>>())?;
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_micros(150 * round) {
                std::thread::yield_now();
            }
            end.qps[0].to_state(state::ERR)?;
            let wcs = collect(&end.send_cq, 16, session.stall())?;
            let good = wcs.iter().take_while(|wc| wc.status == IBV_WC_SUCCESS).count();
            let flushed = wcs[good..].iter().all(|wc| wc.status == IBV_WC_WR_FLUSH_ERR);
            let ordered = wcs.iter().enumerate().all(|(i, wc)| wc.wr_id == i as u64);
            let detail = format!("{good} good, {} flushed", 16 - good);
            let detail = if flushed && ordered { detail } else { describe(&wcs) };
            session.check("good ones, then flushed ones, in order", flushed && ordered, detail);
        }
        session.barrier()?;
    }
    Ok(())
}

/// Two QPs of one process, and a QP connected to itself.
fn same_process(session: &mut Session) -> Outcome {
    let caps = QpCaps { send_wr: 64, recv_wr: 64, send_sge: 4, recv_sge: 4, inline: 32 };
    let mut end = End::new(session, &Setup { qps: 3, caps, ..Setup::default() })?;
    end.exchange(session)?;
    let mine = [1, 0, 2].map(|i| end.myself(i));
    end.remotes.copy_from_slice(&mine);
    end.to_rts()?;
    let memory = Mr::whole(&end.pd, &Buffer::new(4 * LARGE)?, ALL)?;
    let data = pattern::bytes(session.seed, LARGE);
    memory.buffer().write(0, &data);
    let mut wrong = None;
    for (q, to) in [(0, 1), (1, 0), (2, 2)] {
        for len in [0, 1, 1023, 1024, 1025, 70_000, LARGE] {
            memory.buffer().fill(LARGE, 3 * LARGE, 0);
            end.qps[to].post_recv(&[RecvWr { wr_id: 7, sges: vec![memory.sge(LARGE, LARGE)] }])?;
            let remote = |at: usize| memory.address() + (at as u64);
            end.qps[q].post_send(&[
                SendWr::new(1, Opcode::Send).sges([memory.sge(0, len)]),
                SendWr::new(2, Opcode::Write)
                    .sges([memory.sge(0, len)])
                    .remote(remote(2 * LARGE), memory.rkey()),
                SendWr::new(3, Opcode::Read)
                    .sges([memory.sge(3 * LARGE, len)])
                    .remote(remote(0), memory.rkey()),
            ])?;
            let wcs = collect_good(&end.send_cq, 3, session.stall())?;
            let recv = collect_good(&end.recv_cq, 1, session.stall())?[0];
            let ids: Vec<u64> = wcs.iter().map(|wc| wc.wr_id).collect();
            if ids != [1, 2, 3] || recv.byte_len as usize != len || recv.qpn != end.qps[to].qpn() {
                wrong.get_or_insert(format!("QP {q} to {to}, {len} B: {}", describe(&wcs)));
            }
            let mut got = vec![0; len];
            for part in 1..4 {
                memory.buffer().read(part * LARGE, &mut got);
                if let Some(text) = pattern::difference(&got, &data[..len]) {
                    wrong.get_or_insert(format!("QP {q} to {to}, {len} B, part {part}: {text}"));
                }
            }
        }
    }
    session.check("Send, Write, Read inside one process", wrong.is_none(), wrong.unwrap_or_default());
    session.barrier()
}

/// Children come and go while traffic runs; neither side notices.
fn fork_and_exec(session: &mut Session) -> Outcome {
    let mut end = End::new(session, &Setup::default())?;
    let memory = Mr::whole(&end.pd, &Buffer::new(2 * LARGE)?, ALL)?;
    let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
    end.connect(session)?;
    let data = pattern::bytes(session.seed, LARGE);
    memory.buffer().write(0, &data);
    let rounds = 30;
    for round in 0..rounds {
        let at = (LARGE + round) as u64;
        let write =
            SendWr::new(1, Opcode::Write).sges([memory.sge(0, LARGE - 64)]).remote(remote.0 + at, remote.1);
        end.qps[0].post_send(&[write])?;
        if round % 2 == 0 {
            // posix_spawn: the child shares our memory until it is another program.
            let child = std::process::Command::new("/bin/true").status()?;
            if !child.success() {
                return Err(format!("a child ended with {child}").into());
            }
        } else {
            crate::process::fork_and_wait()?;
        }
        collect_good(&end.send_cq, 1, session.stall())?;
    }
    session.barrier()?;
    let mut got = vec![0; LARGE - 64];
    memory.buffer().read(LARGE + rounds - 1, &mut got);
    let wrong = pattern::difference(&got, &data[..LARGE - 64]);
    let detail = wrong.clone().unwrap_or_else(|| format!("{rounds} children beside Writes"));
    session.check("traffic beside fork and exec", wrong.is_none(), detail);
    session.barrier()
}

/// The device is closed and opened again in the same process, with a connection each time.
fn reopen(session: &mut Session) -> Outcome {
    for life in 0..10u64 {
        let mut end =
            End::new(session, &Setup { attr: Attr { timeout: 16, ..Attr::default() }, ..Setup::default() })?;
        let memory = Mr::whole(&end.pd, &Buffer::new(4096)?, ALL)?;
        end.exchange(session)?;
        end.to_rts()?;
        end.qps[0].post_recv(&[RecvWr { wr_id: life, sges: vec![memory.sge(0, 64)] }])?;
        session.barrier()?;
        end.qps[0].post_send(&[SendWr::new(life, Opcode::Send).sges([memory.sge(64, 64)])])?;
        let wanted = [(life, IBV_WC_SUCCESS)];
        check_statuses(session, "sent", &end.send_cq, &wanted, session.stall())?;
        check_statuses(session, "received", &end.recv_cq, &wanted, session.stall())?;
        session.barrier()?;
    }
    Ok(())
}
