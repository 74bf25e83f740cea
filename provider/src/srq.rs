//! Shared receive queues, basic ones and those of XRC domains.

use std::sync::Arc;

use metaroce_engine as engine;
use metaroce_proto::types::{Event, TagOp};
use parking_lot::Mutex;
use rdma_core_sys::private::verbs_srq;
use rdma_core_sys::*;

use crate::channel::Source;
use crate::cq::Cq;
use crate::ffi::{CPart, Object, Result, next_handle};
use crate::limits::{MAX_SRQ_SGE, MAX_SRQ_WR};
use crate::pd::{Pd, PdShared};
use crate::xrcd::{Domain, Xrcd};

/// A shared receive queue.
#[repr(C)]
pub(crate) struct Srq {
    pub(crate) c: CPart<verbs_srq>,
    pub(crate) engine: Arc<engine::Srq>,
    /// SGEs per request, as granted.
    max_sge: u32,
    max_wr: Mutex<u32>,
    events: Arc<Source<16>>,
    pd: Arc<PdShared>,
    xrcd: Option<Arc<Domain>>,
    tags: bool,
}

/// What an SRQ is besides a queue, and where its receives complete.
pub(crate) enum Extended<'a> {
    /// It serves the XRC connections of a domain.
    Xrc(&'a Xrcd, &'a Cq),
    /// It matches tags against at most so many expected messages.
    Tags(u32, &'a Cq),
}

// SAFETY: repr(C), the C part is first and begins with an ibv_srq.
unsafe impl Object for Srq {
    type C = ibv_srq;
}

impl Srq {
    /// EINVAL beyond the device's limits. `attr` becomes what was granted. libibverbs fills the rest of the C part.
    pub(crate) fn create(
        pd: &Pd,
        attr: &mut ibv_srq_attr,
        extended: Option<&Extended<'_>>,
    ) -> Result<Box<Self>> {
        if !(1..=MAX_SRQ_WR).contains(&attr.max_wr) || attr.max_sge > MAX_SRQ_SGE {
            return Err(libc::EINVAL);
        }
        let pd = Arc::clone(&pd.shared);
        let max_sge = attr.max_sge.max(1);
        let events = Source::new(Arc::clone(&pd.context.events));
        let notify: Option<Box<dyn engine::QpNotify>> = Some(Box::new(Notifier(Arc::clone(&events))));
        let device = &pd.context.device;
        let sizes = (attr.max_wr, max_sge);
        let (engine, srq_type, xrcd) = match extended {
            None => (device.create_srq(pd.number, sizes.0, sizes.1, notify)?, IBV_SRQT_BASIC, None),
            Some(Extended::Xrc(xrcd, cq)) => {
                let domain = Arc::clone(&xrcd.domain);
                let srq = device.create_xrc_srq(pd.number, sizes, domain.number, &cq.engine, notify)?;
                (srq, IBV_SRQT_XRC, Some(domain))
            }
            Some(Extended::Tags(tags, cq)) => {
                (device.create_tag_srq(pd.number, sizes, *tags, &cq.engine, notify)?, IBV_SRQT_TM, None)
            }
        };
        attr.max_sge = max_sge;
        let c = CPart::new(|srq: &mut verbs_srq| {
            srq.srq.handle = next_handle();
            srq.srq_type = srq_type;
            srq.srq_num = engine.id();
        });
        let (max_wr, tags) = (Mutex::new(attr.max_wr), srq_type == IBV_SRQT_TM);
        let srq = Box::new(Self { c, engine, max_sge, max_wr, events, pd, xrcd, tags });
        srq.events.set_element(srq.c.as_ptr());
        Ok(srq)
    }

    /// Fills what libibverbs leaves to the driver in an SRQ of `ibv_create_srq_ex`.
    pub(crate) fn complete(self: Box<Self>, fill: impl FnOnce(&mut verbs_srq)) -> Box<Self> {
        self.c.init_sync();
        self.c.fill(fill);
        self
    }

    /// Its number for XRC messages; EINVAL for an SRQ that is in no domain.
    pub(crate) fn number(&self) -> Result<u32> {
        if self.xrcd.is_some() { Ok(self.engine.id()) } else { Err(libc::EINVAL) }
    }

    /// EIO in the child of a fork.
    pub(crate) fn alive(&self) -> Result<()> {
        self.pd.context.alive()
    }

    /// It matches tags, which only reliable connections do.
    pub(crate) fn has_tags(&self) -> bool {
        self.tags
    }

    /// One change of the expected messages; gives the number of one that is added. EINVAL if the SRQ matches no tags,
    /// ENOMEM when its list is full.
    pub(crate) fn tag_op(&self, op: &TagOp) -> Result<u32> {
        if self.tags { self.engine.post_tag_op(op) } else { Err(libc::EINVAL) }
    }

    /// Changes depth and limit; EINVAL for unknown bits, a depth out of range or a limit beyond the depth.
    pub(crate) fn modify(&self, attr: &ibv_srq_attr, mask: u32) -> Result<()> {
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(libc::EINVAL);
        }
        self.alive()?;
        let mut max_wr = self.max_wr.lock();
        let depth = (mask & IBV_SRQ_MAX_WR != 0).then_some(attr.max_wr);
        let limit = (mask & IBV_SRQ_LIMIT != 0).then_some(attr.srq_limit);
        let new_depth = depth.unwrap_or(*max_wr);
        // A depth below an armed limit would leave a limit that can never be crossed again.
        let armed = limit.unwrap_or_else(|| self.engine.limit());
        if !(1..=MAX_SRQ_WR).contains(&new_depth) || armed > new_depth {
            return Err(libc::EINVAL);
        }
        self.engine.modify(depth, limit)?;
        *max_wr = new_depth;
        Ok(())
    }

    /// The attributes.
    pub(crate) fn query(&self) -> ibv_srq_attr {
        ibv_srq_attr { max_wr: *self.max_wr.lock(), max_sge: self.max_sge, srq_limit: self.engine.limit() }
    }

    /// EBUSY while QPs use it; waits for the acknowledgement of delivered events. Then the object may be dropped.
    pub(crate) fn destroy(&self) -> Result<()> {
        self.engine.destroy()?;
        self.c.wait_acks(self.events.close());
        Ok(())
    }
}

struct Notifier(Arc<Source<16>>);

impl engine::QpNotify for Notifier {
    fn event(&self, event: Event) {
        if let Event::SrqLimit(_) = event {
            self.0.event(IBV_EVENT_SRQ_LIMIT_REACHED);
        }
    }
}
