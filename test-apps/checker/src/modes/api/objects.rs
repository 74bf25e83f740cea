//! Objects: state transitions and their attributes, busy objects, memory registration, limits, CQ resize.

use std::sync::Arc;

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{
    Attr, Buffer, Cq, Mr, Opcode, Pd, Qp, QpCaps, QpOptions, RecvWr, SendWr, Srq, Transport, mask, state,
};

use crate::Outcome;
use crate::expect::{check_errno, check_event, check_state, check_statuses, collect_good};
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::session::Session;

/// RLIMIT_MEMLOCK of the registration case: what `ulimit -l 64` gives.
const MEMLOCK_BYTES: u64 = 64 << 10;
/// Bytes registered under it.
const LARGE: usize = 1 << 30;

/// The cases.
pub fn cases() -> Vec<Case> {
    vec![
        Case::new("transitions", 30, transitions),
        Case::new("query", 30, query),
        Case::new("busy-objects", 30, busy_objects),
        Case::new("register-1-gib", 60, register_large),
        Case::new("register-again", 60, register_again),
        Case::new("srq", 30, srq),
        Case::new("resize-cq", 30, resize_cq),
        Case::new("make-and-destroy", 60, make_and_destroy),
    ]
}

fn transitions(session: &mut Session) -> Outcome {
    let mut end = End::new(session, &Setup::default())?;
    end.exchange(session)?;
    let attr = end.attr_for(0);
    let qp = &end.qps[0];
    let to = |state| Attr { state, ..attr };
    let bad = |session: &mut Session, name: &str, attr: &Attr, mask: u32, stays: u32| -> Outcome {
        check_errno(session, name, &qp.modify(attr, mask), libc::EINVAL);
        check_state(session, &format!("{name}: state"), qp, stays)
    };
    bad(session, "RESET to RTR", &to(state::RTR), mask::TO_RTR, state::RESET)?;
    bad(session, "RESET to RTS", &to(state::RTS), mask::TO_RTS, state::RESET)?;
    bad(session, "INIT without PORT", &to(state::INIT), mask::TO_INIT & !mask::PORT, state::RESET)?;
    bad(session, "INIT with SQ_PSN", &to(state::INIT), mask::TO_INIT | mask::SQ_PSN, state::RESET)?;
    qp.to_init(&attr)?;
    qp.to_init(&attr)?;
    bad(session, "RTR without AV", &to(state::RTR), mask::TO_RTR & !mask::AV, state::INIT)?;
    bad(session, "RTR with TIMEOUT", &to(state::RTR), mask::TO_RTR | mask::TIMEOUT, state::INIT)?;
    bad(session, "INIT to RTS", &to(state::RTS), mask::TO_RTS, state::INIT)?;
    let no_grh = Attr { is_global: false, ..to(state::RTR) };
    bad(session, "RTR without GRH", &no_grh, mask::TO_RTR, state::INIT)?;
    let no_gid = Attr { gid_index: 200, ..to(state::RTR) };
    bad(session, "RTR with an unknown GID index", &no_gid, mask::TO_RTR, state::INIT)?;
    let huge_mtu = Attr { path_mtu: 8192, ..to(state::RTR) };
    bad(session, "path MTU above max_mtu", &huge_mtu, mask::TO_RTR, state::INIT)?;
    qp.to_rtr(&attr)?;
    bad(session, "RTS without TIMEOUT", &to(state::RTS), mask::TO_RTS & !mask::TIMEOUT, state::RTR)?;
    bad(session, "RTR to INIT", &to(state::INIT), mask::TO_INIT, state::RTR)?;
    qp.to_rts(&attr)?;
    bad(session, "RTS to RTR", &to(state::RTR), mask::TO_RTR, state::RTS)?;
    qp.to_state(state::ERR)?;
    bad(session, "ERR to RTS", &to(state::RTS), mask::TO_RTS, state::ERR)?;
    qp.to_state(state::RESET)?;
    check_state(session, "ERR to RESET", qp, state::RESET)?;
    session.barrier()
}

fn query(session: &mut Session) -> Outcome {
    let attr = Attr {
        max_rd_atomic: 3,
        max_dest_rd_atomic: 5,
        min_rnr_timer: 9,
        timeout: 15,
        retry_cnt: 4,
        rnr_retry: 5,
        rq_psn: 0x12_3456,
        sq_psn: 0x65_4321,
        ..Attr::default()
    };
    let mut end = End::new(session, &Setup { attr, ..Setup::default() })?;
    end.connect(session)?;
    // An RC QP has no Q_Key.
    let want = Attr { state: state::RTS, qkey: 0, ..end.attr_for(0) };
    let got = end.qps[0].query()?;
    session.check("query_qp returns what modify_qp set", got == want, format!("{got:?} want {want:?}"));
    let info = end.info;
    let usable = info.max_qp >= 4096 && info.max_qp_wr >= 1024 && info.max_sge >= 4 && info.max_cqe >= 8192;
    session.check("device limits", usable && info.max_mtu == 4096, format!("{info:?}"));
    let gid = end.context.gid(0)?;
    session.check(
        "GID 0 is IPv4-mapped",
        gid[..12] == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff],
        format!("{gid:x?}"),
    );
    session.barrier()
}

fn busy_objects(session: &mut Session) -> Outcome {
    let end = End::new(session, &Setup { srq: Some(8), ..Setup::default() })?;
    check_errno(session, "destroy a CQ in use", &end.send_cq.try_destroy_in_use(), libc::EBUSY);
    check_errno(session, "destroy a receive CQ in use", &end.recv_cq.try_destroy_in_use(), libc::EBUSY);
    check_errno(session, "deallocate a PD in use", &end.pd.try_dealloc_in_use(), libc::EBUSY);
    let pd = Pd::new(&end.context)?;
    let mr = Mr::whole(&pd, &Buffer::new(4096)?, 0)?;
    check_errno(session, "deallocate a PD with an MR", &pd.try_dealloc_in_use(), libc::EBUSY);
    drop(mr);
    session.barrier()
}

fn register_large(session: &mut Session) -> Outcome {
    let limit = libc::rlimit { rlim_cur: MEMLOCK_BYTES, rlim_max: MEMLOCK_BYTES };
    // SAFETY: one rlimit is read; lowering a limit needs no right.
    if unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) } != 0 {
        return Err(std::io::Error::last_os_error().into());
    }
    let mut end = End::new(session, &Setup::default())?;
    let buffer = Buffer::new(LARGE)?;
    let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    let mr = Mr::whole(&end.pd, &buffer, access);
    session.check(
        "reg_mr of 1 GiB with 64 KiB of RLIMIT_MEMLOCK",
        mr.is_ok(),
        format!("{:?}", mr.as_ref().err()),
    );
    let mr = mr?;
    let remote: (u64, u32) = session.swap(&(mr.address(), mr.rkey()))?;
    end.connect(session)?;
    let at = LARGE - 4096;
    buffer.fill(0, 4096, 0x5a);
    let write = SendWr::new(1, Opcode::Write).sges([mr.sge(0, 4096)]).remote(remote.0 + at as u64, remote.1);
    end.qps[0].post_send(&[write])?;
    collect_good(&end.send_cq, 1, session.stall())?;
    session.barrier()?;
    let mut got = vec![0; 4096];
    buffer.read(at, &mut got);
    session.check("its last page is written", got.iter().all(|b| *b == 0x5a), at);
    session.barrier()
}

/// Keys of deregistered memory never work again, also when many registrations reuse their places.
fn register_again(session: &mut Session) -> Outcome {
    let end = End::new(session, &Setup::default())?;
    let buffer = Buffer::new(1 << 20)?;
    let mut last = None;
    let mut same = 0;
    let rounds = 2000;
    for round in 0..rounds {
        let mr = Mr::new(&end.pd, &buffer, (round * 8) % 4096, 8192, IBV_ACCESS_LOCAL_WRITE)?;
        same += usize::from(last == Some(mr.lkey()));
        last = Some(mr.lkey());
    }
    session.check("a freed key is not the next one", same == 0, format!("{same} of {rounds}"));
    let many: Result<Vec<Mr>, _> = (0..4096).map(|i| Mr::new(&end.pd, &buffer, i, 64, 0)).collect();
    let many = many?;
    let mut keys: Vec<u32> = many.iter().map(Mr::lkey).collect();
    keys.sort_unstable();
    keys.dedup();
    session.check("4096 MRs at once have different keys", keys.len() == many.len(), keys.len());
    session.barrier()
}

fn srq(session: &mut Session) -> Outcome {
    let mut end = End::new(session, &Setup { qps: 3, srq: Some(32), ..Setup::default() })?;
    let memory = Mr::whole(&end.pd, &Buffer::new(1 << 16)?, IBV_ACCESS_LOCAL_WRITE)?;
    end.connect(session)?;
    let shared: Arc<Srq> = end.srq.clone().ok_or("an SRQ was asked for")?;
    let recvs: Vec<RecvWr> =
        (0..20).map(|i| RecvWr { wr_id: i, sges: vec![memory.sge(i as usize * 64, 64)] }).collect();
    shared.post_recv(&recvs)?;
    shared.arm_limit(12)?;
    session.barrier()?;
    for i in 0..9u64 {
        let send = SendWr::new(i, Opcode::Send).sges([memory.sge(8192, 1 + i as usize)]);
        end.qps[i as usize % 3].post_send(&[send])?;
    }
    collect_good(&end.send_cq, 9, session.stall())?;
    let wcs = collect_good(&end.recv_cq, 9, session.stall())?;
    let mut ids: Vec<u64> = wcs.iter().map(|wc| wc.wr_id).collect();
    ids.sort_unstable();
    session.check("SRQ receives are taken in order", ids == (0..9).collect::<Vec<_>>(), format!("{ids:?}"));
    let mut per_qp_in_order = true;
    for qp in &end.qps {
        let lens: Vec<u32> = wcs.iter().filter(|wc| wc.qpn == qp.qpn()).map(|wc| wc.byte_len).collect();
        per_qp_in_order &= lens.len() == 3 && lens.is_sorted();
    }
    session.check("each QP's messages in order", per_qp_in_order, wcs.len());
    check_event(session, &end.context, IBV_EVENT_SRQ_LIMIT_REACHED, shared.element())?;
    end.qps[0].to_state(state::ERR)?;
    let element = metaroce_test_verbs::Element::Qp(end.qps[0].qpn());
    check_event(session, &end.context, IBV_EVENT_QP_LAST_WQE_REACHED, element)?;
    session.barrier()
}

fn resize_cq(session: &mut Session) -> Outcome {
    let mut end = End::new(session, &Setup { cqe: 8, ..Setup::default() })?;
    let memory = Mr::whole(&end.pd, &Buffer::new(4096)?, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)?;
    let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
    end.connect(session)?;
    if session.is_a() {
        let resized = end.send_cq.resize(64);
        let capacity = end.send_cq.capacity();
        session.check("resize up", resized.is_ok() && capacity >= 64, format!("{resized:?}, {capacity}"));
        let write = |id| SendWr::new(id, Opcode::Write).sges([memory.sge(0, 64)]).remote(remote.0, remote.1);
        let chain: Vec<SendWr> = (0..50).map(write).collect();
        end.qps[0].post_send(&chain)?;
        // More than the CQ was made for, none polled meanwhile.
        let wanted: Vec<(u64, u32)> = (0..50).map(|id| (id, IBV_WC_SUCCESS)).collect();
        check_statuses(session, "all there after growing", &end.send_cq, &wanted, session.stall())?;
    }
    session.barrier()
}

/// Objects come and go while traffic runs beside them.
fn make_and_destroy(session: &mut Session) -> Outcome {
    let mut end = End::new(session, &Setup::default())?;
    let memory =
        Mr::whole(&end.pd, &Buffer::new(1 << 16)?, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)?;
    let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
    end.connect(session)?;
    let rounds = 300 * session.options.rounds as u64;
    let mut numbers = std::collections::HashSet::new();
    for id in 0..rounds {
        let write = SendWr::new(id, Opcode::Write).sges([memory.sge(0, 20_000)]).remote(remote.0, remote.1);
        end.qps[0].post_send(&[write])?;
        let cq = Cq::new(&end.context, 16, None)?;
        let caps = QpCaps { send_wr: 8, recv_wr: 8, send_sge: 1, recv_sge: 1, inline: 0 };
        let how = QpOptions {
            transport: Transport::Rc,
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            caps,
            signal_all: true,
            extended: id % 2 == 0,
        };
        let qp = Qp::new(&end.pd, &how)?;
        numbers.insert(qp.qpn());
        qp.to_init(&end.attr)?;
        qp.post_recv(&[RecvWr { wr_id: 1, sges: vec![memory.sge(0, 8)] }])?;
        drop((qp, cq));
        collect_good(&end.send_cq, 1, session.stall())?;
    }
    let reserved = numbers.iter().any(|n| [0, 1, 0xff_ffff].contains(n));
    session.check(
        "QP numbers",
        !reserved && numbers.len() > 1,
        format!("{} different of {rounds}", numbers.len()),
    );
    session.barrier()
}
