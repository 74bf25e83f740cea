//! Where the core's completions and events go: the producing ends of all CQs and the notifiers of QPs and SRQs.
//! Part of what the engine's lock guards.

use std::sync::Arc;

use metaroce_proto::{Completion, CqId, Event, Nanos, Qpn, Sink, SrqId};

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
    /// Events to be told after the completions that came before them.
    events: Vec<Event>,
    /// CQs that lost an entry and have not been reported.
    overruns: Vec<CqId>,
    /// CQs whose notification is held back.
    moderated: Vec<CqId>,
    /// Time of the step.
    pub(crate) now: Nanos,
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
    /// Entries not published yet.
    fresh: u32,
    /// The notification held back is due then.
    held_until: Option<Nanos>,
    overrun: bool,
}

impl Sink for Outbox {
    fn complete(&mut self, cq: CqId, completion: &Completion) {
        let Some(slot) = self.cqs.get_mut(cq as usize).and_then(Option::as_mut) else { return };
        if !slot.producer.push(completion, self.now) {
            slot.shared.count_overrun();
            if !std::mem::replace(&mut slot.overrun, true) {
                self.overruns.push(cq);
            }
            return;
        }
        slot.fresh += 1;
        slot.solicited |= completion.solicited;
        if !slot.dirty {
            slot.dirty = true;
            self.dirty.push(cq);
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::State(qpn, state) => {
                if let Some(qp) = self.qp(qpn.index()) {
                    qp.set_state(state);
                }
            }
            // Whoever hears of the last receive of a QP looks for its completion.
            _ => self.events.push(event),
        }
    }
}

impl Outbox {
    /// Shows the entries written since the last call to the pollers, wakes who asked to be told, and tells of events.
    /// Gives whether there were any entries.
    pub(crate) fn publish(&mut self, engine: &Engine) -> bool {
        let any = !self.dirty.is_empty();
        if any {
            self.publish_entries(engine);
        }
        if !self.moderated.is_empty() {
            self.fire_held(engine);
        }
        if !self.events.is_empty() {
            self.tell_events();
        }
        any
    }

    fn publish_entries(&mut self, engine: &Engine) {
        for &cq in &self.dirty {
            if let Some(slot) = self.cqs[cq as usize].as_mut() {
                slot.producer.publish();
            }
        }
        Armed::published();
        for cq in self.dirty.drain(..) {
            if let Some(slot) = self.cqs[cq as usize].as_mut() {
                slot.dirty = false;
                let fresh = std::mem::take(&mut slot.fresh);
                let held = slot.shared.fire(std::mem::take(&mut slot.solicited), fresh, engine);
                match held {
                    Some(period) if slot.held_until.is_none() => {
                        slot.held_until = Some(self.now + period);
                        self.moderated.push(cq);
                    }
                    Some(_) => {}
                    None => slot.held_until = None,
                }
            }
        }
    }

    /// Sends the notifications that were held back for as long as they may be.
    fn fire_held(&mut self, engine: &Engine) {
        let (cqs, now) = (&mut self.cqs, self.now);
        self.moderated.retain(|&cq| {
            let Some(slot) = cqs.get_mut(cq as usize).and_then(Option::as_mut) else { return false };
            match slot.held_until {
                Some(at) if at > now => true,
                Some(_) => {
                    slot.held_until = None;
                    slot.shared.fire_held(engine);
                    false
                }
                None => false,
            }
        });
    }

    /// When the next notification held back is due.
    pub(crate) fn next_held(&self) -> Option<Nanos> {
        let due = |cq: &CqId| self.cqs.get(*cq as usize)?.as_ref()?.held_until;
        self.moderated.iter().filter_map(due).min()
    }

    fn tell_events(&mut self) {
        let mut events = std::mem::take(&mut self.events);
        for event in events.drain(..) {
            match event {
                Event::SrqLimit(srq) => {
                    if let Some(srq) = self.srq(srq) {
                        srq.notify(event);
                    }
                }
                Event::QpFatal(qpn)
                | Event::QpReqErr(qpn)
                | Event::QpAccessErr(qpn)
                | Event::LastWqeReached(qpn)
                | Event::CommEst(qpn)
                | Event::SqDrained(qpn)
                | Event::State(qpn, _) => self.notify_qp(qpn, event),
            }
        }
        self.events = events;
    }

    /// The CQ that lost an entry at this place of the list of those not reported.
    pub(crate) fn overrun(&self, at: usize) -> Option<CqId> {
        self.overruns.get(at).copied()
    }

    /// Reports the CQs that lost entries; after the fate of their QPs is published.
    pub(crate) fn report_overruns(&mut self) {
        for cq in self.overruns.drain(..) {
            if let Some(slot) = self.cqs.get(cq as usize).and_then(Option::as_ref) {
                slot.shared.notify_error();
            }
        }
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
        self.cqs[free] = Some(CqSlot {
            shared: shared.clone(),
            producer,
            dirty: false,
            solicited: false,
            fresh: 0,
            held_until: None,
            overrun: false,
        });
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
