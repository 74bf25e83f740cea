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
    let object = object_of(function)?;
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
    if entry.is_null() || object_of(entry).map(|found| found.dli_fbase) != Some(object.dli_fbase) {
        // dlsym looks into what the object depends on, too.
        return None;
    }
    // SAFETY: the symbol's name says its type, and its version is part of the name; the table is static, or NULL.
    unsafe { std::mem::transmute::<*mut c_void, Entry>(entry)().as_ref() }
        .filter(|ops| ops.size as usize >= size_of::<Ops>())
}

/// The loaded object that an address lies in.
fn object_of(address: *const c_void) -> Option<libc::Dl_info> {
    let mut place = MaybeUninit::zeroed();
    // SAFETY: dladdr takes any address and fills what it is given.
    unsafe { (libc::dladdr(address, place.as_mut_ptr()) != 0).then(|| place.assume_init()) }
}

/// A snapshot or a listener as the program holds it: the provider's, and who can read it.
pub(crate) struct Held {
    pub(crate) ops: &'static Ops,
    pub(crate) inner: Opaque,
}

/// Hands one, which `make` has the provider put into its last argument, to the program.
///
/// # Safety
/// `to` is NULL (gives EINVAL) or writable; `context` is NULL or an open context.
pub(crate) unsafe fn give(
    to: *mut *mut Held,
    context: *mut ibv_context,
    make: impl FnOnce(&'static Ops, *mut Opaque) -> c_int,
) -> c_int {
    // SAFETY: upheld by the caller.
    let Some(to) = (unsafe { to.as_mut() }) else { return libc::EINVAL };
    *to = ptr::null_mut();
    // SAFETY: upheld by the caller.
    let ops = match unsafe { of_context(context) } {
        Ok(ops) => ops,
        Err(errno) => return errno,
    };
    let mut inner = ptr::null_mut();
    let errno = make(ops, &raw mut inner);
    if errno == 0 {
        *to = Box::into_raw(Box::new(Held { ops, inner }));
    }
    errno
}

/// Takes back what [`give`] handed out.
///
/// # Safety
/// `held` is NULL or of [`give`], and the program gives it up.
pub(crate) unsafe fn take_back(held: *mut Held, release: impl FnOnce(&'static Ops, Opaque)) {
    if !held.is_null() {
        // SAFETY: upheld by the caller; `give` made it of a box.
        let Held { ops, inner } = *unsafe { Box::from_raw(held) };
        release(ops, inner);
    }
}
