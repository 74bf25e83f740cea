//! Requests that are wrong: too long, wrong keys, bounds, access rights, opcodes not enabled. The near end
//! posts a good Send, the wrong request, and two more; the table says what each side sees.

use std::time::Duration;

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{Attr, Buffer, Element, Mr, Opcode, Pd, RecvWr, SendWr, Sge, state};

use crate::Outcome;
use crate::expect::{check_event, check_no_event, check_state, check_statuses, surplus};
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::session::Session;

/// All completions of a case are there by then.
const LIMIT: Duration = Duration::from_secs(10);
/// Bytes of each buffer.
const SIZE: usize = 1 << 16;
/// Every remote right.
const REMOTE: u32 = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

/// What is wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Wrong {
    /// The Send is longer than the second receive.
    SendTooLong,
    /// The second receive names a key that does not exist.
    RecvKey,
    /// ... an MR without LOCAL_WRITE.
    RecvReadOnly,
    /// ... an MR of another PD.
    RecvPd,
    /// ... bytes beyond its MR.
    RecvBounds,
    /// The remote key does not exist.
    RemoteKey,
    /// The remote range ends behind its MR.
    RemoteEnd,
    /// The remote range begins before its MR.
    RemoteBegin,
    /// The remote MR belongs to another PD than the QP.
    RemotePd,
    /// The remote MR gives no remote right.
    RemoteRight,
    /// The remote MR has been deregistered.
    RemoteGone,
    /// The responder QP does not enable the operation.
    NotEnabled,
    /// The atomic's address is not divisible by 8.
    Misaligned,
    /// The responder QP allows no Reads and atomics.
    NoRdAtomic,
    /// A local SGE names a key that does not exist.
    LocalKey,
    /// A local SGE reaches beyond its MR.
    LocalBounds,
    /// A local SGE names an MR of another PD.
    LocalPd,
    /// A Read lands in an MR without LOCAL_WRITE.
    LocalReadOnly,
}

impl Wrong {
    /// Status at the requester, of the receive at the responder, and the responder's event.
    fn outcome(self) -> (u32, Option<u32>, Option<u32>) {
        use Wrong::*;
        match self {
            SendTooLong => (IBV_WC_REM_INV_REQ_ERR, Some(IBV_WC_LOC_LEN_ERR), None),
            RecvKey | RecvReadOnly | RecvPd | RecvBounds => {
                (IBV_WC_REM_OP_ERR, Some(IBV_WC_LOC_PROT_ERR), None)
            }
            RemoteKey | RemoteEnd | RemoteBegin | RemotePd | RemoteRight | RemoteGone => {
                (IBV_WC_REM_ACCESS_ERR, None, Some(IBV_EVENT_QP_ACCESS_ERR))
            }
            NotEnabled | Misaligned | NoRdAtomic => {
                (IBV_WC_REM_INV_REQ_ERR, None, Some(IBV_EVENT_QP_REQ_ERR))
            }
            LocalKey | LocalBounds | LocalPd | LocalReadOnly => (IBV_WC_LOC_PROT_ERR, None, None),
        }
    }

    /// Found by the requester alone: the responder notices nothing.
    fn is_local(self) -> bool {
        self.outcome().0 == IBV_WC_LOC_PROT_ERR
    }
}

/// A fault's name, the fault, and the opcodes it is tried with.
type Row<'a> = (&'a str, Wrong, &'a [(&'a str, Opcode)]);

/// The cases: each fault with each opcode it can meet.
pub fn cases() -> Vec<Case> {
    use Wrong::*;
    let send = ("send", Opcode::Send);
    let write = ("write", Opcode::Write);
    let read = ("read", Opcode::Read);
    let swap = ("swap", Opcode::CompareSwap(1, 2));
    let add = ("add", Opcode::FetchAdd(1));
    let imm = ("write-imm", Opcode::WriteImm(7));
    let table: [Row; 18] = [
        ("too-long", SendTooLong, &[send, ("send-imm", Opcode::SendImm(9))]),
        ("recv-bad-lkey", RecvKey, &[send]),
        ("recv-read-only", RecvReadOnly, &[send]),
        ("recv-other-pd", RecvPd, &[send]),
        ("recv-out-of-bounds", RecvBounds, &[send]),
        ("bad-rkey", RemoteKey, &[write, imm, read, swap, add]),
        ("beyond-end", RemoteEnd, &[write, imm, read, add]),
        ("before-begin", RemoteBegin, &[write, read]),
        ("other-pd", RemotePd, &[write, read]),
        ("no-right", RemoteRight, &[write, read, swap]),
        ("deregistered", RemoteGone, &[write, read]),
        ("not-enabled", NotEnabled, &[write, read, add]),
        ("misaligned", Misaligned, &[swap, add]),
        ("no-rd-atomic", NoRdAtomic, &[read, add]),
        ("local-bad-lkey", LocalKey, &[send, write, read]),
        ("local-out-of-bounds", LocalBounds, &[send, write]),
        ("local-other-pd", LocalPd, &[write]),
        ("local-read-only", LocalReadOnly, &[read, add]),
    ];
    let mut cases = Vec::new();
    for (name, wrong, opcodes) in table {
        for (with, opcode) in opcodes {
            let opcode = *opcode;
            let run = move |session: &mut Session| request(session, wrong, opcode);
            cases.push(Case::new(format!("{name}-{with}"), 40, run));
        }
    }
    cases
}

/// Memory of an end, each kind of MR the faults need. MRs before the PD they belong to.
struct Memory {
    /// All rights; the middle half of its buffer, so that both its neighbours are mapped.
    good: Mr,
    /// Of another PD.
    foreign: Mr,
    /// Neither local write nor any remote right.
    bare: Mr,
    _other: std::sync::Arc<Pd>,
}

impl Memory {
    fn new(end: &End) -> Outcome<Self> {
        let other = Pd::new(&end.context)?;
        let all = IBV_ACCESS_LOCAL_WRITE | REMOTE;
        Ok(Self {
            good: Mr::new(&end.pd, &Buffer::new(2 * SIZE)?, SIZE / 2, SIZE, all)?,
            foreign: Mr::whole(&other, &Buffer::new(SIZE)?, all)?,
            bare: Mr::whole(&end.pd, &Buffer::new(SIZE)?, 0)?,
            _other: other,
        })
    }
}

fn request(session: &mut Session, wrong: Wrong, opcode: Opcode) -> Outcome {
    let mut end = End::new(session, &Setup::default())?;
    if !session.is_a() {
        if wrong == Wrong::NotEnabled {
            end.attr.access = IBV_ACCESS_LOCAL_WRITE;
        }
        if wrong == Wrong::NoRdAtomic {
            end.attr.max_dest_rd_atomic = 0;
        }
    }
    if wrong.is_local() || session.is_a() {
        end.attr = Attr { timeout: 16, ..end.attr };
    }
    let memory = Memory::new(&end)?;
    end.connect(session)?;
    if session.is_a() {
        requester(session, &end, &memory, wrong, opcode)
    } else {
        responder(session, &end, memory, wrong, opcode)
    }
}

fn is_atomic(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::CompareSwap(..) | Opcode::FetchAdd(_))
}

fn requester(session: &mut Session, end: &End, memory: &Memory, wrong: Wrong, opcode: Opcode) -> Outcome {
    let (good_remote, wrong_remote): ((u64, u32), (u64, u32)) = session.hear()?;
    let good = |at| memory.good.sge(at, 64);
    let local = match wrong {
        Wrong::LocalKey => Sge { lkey: memory.good.lkey() ^ 0x0055_5500, ..good(0) },
        Wrong::LocalBounds => Sge { addr: memory.good.address() + SIZE as u64 - 4, ..good(0) },
        Wrong::LocalPd => memory.foreign.sge(0, 64),
        Wrong::LocalReadOnly => memory.bare.sge(0, 64),
        _ => good(0),
    };
    let len = if is_atomic(opcode) { 8 } else { 64 };
    let wrs = [
        SendWr::new(1, Opcode::Send).sges([good(1024)]),
        SendWr::new(2, opcode).sges([Sge { len, ..local }]).remote(wrong_remote.0, wrong_remote.1),
        SendWr::new(3, Opcode::Send).sges([good(2048)]),
        // Unsignaled, but a flush is reported all the same.
        SendWr::new(4, Opcode::Write).sges([good(3072)]).remote(good_remote.0, good_remote.1).unsignaled(),
    ];
    end.qps[0].post_send(&wrs)?;
    let status = wrong.outcome().0;
    let wanted = [(1, IBV_WC_SUCCESS), (2, status), (3, IBV_WC_WR_FLUSH_ERR), (4, IBV_WC_WR_FLUSH_ERR)];
    check_statuses(session, "requester completions", &end.send_cq, &wanted, LIMIT)?;
    check_state(session, "requester state", &end.qps[0], state::ERR)?;
    check_no_event(session, &end.context, "requester events")?;
    end.qps[0].post_send(&[SendWr::new(5, Opcode::Send).sges([good(0)])])?;
    check_statuses(session, "post in ERR", &end.send_cq, &[(5, IBV_WC_WR_FLUSH_ERR)], LIMIT)?;
    session.barrier()?;
    session.barrier()
}

fn responder(session: &mut Session, end: &End, memory: Memory, wrong: Wrong, opcode: Opcode) -> Outcome {
    let recv = |at| memory.good.sge(at, 64);
    let second = match wrong {
        Wrong::SendTooLong => Sge { len: 63, ..recv(1024) },
        Wrong::RecvKey => Sge { lkey: memory.good.lkey() ^ 0x0055_5500, ..recv(1024) },
        Wrong::RecvReadOnly => memory.bare.sge(0, 64),
        Wrong::RecvPd => memory.foreign.sge(0, 64),
        Wrong::RecvBounds => Sge { addr: memory.good.address() + SIZE as u64 - 4, ..recv(0) },
        _ => recv(1024),
    };
    let sges = [recv(0), second, recv(2048), recv(3072)];
    let wrs: Vec<RecvWr> = (1..).zip(sges).map(|(wr_id, sge)| RecvWr { wr_id, sges: vec![sge] }).collect();
    end.qps[0].post_recv(&wrs)?;
    let (address, rkey) = (memory.good.address() + 8192, memory.good.rkey());
    let good_remote = (address, rkey);
    let mut kept = Some(memory);
    let memory = kept.as_ref().ok_or("memory is here")?;
    let wrong_remote = match wrong {
        Wrong::RemoteKey => (address, rkey ^ 0x0055_5500),
        // An atomic must stay aligned, or that is what is wrong with it.
        Wrong::RemoteEnd if is_atomic(opcode) => (memory.good.address() + SIZE as u64, rkey),
        Wrong::RemoteEnd => (memory.good.address() + SIZE as u64 - 4, rkey),
        Wrong::RemoteBegin => (memory.good.address() - 8, rkey),
        Wrong::RemotePd => (memory.foreign.address(), memory.foreign.rkey()),
        Wrong::RemoteRight => (memory.bare.address(), memory.bare.rkey()),
        Wrong::RemoteGone => (memory.foreign.address(), memory.foreign.rkey()),
        Wrong::Misaligned => (address + 4, rkey),
        _ => good_remote,
    };
    let before = snapshot(memory);
    if wrong == Wrong::RemoteGone {
        // A key of the QP's own PD that is not there any more.
        let gone = Mr::whole(&end.pd, &Buffer::new(SIZE)?, IBV_ACCESS_LOCAL_WRITE | REMOTE)?;
        let remote = (gone.address(), gone.rkey());
        drop(gone);
        session.tell(&(good_remote, remote))?;
    } else {
        session.tell(&(good_remote, wrong_remote))?;
    }
    session.barrier()?;
    let (_, status, event) = wrong.outcome();
    let mut wanted = vec![(1, IBV_WC_SUCCESS)];
    if !wrong.is_local() {
        wanted.push((2, status.unwrap_or(IBV_WC_WR_FLUSH_ERR)));
        wanted.extend([(3, IBV_WC_WR_FLUSH_ERR), (4, IBV_WC_WR_FLUSH_ERR)]);
    }
    check_statuses(session, "responder completions", &end.recv_cq, &wanted, LIMIT)?;
    let state = if wrong.is_local() { state::RTS } else { state::ERR };
    check_state(session, "responder state", &end.qps[0], state)?;
    match event {
        Some(kind) => check_event(session, &end.context, kind, Element::Qp(end.qps[0].qpn()))?,
        None => check_no_event(session, &end.context, "responder events")?,
    }
    // A Send may have been placed in part; a bad place for a response may show only when the response is
    // there.
    let may_touch = matches!(opcode, Opcode::Send | Opcode::SendImm(_)) || wrong == Wrong::LocalReadOnly;
    let untouched = snapshot(memory) == before || may_touch;
    session.check("memory untouched", untouched, format!("{wrong:?}"));
    let stray = surplus(&end.send_cq)?;
    session.check("no completions of sends", stray.is_empty(), stray.len());
    session.barrier()?;
    kept.take();
    Ok(())
}

/// Everything a wrong request might have written.
fn snapshot(memory: &Memory) -> Vec<u8> {
    let mut all = Vec::new();
    for mr in [&memory.good, &memory.foreign, &memory.bare] {
        let mut bytes = vec![0; mr.buffer().len()];
        mr.buffer().read(0, &mut bytes);
        // The first 64 bytes of the good MR take the good Send.
        if std::ptr::eq(mr, &raw const memory.good) {
            bytes[SIZE / 2..SIZE / 2 + 64].fill(0);
        }
        all.append(&mut bytes);
    }
    all
}
