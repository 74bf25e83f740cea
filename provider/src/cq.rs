//! Completion queues, plain and extended.

use std::sync::Arc;

use metaroce_engine as engine;
use metaroce_proto::types::Completion;
use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;
use rdma_core_sys::private::verbs_cq;
use rdma_core_sys::*;

use crate::channel::{CompChannel, Source};
use crate::context::Context;
use crate::ffi::{CPart, LockedCell, Object, Result, next_handle};
use crate::limits::MAX_CQE;
use crate::pd::PdShared;
use crate::poll;

/// A completion queue.
#[repr(C)]
pub(crate) struct Cq {
    pub(crate) c: CPart<verbs_cq>,
    pub(crate) engine: Arc<engine::Cq>,
    completions: Option<Arc<Source<8>>>,
    errors: Arc<Source<16>>,
    /// Held from a successful `ibv_start_poll` to `ibv_end_poll`.
    pub(crate) poll_lock: RawMutex,
    /// The completion an extended poll is at; guarded by `poll_lock`.
    pub(crate) current: LockedCell<Option<(Completion, u64)>>,
    pub(crate) context: Arc<Context>,
    /// Keeps a parent domain in use.
    _pd: Option<Arc<PdShared>>,
}

// SAFETY: repr(C), the C part is first and begins with an ibv_cq.
unsafe impl Object for Cq {
    type C = ibv_cq;
}

/// What a CQ is made of.
pub(crate) struct CqCreate {
    /// Entries asked for.
    pub(crate) cqe: u32,
    /// Completion vector; checked, but all vectors are one.
    pub(crate) comp_vector: u32,
    /// Our side of the completion channel.
    pub(crate) channel: Option<Arc<CompChannel>>,
    /// `IBV_WC_EX_WITH_*` of an extended CQ.
    pub(crate) wc_flags: Option<u64>,
    /// The parent domain of an extended CQ.
    pub(crate) parent_domain: Option<Arc<PdShared>>,
}

/// What an extended CQ can be asked to read.
const WC_FLAGS_SUPPORTED: u64 = IBV_WC_STANDARD_FLAGS as u64 | WC_TIMES | IBV_WC_EX_WITH_TM_INFO as u64;
/// What needs the time of each completion.
const WC_TIMES: u64 =
    (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK) as u64;

impl Cq {
    /// EINVAL for a depth or vector out of range, EOPNOTSUPP for `wc_flags` we cannot read.
    pub(crate) fn create(context: &Arc<Context>, create: CqCreate) -> Result<Box<Self>> {
        if !(1..=MAX_CQE).contains(&create.cqe) || create.comp_vector >= context.comp_vectors {
            return Err(libc::EINVAL);
        }
        if create.wc_flags.is_some_and(|flags| flags & !WC_FLAGS_SUPPORTED != 0) {
            return Err(libc::EOPNOTSUPP);
        }
        let completions = create.channel.map(Source::new);
        let errors = Source::new(Arc::clone(&context.events));
        let notifier = Notifier { completions: completions.clone(), errors: Arc::clone(&errors) };
        let notify = Some(Box::new(notifier) as Box<dyn engine::CqNotify>);
        let engine = if create
            .wc_flags
            .is_some_and(|flags| flags & (WC_TIMES | u64::from(IBV_WC_EX_WITH_TM_INFO)) != 0)
        {
            context.device.create_extended_cq(create.cqe, notify)?
        } else {
            context.device.create_cq(create.cqe, notify)?
        };
        let c = CPart::new(|c: &mut verbs_cq| {
            if let Some(flags) = create.wc_flags {
                poll::set_functions(c, flags);
            }
        });
        let cq = Box::new(Self {
            c,
            engine,
            completions,
            errors,
            poll_lock: RawMutex::INIT,
            current: LockedCell::new(None),
            context: Arc::clone(context),
            _pd: create.parent_domain,
        });
        cq.c.set_cqe(cq.engine.capacity());
        cq.c.set_cq_handle(next_handle());
        // The address C knows; nothing can complete before a QP uses the CQ.
        if let Some(source) = &cq.completions {
            source.set_element(cq.c.as_ptr());
        }
        cq.errors.set_element(cq.c.as_ptr());
        Ok(cq)
    }

    /// EINVAL out of range or below the number of entries waiting.
    pub(crate) fn resize(&self, cqe: u32) -> Result<()> {
        if !(1..=MAX_CQE).contains(&cqe) {
            return Err(libc::EINVAL);
        }
        let granted = self.engine.resize(cqe)?;
        self.c.set_cqe(granted);
        Ok(())
    }

    /// Holds events back; EINVAL for other attributes than moderation.
    pub(crate) fn modify(&self, attr: &ibv_modify_cq_attr) -> Result<()> {
        if attr.attr_mask != IBV_CQ_ATTR_MODERATE {
            return Err(libc::EINVAL);
        }
        self.engine.moderate(attr.moderate.cq_count, attr.moderate.cq_period)
    }

    /// EBUSY while QPs use it; waits for the acknowledgement of delivered events. Then the object may be dropped.
    pub(crate) fn destroy(&self) -> Result<()> {
        self.engine.destroy()?;
        let completions = self.completions.as_ref().map_or(0, |source| source.close());
        self.c.wait_acks(completions, self.errors.close());
        Ok(())
    }

    /// Arms the CQ for one event.
    pub(crate) fn arm(&self, solicited_only: bool) {
        self.engine.arm(solicited_only);
    }

    /// The application has read a completion event.
    pub(crate) fn event_read(&self) {
        if let Some(source) = self.completions.as_ref().filter(|_| self.context.alive().is_ok()) {
            source.after_read();
        }
    }
}

/// Carries the engine's notifications into the channels.
struct Notifier {
    completions: Option<Arc<Source<8>>>,
    errors: Arc<Source<16>>,
}

impl engine::CqNotify for Notifier {
    fn completion_event(&self) {
        if let Some(source) = &self.completions {
            source.completion();
        }
    }
    fn error(&self) {
        self.errors.event(IBV_EVENT_CQ_ERR);
    }
}
