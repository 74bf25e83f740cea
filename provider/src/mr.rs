//! Memory regions.

use std::sync::Arc;

use metaroce_proto::types::access;
use rdma_core_sys::ibv_mr;
use rdma_core_sys::private::{IBV_MR_TYPE_MR, verbs_mr};

use crate::ffi::{CPart, Object, Result, next_handle};
use crate::pd::{Pd, PdShared};

/// Flags a device may ignore (`IBV_ACCESS_OPTIONAL_RANGE`).
const OPTIONAL_RANGE: u32 = 0x3ff0_0000;
/// Every flag that must be understood.
const MANDATORY: u32 = access::LOCAL_WRITE
    | access::REMOTE_WRITE
    | access::REMOTE_READ
    | access::REMOTE_ATOMIC
    | access::MW_BIND
    | access::ZERO_BASED
    | access::ON_DEMAND
    | access::HUGETLB;

/// A memory region.
#[repr(C)]
pub(crate) struct Mr {
    _c: CPart<verbs_mr>,
    key: u32,
    pd: Arc<PdShared>,
}

// SAFETY: repr(C), the C part is first and begins with an ibv_mr.
unsafe impl Object for Mr {
    type C = ibv_mr;
}

impl Mr {
    /// Registers `length` bytes at `va`, reachable from `iova`.
    pub(crate) fn register(pd: &Pd, va: u64, length: u64, iova: u64, flags: u32) -> Result<Box<Self>> {
        check_access(flags)?;
        let iova = if flags & access::ZERO_BASED != 0 { 0 } else { iova };
        if length == 0 || va.checked_add(length).is_none() || iova.checked_add(length).is_none() {
            return Err(libc::EINVAL);
        }
        let pd = Arc::clone(&pd.shared);
        let key = pd.context.device.register_mr(pd.number, va, iova, length, flags)?;
        let _c = CPart::new(|mr: &mut verbs_mr| {
            mr.ibv_mr.handle = next_handle();
            mr.ibv_mr.lkey = key;
            mr.ibv_mr.rkey = key;
            mr.mr_type = IBV_MR_TYPE_MR;
            mr.access = flags as i32;
        });
        Ok(Box::new(Self { _c, key, pd }))
    }

    /// Kills the key; afterwards no byte passes and the object may be dropped.
    pub(crate) fn deregister(&self) -> Result<()> {
        self.pd.context.device.deregister_mr(self.key)
    }
}

/// EINVAL for unknown mandatory flags and for remote writing without local writing.
fn check_access(flags: u32) -> Result<()> {
    let remote_writes = flags & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
    if flags & !(MANDATORY | OPTIONAL_RANGE) != 0 || remote_writes && flags & access::LOCAL_WRITE == 0 {
        return Err(libc::EINVAL);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_access_follows_the_specification() {
        for flags in 0..256 {
            let writes = flags & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
            let legal = !writes || flags & access::LOCAL_WRITE != 0;
            assert_eq!(check_access(flags).is_ok(), legal, "{flags:#x}");
            assert_eq!(check_access(flags | OPTIONAL_RANGE).is_ok(), legal, "{flags:#x} with optional flags");
        }
        for bit in (8..20).chain([30, 31]) {
            assert_eq!(check_access(1 << bit), Err(libc::EINVAL), "bit {bit}");
        }
    }
}
