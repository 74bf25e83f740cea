//! Device memory: memory of the device's own, which programs reach by copying and by registered regions.

use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdma_core_sys::private::verbs_dm;
use rdma_core_sys::*;

use crate::exports::Exports;
use crate::ffi::{CPart, Object, Result, next_handle, object, set_errno};
use crate::limits::MAX_DM_SIZE;
use crate::pages::Room;

/// Copies begin and end at multiples of this, as on the devices programs know.
const UNIT: u64 = 4;
/// The largest alignment that can be asked for, as a power of two: a page.
const LOG_ALIGN_MAX: u32 = 12;

/// Bytes allocated in this process.
static IN_USE: AtomicU64 = AtomicU64::new(0);
static EXPORTS: Exports<Memory> = Exports::new();

/// A piece of device memory as C sees it.
#[repr(C)]
pub(crate) struct Dm {
    _c: CPart<verbs_dm>,
    memory: Arc<Memory>,
}

/// The memory itself; regions and imports keep it.
pub(crate) struct Memory {
    room: Room,
    len: u64,
}

// SAFETY: repr(C), the C part is first and begins with an ibv_dm.
unsafe impl Object for Dm {
    type C = ibv_dm;
}

impl Dm {
    /// EINVAL for no or unknown attributes, ENOMEM when the device has not so much left.
    pub(crate) fn alloc(context: *mut ibv_context, attr: &ibv_alloc_dm_attr) -> Result<Box<Self>> {
        if attr.comp_mask != 0 || attr.length == 0 || attr.log_align_req > LOG_ALIGN_MAX {
            return Err(libc::EINVAL);
        }
        let len = attr.length as u64;
        let taken = |used: u64| used.checked_add(len).filter(|total| *total <= MAX_DM_SIZE);
        IN_USE.fetch_update(Ordering::Relaxed, Ordering::Relaxed, taken).map_err(|_| libc::ENOMEM)?;
        let room = Room::new(attr.length).inspect_err(|_| {
            IN_USE.fetch_sub(len, Ordering::Relaxed);
        })?;
        let memory = Arc::new(Memory { room, len });
        let handle = next_handle();
        EXPORTS.add(handle, &memory);
        Ok(Self::over(context, handle, memory))
    }
    /// The memory another context of this process allocated; ENOENT when there is none of that handle.
    pub(crate) fn import(context: *mut ibv_context, handle: u32) -> Result<Box<Self>> {
        Ok(Self::over(context, handle, EXPORTS.find(handle)?))
    }
    fn over(context: *mut ibv_context, handle: u32, memory: Arc<Memory>) -> Box<Self> {
        let _c = CPart::new(|dm: &mut verbs_dm| {
            (dm.dm.context, dm.dm.handle, dm.handle) = (context, handle, handle);
            dm.dm.memcpy_to_dm = Some(memcpy_to_dm);
            dm.dm.memcpy_from_dm = Some(memcpy_from_dm);
            dm.dm.comp_mask = IBV_DM_MASK_HANDLE;
        });
        Box::new(Self { _c, memory })
    }
    /// EBUSY while a region or an import has the memory.
    pub(crate) fn free(&self) -> Result<()> {
        if Arc::strong_count(&self.memory) > 1 { Err(libc::EBUSY) } else { Ok(()) }
    }
    /// The memory, if `offset..offset + len` lies in it; EINVAL if not.
    pub(crate) fn part(&self, offset: u64, len: usize) -> Result<Arc<Memory>> {
        let end = offset.checked_add(len as u64).ok_or(libc::EINVAL)?;
        if end > self.memory.len { Err(libc::EINVAL) } else { Ok(Arc::clone(&self.memory)) }
    }
    /// The address of a part for a copy; EINVAL outside or across units.
    fn copied(&self, offset: u64, len: usize) -> Result<*mut u8> {
        if !offset.is_multiple_of(UNIT) || !(len as u64).is_multiple_of(UNIT) {
            return Err(libc::EINVAL);
        }
        self.part(offset, len)?;
        Ok(self.memory.room.at(offset as usize))
    }
}

impl Memory {
    /// Where it begins.
    pub(crate) fn address(&self) -> u64 {
        self.room.at(0) as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        IN_USE.fetch_sub(self.len, Ordering::Relaxed);
    }
}

fn copied(outcome: Result<()>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            errno
        }
    }
}

unsafe extern "C" fn memcpy_to_dm(dm: *mut ibv_dm, offset: u64, from: *const c_void, len: usize) -> c_int {
    // SAFETY: the application passes device memory of ours and a readable buffer; the range was checked.
    copied(unsafe {
        object::<Dm>(dm).and_then(|dm| {
            dm.copied(offset, len)?.copy_from(from.cast(), len);
            Ok(())
        })
    })
}

unsafe extern "C" fn memcpy_from_dm(to: *mut c_void, dm: *mut ibv_dm, offset: u64, len: usize) -> c_int {
    // SAFETY: the application passes device memory of ours and a writable buffer; the range was checked.
    copied(unsafe {
        object::<Dm>(dm).and_then(|dm| {
            dm.copied(offset, len)?.copy_to(to.cast(), len);
            Ok(())
        })
    })
}
