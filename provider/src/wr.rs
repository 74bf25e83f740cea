//! The `ibv_wr_*` interface: requests built step by step between `ibv_wr_start` and `ibv_wr_complete`.
//!
//! Each builder call begins a request; the setter that follows (SGEs or inline data) pushes it. A request without
//! setter has no data and is pushed by the next builder call or by complete. Any error makes complete take back the
//! whole batch.

use std::ffi::{c_int, c_void};

use metaroce_engine::SendPost;
use metaroce_proto::types::{Opcode, SendWqe, Sge, send_flags};
use rdma_core_sys::private::verbs_qp;
use rdma_core_sys::*;

use crate::chain;
use crate::ffi::{CPart, Errno, Result, object};
use crate::post::{check_atomic_length, check_flags, check_inline, check_sges, sig_all, total};
use crate::qp::Qp;

/// A batch being built. It holds the engine's send lock from start to complete or abort.
#[derive(Default)]
pub(crate) struct Builder {
    post: Option<SendPost<'static>>,
    /// The request that waits for its setter.
    open: Option<SendWqe>,
    /// Data of the open request that still waits for its address.
    waiting: Option<Waiting>,
    /// The QP's requests need an address (UD: handle, QPN and Q_Key; XRC: SRQ).
    needs_address: bool,
    /// The open request has it.
    addressed: bool,
    /// The first error.
    error: Option<Errno>,
}

/// Data of a request whose address comes after it; the interface allows either order.
enum Waiting {
    Sges(Vec<Sge>),
    Inline(Vec<u8>),
}

impl Builder {
    fn begin(&mut self, post: SendPost<'static>, needs_address: bool) {
        *self = Self { post: Some(post), needs_address, ..Self::default() };
    }

    fn fail(&mut self, outcome: Result<()>) {
        if let Err(errno) = outcome {
            self.error.get_or_insert(errno);
        }
    }

    /// Pushes a request whose setter did not come.
    fn close_open(&mut self) {
        if self.waiting.take().is_some() {
            self.open = None;
            return self.fail(Err(libc::EINVAL));
        }
        if self.open.is_some() {
            self.set_sges(0, 0, 0, std::iter::empty());
        }
    }

    /// Begins a request.
    fn open(&mut self, qp: &Qp, opcode: Opcode, fill: impl FnOnce(&mut SendWqe)) {
        self.close_open();
        let (wr_id, flags) = qp.c.wr_id_flags();
        // INLINE is chosen by the setter here.
        let flags = match check_flags(opcode, flags & !IBV_SEND_INLINE) {
            Ok(flags) => flags | sig_all(qp),
            Err(errno) => return self.fail(Err(errno)),
        };
        let mut wqe = SendWqe::new(wr_id, opcode, flags);
        fill(&mut wqe);
        self.addressed = !self.needs_address || opcode.is_local();
        self.open = Some(wqe);
    }

    /// Gives the open request its SGEs and pushes it.
    fn set_sges(&mut self, length: u32, count: usize, max: u32, sges: impl ExactSizeIterator<Item = Sge>) {
        let outcome = match (&mut self.post, self.open.take()) {
            (Some(post), Some(mut wqe)) => check_sges(count, max).and_then(|num_sge| {
                if matches!(wqe.opcode, Opcode::CompareSwap | Opcode::FetchAdd | Opcode::AtomicWrite) {
                    check_atomic_length(length)?;
                }
                (wqe.num_sge, wqe.length) = (num_sge, length);
                if !self.addressed {
                    (self.open, self.waiting) = (Some(wqe), Some(Waiting::Sges(sges.collect())));
                    return Ok(());
                }
                post.push(wqe, sges)
            }),
            _ => Err(libc::EINVAL),
        };
        self.fail(outcome);
    }

    /// Gives the open request its inline data and pushes it.
    fn set_inline<'a>(&mut self, max: u32, parts: impl Iterator<Item = &'a [u8]> + Clone) {
        let length: u64 = parts.clone().map(|part| part.len() as u64).sum();
        let outcome = match (&mut self.post, self.open.take()) {
            (Some(post), Some(mut wqe)) if !wqe.opcode.has_response() && !wqe.opcode.is_local() => {
                check_inline(u32::try_from(length).unwrap_or(u32::MAX), max).and_then(|inline_len| {
                    wqe.flags |= send_flags::INLINE;
                    (wqe.inline_len, wqe.length) = (inline_len, u32::from(inline_len));
                    if !self.addressed {
                        let data = parts.flatten().copied().collect();
                        (self.open, self.waiting) = (Some(wqe), Some(Waiting::Inline(data)));
                        return Ok(());
                    }
                    post.push_inline(wqe, parts)
                })
            }
            _ => Err(libc::EINVAL),
        };
        self.fail(outcome);
    }

    /// Gives the open request its address, and pushes it if its data came before.
    fn set_address(&mut self, fill: Result<impl FnOnce(&mut SendWqe)>) {
        let outcome = match (&mut self.post, self.open.take(), fill) {
            (_, _, Err(errno)) => Err(errno),
            (Some(post), Some(mut wqe), Ok(fill)) => {
                fill(&mut wqe);
                self.addressed = true;
                match self.waiting.take() {
                    Some(Waiting::Sges(sges)) => post.push(wqe, sges.into_iter()),
                    Some(Waiting::Inline(data)) => post.push_inline(wqe, std::iter::once(&data[..])),
                    None => {
                        self.open = Some(wqe);
                        Ok(())
                    }
                }
            }
            _ => Err(libc::EINVAL),
        };
        self.fail(outcome);
    }

    /// Ends the batch: the lock's guard, for the caller to commit or discard *after* it has let go of the builder,
    /// and what went wrong.
    fn finish(&mut self) -> (Option<SendPost<'static>>, Option<Errno>) {
        self.close_open();
        (self.post.take(), self.error.take())
    }
}

/// The operations a QP can be asked for with `send_ops_flags`.
const OPS_RC: u64 = OPS_UC
    | (IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        | IBV_QP_EX_WITH_ATOMIC_WRITE
        | IBV_QP_EX_WITH_SEND_WITH_INV) as u64;
const OPS_UC: u64 = OPS_UD
    | (IBV_QP_EX_WITH_RDMA_WRITE
        | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | IBV_QP_EX_WITH_LOCAL_INV
        | IBV_QP_EX_WITH_BIND_MW) as u64;
const OPS_UD: u64 = (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM) as u64;

/// EOPNOTSUPP when the transport does not have one of the operations.
pub(crate) fn check_ops(qp_type: ibv_qp_type, ops: u64) -> Result<()> {
    let supported = match qp_type {
        IBV_QPT_RC | IBV_QPT_XRC_SEND => OPS_RC,
        IBV_QPT_UC => OPS_UC,
        IBV_QPT_UD => OPS_UD,
        IBV_QPT_RAW_PACKET => u64::from(IBV_QP_EX_WITH_SEND),
        _ => 0,
    };
    if ops & !supported != 0 { Err(libc::EOPNOTSUPP) } else { Ok(()) }
}

/// The plain part of a QP under construction.
pub(crate) fn plain_part(qp: &mut verbs_qp) -> &mut ibv_qp {
    // SAFETY: all-zero bytes are a valid ibv_qp, with which ibv_qp_ex begins.
    unsafe { &mut qp.u.qp }
}

/// What `query_qp` reports of the C part.
pub(crate) fn init_attr_of(qp: &CPart<verbs_qp>) -> ibv_qp_init_attr {
    let qp = qp.as_ptr().cast::<ibv_qp>();
    // SAFETY: our own live object; nobody changes these members after creation.
    unsafe {
        ibv_qp_init_attr {
            qp_context: (*qp).qp_context,
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            srq: (*qp).srq,
            qp_type: (*qp).qp_type,
            ..Default::default()
        }
    }
}

/// Sets the builder functions that were asked for; calling another one is a NULL call, as with any device.
pub(crate) fn set_functions(qp: &mut verbs_qp, ops: u64) {
    // SAFETY: all-zero bytes are a valid ibv_qp_ex.
    let ex = unsafe { &mut qp.u.qp_ex };
    let asked = |bit: u32| ops & u64::from(bit) != 0;
    ex.wr_start = Some(wr_start);
    ex.wr_complete = Some(wr_complete);
    ex.wr_abort = Some(wr_abort);
    ex.wr_set_sge = Some(wr_set_sge);
    ex.wr_set_sge_list = Some(wr_set_sge_list);
    ex.wr_set_inline_data = Some(wr_set_inline_data);
    ex.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    ex.wr_set_ud_addr = Some(wr_set_ud_addr);
    ex.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    if asked(IBV_QP_EX_WITH_SEND) {
        ex.wr_send = Some(wr_send);
    }
    if asked(IBV_QP_EX_WITH_SEND_WITH_IMM) {
        ex.wr_send_imm = Some(wr_send_imm);
    }
    if asked(IBV_QP_EX_WITH_RDMA_WRITE) {
        ex.wr_rdma_write = Some(wr_rdma_write);
    }
    if asked(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) {
        ex.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    }
    if asked(IBV_QP_EX_WITH_RDMA_READ) {
        ex.wr_rdma_read = Some(wr_rdma_read);
    }
    if asked(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP) {
        ex.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    }
    if asked(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD) {
        ex.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    }
    if asked(IBV_QP_EX_WITH_ATOMIC_WRITE) {
        ex.wr_atomic_write = Some(wr_atomic_write);
    }
    if asked(IBV_QP_EX_WITH_LOCAL_INV) {
        ex.wr_local_inv = Some(wr_local_inv);
    }
    if asked(IBV_QP_EX_WITH_BIND_MW) {
        ex.wr_bind_mw = Some(wr_bind_mw);
    }
    if asked(IBV_QP_EX_WITH_SEND_WITH_INV) {
        ex.wr_send_inv = Some(wr_send_inv);
    }
}

/// Runs `f` on the QP and its builder.
///
/// # Safety
/// `qp` is one of ours and the calling thread is between `wr_start` and `wr_complete` or `wr_abort`.
unsafe fn building<R>(qp: *mut ibv_qp_ex, f: impl FnOnce(&Qp, &mut Builder) -> R) -> Option<R> {
    // SAFETY: upheld by the caller: the thread holds the send lock, which guards the builder.
    unsafe {
        let qp = object::<Qp>(qp.cast()).ok()?;
        Some(qp.builder.with(|builder| f(qp, builder)))
    }
}

unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the application passes one of our QPs, which it keeps until complete or abort: the lock's guard may
    // then outlive this call. Taking the lock comes first, so the builder is ours.
    unsafe {
        if let Ok(qp) = object::<Qp>(qp.cast()) {
            let post = std::mem::transmute::<SendPost<'_>, SendPost<'static>>(qp.engine.send_batch());
            let needs_address = matches!(qp.qp_type, IBV_QPT_UD | IBV_QPT_XRC_SEND);
            qp.builder.with(|builder| builder.begin(post, needs_address));
        }
    }
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the application calls this after wr_start on the same thread.
    match unsafe { building(qp, |_, builder| builder.finish()) } {
        Some((Some(post), None)) => {
            post.commit();
            0
        }
        Some((Some(post), Some(errno))) => {
            post.discard();
            errno
        }
        _ => libc::EINVAL,
    }
}

unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: as wr_complete.
    if let Some((Some(post), _)) = unsafe { building(qp, |_, builder| builder.finish()) } {
        post.discard();
    }
}

unsafe extern "C" fn wr_send(qp: *mut ibv_qp_ex) {
    // SAFETY: the application calls this between wr_start and wr_complete on the same thread.
    unsafe { building(qp, |qp, builder| builder.open(qp, Opcode::Send, |_| {})) };
}

unsafe extern "C" fn wr_send_imm(qp: *mut ibv_qp_ex, imm: __be32) {
    // SAFETY: as wr_send.
    unsafe { building(qp, |qp, builder| builder.open(qp, Opcode::SendImm, |wqe| wqe.imm = imm)) };
}

/// The only one that brings its data along.
unsafe extern "C" fn wr_atomic_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, data: *const c_void) {
    // SAFETY: as wr_send; the application passes 8 readable bytes.
    unsafe {
        building(qp, |qp, builder| {
            builder.open(qp, Opcode::AtomicWrite, |wqe| (wqe.rkey, wqe.remote_addr) = (rkey, remote_addr));
            builder.set_inline(qp.cap.max_inline_data, std::iter::once(chain::bytes(data.cast(), 8)));
        })
    };
}

unsafe extern "C" fn wr_send_inv(qp: *mut ibv_qp_ex, key: u32) {
    // SAFETY: as wr_send.
    unsafe { building(qp, |qp, builder| builder.open(qp, Opcode::SendInv, |wqe| wqe.imm = key)) };
}

unsafe extern "C" fn wr_local_inv(qp: *mut ibv_qp_ex, key: u32) {
    // SAFETY: as wr_send.
    unsafe { building(qp, |qp, builder| builder.open(qp, Opcode::LocalInv, |wqe| wqe.imm = key)) };
}

unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: as wr_send; the application passes a live window and a valid description.
    unsafe {
        let bind = info.as_ref().ok_or(libc::EINVAL).and_then(|info| chain::window_bind(mw, rkey, info));
        building(qp, |qp, builder| match bind {
            Ok(bind) => builder.open(qp, Opcode::BindWindow, |wqe| wqe.set_bind(&bind)),
            Err(errno) => builder.fail(Err(errno)),
        })
    };
}

unsafe extern "C" fn wr_rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: as wr_send.
    unsafe {
        building(qp, |qp, builder| {
            builder.open(qp, Opcode::Write, |wqe| (wqe.rkey, wqe.remote_addr) = (rkey, remote_addr));
        })
    };
}

unsafe extern "C" fn wr_rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, imm: __be32) {
    // SAFETY: as wr_send.
    unsafe {
        building(qp, |qp, builder| {
            builder.open(qp, Opcode::WriteImm, |wqe| {
                (wqe.rkey, wqe.remote_addr, wqe.imm) = (rkey, remote_addr, imm);
            });
        })
    };
}

unsafe extern "C" fn wr_rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    // SAFETY: as wr_send.
    unsafe {
        building(qp, |qp, builder| {
            builder.open(qp, Opcode::Read, |wqe| (wqe.rkey, wqe.remote_addr) = (rkey, remote_addr));
        })
    };
}

unsafe extern "C" fn wr_atomic_cmp_swp(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare: u64,
    swap: u64,
) {
    // SAFETY: as wr_send.
    unsafe {
        building(qp, |qp, builder| {
            builder.open(qp, Opcode::CompareSwap, |wqe| {
                (wqe.rkey, wqe.remote_addr) = (rkey, remote_addr);
                (wqe.compare_add, wqe.swap) = (compare, swap);
            });
        })
    };
}

unsafe extern "C" fn wr_atomic_fetch_add(qp: *mut ibv_qp_ex, rkey: u32, remote_addr: u64, add: u64) {
    // SAFETY: as wr_send.
    unsafe {
        building(qp, |qp, builder| {
            builder.open(qp, Opcode::FetchAdd, |wqe| {
                (wqe.rkey, wqe.remote_addr, wqe.compare_add) = (rkey, remote_addr, add);
            });
        })
    };
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let sge = Sge { addr, len: length, lkey };
    // SAFETY: as wr_send.
    unsafe {
        building(qp, |qp, builder| {
            builder.set_sges(length, 1, qp.cap.max_send_sge, std::iter::once(sge));
        })
    };
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
    // SAFETY: as wr_send.
    unsafe {
        building(qp, |_, builder| {
            let dest = chain::destination(ah, remote_qpn, remote_qkey);
            builder.set_address(dest.map(|dest| move |wqe: &mut SendWqe| wqe.dest = Some(dest)));
        });
    };
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, remote_srqn: u32) {
    // SAFETY: as wr_send.
    unsafe {
        building(qp, |_, builder| builder.set_address(Ok(|wqe: &mut SendWqe| wqe.remote_srq = remote_srqn)))
    };
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, num_sge: usize, list: *const ibv_sge) {
    // SAFETY: as wr_send; the application passes a list of num_sge SGEs.
    unsafe {
        building(qp, |qp, builder| {
            // What does not fit is no count of SGEs either.
            let count = c_int::try_from(num_sge).unwrap_or(-1);
            let sges = chain::sge_list(list, count, qp.cap.max_send_sge);
            match sges.and_then(|sges| Ok((sges, total(sges)?))) {
                Ok((sges, length)) => {
                    builder.set_sges(length, sges.len(), qp.cap.max_send_sge, sges.iter().map(chain::sge));
                }
                Err(errno) => builder.fail(Err(errno)),
            }
        })
    };
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let buf = ibv_data_buf { addr, length };
    // SAFETY: as wr_send; the application passes a readable buffer.
    unsafe { wr_set_inline_data_list(qp, 1, &buf) };
}

unsafe extern "C" fn wr_set_inline_data_list(qp: *mut ibv_qp_ex, num_buf: usize, list: *const ibv_data_buf) {
    // SAFETY: as wr_send; the application passes a list of num_buf readable buffers.
    unsafe {
        building(qp, |qp, builder| match chain::inline_list(list, num_buf, qp.cap.max_inline_data) {
            Ok(parts) => builder.set_inline(qp.cap.max_inline_data, parts),
            Err(errno) => builder.fail(Err(errno)),
        })
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_ops_knows_what_each_transport_has() {
        for bit in 0..14 {
            let op = 1u64 << bit;
            for (qp_type, supported) in [(IBV_QPT_RC, OPS_RC), (IBV_QPT_UC, OPS_UC), (IBV_QPT_UD, OPS_UD)] {
                let expected = if supported & op != 0 { Ok(()) } else { Err(libc::EOPNOTSUPP) };
                assert_eq!(check_ops(qp_type, op), expected, "type {qp_type}, bit {bit}");
            }
        }
        assert_eq!(check_ops(IBV_QPT_RC, IBV_QP_EX_WITH_TSO.into()), Err(libc::EOPNOTSUPP));
        assert_eq!(check_ops(IBV_QPT_RAW_PACKET, IBV_QP_EX_WITH_SEND_WITH_IMM.into()), Err(libc::EOPNOTSUPP));
        assert_eq!(check_ops(IBV_QPT_RC, 0), Ok(()));
    }

    #[test]
    fn set_functions_sets_what_was_asked() {
        let mut qp: verbs_qp = crate::ffi::zeroed();
        set_functions(&mut qp, (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_READ).into());
        // SAFETY: initialised above.
        let ex = unsafe { &qp.u.qp_ex };
        assert!(ex.wr_send.is_some() && ex.wr_rdma_read.is_some() && ex.wr_start.is_some());
        assert!(ex.wr_rdma_write.is_none() && ex.wr_send_imm.is_none() && ex.wr_bind_mw.is_none());
    }
}
