//! Memory regions.

use std::sync::Arc;

use metaroce_proto::types::access;
use parking_lot::Mutex;
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
    c: CPart<verbs_mr>,
    key: u32,
    region: Mutex<Region>,
}

/// What re-registration changes.
struct Region {
    pd: Arc<PdShared>,
    flags: u32,
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
        check_range(va, iova, length)?;
        let pd = Arc::clone(&pd.shared);
        let key = pd.context.device.register_mr(pd.number, va, iova, length, flags)?;
        pd.context.open.mr_made(key);
        let c = CPart::new(|mr: &mut verbs_mr| {
            mr.ibv_mr.handle = next_handle();
            mr.ibv_mr.lkey = key;
            mr.ibv_mr.rkey = key;
            mr.mr_type = IBV_MR_TYPE_MR;
            mr.access = flags as i32;
        });
        Ok(Box::new(Self { c, key, region: Mutex::new(Region { pd, flags }) }))
    }

    /// Changes PD, memory or access flags; the keys stay. On failure the MR stays as it was.
    pub(crate) fn reregister(
        &self,
        pd: Option<&Pd>,
        range: Option<(u64, u64)>,
        flags: Option<u32>,
    ) -> Result<()> {
        let mut region = self.region.lock();
        let new_flags = flags.unwrap_or(region.flags);
        check_access(new_flags)?;
        let zero_based = new_flags & access::ZERO_BASED != 0;
        // The memory would have to move in its own address space without being named.
        if range.is_none() && (new_flags ^ region.flags) & access::ZERO_BASED != 0 {
            return Err(libc::EINVAL);
        }
        let range = range.map(|(va, length)| (va, if zero_based { 0 } else { va }, length));
        if let Some((va, iova, length)) = range {
            check_range(va, iova, length)?;
        }
        let pd = pd.map(|pd| &pd.shared);
        region.pd.context.device.reregister_mr(self.key, pd.map(|pd| pd.number), range, flags)?;
        self.c.set_access(new_flags);
        region.flags = new_flags;
        if let Some(pd) = pd {
            region.pd = Arc::clone(pd);
        }
        Ok(())
    }

    /// Kills the key; afterwards no byte passes and the object may be dropped.
    pub(crate) fn deregister(&self) -> Result<()> {
        let context = &self.region.lock().pd.context;
        context.open.mr_gone(self.key);
        context.device.deregister_mr(self.key)
    }
}

fn check_range(va: u64, iova: u64, length: u64) -> Result<()> {
    let wraps = va.checked_add(length).is_none() || iova.checked_add(length).is_none();
    if length == 0 || wraps { Err(libc::EINVAL) } else { Ok(()) }
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
