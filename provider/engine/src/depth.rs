//! Queue depths: how many slots of each queue polled completions have given back. Posters compare with what they
//! posted; pollers find the counter by the QP's index, without hash, lock or reference count.

use std::sync::atomic::{AtomicU32, Ordering};

use metaroce_proto::{Completion, Qpn, SrqId};

use crate::limits::{QPS_MAX, SRQS_MAX};

/// The counters of all queues of a device. They wrap; only differences mean something.
#[derive(Debug)]
pub(crate) struct Depths {
    qps: Box<[QpDepth]>,
    srqs: Box<[AtomicU32]>,
}

#[derive(Debug, Default)]
struct QpDepth {
    send: AtomicU32,
    recv: AtomicU32,
    /// Number of the SRQ its receives come from, plus one; 0 without one.
    srq: AtomicU32,
}

impl Depths {
    pub(crate) fn new() -> Self {
        Depths {
            qps: (0..QPS_MAX).map(|_| QpDepth::default()).collect(),
            srqs: (0..SRQS_MAX).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// A completion was polled: gives back what it held.
    pub(crate) fn release(&self, completion: &Completion) {
        let qp = &self.qps[completion.qpn.index()];
        if completion.sq_release > 0 {
            qp.send.fetch_add(completion.sq_release, Ordering::Release);
        }
        if let Some(srq) = completion.srq {
            self.srqs[srq as usize].fetch_add(completion.rq_release, Ordering::Release);
        } else if completion.rq_release > 0 {
            self.release_recv(completion.qpn, completion.rq_release);
        }
    }

    /// Gives back slots of the queue from which the QP's receives come.
    pub(crate) fn release_recv(&self, qpn: Qpn, count: u32) {
        let qp = &self.qps[qpn.index()];
        let counter = match qp.srq.load(Ordering::Relaxed) {
            0 => &qp.recv,
            srq => &self.srqs[srq as usize - 1],
        };
        counter.fetch_add(count, Ordering::Release);
    }

    /// Slots of the send queue given back so far.
    pub(crate) fn sends_released(&self, qpn: Qpn) -> u32 {
        self.qps[qpn.index()].send.load(Ordering::Acquire)
    }
    /// Slots of the QP's own receive queue given back so far.
    pub(crate) fn recvs_released(&self, qpn: Qpn) -> u32 {
        self.qps[qpn.index()].recv.load(Ordering::Acquire)
    }
    /// Slots of the SRQ given back so far.
    pub(crate) fn srq_released(&self, srq: SrqId) -> u32 {
        self.srqs[srq as usize].load(Ordering::Acquire)
    }

    /// Says from which queue a new QP's receives come.
    pub(crate) fn attach(&self, qpn: Qpn, srq: Option<SrqId>) {
        self.qps[qpn.index()].srq.store(srq.map_or(0, |id| id + 1), Ordering::Relaxed);
    }
}
