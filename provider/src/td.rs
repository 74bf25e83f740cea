//! Thread domains: accepted, and without effect, because every object locks for itself.

use std::sync::Arc;

use rdma_core_sys::{ibv_context, ibv_td};

use crate::ffi::{CPart, Object, Result};

/// A thread domain.
#[repr(C)]
pub(crate) struct Td {
    _c: CPart<ibv_td>,
    /// Shared with the parent domains made with it, which is how its use is counted.
    pub(crate) uses: Arc<()>,
}

// SAFETY: repr(C), the C part is first and is an ibv_td.
unsafe impl Object for Td {
    type C = ibv_td;
}

impl Td {
    /// `context` is what libibverbs finds the device by.
    pub(crate) fn alloc(context: *mut ibv_context) -> Box<Self> {
        Box::new(Self { _c: CPart::new(|td: &mut ibv_td| td.context = context), uses: Arc::new(()) })
    }

    /// EBUSY while a parent domain has it.
    pub(crate) fn check_unused(&self) -> Result<()> {
        if Arc::strong_count(&self.uses) > 1 { Err(libc::EBUSY) } else { Ok(()) }
    }
}
