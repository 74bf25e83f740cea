//! Completion queues and channels.

use std::ffi::CStr;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use crate::context::readable;
use crate::{Context, check, last_error, sys};

/// CQEs taken by one poll at most.
const BATCH: usize = 32;

/// A work completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wc {
    /// The WR's cookie.
    pub wr_id: u64,
    /// `IBV_WC_*` status.
    pub status: u32,
    /// `IBV_WC_*` opcode; meaningless unless the status is success.
    pub opcode: u32,
    /// Bytes received or read.
    pub byte_len: u32,
    /// Immediate in host order of the value that was posted, when the flags say so.
    pub imm: Option<u32>,
    /// Local QP.
    pub qpn: u32,
    /// Sender's QP (datagrams).
    pub src_qpn: u32,
    /// The first 40 bytes of the receive are a GRH.
    pub grh: bool,
}

/// Name of an `IBV_WC_*` status.
pub fn status_name(status: u32) -> String {
    // SAFETY: ibv_wc_status_str returns a static C string for every value.
    unsafe { CStr::from_ptr(sys::ibv_wc_status_str(status)) }.to_string_lossy().into_owned()
}

/// Name of an `IBV_WC_*` opcode.
pub fn opcode_name(opcode: u32) -> &'static str {
    match opcode {
        sys::IBV_WC_SEND => "SEND",
        sys::IBV_WC_RDMA_WRITE => "RDMA_WRITE",
        sys::IBV_WC_RDMA_READ => "RDMA_READ",
        sys::IBV_WC_COMP_SWAP => "COMP_SWAP",
        sys::IBV_WC_FETCH_ADD => "FETCH_ADD",
        sys::IBV_WC_RECV => "RECV",
        sys::IBV_WC_RECV_RDMA_WITH_IMM => "RECV_RDMA_WITH_IMM",
        _ => "?",
    }
}

/// A completion channel.
#[derive(Debug)]
pub struct Channel {
    raw: NonNull<sys::ibv_comp_channel>,
    context: Arc<Context>,
}

// SAFETY: verbs objects may be used from any thread.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Channel {
    /// Makes one.
    pub fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open and kept so by the Arc.
        let raw = unsafe { sys::ibv_create_comp_channel(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("ibv_create_comp_channel"))?;
        Ok(Arc::new(Self { raw, context: context.clone() }))
    }

    /// Waits at most `limit` for a completion event, takes and acknowledges it; true when there was one.
    pub fn event(&self, limit: Duration) -> io::Result<bool> {
        // SAFETY: the channel is alive, so its fd is valid and its CQs are too (they hold an Arc of the
        // channel).
        unsafe {
            if !readable(self.raw.as_ref().fd, limit)? {
                return Ok(false);
            }
            let (mut cq, mut cookie) = (ptr::null_mut(), ptr::null_mut());
            check("ibv_get_cq_event", sys::ibv_get_cq_event(self.raw.as_ptr(), &mut cq, &mut cookie))?;
            sys::ibv_ack_cq_events(cq, 1);
        }
        Ok(true)
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        let _context = &self.context;
        // SAFETY: CQs hold an Arc of their channel, so none is left; the context outlives this call.
        unsafe { sys::ibv_destroy_comp_channel(self.raw.as_ptr()) };
    }
}

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    raw: NonNull<sys::ibv_cq>,
    channel: Option<Arc<Channel>>,
    _context: Arc<Context>,
}

// SAFETY: verbs objects may be used from any thread.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl Cq {
    /// Makes one with room for at least `entries`.
    pub fn new(
        context: &Arc<Context>,
        entries: i32,
        channel: Option<&Arc<Channel>>,
    ) -> io::Result<Arc<Self>> {
        let raw_channel = channel.map_or(ptr::null_mut(), |c| c.raw.as_ptr());
        // SAFETY: context and channel are alive and kept so by the Arcs stored below.
        let raw = unsafe { sys::ibv_create_cq(context.raw(), entries, ptr::null_mut(), raw_channel, 0) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("ibv_create_cq"))?;
        Ok(Arc::new(Self { raw, channel: channel.cloned(), _context: context.clone() }))
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_cq {
        self.raw.as_ptr()
    }

    /// How an [`crate::AsyncEvent`] names it.
    pub fn element(&self) -> crate::Element {
        crate::Element::Cq(self.raw() as usize)
    }

    /// Entries it has room for.
    pub fn capacity(&self) -> i32 {
        // SAFETY: the CQ is alive.
        unsafe { self.raw.as_ref() }.cqe
    }

    /// Appends what has completed (at most one batch) to `into`; returns how many.
    pub fn poll(&self, into: &mut Vec<Wc>) -> io::Result<usize> {
        self.poll_at_most(BATCH, into)
    }

    /// The same, and no more than `most`: what is left stays in the CQ.
    pub fn poll_at_most(&self, most: usize, into: &mut Vec<Wc>) -> io::Result<usize> {
        // SAFETY: all-zero is a valid ibv_wc array; ibv_poll_cq fills at most BATCH entries and returns how
        // many.
        let (count, raw) = unsafe {
            let mut raw: [sys::ibv_wc; BATCH] = std::mem::zeroed();
            (sys::ibv_poll_cq(self.raw(), most.min(BATCH) as i32, raw.as_mut_ptr()), raw)
        };
        let count =
            usize::try_from(count).map_err(|_| io::Error::other(format!("ibv_poll_cq returned {count}")))?;
        into.extend(raw[..count].iter().map(|wc| {
            // SAFETY: imm_data and invalidated_rkey are both u32: any bits are valid.
            let imm = unsafe { wc.__bindgen_anon_1.imm_data };
            Wc {
                wr_id: wc.wr_id,
                status: wc.status,
                opcode: wc.opcode,
                byte_len: wc.byte_len,
                imm: (wc.wc_flags & sys::IBV_WC_WITH_IMM != 0).then(|| u32::from_be(imm)),
                qpn: wc.qp_num,
                src_qpn: wc.src_qp,
                grh: wc.wc_flags & sys::IBV_WC_GRH != 0,
            }
        }));
        Ok(count)
    }

    /// Asks for one event on the next completion (or the next solicited one).
    pub fn arm(&self, solicited_only: bool) -> io::Result<()> {
        // SAFETY: the CQ is alive.
        check("ibv_req_notify_cq", unsafe { sys::ibv_req_notify_cq(self.raw(), i32::from(solicited_only)) })
    }

    /// Changes its capacity.
    pub fn resize(&self, entries: i32) -> io::Result<()> {
        // SAFETY: the CQ is alive.
        check("ibv_resize_cq", unsafe { sys::ibv_resize_cq(self.raw(), entries) })
    }

    /// Calls `ibv_destroy_cq` although QPs may still use it: only an error is a right answer then.
    pub fn try_destroy_in_use(&self) -> io::Result<()> {
        // SAFETY: the device must refuse; a device that frees a CQ in use fails the test that calls this.
        check("ibv_destroy_cq", unsafe { sys::ibv_destroy_cq(self.raw()) })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        let _channel = &self.channel;
        // SAFETY: QPs hold Arcs of their CQs, so none is left; every event was acknowledged in
        // `Channel::event`.
        unsafe { sys::ibv_destroy_cq(self.raw()) };
    }
}
