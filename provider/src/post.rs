//! `ibv_post_send`, `ibv_post_recv` and `ibv_post_srq_recv`: chains of requests into the engine's queues.
//!
//! Requests before the first bad one are posted, as the specification wants; the caller reports it in `bad_wr`.

use metaroce_engine::{self as engine, SendPost};
use metaroce_proto::types::{Opcode, SendWqe, send_flags};
use rdma_core_sys::*;

use crate::chain::{self, RecvChain, SendChain, SendRequest};
use crate::ffi::Result;
use crate::limits::{MAX_MSG_SZ, MAX_SGE};
use crate::qp::Qp;

/// Posts a chain; on error `chain` stands at the request that was refused.
pub(crate) fn send(qp: &Qp, chain: &mut SendChain<'_>) -> Result<()> {
    let mut post = qp.engine.send();
    let mut outcome = Ok(());
    while let Some(request) = chain.peek() {
        outcome = push(qp, &mut post, request);
        if outcome.is_err() {
            break;
        }
        chain.advance();
    }
    post.commit();
    outcome
}

fn push(qp: &Qp, post: &mut SendPost<'_>, request: SendRequest<'_>) -> Result<()> {
    // Before anything of the list is read.
    let sges = request.sges(qp.cap.max_send_sge)?;
    let opcode = opcode_of(qp.qp_type, request.opcode())?;
    let flags = check_flags(opcode, request.flags())? | sig_all(qp);
    let length = total(sges)?;
    let mut wqe = SendWqe::new(request.wr_id(), opcode, flags);
    (wqe.length, wqe.imm) = (length, request.imm());
    match qp.qp_type {
        IBV_QPT_UD => wqe.dest = Some(request.destination()?),
        IBV_QPT_XRC_SEND => wqe.remote_srq = request.remote_srq(),
        _ => {}
    }
    match opcode {
        Opcode::AtomicWrite => {
            check_atomic_length(length)?;
            (wqe.remote_addr, wqe.rkey) = request.rdma();
        }
        Opcode::CompareSwap | Opcode::FetchAdd => {
            check_atomic_length(length)?;
            (wqe.remote_addr, wqe.rkey, wqe.compare_add, wqe.swap) = request.atomic();
        }
        Opcode::Send | Opcode::SendImm => {}
        Opcode::SendInv => wqe.imm = request.invalidate_key(),
        Opcode::LocalInv | Opcode::BindWindow | Opcode::Nop => {
            if opcode == Opcode::BindWindow {
                wqe.set_bind(&request.bind()?);
            }
            (wqe.length, wqe.imm) = (0, request.invalidate_key());
            return post.push(wqe, std::iter::empty());
        }
        Opcode::Write | Opcode::WriteImm | Opcode::Read => (wqe.remote_addr, wqe.rkey) = request.rdma(),
    }
    if flags & send_flags::INLINE != 0 {
        wqe.inline_len = check_inline(length, qp.cap.max_inline_data)?;
        return post.push_inline(wqe, request.inline_parts(sges));
    }
    wqe.num_sge = check_sges(sges.len(), qp.cap.max_send_sge)?;
    post.push(wqe, sges.iter().map(chain::sge))
}

/// SIGNALED if the QP signals all.
pub(crate) fn sig_all(qp: &Qp) -> u8 {
    if qp.sq_sig_all { send_flags::SIGNALED } else { 0 }
}

/// The core's opcode; EINVAL when the transport or the device does not have it.
pub(crate) fn opcode_of(qp_type: ibv_qp_type, opcode: ibv_wr_opcode) -> Result<Opcode> {
    let opcode = match opcode {
        IBV_WR_RDMA_WRITE => Opcode::Write,
        IBV_WR_RDMA_WRITE_WITH_IMM => Opcode::WriteImm,
        IBV_WR_SEND => Opcode::Send,
        IBV_WR_SEND_WITH_IMM => Opcode::SendImm,
        IBV_WR_RDMA_READ => Opcode::Read,
        IBV_WR_ATOMIC_CMP_AND_SWP => Opcode::CompareSwap,
        IBV_WR_ATOMIC_FETCH_AND_ADD => Opcode::FetchAdd,
        IBV_WR_LOCAL_INV => Opcode::LocalInv,
        IBV_WR_BIND_MW => Opcode::BindWindow,
        IBV_WR_SEND_WITH_INV => Opcode::SendInv,
        IBV_WR_ATOMIC_WRITE => Opcode::AtomicWrite,
        _ => return Err(libc::EINVAL),
    };
    let legal = match qp_type {
        IBV_QPT_RC | IBV_QPT_XRC_SEND => true,
        IBV_QPT_XRC_RECV => false,
        IBV_QPT_RAW_PACKET => opcode == Opcode::Send,
        IBV_QPT_UC => !opcode.has_response() && !matches!(opcode, Opcode::SendInv | Opcode::AtomicWrite),
        _ => matches!(opcode, Opcode::Send | Opcode::SendImm),
    };
    if legal { Ok(opcode) } else { Err(libc::EINVAL) }
}

/// The core's flags; EINVAL for unknown ones and for INLINE where the request brings data in.
pub(crate) fn check_flags(opcode: Opcode, flags: u32) -> Result<u8> {
    const KNOWN: u32 = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE;
    if flags & !KNOWN != 0 || flags & IBV_SEND_INLINE != 0 && (opcode.has_response() || opcode.is_local()) {
        return Err(libc::EINVAL);
    }
    // The values are those of the header.
    Ok(flags as u8)
}

/// Sum of the SGEs; EINVAL beyond the longest message.
pub(crate) fn total(sges: &[ibv_sge]) -> Result<u32> {
    let sum: u64 = sges.iter().map(|sge| u64::from(sge.length)).sum();
    if sum > u64::from(MAX_MSG_SZ) { Err(libc::EINVAL) } else { Ok(sum as u32) }
}

/// Atomics fetch exactly 8 bytes.
pub(crate) fn check_atomic_length(length: u32) -> Result<()> {
    if length == 8 { Ok(()) } else { Err(libc::EINVAL) }
}

pub(crate) fn check_inline(length: u32, max: u32) -> Result<u16> {
    // max is at most MAX_INLINE, which fits.
    if length <= max { Ok(length as u16) } else { Err(libc::EINVAL) }
}

pub(crate) fn check_sges(count: usize, max: u32) -> Result<u8> {
    // max is at most MAX_SGE, which fits.
    if count <= max as usize { Ok(count as u8) } else { Err(libc::EINVAL) }
}

/// Posts a chain; on error `chain` stands at the request that was refused.
pub(crate) fn recv(qp: &Qp, chain: &mut RecvChain<'_>) -> Result<()> {
    let mut post = qp.engine.recv();
    while let Some(request) = chain.peek() {
        let sges = request.sges(qp.cap.max_recv_sge)?;
        post.push(request.wr_id(), sges.iter().map(chain::sge))?;
        chain.advance();
    }
    Ok(())
}

/// Posts a chain; on error `chain` stands at the request that was refused.
pub(crate) fn shared_recv(queue: &engine::Srq, chain: &mut RecvChain<'_>) -> Result<()> {
    let mut post = queue.recv();
    while let Some(request) = chain.peek() {
        let sges = request.sges(MAX_SGE)?;
        post.push(request.wr_id(), sges.iter().map(chain::sge))?;
        chain.advance();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcode_of_knows_what_each_transport_has() {
        for opcode in 0..=16 {
            let rc = opcode <= IBV_WR_SEND_WITH_INV || opcode == IBV_WR_ATOMIC_WRITE;
            let uc = opcode <= IBV_WR_SEND_WITH_IMM || opcode == IBV_WR_LOCAL_INV || opcode == IBV_WR_BIND_MW;
            let ud = opcode == IBV_WR_SEND || opcode == IBV_WR_SEND_WITH_IMM;
            for (qp_type, legal) in [(IBV_QPT_RC, rc), (IBV_QPT_UC, uc), (IBV_QPT_UD, ud)] {
                let got = opcode_of(qp_type, opcode);
                assert_eq!(got.is_ok(), legal, "type {qp_type}, opcode {opcode}");
                if let Ok(core) = got {
                    assert_eq!(core as u32, opcode);
                }
            }
        }
    }

    #[test]
    fn check_flags_refuses_unknown_and_inline_reads() {
        for flags in 0..16 {
            let inline = flags & IBV_SEND_INLINE != 0;
            assert_eq!(check_flags(Opcode::Write, flags), Ok(flags as u8));
            assert_eq!(check_flags(Opcode::Read, flags).is_ok(), !inline);
            assert_eq!(check_flags(Opcode::FetchAdd, flags).is_ok(), !inline);
        }
        assert_eq!(check_flags(Opcode::Send, IBV_SEND_IP_CSUM), Err(libc::EINVAL));
        assert_eq!(check_flags(Opcode::Send, 1 << 31), Err(libc::EINVAL));
    }

    #[test]
    fn total_does_not_wrap() {
        let sge = |length| ibv_sge { addr: 0, length, lkey: 0 };
        assert_eq!(total(&[]), Ok(0));
        assert_eq!(total(&[sge(1), sge(0), sge(41)]), Ok(42));
        assert_eq!(total(&[sge(MAX_MSG_SZ)]), Ok(MAX_MSG_SZ));
        assert_eq!(total(&[sge(MAX_MSG_SZ), sge(1)]), Err(libc::EINVAL));
        assert_eq!(total(&[sge(u32::MAX), sge(u32::MAX)]), Err(libc::EINVAL));
    }
}
