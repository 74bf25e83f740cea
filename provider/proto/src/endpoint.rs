//! The endpoint: all connections, queue pairs and memory regions of one process.

use crate::burst::TxBurst;
use crate::config::Config;
use crate::memory::Memory;
use crate::stats::{EndpointStats, PathStats};
use crate::types::*;

/// All protocol state of one process (one slot). Owned by the driver behind one lock.
///
/// Contract: inputs are the `post_*`, `on_datagram`, `on_timeout` and control calls; outputs are bursts, completions
/// into the [`Sink`] and `next_timeout`. After any input: call [`Endpoint::poll_burst`] until it gives `false`, then
/// [`Endpoint::next_timeout`]. One `now` per batch of inputs; it never decreases. A step that ran late feeds its
/// received datagrams before it calls `on_timeout`.
#[derive(Debug)]
pub struct Endpoint {
    config: Config,
}

impl Endpoint {
    /// A fresh endpoint.
    pub fn new(config: Config) -> Self {
        Endpoint { config }
    }
    /// Registers `len` bytes at `va`, reachable as `iova..iova + len`; gives the key (lkey == rkey), unpredictable
    /// and not soon reused.
    pub fn register_mr(
        &mut self,
        pd: u32,
        va: u64,
        iova: u64,
        len: u64,
        access: u32,
    ) -> Result<u32, Refused> {
        let _ = (pd, va, iova, len, access);
        Err(Refused::Unsupported)
    }
    /// Kills a key; when it returns no byte passes any more.
    pub fn deregister_mr(&mut self, key: u32) -> Result<(), Refused> {
        let _ = key;
        Err(Refused::NotFound)
    }
    /// Makes a shared receive queue.
    pub fn create_srq(&mut self, pd: u32, max_wr: u32, max_sge: u32) -> Result<SrqId, Refused> {
        let _ = (pd, max_wr, max_sge);
        Err(Refused::Unsupported)
    }
    /// Changes depth and limit (0 disarms) of an SRQ.
    pub fn modify_srq(&mut self, srq: SrqId, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), Refused> {
        let _ = (srq, max_wr, limit);
        Err(Refused::Unsupported)
    }
    /// The armed limit of an SRQ (0: none).
    pub fn srq_limit(&self, srq: SrqId) -> Result<u32, Refused> {
        let _ = srq;
        Err(Refused::Unsupported)
    }
    /// Destroys an SRQ that no QP uses (else Busy).
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), Refused> {
        let _ = srq;
        Err(Refused::Unsupported)
    }
    /// Makes a QP in RESET.
    pub fn create_qp(&mut self, init: &QpInit) -> Result<Qpn, Refused> {
        let _ = (init, &self.config);
        Err(Refused::Unsupported)
    }
    /// Changes attributes and state. Flushes go to `sink`.
    pub fn modify_qp(
        &mut self,
        now: Nanos,
        qpn: Qpn,
        change: &QpModify,
        sink: &mut impl Sink,
    ) -> Result<(), Refused> {
        let _ = (now, qpn, change, sink);
        Err(Refused::Unsupported)
    }
    /// Current state (the core moves a QP to ERR, SQE or from SQD-draining by itself).
    pub fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        let _ = qpn;
        None
    }
    /// Destroys a QP; nothing of it completes afterwards. Owed acknowledgements leave with the next bursts.
    pub fn destroy_qp(&mut self, now: Nanos, qpn: Qpn) -> Result<(), Refused> {
        let _ = (now, qpn);
        Err(Refused::NotFound)
    }
    /// Takes posted sends over; the batch is emptied. The caller guarantees the queue's depth.
    pub fn post_sends(&mut self, now: Nanos, qpn: Qpn, batch: &mut SendBatch, sink: &mut impl Sink) {
        let _ = (now, qpn, batch, sink);
    }
    /// Takes posted receives over; the batch is emptied.
    pub fn post_recvs(&mut self, now: Nanos, qpn: Qpn, batch: &mut RecvBatch, sink: &mut impl Sink) {
        let _ = (now, qpn, batch, sink);
    }
    /// Takes receives posted to an SRQ over; the batch is emptied.
    pub fn post_srq_recvs(&mut self, now: Nanos, srq: SrqId, batch: &mut RecvBatch, sink: &mut impl Sink) {
        let _ = (now, srq, batch, sink);
    }
    /// A received datagram.
    pub fn on_datagram(
        &mut self,
        now: Nanos,
        meta: &RxMeta,
        bytes: &[u8],
        mem: &mut impl Memory,
        sink: &mut impl Sink,
    ) {
        let _ = (now, meta, bytes, mem, sink);
    }
    /// Runs what is due. Call it when `next_timeout` has passed, after the received datagrams.
    pub fn on_timeout(&mut self, now: Nanos, mem: &mut impl Memory, sink: &mut impl Sink) {
        let _ = (now, mem, sink);
    }
    /// When `on_timeout` wants to be called next.
    pub fn next_timeout(&self) -> Option<Nanos> {
        None
    }
    /// Fills `burst` with packets for one path; `false` if there is nothing to send now. Local errors found while
    /// gathering (bad lkey) complete into `sink`.
    pub fn poll_burst(&mut self, now: Nanos, burst: &mut TxBurst, sink: &mut impl Sink) -> bool {
        let _ = (now, burst, sink);
        false
    }
    /// The driver could not send packets `from..` of the burst just polled (EAGAIN): they burn no numbers and come
    /// again. Call it before the next `poll_burst`.
    pub fn unsend(&mut self, burst: &TxBurst, from: usize) {
        let _ = (burst, from);
    }
    /// The driver got EFAULT for the burst just polled: nothing was sent. Packets come again one by one; the WQE of
    /// a single faulting packet ends with LOC_PROT_ERR.
    pub fn fault(&mut self, now: Nanos, burst: &TxBurst, sink: &mut impl Sink) {
        let _ = (now, burst, sink);
    }
    /// Begins an orderly end: CLOSE with the final acknowledgement state to every peer.
    pub fn close(&mut self, now: Nanos) {
        let _ = now;
    }
    /// Every peer has confirmed the CLOSE (or there is none).
    pub fn closed(&self) -> bool {
        true
    }
    /// Acknowledgements wait for a packet to ride on; `poll_burst` after this sends them at once.
    pub fn flush_acks(&mut self) {}
    /// Counters of the endpoint.
    pub fn stats(&self) -> EndpointStats {
        EndpointStats::default()
    }
    /// Counters per path slot (plane-major: plane * paths_per_plane + path).
    pub fn path_stats(&self, out: &mut Vec<PathStats>) {
        out.clear();
    }
}
