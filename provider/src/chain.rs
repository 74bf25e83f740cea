//! Views of work request chains: the part of the unsafe fence that reads `ibv_send_wr` and `ibv_recv_wr` lists.

use std::ffi::c_int;
use std::marker::PhantomData;
use std::slice;

use metaroce_proto::types::{Bind, Destination, Expected, Qpn, Sge, TagChange, TagOp, access};
use rdma_core_sys::*;

use crate::ah::Ah;
use crate::ffi::{Result, object};
use crate::limits::MAX_SGE;
use crate::mw::Mw;

/// A chain of send requests. Iterate with [`SendChain::next`].
pub(crate) struct SendChain<'a> {
    next: *mut ibv_send_wr,
    life: PhantomData<&'a ibv_send_wr>,
}

/// One send request of a chain.
#[derive(Clone, Copy)]
pub(crate) struct SendRequest<'a> {
    wr: &'a ibv_send_wr,
}

/// A chain of receive requests.
pub(crate) struct RecvChain<'a> {
    next: *mut ibv_recv_wr,
    life: PhantomData<&'a ibv_recv_wr>,
}

/// One receive request of a chain.
#[derive(Clone, Copy)]
pub(crate) struct RecvRequest<'a> {
    wr: &'a ibv_recv_wr,
}

impl<'a> SendChain<'a> {
    /// # Safety
    /// `first` is NULL or the head of a well-formed chain that stays unchanged during `'a`; SGE lists are valid, and
    /// so are the buffers of requests with IBV_SEND_INLINE.
    pub(crate) unsafe fn new(first: *mut ibv_send_wr) -> Self {
        Self { next: first, life: PhantomData }
    }

    /// The request [`Iterator::next`] gives next, for `bad_wr`.
    pub(crate) fn position(&self) -> *mut ibv_send_wr {
        self.next
    }

    /// The current request, without moving on.
    pub(crate) fn peek(&self) -> Option<SendRequest<'a>> {
        // SAFETY: `new`'s caller vouches for the chain.
        unsafe { self.next.as_ref() }.map(|wr| SendRequest { wr })
    }

    /// Moves on to the next request.
    pub(crate) fn advance(&mut self) {
        if let Some(request) = self.peek() {
            self.next = request.wr.next;
        }
    }
}

impl<'a> SendRequest<'a> {
    pub(crate) fn wr_id(self) -> u64 {
        self.wr.wr_id
    }
    pub(crate) fn opcode(self) -> ibv_wr_opcode {
        self.wr.opcode
    }
    pub(crate) fn flags(self) -> u32 {
        self.wr.send_flags
    }
    /// Immediate data as stored (`__be32`).
    pub(crate) fn imm(self) -> u32 {
        // SAFETY: both members are u32.
        unsafe { self.wr.__bindgen_anon_1.imm_data }
    }
    /// Remote address and key of a Write or Read.
    pub(crate) fn rdma(self) -> (u64, u32) {
        // SAFETY: plain integers, whatever member was written.
        unsafe { (self.wr.wr.rdma.remote_addr, self.wr.wr.rdma.rkey) }
    }
    /// Remote address, key, compare/add and swap of an atomic.
    pub(crate) fn atomic(self) -> (u64, u32, u64, u64) {
        // SAFETY: plain integers, whatever member was written.
        unsafe {
            let a = &self.wr.wr.atomic;
            (a.remote_addr, a.rkey, a.compare_add, a.swap)
        }
    }
    /// The key that Send with invalidate or a local invalidation names.
    pub(crate) fn invalidate_key(self) -> u32 {
        // SAFETY: both members are u32.
        unsafe { self.wr.__bindgen_anon_1.invalidate_rkey }
    }
    /// How a window is bound; EINVAL without a type 2 window.
    pub(crate) fn bind(self) -> Result<Bind> {
        // SAFETY: plain integers and pointers, whatever member was written; the application passes live objects.
        unsafe {
            let bind = &self.wr.__bindgen_anon_2.bind_mw;
            window_bind(bind.mw, bind.rkey, &bind.bind_info)
        }
    }
    /// The SRQ an XRC message is for.
    pub(crate) fn remote_srq(self) -> u32 {
        // SAFETY: a plain integer, whatever member was written.
        unsafe { self.wr.qp_type.xrc.remote_srqn }
    }
    /// Where a datagram goes; EINVAL without an address handle of ours.
    pub(crate) fn destination(self) -> Result<Destination> {
        // SAFETY: plain integers and a pointer, whatever member was written.
        let ud = unsafe { self.wr.wr.ud };
        destination(ud.ah, ud.remote_qpn, ud.remote_qkey)
    }
    /// The SGE list; EINVAL when it has more than `max` or its length is negative.
    pub(crate) fn sges(self, max: u32) -> Result<&'a [ibv_sge]> {
        // SAFETY: `SendChain::new`'s caller vouches for the list.
        unsafe { sge_list(self.wr.sg_list, self.wr.num_sge, max) }
    }
    /// The bytes that the SGEs of this request, which is an inline one, point at.
    pub(crate) fn inline_parts(self, sges: &'a [ibv_sge]) -> impl Iterator<Item = &'a [u8]> + Clone {
        // SAFETY: `SendChain::new`'s caller vouches for the buffers of inline requests.
        sges.iter().map(|sge| unsafe { bytes(sge.addr as _, sge.length as usize) })
    }
}

impl<'a> RecvChain<'a> {
    /// # Safety
    /// `first` is NULL or the head of a well-formed chain that stays unchanged during `'a`, with valid SGE lists.
    pub(crate) unsafe fn new(first: *mut ibv_recv_wr) -> Self {
        Self { next: first, life: PhantomData }
    }

    /// The current request, for `bad_wr`.
    pub(crate) fn position(&self) -> *mut ibv_recv_wr {
        self.next
    }

    /// The current request, without moving on.
    pub(crate) fn peek(&self) -> Option<RecvRequest<'a>> {
        // SAFETY: `new`'s caller vouches for the chain.
        unsafe { self.next.as_ref() }.map(|wr| RecvRequest { wr })
    }

    /// Moves on to the next request.
    pub(crate) fn advance(&mut self) {
        if let Some(request) = self.peek() {
            self.next = request.wr.next;
        }
    }
}

impl<'a> RecvRequest<'a> {
    pub(crate) fn wr_id(self) -> u64 {
        self.wr.wr_id
    }
    /// The SGE list; EINVAL when it has more than `max` or its length is negative.
    pub(crate) fn sges(self, max: u32) -> Result<&'a [ibv_sge]> {
        // SAFETY: `RecvChain::new`'s caller vouches for the list.
        unsafe { sge_list(self.wr.sg_list, self.wr.num_sge, max) }
    }
}

/// Where a datagram goes: the address handle resolved. EINVAL without one.
pub(crate) fn destination(ah: *mut ibv_ah, qpn: u32, qkey: u32) -> Result<Destination> {
    // SAFETY: the application passes an address handle that it keeps alive during the call, or NULL.
    let ah = unsafe { object::<Ah>(ah)? };
    Ok(Destination { ip: ah.remote, qpn: Qpn(qpn & 0xff_ffff), qkey })
}

/// How a type 2 window is bound under a key; EINVAL for another window.
///
/// # Safety
/// `mw` is NULL or a live window of ours, the region in `info` NULL or a live one.
pub(crate) unsafe fn window_bind(mw: *mut ibv_mw, new_key: u32, info: &ibv_mw_bind_info) -> Result<Bind> {
    // SAFETY: upheld by the caller.
    unsafe {
        if !object::<Mw>(mw)?.is_type2() {
            return Err(libc::EINVAL);
        }
        Ok(Bind { new_key, ..bind_info(info)? })
    }
}

/// The memory and rights of a binding; the key is the caller's business. EINVAL for rights a window cannot give.
///
/// # Safety
/// The region in `info` is NULL or a live one.
pub(crate) unsafe fn bind_info(info: &ibv_mw_bind_info) -> Result<Bind> {
    const REMOTE: u32 = access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;
    // LOCAL_WRITE changes nothing, and programs set it.
    if info.mw_access_flags & !(REMOTE | access::ZERO_BASED | access::LOCAL_WRITE) != 0 {
        return Err(libc::EINVAL);
    }
    // SAFETY: upheld by the caller.
    let region = unsafe { info.mr.as_ref() }.map_or(0, |mr| mr.lkey);
    let access = info.mw_access_flags & (REMOTE | access::ZERO_BASED);
    Ok(Bind { new_key: 0, region, addr: info.addr, len: info.length, access })
}

/// A change of the expected messages. EINVAL for more SGEs than one, unknown operations or flags.
///
/// # Safety
/// The list in `wr` has as many SGEs as it says.
pub(crate) unsafe fn tag_op(wr: &ibv_ops_wr) -> Result<TagOp> {
    let flags = u32::try_from(wr.flags).map_err(|_| libc::EINVAL)?;
    if flags & !(IBV_OPS_SIGNALED | IBV_OPS_TM_SYNC) != 0 {
        return Err(libc::EINVAL);
    }
    let change = match wr.opcode {
        IBV_WR_TAG_ADD => {
            let add = &wr.tm.add;
            // SAFETY: upheld by the caller.
            let sges = unsafe { sge_list(add.sg_list, add.num_sge, 1) }?;
            let data = sges.first().map_or_else(Sge::default, sge);
            let (wr_id, tag, mask) = (add.recv_wr_id, add.tag, add.mask);
            TagChange::Add(Expected { wr_id, tag, mask, sge: data })
        }
        IBV_WR_TAG_DEL => TagChange::Delete(wr.tm.handle),
        IBV_WR_TAG_SYNC => TagChange::Sync,
        _ => return Err(libc::EINVAL),
    };
    let (sync, signaled) = (flags & IBV_OPS_TM_SYNC != 0, flags & IBV_OPS_SIGNALED != 0);
    Ok(TagOp { wr_id: wr.wr_id, change, heard: wr.tm.unexpected_cnt, sync, signaled })
}

/// The SGE as the core knows it.
pub(crate) fn sge(sge: &ibv_sge) -> Sge {
    Sge { addr: sge.addr, len: sge.length, lkey: sge.lkey }
}

/// An SGE list of the caller. EINVAL when it has more than `max`: nothing of it is read then, as a count that is wrong
/// says nothing of the memory.
///
/// # Safety
/// `list` holds `count` SGEs that stay unchanged during `'a`, if they are not too many; it may be NULL when `count` is 0.
pub(crate) unsafe fn sge_list<'a>(list: *const ibv_sge, count: c_int, max: u32) -> Result<&'a [ibv_sge]> {
    match u32::try_from(count) {
        Ok(0) => Ok(&[]),
        // SAFETY: upheld by the caller.
        Ok(n) if n <= max && !list.is_null() => Ok(unsafe { slice::from_raw_parts(list, n as usize) }),
        _ => Err(libc::EINVAL),
    }
}

/// The buffers of an inline list. EINVAL when they have more than `max` bytes together, or are so many that most are
/// empty: nothing is read then but their lengths.
///
/// # Safety
/// `list` holds `count` buffers that are readable and stay unchanged during `'a`, if they are not too many.
pub(crate) unsafe fn inline_list<'a>(
    list: *const ibv_data_buf,
    count: usize,
    max: u32,
) -> Result<impl Iterator<Item = &'a [u8]> + Clone> {
    let bufs: &'a [ibv_data_buf] = match count {
        0 => &[],
        _ if list.is_null() || count > max.max(MAX_SGE) as usize => return Err(libc::EINVAL),
        // SAFETY: upheld by the caller.
        _ => unsafe { slice::from_raw_parts(list, count) },
    };
    let mut room = max as usize;
    for buf in bufs {
        room = room.checked_sub(buf.length).ok_or(libc::EINVAL)?;
    }
    // SAFETY: upheld by the caller; each is at most `max` long.
    Ok(bufs.iter().map(|buf| unsafe { bytes(buf.addr.cast(), buf.length) }))
}

/// A buffer of the caller.
///
/// # Safety
/// `len` bytes at `addr` are readable during `'a`; `addr` may be anything when `len` is 0.
pub(crate) unsafe fn bytes<'a>(addr: *const u8, len: usize) -> &'a [u8] {
    if len == 0 || addr.is_null() {
        return &[];
    }
    // SAFETY: upheld by the caller.
    unsafe { slice::from_raw_parts(addr, len) }
}
