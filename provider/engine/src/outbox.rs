//! Where the core's completions and events go: the producing ends of all CQs and the notifiers of QPs and SRQs.
//! Part of what the engine's lock guards.

use std::sync::Arc;

use metaroce_proto::{Completion, CqId, Event, Qpn, Sink, SrqId};

use crate::arm::Armed;
use crate::cq::CqShared;
use crate::drive::Engine;
use crate::qp::QpShared;
use crate::ring::Producer;
use crate::srq::SrqShared;

/// All objects that hear of something, by number.
#[derive(Default)]
pub(crate) struct Outbox {
    cqs: Vec<Option<CqSlot>>,
    qps: Vec<Option<Arc<QpShared>>>,
    srqs: Vec<Option<Arc<SrqShared>>>,
    /// CQs with entries not published yet.
    dirty: Vec<CqId>,
    /// QPs alive.
    qp_count: u64,
}

/// The producing end of one CQ.
pub(crate) struct CqSlot {
    pub(crate) shared: Arc<CqShared>,
    pub(crate) producer: Producer,
    dirty: bool,
    /// One of the unpublished entries counts for solicited-only arming.
    solicited: bool,
    overrun: bool,
}

impl Sink for Outbox {
    fn complete(&mut self, cq: CqId, completion: &Completion) {
        let Some(slot) = self.cqs.get_mut(cq as usize).and_then(Option::as_mut) else { return };
        if !slot.producer.push(completion) {
            slot.overrun();
            return;
        }
        slot.solicited |= completion.solicited;
        if !slot.dirty {
            slot.dirty = true;
            self.dirty.push(cq);
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::SrqLimit(srq) => {
                if let Some(srq) = self.srqs.get(srq as usize).and_then(Option::as_ref) {
                    srq.notify(event);
                }
            }
            Event::State(qpn, state) => {
                if let Some(qp) = self.qp(qpn.index()) {
                    qp.set_state(state);
                }
            }
            Event::QpFatal(qpn)
            | Event::QpReqErr(qpn)
            | Event::QpAccessErr(qpn)
            | Event::LastWqeReached(qpn)
            | Event::CommEst(qpn)
            | Event::SqDrained(qpn) => self.notify_qp(qpn, event),
        }
    }
}

impl CqSlot {
    /// An entry found no room. The verbs event is raised once; further entries are dropped and counted.
    fn overrun(&mut self) {
        self.shared.count_overrun();
        if !std::mem::replace(&mut self.overrun, true) {
            self.shared.notify_error();
        }
    }
}

impl Outbox {
    /// Shows the entries written since the last call to the pollers and wakes who asked to be told. Gives whether
    /// there were any.
    pub(crate) fn publish(&mut self, engine: &Engine) -> bool {
        if self.dirty.is_empty() {
            return false;
        }
        for &cq in &self.dirty {
            if let Some(slot) = self.cqs[cq as usize].as_mut() {
                slot.producer.publish();
            }
        }
        Armed::published();
        for cq in self.dirty.drain(..) {
            if let Some(slot) = self.cqs[cq as usize].as_mut() {
                slot.dirty = false;
                slot.shared.fire(std::mem::take(&mut slot.solicited), engine);
            }
        }
        true
    }

    /// Takes a CQ in; `make` gets its number.
    pub(crate) fn add_cq(
        &mut self,
        producer: Producer,
        make: impl FnOnce(CqId) -> CqShared,
    ) -> Arc<CqShared> {
        let free = self.cqs.iter().position(Option::is_none).unwrap_or(self.cqs.len());
        if free == self.cqs.len() {
            self.cqs.push(None);
        }
        let shared = Arc::new(make(free as CqId));
        self.cqs[free] =
            Some(CqSlot { shared: shared.clone(), producer, dirty: false, solicited: false, overrun: false });
        shared
    }
    /// The producing end of a CQ.
    pub(crate) fn cq(&mut self, cq: CqId) -> Option<&mut CqSlot> {
        self.cqs.get_mut(cq as usize)?.as_mut()
    }
    /// Forgets a CQ.
    pub(crate) fn remove_cq(&mut self, cq: CqId) {
        if let Some(slot) = self.cqs.get_mut(cq as usize) {
            *slot = None;
        }
    }

    /// Takes a QP in.
    pub(crate) fn add_qp(&mut self, qp: Arc<QpShared>) {
        let index = qp.qpn().index();
        put(&mut self.qps, index, qp);
        self.qp_count += 1;
    }
    /// The QP with this index.
    pub(crate) fn qp(&self, index: usize) -> Option<&Arc<QpShared>> {
        self.qps.get(index)?.as_ref()
    }
    /// Forgets a QP.
    pub(crate) fn remove_qp(&mut self, qpn: Qpn) {
        if self.qps.get_mut(qpn.index()).and_then(Option::take).is_some() {
            self.qp_count -= 1;
        }
    }
    /// QPs alive.
    pub(crate) fn qp_count(&self) -> u64 {
        self.qp_count
    }

    /// Takes an SRQ in.
    pub(crate) fn add_srq(&mut self, srq: Arc<SrqShared>) {
        let index = srq.id() as usize;
        put(&mut self.srqs, index, srq);
    }
    /// The SRQ with this number.
    pub(crate) fn srq(&self, id: SrqId) -> Option<&Arc<SrqShared>> {
        self.srqs.get(id as usize)?.as_ref()
    }
    /// Forgets an SRQ.
    pub(crate) fn remove_srq(&mut self, id: SrqId) {
        if let Some(slot) = self.srqs.get_mut(id as usize) {
            *slot = None;
        }
    }

    fn notify_qp(&self, qpn: Qpn, event: Event) {
        if let Some(qp) = self.qp(qpn.index()) {
            qp.notify(event);
        }
    }
}

fn put<T>(table: &mut Vec<Option<T>>, index: usize, value: T) {
    if table.len() <= index {
        table.resize_with(index + 1, || None);
    }
    table[index] = Some(value);
}
