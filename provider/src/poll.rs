//! `ibv_poll_cq` and the extended polling functions of `ibv_cq_ex`.

use std::ffi::c_int;
use std::mem::MaybeUninit;

use metaroce_proto::types::{Completion, WC_GRH, WC_IPV4};
use parking_lot::lock_api::RawMutex as _;
use rdma_core_sys::private::verbs_cq;
use rdma_core_sys::*;

use crate::cq::Cq;
use crate::ffi::{object, put};

/// Moves completions into `wc`; gives their number.
pub(crate) fn poll(cq: &Cq, wc: &mut [MaybeUninit<ibv_wc>]) -> usize {
    let mut filled = 0;
    cq.engine.poll(wc.len(), |completion| {
        wc[filled].write(work_completion(completion));
        filled += 1;
    })
}

fn work_completion(c: &Completion) -> ibv_wc {
    ibv_wc {
        wr_id: c.wr_id,
        status: c.status as u32,
        opcode: c.opcode as u32,
        vendor_err: 0,
        byte_len: c.byte_len,
        __bindgen_anon_1: ibv_wc__bindgen_ty_1 { imm_data: c.imm },
        qp_num: c.qpn.0,
        src_qp: c.src_qp.0,
        wc_flags: flags(c),
        pkey_index: 0,
        slid: 0,
        sl: service_level(c),
        dlid_path_bits: 0,
    }
}

/// `IBV_WC_*` flags.
fn flags(c: &Completion) -> u32 {
    u32::from(c.wc_flags & !WC_IPV4)
}

/// RoCE has no service level in what arrives; as RNICs do, the field says which header a datagram's first 40 bytes hold:
/// 8 (RoCE v2) with 1 for IPv6 or 2 for IPv4. UCX checks the address in that header.
fn service_level(c: &Completion) -> u8 {
    match (c.wc_flags & WC_GRH != 0, c.wc_flags & WC_IPV4 != 0) {
        (false, _) => 0,
        (true, false) => 8 | 1,
        (true, true) => 8 | 2,
    }
}

/// Begins a batch: takes the poll lock and the first completion; ENOENT (and no lock) when there is none.
fn start(cq: &Cq) -> c_int {
    cq.poll_lock.lock();
    let outcome = next(cq);
    if outcome != 0 {
        // SAFETY: locked above by this thread.
        unsafe { cq.poll_lock.unlock() };
    }
    outcome
}

/// Moves on to the next completion; ENOENT when there is none. The caller holds the poll lock.
fn next(cq: &Cq) -> c_int {
    let mut taken = None;
    cq.engine.poll_stamped(1, |completion, stamp| taken = Some((*completion, stamp)));
    let Some((completion, _)) = taken else { return libc::ENOENT };
    cq.c.set_current(completion.wr_id, completion.status as u32);
    // SAFETY: the caller holds the poll lock.
    unsafe { cq.current.with(|current| *current = taken) };
    0
}

/// What `read` says about the current completion; 0 when there is none (misuse).
fn read<T: Default>(cq: *mut ibv_cq_ex, read: impl FnOnce(&Completion) -> T) -> T {
    // SAFETY: the application passes one of our CQs, between start_poll and end_poll, so this thread has the lock.
    unsafe {
        object::<Cq>(cq.cast()).map_or_else(
            |_| T::default(),
            |cq| cq.current.with(|current| current.as_ref().map(|c| read(&c.0)).unwrap_or_default()),
        )
    }
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: the application passes one of our CQs and a valid or NULL attr.
    unsafe {
        match (object::<Cq>(cq.cast()), attr.as_ref()) {
            (Ok(cq), Some(attr)) if attr.comp_mask == 0 => start(cq),
            _ => libc::EINVAL,
        }
    }
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the application passes one of our CQs, after a successful start_poll.
    unsafe { object::<Cq>(cq.cast()).map_or_else(|errno| errno, next) }
}

unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: the application passes one of our CQs, after a successful start_poll by the same thread.
    unsafe {
        if let Ok(cq) = object::<Cq>(cq.cast()) {
            cq.current.with(|current| *current = None);
            cq.poll_lock.unlock();
        }
    }
}

unsafe extern "C" fn read_opcode(cq: *mut ibv_cq_ex) -> ibv_wc_opcode {
    read(cq, |c| c.opcode as u32)
}
unsafe extern "C" fn read_vendor_err(_: *mut ibv_cq_ex) -> u32 {
    0
}
unsafe extern "C" fn read_byte_len(cq: *mut ibv_cq_ex) -> u32 {
    read(cq, |c| c.byte_len)
}
unsafe extern "C" fn read_imm_data(cq: *mut ibv_cq_ex) -> __be32 {
    read(cq, |c| c.imm)
}
unsafe extern "C" fn read_qp_num(cq: *mut ibv_cq_ex) -> u32 {
    read(cq, |c| c.qpn.0)
}
unsafe extern "C" fn read_src_qp(cq: *mut ibv_cq_ex) -> u32 {
    read(cq, |c| c.src_qp.0)
}
unsafe extern "C" fn read_wc_flags(cq: *mut ibv_cq_ex) -> u32 {
    read(cq, flags)
}
unsafe extern "C" fn read_tm_info(cq: *mut ibv_cq_ex, info: *mut ibv_wc_tm_info) {
    let tags = read(cq, |c| c.tags);
    // SAFETY: the application passes a structure to fill, or NULL by mistake.
    let _ = unsafe { put(info, ibv_wc_tm_info { tag: tags.tag, priv_: tags.app_ctx }) };
}
/// RoCE has no LIDs.
unsafe extern "C" fn read_slid(_: *mut ibv_cq_ex) -> u32 {
    0
}
unsafe extern "C" fn read_sl(cq: *mut ibv_cq_ex) -> u8 {
    read(cq, service_level)
}
unsafe extern "C" fn read_dlid_path_bits(_: *mut ibv_cq_ex) -> u8 {
    0
}

/// Time of the current completion by the device's clock, with that clock's time now; zeros when there is none.
unsafe fn stamp(cq: *mut ibv_cq_ex) -> (u64, u64) {
    // SAFETY: as in `read`.
    unsafe {
        object::<Cq>(cq.cast()).map_or((0, 0), |cq| {
            let stamp = cq.current.with(|current| current.map_or(0, |c| c.1));
            (stamp, cq.context.device.clock_ns())
        })
    }
}

unsafe extern "C" fn read_completion_ts(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: the application passes one of our CQs, between start_poll and end_poll.
    unsafe { stamp(cq).0 }
}
unsafe extern "C" fn read_completion_wallclock_ns(cq: *mut ibv_cq_ex) -> u64 {
    // SAFETY: as above.
    let (stamp, now) = unsafe { stamp(cq) };
    let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    // Good for 500 years.
    wall.map_or(0, |wall| (wall.as_nanos() as u64).wrapping_sub(now - stamp))
}

/// Sets the polling functions of an extended CQ: all the standard readers, asked for or not, and those of times only
/// where times are remembered.
pub(crate) fn set_functions(cq: &mut verbs_cq, wc_flags: u64) {
    // SAFETY: all-zero bytes are a valid ibv_cq_ex.
    let ex = unsafe { &mut cq.cq_ex };
    ex.start_poll = Some(start_poll);
    ex.next_poll = Some(next_poll);
    ex.end_poll = Some(end_poll);
    ex.read_opcode = Some(read_opcode);
    ex.read_vendor_err = Some(read_vendor_err);
    ex.read_byte_len = Some(read_byte_len);
    ex.read_imm_data = Some(read_imm_data);
    ex.read_qp_num = Some(read_qp_num);
    ex.read_src_qp = Some(read_src_qp);
    ex.read_wc_flags = Some(read_wc_flags);
    ex.read_slid = Some(read_slid);
    ex.read_sl = Some(read_sl);
    ex.read_dlid_path_bits = Some(read_dlid_path_bits);
    if wc_flags & u64::from(IBV_WC_EX_WITH_TM_INFO) != 0 {
        ex.read_tm_info = Some(read_tm_info);
    }
    if wc_flags & u64::from(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP) != 0 {
        ex.read_completion_ts = Some(read_completion_ts);
    }
    if wc_flags & u64::from(IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) != 0 {
        ex.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
    }
}
