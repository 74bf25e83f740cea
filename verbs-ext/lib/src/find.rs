//! The unsafe fence: from a verbs object to the table of functions of the provider that made it.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use metaroce_ext_abi::{ENTRY, Entry, Opaque, Ops};
use rdma_core_sys::{ibv_context, ibv_qp};

/// A positive `errno` value.
pub(crate) type Errno = c_int;

/// The table behind an open context: EINVAL for NULL, ENODEV for another driver's.
///
/// # Safety
/// `context` is NULL or an open context.
pub(crate) unsafe fn of_context(context: *mut ibv_context) -> Result<&'static Ops, Errno> {
    // SAFETY: upheld by the caller. Its table of operations is part of what programs are compiled against.
    let poll_cq = unsafe { context.as_ref() }.ok_or(libc::EINVAL)?.ops.poll_cq.ok_or(libc::ENODEV)?;
    let ops = table_beside(poll_cq as *const c_void).ok_or(libc::ENODEV)?;
    // SAFETY: the context is open; the provider compares, and follows nothing of another's.
    match unsafe { (ops.owns)(context.cast()) } {
        0 => Ok(ops),
        errno => Err(errno),
    }
}

/// The table behind a queue pair.
///
/// # Safety
/// `qp` is NULL or a queue pair that is not destroyed.
pub(crate) unsafe fn of_qp(qp: *mut ibv_qp) -> Result<&'static Ops, Errno> {
    // SAFETY: upheld by the caller.
    unsafe { of_context(qp.as_ref().ok_or(libc::EINVAL)?.context) }
}

/// The table that the object offers in which this function lies.
fn table_beside(function: *const c_void) -> Option<&'static Ops> {
    let mut place = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and fills what it is given.
    let object = unsafe { (libc::dladdr(function, place.as_mut_ptr()) != 0).then(|| place.assume_init())? };
    // SAFETY: NOLOAD runs nothing: it finds what is loaded under this name. The handle is kept: providers stay.
    let handle = unsafe {
        if object.dli_fname.is_null() {
            return None;
        }
        libc::dlopen(object.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD)
    };
    if handle.is_null() {
        return None;
    }
    // SAFETY: a handle of dlopen, a name that ends with NUL.
    let entry = unsafe { libc::dlsym(handle, ENTRY.as_ptr()) };
    if entry.is_null() || base_of(entry) != Some(object.dli_fbase) {
        // dlsym looks into what the object depends on, too.
        return None;
    }
    // SAFETY: the symbol's name says its type, and its version is part of the name; the table is static, or NULL.
    unsafe { std::mem::transmute::<*mut c_void, Entry>(entry)().as_ref() }
        .filter(|ops| ops.size as usize >= size_of::<Ops>())
}

/// Where the object begins that an address lies in.
fn base_of(address: *mut c_void) -> Option<*mut c_void> {
    let mut place = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr takes any address and fills what it is given.
    unsafe { (libc::dladdr(address, place.as_mut_ptr()) != 0).then(|| place.assume_init().dli_fbase) }
}

/// A snapshot or a listener as the program holds it: the provider's, and who can read it.
pub(crate) struct Held {
    pub(crate) ops: &'static Ops,
    pub(crate) inner: Opaque,
}

/// Hands one to the program.
///
/// # Safety
/// `to` is NULL (gives EINVAL) or writable.
pub(crate) unsafe fn give(to: *mut *mut Held, make: impl FnOnce() -> Result<Held, Errno>) -> c_int {
    // SAFETY: upheld by the caller.
    let Some(to) = (unsafe { to.as_mut() }) else { return libc::EINVAL };
    *to = ptr::null_mut();
    match make() {
        Ok(held) => {
            *to = Box::into_raw(Box::new(held));
            0
        }
        Err(errno) => errno,
    }
}
