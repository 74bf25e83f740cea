//! Work requests and their posting, by `ibv_post_send` and by the `ibv_wr_*` interface.

use std::ptr;

use crate::{Destination, Qp, Srq, sys};

/// A scatter/gather element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sge {
    /// Address.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Key of the MR the address lies in.
    pub lkey: u32,
}

/// Operations of an RC QP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opcode {
    /// `IBV_WR_SEND`
    Send,
    /// `IBV_WR_SEND_WITH_IMM`
    SendImm(u32),
    /// `IBV_WR_RDMA_WRITE`
    Write,
    /// `IBV_WR_RDMA_WRITE_WITH_IMM`
    WriteImm(u32),
    /// `IBV_WR_RDMA_READ`
    Read,
    /// `IBV_WR_ATOMIC_CMP_AND_SWP` of (compare, swap)
    CompareSwap(u64, u64),
    /// `IBV_WR_ATOMIC_FETCH_AND_ADD`
    FetchAdd(u64),
    /// A raw opcode number, to see it refused.
    Raw(u32),
}

impl Opcode {
    fn raw(self) -> u32 {
        match self {
            Opcode::Send => sys::IBV_WR_SEND,
            Opcode::SendImm(_) => sys::IBV_WR_SEND_WITH_IMM,
            Opcode::Write => sys::IBV_WR_RDMA_WRITE,
            Opcode::WriteImm(_) => sys::IBV_WR_RDMA_WRITE_WITH_IMM,
            Opcode::Read => sys::IBV_WR_RDMA_READ,
            Opcode::CompareSwap(..) => sys::IBV_WR_ATOMIC_CMP_AND_SWP,
            Opcode::FetchAdd(_) => sys::IBV_WR_ATOMIC_FETCH_AND_ADD,
            Opcode::Raw(value) => value,
        }
    }

    /// The opcode of its completion.
    pub fn completion(self) -> u32 {
        match self {
            Opcode::Send | Opcode::SendImm(_) => sys::IBV_WC_SEND,
            Opcode::Write | Opcode::WriteImm(_) => sys::IBV_WC_RDMA_WRITE,
            Opcode::Read => sys::IBV_WC_RDMA_READ,
            Opcode::CompareSwap(..) => sys::IBV_WC_COMP_SWAP,
            Opcode::FetchAdd(_) => sys::IBV_WC_FETCH_ADD,
            Opcode::Raw(value) => value,
        }
    }

    /// Takes a receive at the responder.
    pub fn consumes_recv(self) -> bool {
        matches!(self, Opcode::Send | Opcode::SendImm(_) | Opcode::WriteImm(_))
    }
}

/// `IBV_SEND_*` flags.
pub mod flags {
    pub use crate::sys::{IBV_SEND_FENCE, IBV_SEND_SIGNALED, IBV_SEND_SOLICITED};
}

/// A send work request.
#[derive(Debug, Clone)]
pub struct SendWr {
    /// Cookie.
    pub wr_id: u64,
    /// What.
    pub opcode: Opcode,
    /// `IBV_SEND_*` flags but INLINE.
    pub flags: u32,
    /// Where from (or to: Read, atomics).
    pub sges: Vec<Sge>,
    /// Sent inline instead of the SGEs, each part as one SGE.
    pub inline: Option<Vec<Vec<u8>>>,
    /// Remote address.
    pub remote: u64,
    /// Remote key.
    pub rkey: u32,
    /// Where a datagram goes.
    pub to: Option<Destination>,
}

impl SendWr {
    /// A signaled request without data; the fields are public.
    pub fn new(wr_id: u64, opcode: Opcode) -> Self {
        let flags = sys::IBV_SEND_SIGNALED;
        Self { wr_id, opcode, flags, sges: Vec::new(), inline: None, remote: 0, rkey: 0, to: None }
    }

    /// With these SGEs.
    pub fn sges(mut self, sges: impl IntoIterator<Item = Sge>) -> Self {
        self.sges = sges.into_iter().collect();
        self
    }

    /// To or from this remote memory.
    pub fn remote(mut self, address: u64, rkey: u32) -> Self {
        (self.remote, self.rkey) = (address, rkey);
        self
    }

    /// As a datagram to there.
    pub fn to(mut self, to: &Destination) -> Self {
        self.to = Some(to.clone());
        self
    }

    /// Without a completion when it succeeds.
    pub fn unsignaled(mut self) -> Self {
        self.flags &= !sys::IBV_SEND_SIGNALED;
        self
    }
}

/// A receive work request.
#[derive(Debug, Clone)]
pub struct RecvWr {
    /// Cookie.
    pub wr_id: u64,
    /// Where to.
    pub sges: Vec<Sge>,
}

/// A refused post.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadWr {
    /// What the call returned.
    pub errno: i32,
    /// Index of the WR `bad_wr` points at; None when it points at none of the chain.
    pub index: Option<usize>,
}

impl std::fmt::Display for BadWr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (bad_wr {:?})", std::io::Error::from_raw_os_error(self.errno), self.index)
    }
}

impl std::error::Error for BadWr {}

impl From<BadWr> for std::io::Error {
    fn from(bad: BadWr) -> Self {
        std::io::Error::other(format!("post refused: {bad}"))
    }
}

/// SGE lists of a chain in C layout; inline parts appear as SGEs without key.
fn raw_sges(wrs: &[SendWr]) -> Vec<Vec<sys::ibv_sge>> {
    wrs.iter()
        .map(|wr| match &wr.inline {
            Some(parts) => parts
                .iter()
                .map(|p| sys::ibv_sge { addr: p.as_ptr() as u64, length: p.len() as u32, lkey: 0 })
                .collect(),
            None => wr.sges.iter().map(Sge::raw).collect(),
        })
        .collect()
}

impl Sge {
    fn raw(&self) -> sys::ibv_sge {
        sys::ibv_sge { addr: self.addr, length: self.len, lkey: self.lkey }
    }
}

impl Qp {
    /// `ibv_post_send` of the whole chain.
    pub fn post_send(&self, wrs: &[SendWr]) -> Result<(), BadWr> {
        let mut sges = raw_sges(wrs);
        let mut chain: Vec<sys::ibv_send_wr> = wrs
            .iter()
            .zip(&mut sges)
            .map(|(wr, sges)| {
                let mut raw = sys::ibv_send_wr {
                    wr_id: wr.wr_id,
                    sg_list: sges.as_mut_ptr(),
                    num_sge: sges.len() as i32,
                    opcode: wr.opcode.raw(),
                    send_flags: wr.flags | if wr.inline.is_some() { sys::IBV_SEND_INLINE } else { 0 },
                    ..Default::default()
                };
                match wr.opcode {
                    Opcode::SendImm(imm) | Opcode::WriteImm(imm) => {
                        raw.__bindgen_anon_1.imm_data = imm.to_be()
                    }
                    _ => {}
                }
                let (remote_addr, rkey) = (wr.remote, wr.rkey);
                let atomic = match wr.opcode {
                    Opcode::CompareSwap(compare_add, swap) => Some((compare_add, swap)),
                    Opcode::FetchAdd(add) => Some((add, 0)),
                    _ => None,
                };
                match atomic {
                    Some((compare_add, swap)) => {
                        raw.wr.atomic = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_2 {
                            remote_addr,
                            compare_add,
                            swap,
                            rkey,
                        };
                    }
                    None if wr.to.is_some() => {}
                    None => raw.wr.rdma = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_1 { remote_addr, rkey },
                }
                if let Some(to) = &wr.to {
                    raw.wr.ud = sys::ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
                        ah: to.ah.raw(),
                        remote_qpn: to.qpn,
                        remote_qkey: to.qkey,
                    };
                }
                raw
            })
            .collect();
        let base = chain.as_mut_ptr();
        for i in 1..chain.len() {
            // SAFETY: `i` is inside the chain, which is not resized any more.
            chain[i - 1].next = unsafe { base.add(i) };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the chain, its SGE arrays and the inline bytes live until after the call; registered memory
        // is kept by its MR, wrong keys are the device's to refuse.
        let errno = unsafe { sys::ibv_post_send(self.raw(), base, &mut bad) };
        refused(errno, bad, base, size_of::<sys::ibv_send_wr>(), wrs.len())
    }

    /// The same requests by the extended interface (`ibv_wr_start` ... `ibv_wr_complete`). The QP must have
    /// been made with [`crate::QpOptions::extended`].
    pub fn post_send_extended(&self, wrs: &[SendWr]) -> Result<(), BadWr> {
        let sges = raw_sges(wrs);
        // SAFETY: the QP was made with ibv_create_qp_ex and send_ops_flags (asserted), so the ex pointer is
        // valid and every builder called here was asked for; SGE arrays and inline bytes live until after
        // ibv_wr_complete.
        let errno = unsafe {
            let ex = sys::ibv_qp_to_qp_ex(self.raw());
            assert!(!ex.is_null() && self.is_extended(), "QP without the extended post interface");
            sys::ibv_wr_start(ex);
            for (wr, sges) in wrs.iter().zip(&sges) {
                (*ex).wr_id = wr.wr_id;
                (*ex).wr_flags = wr.flags;
                match wr.opcode {
                    Opcode::Send => sys::ibv_wr_send(ex),
                    Opcode::SendImm(imm) => sys::ibv_wr_send_imm(ex, imm.to_be()),
                    Opcode::Write => sys::ibv_wr_rdma_write(ex, wr.rkey, wr.remote),
                    Opcode::WriteImm(imm) => sys::ibv_wr_rdma_write_imm(ex, wr.rkey, wr.remote, imm.to_be()),
                    Opcode::Read => sys::ibv_wr_rdma_read(ex, wr.rkey, wr.remote),
                    Opcode::CompareSwap(compare, swap) => {
                        sys::ibv_wr_atomic_cmp_swp(ex, wr.rkey, wr.remote, compare, swap);
                    }
                    Opcode::FetchAdd(add) => sys::ibv_wr_atomic_fetch_add(ex, wr.rkey, wr.remote, add),
                    Opcode::Raw(value) => unreachable!("opcode {value} has no builder"),
                }
                if let Some(to) = &wr.to {
                    sys::ibv_wr_set_ud_addr(ex, to.ah.raw(), to.qpn, to.qkey);
                }
                match (&wr.inline, &sges[..]) {
                    (Some(_), [one]) => {
                        sys::ibv_wr_set_inline_data(ex, one.addr as *mut _, one.length as usize);
                    }
                    (Some(_), many) => {
                        let list: Vec<_> = many
                            .iter()
                            .map(|s| sys::ibv_data_buf { addr: s.addr as *mut _, length: s.length as usize })
                            .collect();
                        sys::ibv_wr_set_inline_data_list(ex, list.len(), list.as_ptr());
                    }
                    (None, [one]) => sys::ibv_wr_set_sge(ex, one.lkey, one.addr, one.length),
                    (None, many) => sys::ibv_wr_set_sge_list(ex, many.len(), many.as_ptr()),
                }
            }
            sys::ibv_wr_complete(ex)
        };
        if errno == 0 { Ok(()) } else { Err(BadWr { errno, index: None }) }
    }

    /// `ibv_post_recv` of the whole chain.
    pub fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), BadWr> {
        post_recv(wrs, |chain, bad| {
            // SAFETY: the chain and its SGE arrays live until after the call.
            unsafe { sys::ibv_post_recv(self.raw(), chain, bad) }
        })
    }
}

impl Srq {
    /// `ibv_post_srq_recv` of the whole chain.
    pub fn post_recv(&self, wrs: &[RecvWr]) -> Result<(), BadWr> {
        post_recv(wrs, |chain, bad| {
            // SAFETY: the chain and its SGE arrays live until after the call.
            unsafe { sys::ibv_post_srq_recv(self.raw(), chain, bad) }
        })
    }
}

fn post_recv(
    wrs: &[RecvWr],
    post: impl FnOnce(*mut sys::ibv_recv_wr, *mut *mut sys::ibv_recv_wr) -> i32,
) -> Result<(), BadWr> {
    let mut sges: Vec<Vec<_>> = wrs.iter().map(|wr| wr.sges.iter().map(Sge::raw).collect()).collect();
    let mut chain: Vec<sys::ibv_recv_wr> = wrs
        .iter()
        .zip(&mut sges)
        .map(|(wr, sges)| sys::ibv_recv_wr {
            wr_id: wr.wr_id,
            next: ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as i32,
        })
        .collect();
    let base = chain.as_mut_ptr();
    for i in 1..chain.len() {
        // SAFETY: `i` is inside the chain, which is not resized any more.
        chain[i - 1].next = unsafe { base.add(i) };
    }
    let mut bad = ptr::null_mut();
    let errno = post(base, &mut bad);
    refused(errno, bad, base, size_of::<sys::ibv_recv_wr>(), wrs.len())
}

/// Turns a post's return value and `bad_wr` into an index of the chain.
fn refused<T>(errno: i32, bad: *mut T, base: *mut T, size: usize, count: usize) -> Result<(), BadWr> {
    if errno == 0 {
        return Ok(());
    }
    let index = (bad as usize).checked_sub(base as usize).map(|d| d / size).filter(|i| *i < count);
    Err(BadWr { errno, index: if bad.is_null() { None } else { index } })
}
