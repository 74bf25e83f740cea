//! Memory regions.

use std::sync::Arc;

use metaroce_proto::types::access;
use parking_lot::Mutex;
use rdma_core_sys::private::*;
use rdma_core_sys::{ibv_context, ibv_mr, ibv_pd};

use crate::context::Context;
use crate::dm;
use crate::exports::Exports;
use crate::ffi::{CPart, Object, Result, next_handle};
use crate::pages;
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
    /// That of its PD, whichever it is moved to.
    context: Arc<Context>,
    region: Mutex<Region>,
    _exported: Arc<Exported>,
    /// The device memory it lies in.
    _memory: Option<Arc<dm::Memory>>,
}

/// What an import needs to know.
struct Exported {
    key: u32,
    length: u64,
}

static EXPORTS: Exports<Exported> = Exports::new();

/// Context and PD as C knows them, which libibverbs fills in for ordinary regions only.
type Within = (*mut ibv_context, *mut ibv_pd);

/// What re-registration changes.
struct Region {
    pd: Arc<PdShared>,
    flags: u32,
    /// Address and length of the application's memory; none of device memory, null and imported regions.
    memory: Option<(u64, u64)>,
}

// SAFETY: repr(C), the C part is first and begins with an ibv_mr.
unsafe impl Object for Mr {
    type C = ibv_mr;
}

impl Mr {
    /// Registers `length` bytes at `va`, reachable from `iova`. EFAULT when they are not there, or not writable where the
    /// flags ask for that, unless on-demand paging is asked for.
    pub(crate) fn register(pd: &Pd, va: u64, length: u64, iova: u64, flags: u32) -> Result<Box<Self>> {
        check_access(flags)?;
        let iova = if flags & access::ZERO_BASED != 0 { 0 } else { iova };
        check_range(va, iova, length)?;
        check_memory((va, length), flags)?;
        let pd = Arc::clone(&pd.shared);
        let key = pd.context.device.register_mr(pd.number, va, iova, length, flags)?;
        let mr = Self::made(pd, key, length, flags, None, |_| {});
        mr.region.lock().memory = Some((va, length));
        Ok(mr)
    }

    /// A region that reads as zeros and takes writes without a trace, for local use.
    pub(crate) fn null(pd: &Pd, within: Within) -> Result<Box<Self>> {
        let pd = Arc::clone(&pd.shared);
        let key = pd.context.device.register_null_mr(pd.number)?;
        Ok(Self::made(pd, key, u64::MAX, access::LOCAL_WRITE, None, |mr| {
            (mr.ibv_mr.context, mr.ibv_mr.pd) = within;
            mr.ibv_mr.length = usize::MAX;
            mr.mr_type = IBV_MR_TYPE_NULL_MR;
        }))
    }

    /// A region of `length` bytes of device memory, which `offset` is within. It is always zero-based.
    pub(crate) fn device(
        pd: &Pd,
        within: Within,
        memory: Arc<dm::Memory>,
        offset: u64,
        length: u64,
        flags: u32,
    ) -> Result<Box<Self>> {
        check_access(flags)?;
        if flags & access::ZERO_BASED == 0 {
            return Err(libc::EINVAL);
        }
        let pd = Arc::clone(&pd.shared);
        let key = pd.context.device.register_mr(pd.number, memory.address() + offset, 0, length, flags)?;
        Ok(Self::made(pd, key, length, flags, Some(memory), |mr| {
            (mr.ibv_mr.context, mr.ibv_mr.pd) = within;
            mr.ibv_mr.length = length as usize;
        }))
    }

    /// A region another context of this process registered; ENOENT when there is none of that handle.
    pub(crate) fn import(pd: &Pd, within: Within, handle: u32) -> Result<Box<Self>> {
        let exported = EXPORTS.find(handle)?;
        let key = exported.key;
        let c = CPart::new(|mr: &mut verbs_mr| {
            (mr.ibv_mr.context, mr.ibv_mr.pd) = within;
            (mr.ibv_mr.handle, mr.ibv_mr.length) = (handle, exported.length as usize);
            (mr.ibv_mr.lkey, mr.ibv_mr.rkey) = (key, key);
            mr.mr_type = IBV_MR_TYPE_IMPORTED_MR;
        });
        let region = Mutex::new(Region { pd: Arc::clone(&pd.shared), flags: 0, memory: None });
        let context = Arc::clone(&pd.shared.context);
        Ok(Box::new(Self { c, key, context, region, _exported: exported, _memory: None }))
    }

    fn made(
        pd: Arc<PdShared>,
        key: u32,
        length: u64,
        flags: u32,
        memory: Option<Arc<dm::Memory>>,
        fill: impl FnOnce(&mut verbs_mr),
    ) -> Box<Self> {
        pd.context.open.mr_made(key);
        let (handle, exported) = (next_handle(), Arc::new(Exported { key, length }));
        EXPORTS.add(handle, &exported);
        let c = CPart::new(|mr: &mut verbs_mr| {
            (mr.ibv_mr.lkey, mr.ibv_mr.rkey, mr.ibv_mr.handle) = (key, key, handle);
            (mr.mr_type, mr.access) = (IBV_MR_TYPE_MR, flags as i32);
            fill(mr);
        });
        let context = Arc::clone(&pd.context);
        let region = Mutex::new(Region { pd, flags, memory: None });
        Box::new(Self { c, key, context, region, _exported: exported, _memory: memory })
    }

    /// Changes PD, memory or access flags; the keys stay. On failure the MR stays as it was.
    pub(crate) fn reregister(
        &self,
        pd: Option<&Pd>,
        range: Option<(u64, u64)>,
        flags: Option<u32>,
    ) -> Result<()> {
        self.context.alive()?;
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
        let memory = range.map(|(va, _, length)| (va, length)).or(region.memory);
        if let Some(memory) = memory.filter(|_| range.is_some() || flags.is_some()) {
            check_memory(memory, new_flags)?;
        }
        let pd = pd.map(|pd| &pd.shared);
        region.pd.context.device.reregister_mr(self.key, pd.map(|pd| pd.number), range, flags)?;
        self.c.set_access(new_flags);
        (region.flags, region.memory) = (new_flags, memory);
        if let Some(pd) = pd {
            region.pd = Arc::clone(pd);
        }
        Ok(())
    }

    /// Kills the key; afterwards no byte passes and the object may be dropped. EBUSY while a window is bound to it.
    pub(crate) fn deregister(&self) -> Result<()> {
        self.context.device.deregister_mr(self.key)?;
        self.context.open.mr_gone(self.key);
        Ok(())
    }
}

fn check_range(va: u64, iova: u64, length: u64) -> Result<()> {
    let wraps = va.checked_add(length).is_none() || iova.checked_add(length).is_none();
    if length == 0 || wraps { Err(libc::EINVAL) } else { Ok(()) }
}

/// EFAULT for memory that a device could not pin: not mapped, or not accessible as the flags promise. Memory on demand is
/// looked at when it is used.
fn check_memory((va, length): (u64, u64), flags: u32) -> Result<()> {
    const WRITES: u32 = access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_ATOMIC | access::MW_BIND;
    if flags & access::ON_DEMAND != 0 { Ok(()) } else { pages::populate(va, length, flags & WRITES != 0) }
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
