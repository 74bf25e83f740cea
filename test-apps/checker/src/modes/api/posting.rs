//! What posting accepts and refuses: depth, SGEs, inline, state, opcode; `bad_wr`; slots of unsignaled
//! requests.

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{Attr, BadWr, Buffer, Mr, Opcode, QpCaps, RecvWr, SendWr, state};

use crate::Outcome;
use crate::expect::{check_statuses, collect_good};
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::session::Session;

/// Depth asked of the queues.
const DEPTH: u32 = 16;
/// SGEs asked for.
const SGES: u32 = 3;
/// Inline bytes asked for.
const INLINE: u32 = 64;

/// The cases.
pub fn cases() -> Vec<Case> {
    vec![
        Case::new("queue-depth", 30, queue_depth),
        Case::new("queue-depth-extended", 30, queue_depth_extended),
        Case::new("too-many-sges", 30, too_many_sges),
        Case::new("inline", 30, inline),
        Case::new("wrong-state", 30, wrong_state),
        Case::new("unsignaled-slots", 60, unsignaled_slots),
    ]
}

fn setup() -> Setup {
    let caps = QpCaps { send_wr: DEPTH, recv_wr: DEPTH, send_sge: SGES, recv_sge: SGES, inline: INLINE };
    Setup { caps, ..Setup::default() }
}

fn memory(end: &End) -> Outcome<Mr> {
    Ok(Mr::whole(&end.pd, &Buffer::new(1 << 16)?, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)?)
}

fn check_bad(session: &mut Session, name: &str, got: Result<(), BadWr>, errno: i32, index: Option<usize>) {
    let want = BadWr { errno, index };
    let detail = match got {
        Ok(()) => format!("accepted; want {want}"),
        Err(bad) => format!("{bad} (want {want})"),
    };
    session.check(name, got == Err(want), detail);
}

/// Ends whose far end has no receive posted, so that what the near end sends stays outstanding.
fn waiting_end(session: &mut Session) -> Outcome<(End, Mr)> {
    let mut end =
        End::new(session, &Setup { attr: Attr { min_rnr_timer: 20, ..Attr::default() }, ..setup() })?;
    let memory = memory(&end)?;
    end.connect(session)?;
    Ok((end, memory))
}

fn queue_depth(session: &mut Session) -> Outcome {
    let (end, memory) = waiting_end(session)?;
    let caps = end.qps[0].caps();
    let asked =
        caps.send_wr >= DEPTH && caps.recv_wr >= DEPTH && caps.inline >= INLINE && caps.send_sge >= SGES;
    session.check("capacities at least as asked", asked, format!("{caps:?}"));
    if session.is_a() {
        let depth = caps.send_wr as usize;
        let send = |id| SendWr::new(id as u64, Opcode::Send).sges([memory.sge(0, 64)]);
        let chain: Vec<SendWr> = (0..depth + 3).map(send).collect();
        let got = end.qps[0].post_send(&chain);
        check_bad(session, "send N + 3 in one chain", got, libc::ENOMEM, Some(depth));
        check_bad(session, "one more", end.qps[0].post_send(&chain[..1]), libc::ENOMEM, Some(0));
        session.tell(&depth)?;
        let wanted: Vec<(u64, u32)> = (0..depth as u64).map(|id| (id, IBV_WC_SUCCESS)).collect();
        check_statuses(session, "exactly N completed", &end.send_cq, &wanted, session.stall())?;
    } else {
        let sends: usize = session.hear()?;
        let depth = caps.recv_wr as usize;
        let recv = |id| RecvWr { wr_id: id as u64, sges: vec![memory.sge(1024, 64)] };
        let chain: Vec<RecvWr> = (0..depth + 2).map(recv).collect();
        check_bad(
            session,
            "receive N + 2 in one chain",
            end.qps[0].post_recv(&chain),
            libc::ENOMEM,
            Some(depth),
        );
        let mut received = 0;
        for next in depth.. {
            if received >= sends {
                break;
            }
            received += collect_good(&end.recv_cq, 1, session.stall())?.len();
            // Each completion frees one place in the queue.
            end.qps[0].post_recv(&[recv(next)])?;
        }
        session.check("received", received == sends, format!("{received} of {sends}"));
    }
    session.barrier()
}

fn queue_depth_extended(session: &mut Session) -> Outcome {
    let mut end = End::new(session, &Setup { qps: 2, extended: true, ..setup() })?;
    let memory = memory(&end)?;
    end.connect(session)?;
    if session.is_a() {
        // Odd QPs have the extended interface; nothing is received at the far end, so all stays outstanding.
        let qp = &end.qps[1];
        let depth = qp.caps().send_wr as usize;
        let send = |id| SendWr::new(id as u64, Opcode::Send).sges([memory.sge(0, 64)]);
        let chain: Vec<SendWr> = (0..depth).map(send).collect();
        let fits = qp.post_send_extended(&chain);
        session.check("N between start and complete", fits.is_ok(), format!("{fits:?}"));
        check_bad(session, "one more", qp.post_send_extended(&[send(99)]), libc::ENOMEM, None);
    }
    session.barrier()
}

fn too_many_sges(session: &mut Session) -> Outcome {
    let (end, memory) = waiting_end(session)?;
    let caps = end.qps[0].caps();
    let sges = |n: u32| (0..n as usize).map(|i| memory.sge(i * 64, 8)).collect::<Vec<_>>();
    let send = |id, n| SendWr::new(id, Opcode::Send).sges(sges(n));
    let chain = [send(1, 1), send(2, caps.send_sge + 1), send(3, 1)];
    check_bad(session, "send SGEs above the limit", end.qps[0].post_send(&chain), libc::EINVAL, Some(1));
    let recv = |id, n| RecvWr { wr_id: id, sges: sges(n) };
    let chain = [recv(1, caps.recv_sge), recv(2, caps.recv_sge + 1)];
    check_bad(session, "receive SGEs above the limit", end.qps[0].post_recv(&chain), libc::EINVAL, Some(1));
    // What stood before the offender was posted, on both sides.
    check_statuses(
        session,
        "the WR before it is sent",
        &end.send_cq,
        &[(1, IBV_WC_SUCCESS)],
        session.stall(),
    )?;
    check_statuses(
        session,
        "the receive before it is used",
        &end.recv_cq,
        &[(1, IBV_WC_SUCCESS)],
        session.stall(),
    )?;
    session.barrier()
}

fn inline(session: &mut Session) -> Outcome {
    let (end, _memory) = waiting_end(session)?;
    if session.is_a() {
        let most = end.qps[0].caps().inline as usize;
        let send = |id, len: usize| {
            let mut wr = SendWr::new(id, Opcode::Send);
            wr.inline = Some(vec![vec![7; len]]);
            wr
        };
        let chain = [send(1, most), send(2, most + 1), send(3, 1)];
        check_bad(session, "inline above the limit", end.qps[0].post_send(&chain), libc::EINVAL, Some(1));
        session.barrier()?;
        check_statuses(
            session,
            "the WR before it is sent",
            &end.send_cq,
            &[(1, IBV_WC_SUCCESS)],
            session.stall(),
        )?;
    } else {
        let receive = Mr::whole(&end.pd, &Buffer::new(1 << 16)?, IBV_ACCESS_LOCAL_WRITE)?;
        end.qps[0].post_recv(&[RecvWr { wr_id: 1, sges: vec![receive.sge(0, 1 << 16)] }])?;
        session.barrier()?;
        let wc = collect_good(&end.recv_cq, 1, session.stall())?[0];
        let mut got = vec![0; wc.byte_len as usize];
        receive.buffer().read(0, &mut got);
        session.check("inline bytes", !got.is_empty() && got.iter().all(|b| *b == 7), got.len());
        // The receiving buffer outlives the peer's completion.
        session.barrier()?;
        return session.barrier();
    }
    session.barrier()?;
    session.barrier()
}

fn wrong_state(session: &mut Session) -> Outcome {
    let mut end = End::new(session, &setup())?;
    let memory = memory(&end)?;
    end.exchange(session)?;
    let attr = end.attr_for(0);
    let qp = &end.qps[0];
    let send = [SendWr::new(1, Opcode::Send).sges([memory.sge(0, 8)])];
    let recv = [RecvWr { wr_id: 1, sges: vec![memory.sge(0, 8)] }];
    check_bad(session, "send in RESET", qp.post_send(&send), libc::EINVAL, Some(0));
    check_bad(session, "receive in RESET", qp.post_recv(&recv), libc::EINVAL, Some(0));
    qp.to_init(&attr)?;
    check_bad(session, "send in INIT", qp.post_send(&send), libc::EINVAL, Some(0));
    let in_init = qp.post_recv(&recv);
    session.check("receive in INIT", in_init.is_ok(), format!("{in_init:?}"));
    qp.to_rtr(&attr)?;
    check_bad(session, "send in RTR", qp.post_send(&send), libc::EINVAL, Some(0));
    qp.to_rts(&attr)?;
    let strange = [SendWr::new(1, Opcode::Raw(77)).sges([memory.sge(0, 8)])];
    check_bad(session, "unknown opcode", qp.post_send(&strange), libc::EINVAL, Some(0));
    session.barrier()?;
    qp.post_send(&send)?;
    check_statuses(session, "then a good one", &end.send_cq, &[(1, IBV_WC_SUCCESS)], session.stall())?;
    check_statuses(session, "and its receive", &end.recv_cq, &[(1, IBV_WC_SUCCESS)], session.stall())?;
    session.barrier()?;
    qp.to_state(state::ERR)?;
    let in_err = qp.post_recv(&[RecvWr { wr_id: 8, sges: vec![memory.sge(0, 8)] }]);
    session.check("receive in ERR is accepted", in_err.is_ok(), format!("{in_err:?}"));
    let flushed = [(8, IBV_WC_WR_FLUSH_ERR)];
    check_statuses(session, "and flushed", &end.recv_cq, &flushed, session.stall())?;
    session.barrier()
}

/// Slots of unsignaled requests come back with the next signaled completion, again and again, round the
/// queue.
fn unsignaled_slots(session: &mut Session) -> Outcome {
    let mut end = End::new(session, &setup())?;
    let memory = memory(&end)?;
    let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
    end.connect(session)?;
    if session.is_a() {
        let depth = end.qps[0].caps().send_wr as u64;
        let rounds = 500 * session.options.rounds as u64;
        let mut wrong = None;
        for round in 0..rounds {
            // Every length from 1 to N, so that signaled ones fall on every slot.
            let count = 1 + round % depth;
            let write =
                |id| SendWr::new(id, Opcode::Write).sges([memory.sge(0, 32)]).remote(remote.0, remote.1);
            let mut chain: Vec<SendWr> = (1..count).map(|id| write(id).unsignaled()).collect();
            chain.push(write(round + 1000));
            end.qps[0].post_send(&chain).map_err(|bad| format!("round {round}, {count} requests: {bad}"))?;
            let wcs = collect_good(&end.send_cq, 1, session.stall())?;
            if wcs.len() != 1 || wcs[0].wr_id != round + 1000 {
                wrong = Some(crate::expect::describe(&wcs));
                break;
            }
        }
        let detail = wrong.clone().unwrap_or_else(|| format!("{rounds} rounds of 1 to {depth}"));
        session.check("only the signaled ones complete, all slots return", wrong.is_none(), detail);
    }
    session.barrier()
}
