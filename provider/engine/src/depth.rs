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

/// What completions in a row give back to one QP's queues and one SRQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Returns {
    qpn: Qpn,
    srq: Option<SrqId>,
    sends: u32,
    recvs: u32,
}

impl Returns {
    /// What one completion gives back.
    pub(crate) fn of(completion: &Completion) -> Returns {
        Returns {
            qpn: completion.qpn,
            srq: completion.srq,
            sends: completion.sq_release,
            recvs: completion.rq_release,
        }
    }
    /// Adds a completion's; `false`, and nothing added, if it gives to other queues.
    pub(crate) fn add(&mut self, completion: &Completion) -> bool {
        let more = Returns::of(completion);
        if self.sends | self.recvs == 0 {
            *self = more;
            return true;
        }
        let same = (self.qpn, self.srq) == (more.qpn, more.srq);
        if same {
            self.sends = self.sends.wrapping_add(more.sends);
            self.recvs += more.recvs;
        }
        same
    }
}

impl Depths {
    pub(crate) fn new() -> Self {
        Depths {
            qps: (0..QPS_MAX).map(|_| QpDepth::default()).collect(),
            srqs: (0..SRQS_MAX).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Completions were polled, and their places in the CQ given back: gives back what they held. In this order, or a
    /// CQ exactly as deep as the queues on it could overflow.
    pub(crate) fn release(&self, returns: Returns) {
        let Returns { qpn, srq, sends, recvs } = returns;
        if sends > 0 {
            self.qps[qpn.index()].send.fetch_add(sends, Ordering::Release);
        }
        match srq {
            _ if recvs == 0 => {}
            Some(srq) => {
                self.srqs[srq as usize].fetch_add(recvs, Ordering::Release);
            }
            None => self.release_recv(qpn, recvs),
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
