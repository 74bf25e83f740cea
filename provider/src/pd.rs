//! Protection domains.

use std::sync::Arc;

use rdma_core_sys::ibv_pd;

use crate::context::Context;
use crate::ffi::{CPart, Object, Result, next_handle};

/// A protection domain.
#[repr(C)]
pub(crate) struct Pd {
    _c: CPart<ibv_pd>,
    /// Shared with every object made in it, which is how its use is counted.
    pub(crate) shared: Arc<PdShared>,
}

/// What the objects of a PD know of it.
pub(crate) struct PdShared {
    /// The PD's number in the core.
    pub(crate) number: u32,
    /// The device it belongs to.
    pub(crate) context: Arc<Context>,
}

// SAFETY: repr(C), the C part is first and is an ibv_pd.
unsafe impl Object for Pd {
    type C = ibv_pd;
}

impl Pd {
    pub(crate) fn alloc(context: &Arc<Context>) -> Box<Self> {
        let shared = PdShared { number: context.device.alloc_pd(), context: Arc::clone(context) };
        let _c = CPart::new(|pd: &mut ibv_pd| pd.handle = next_handle());
        Box::new(Self { _c, shared: Arc::new(shared) })
    }

    /// EBUSY while an object of the PD exists.
    pub(crate) fn check_unused(&self) -> Result<()> {
        if Arc::strong_count(&self.shared) > 1 { Err(libc::EBUSY) } else { Ok(()) }
    }
}
