//! How libibverbs finds the driver: registration, device objects, opening and closing of contexts.

use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::ptr;
use std::sync::OnceLock;

use parking_lot::Mutex;
use rdma_core_sys::dl::{DlError, Libibverbs, verbs_context_of};
use rdma_core_sys::private::*;
use rdma_core_sys::*;

use crate::context::{Context, ContextMemory};
use crate::entry::OPS;
use crate::ffi::{Result, guarded, set_errno, zeroed};
use crate::logger;

/// `IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS`: libibverbs passes optional access flags on.
const CORE_SUPPORT_OPTIONAL_MR_ACCESS: u64 = 1;
/// `RDMA_DRIVER_UNKNOWN`: no kernel driver is behind the device.
const DRIVER_ID: u32 = 0;

static LIBIBVERBS: OnceLock<Libibverbs> = OnceLock::new();

/// Structures with raw pointers to constants, which do not change after initialisation.
struct Constant<T>(T);
// SAFETY: immutable, and so is what it points at.
unsafe impl<T> Sync for Constant<T> {}

static MATCH_TABLE: Constant<[verbs_match_ent; 2]> = Constant([
    verbs_match_ent {
        driver_data: ptr::null_mut(),
        u: verbs_match_ent_u { modalias: c"rdma_device:*Nmetaroce*".as_ptr() },
        vendor: 0,
        device: 0,
        kind: VERBS_MATCH_MODALIAS,
    },
    verbs_match_ent {
        driver_data: ptr::null_mut(),
        u: verbs_match_ent_u { driver_id: 0 },
        vendor: 0,
        device: 0,
        kind: VERBS_MATCH_SENTINEL,
    },
]);

static DEVICE_OPS: Constant<verbs_device_ops> = Constant(verbs_device_ops {
    name: c"metaroce".as_ptr(),
    match_min_abi_version: 0,
    match_max_abi_version: u32::MAX,
    match_table: &raw const MATCH_TABLE.0 as *const verbs_match_ent,
    static_providers: ptr::null(),
    match_device: None,
    alloc_context: Some(alloc_context),
    import_context: Some(import_context),
    alloc_device: Some(alloc_device),
    uninit_device: Some(uninit_device),
});

/// Registers the driver with the libibverbs that loads this library.
pub(crate) fn register() {
    match Libibverbs::resolve() {
        Ok(lib) => {
            let lib = LIBIBVERBS.get_or_init(|| lib);
            // SAFETY: the table is constant and of the private ABI whose function was resolved.
            unsafe { (lib.register_driver)(&raw const DEVICE_OPS.0) };
        }
        // A test or a curious tool: nothing to register with, nothing to say.
        Err(DlError::NotLoaded) => {}
        Err(DlError::Missing(name)) => {
            logger::init_early();
            log::error!(
                "this libibverbs has no {}: it speaks another private ABI than 34",
                name.to_string_lossy()
            );
        }
    }
}

unsafe extern "C" fn alloc_device(_: *mut verbs_sysfs_dev) -> *mut verbs_device {
    let mut device: verbs_device = zeroed();
    device.core_support = CORE_SUPPORT_OPTIONAL_MR_ACCESS;
    Box::into_raw(Box::new(device))
}

unsafe extern "C" fn uninit_device(device: *mut verbs_device) {
    // SAFETY: libibverbs gives back what alloc_device made, when nobody uses it any more.
    drop(unsafe { Box::from_raw(device) });
}

/// `ibv_import_device`: another context over the process's device. EOPNOTSUPP for a descriptor of another process,
/// whose objects lie in that process's memory.
unsafe extern "C" fn import_context(device: *mut ibv_device, cmd_fd: c_int) -> *mut verbs_context {
    if !OPEN.lock().iter().any(|open| same_file(*open, cmd_fd)) {
        logger::init_early();
        log::error!("a device can be imported only within the process that opened it");
        set_errno(libc::EOPNOTSUPP);
        return ptr::null_mut();
    }
    // SAFETY: as our caller's; libibverbs hands the descriptor over.
    unsafe {
        let verbs = alloc_context(device, cmd_fd, ptr::null_mut());
        if let Some(verbs) = verbs.as_mut() {
            // libibverbs puts a channel of the kernel's making into its place.
            libc::close(std::mem::replace(&mut verbs.context.async_fd, -1));
            if let Some(context) = &*(*(&raw mut *verbs).cast::<ContextMemory>()).state {
                context.events_come_later();
            }
        }
        verbs
    }
}

/// The descriptors of the contexts that are open, to know one of ours again when it is imported.
static OPEN: Mutex<Vec<c_int>> = Mutex::new(Vec::new());

/// Two descriptors are of one open file. Where the kernel does not say so they may be: handles are random, and what
/// is imported by them is found or not.
fn same_file(a: c_int, b: c_int) -> bool {
    const KCMP_FILE: c_int = 0;
    // SAFETY: compares two descriptors of this process.
    let order = unsafe {
        let me = libc::getpid();
        libc::syscall(
            libc::SYS_kcmp,
            me,
            me,
            KCMP_FILE,
            libc::c_ulong::from(a as u32),
            libc::c_ulong::from(b as u32),
        )
    };
    order <= 0
}

unsafe extern "C" fn alloc_context(
    device: *mut ibv_device,
    cmd_fd: c_int,
    _private: *mut c_void,
) -> *mut verbs_context {
    let Some(lib) = LIBIBVERBS.get() else {
        // SAFETY: the descriptor was handed over to us.
        unsafe { libc::close(cmd_fd) };
        set_errno(libc::ENOSYS);
        return ptr::null_mut();
    };
    let size = size_of::<ContextMemory>();
    // SAFETY: ContextMemory begins with the verbs_context, hence offset 0; failure has closed cmd_fd and set errno.
    let memory = unsafe { (lib.init_and_alloc_context)(device, cmd_fd, size, ptr::null_mut(), DRIVER_ID) };
    if memory.is_null() {
        return ptr::null_mut();
    }
    let memory = memory.cast::<ContextMemory>();
    // SAFETY: zeroed memory of the right size in which libibverbs has initialised its part; nobody else has it.
    let opened = guarded("ibv_open_device", || unsafe { open(lib, device, memory) });
    match opened {
        // SAFETY: just made.
        Ok(()) => unsafe { (*memory).verbs.as_ptr() },
        Err(errno) => {
            // SAFETY: made by init_and_alloc_context, which used calloc; uninit closes cmd_fd.
            unsafe {
                (lib.uninit_context)((*memory).verbs.as_ptr());
                libc::free(memory.cast());
            }
            set_errno(errno);
            ptr::null_mut()
        }
    }
}

/// Fills a fresh context.
///
/// # Safety
/// `memory` was made by `init_and_alloc_context` for `device` and is known to nobody else.
unsafe fn open(lib: &Libibverbs, device: *mut ibv_device, memory: *mut ContextMemory) -> Result<()> {
    // SAFETY: upheld by the caller.
    unsafe {
        let verbs = (*memory).verbs.as_ptr();
        if (*verbs).sz != size_of::<verbs_context>() {
            log::error!("this libibverbs has another verbs_context ({} bytes) than expected", (*verbs).sz);
            return Err(libc::ENOSYS);
        }
        let (context, async_fd) = Context::open((lib.get_device_guid)(device))?;
        (lib.set_ops)(verbs, &raw const OPS);
        // Set by us, so that libibverbs does not ask the kernel for one.
        (*verbs).context.async_fd = async_fd;
        OPEN.lock().push((*verbs).context.cmd_fd);
        (*verbs).context.num_comp_vectors = context.comp_vectors as c_int;
        (&raw mut (*memory).state).write(ManuallyDrop::new(Some(context)));
        Ok(())
    }
}

/// `free_context`: closes the device.
pub(crate) unsafe extern "C" fn free_context(context: *mut ibv_context) {
    let Some(lib) = LIBIBVERBS.get() else { return };
    // SAFETY: libibverbs passes an open context of ours for the last time.
    unsafe {
        let memory = verbs_context_of(context).cast::<ContextMemory>();
        let state = ManuallyDrop::take(&mut (*memory).state);
        let mut open = OPEN.lock();
        if let Some(at) = open.iter().position(|fd| *fd == (*context).cmd_fd) {
            open.swap_remove(at);
        }
        drop(open);
        let _ = guarded("ibv_close_device", || {
            // Objects that the application has left keep the context's memory, but nothing of them works on.
            state.as_ref().inspect(|context| context.close());
            drop(state);
            Ok(())
        });
        (lib.uninit_context)((*memory).verbs.as_ptr());
        libc::free(memory.cast());
    }
}
