//! Protection domains and parent domains.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rdma_core_sys::{ibv_context, ibv_pd};

use crate::context::Context;
use crate::exports::Exports;
use crate::ffi::{CPart, Object, Result, next_handle};
use crate::td::Td;

/// A protection domain.
#[repr(C)]
pub(crate) struct Pd {
    _c: CPart<ibv_pd>,
    /// Shared with every object made in it, which is how its use is counted.
    pub(crate) shared: Arc<PdShared>,
    is_parent: bool,
    /// The thread domain of a parent domain.
    _td: Option<Arc<()>>,
}

/// What the objects of a PD know of it.
pub(crate) struct PdShared {
    /// The PD's number in the core.
    pub(crate) number: u32,
    /// The device it belongs to.
    pub(crate) context: Arc<Context>,
    /// A parent domain or an import stands for this one.
    _stands_for: Option<Arc<PdShared>>,
    /// A datagram QP that librdmacm set up is or was in it.
    has_rdma_cm_datagrams: AtomicBool,
}

/// The queue key by which QPs of rdma_cm's datagram port space are known (RDMA_UDP_QKEY of rdma/rdma_cma.h).
const RDMA_UDP_QKEY: u32 = 0x0123_4567;

impl PdShared {
    /// One of its datagram QPs got this queue key.
    pub(crate) fn note_qkey(&self, qkey: u32) {
        if qkey == RDMA_UDP_QKEY {
            self.has_rdma_cm_datagrams.store(true, Ordering::Relaxed);
        }
    }

    /// Whether an address vector without a global route names this port itself. On RoCE it names nothing, except to
    /// librdmacm: a datagram rsocket sends what came by plain UDP on to its own QP this way.
    pub(crate) fn may_omit_route(&self) -> bool {
        self.has_rdma_cm_datagrams.load(Ordering::Relaxed)
    }
}

static EXPORTS: Exports<PdShared> = Exports::new();

// SAFETY: repr(C), the C part is first and is an ibv_pd.
unsafe impl Object for Pd {
    type C = ibv_pd;
}

impl Pd {
    pub(crate) fn alloc(context: &Arc<Context>) -> Box<Self> {
        let shared = PdShared {
            number: context.device.alloc_pd(),
            context: Arc::clone(context),
            _stands_for: None,
            has_rdma_cm_datagrams: AtomicBool::new(false),
        };
        let (shared, handle) = (Arc::new(shared), next_handle());
        EXPORTS.add(handle, &shared);
        let _c = CPart::new(|pd: &mut ibv_pd| pd.handle = handle);
        Box::new(Self { _c, shared, is_parent: false, _td: None })
    }

    /// The PD of another context of this process; ENOENT when there is none of that handle. Objects made in either
    /// are objects of both.
    pub(crate) fn import(context: Arc<Context>, c: *mut ibv_context, handle: u32) -> Result<Box<Self>> {
        let of = EXPORTS.find(handle)?;
        let shared = PdShared {
            number: of.number,
            context,
            _stands_for: Some(of),
            has_rdma_cm_datagrams: AtomicBool::new(false),
        };
        let _c = CPart::new(|pd: &mut ibv_pd| (pd.context, pd.handle) = (c, handle));
        Ok(Box::new(Self { _c, shared: Arc::new(shared), is_parent: false, _td: None }))
    }

    /// A parent domain: the same protection domain under another name, whose objects count as its own.
    /// `context` is what libibverbs finds the device by.
    pub(crate) fn parent_domain(of: &Pd, td: Option<&Td>, context: *mut ibv_context) -> Box<Self> {
        let shared = PdShared {
            number: of.shared.number,
            context: Arc::clone(&of.shared.context),
            _stands_for: Some(Arc::clone(&of.shared)),
            has_rdma_cm_datagrams: AtomicBool::new(false),
        };
        let _c = CPart::new(|pd: &mut ibv_pd| (pd.context, pd.handle) = (context, next_handle()));
        Box::new(Self {
            _c,
            shared: Arc::new(shared),
            is_parent: true,
            _td: td.map(|td| Arc::clone(&td.uses)),
        })
    }

    /// A PD without a C object, for what needs one but is in none.
    pub(crate) fn none(context: &Arc<Context>) -> Arc<PdShared> {
        let (number, context) = (context.device.alloc_pd(), Arc::clone(context));
        Arc::new(PdShared {
            number,
            context,
            _stands_for: None,
            has_rdma_cm_datagrams: AtomicBool::new(false),
        })
    }

    /// It was made by [`Pd::parent_domain`].
    pub(crate) fn is_parent_domain(&self) -> bool {
        self.is_parent
    }

    /// EBUSY while an object of the PD exists.
    pub(crate) fn check_unused(&self) -> Result<()> {
        if Arc::strong_count(&self.shared) > 1 { Err(libc::EBUSY) } else { Ok(()) }
    }
}
