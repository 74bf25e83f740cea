//! Hooks of the calls that reach an rdma_cm descriptor: `write`, and `fstat`, which must show a character device.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;

use libc::{size_t, ssize_t};

use super::symbol::real;
use crate::rdmacm::{self, Written};
use crate::{device, guard, ops};

/// Opens the rdma_cm node if `path` is it; `None` when it is not.
///
/// # Safety
/// `path` is null or a C string.
#[inline]
pub(super) unsafe fn open_node(dirfd: c_int, path: *const c_char, flags: c_int) -> Option<c_int> {
    // SAFETY: not null, so a C string by contract.
    if path.is_null() || guard::active() || !rdmacm::may_be_node(unsafe { CStr::from_ptr(path) }) {
        return None;
    }
    // SAFETY: as above.
    let path = unsafe { CStr::from_ptr(path) };
    let opened = guard::run(|| ops::is_rdma_cm(dirfd, path).then(|| rdmacm::open(flags))).flatten()?;
    Some(opened.unwrap_or_else(|errno| {
        guard::set_errno(errno);
        -1
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn write(fd: c_int, data: *const c_void, size: size_t) -> ssize_t {
    let call = || {
        let written = real!(write: fn(c_int, *const c_void, size_t) -> ssize_t; -1; (fd, data, size));
        // SAFETY: the caller passes data of that size, as the kernel had to look at it only after the descriptor.
        if written < 0 && guard::errno() == libc::EBADF && unsafe { waits_for_closed(data, size) } {
            linger();
        }
        written
    };
    if !rdmacm::any_channels() || data.is_null() || guard::active() {
        return call();
    }
    let mut has_waited = false;
    loop {
        // SAFETY: the caller passes data of that size; only as much is looked at as a command has.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), size) };
        if !has_waited && !rdmacm::looks_like_command(bytes) {
            return call();
        }
        match guard::run(|| rdmacm::write(fd, bytes)) {
            // Closed while we waited, and perhaps the number is another file's by now.
            Some(Written::Foreign) if has_waited => return wait_for_ever(),
            Some(Written::Foreign) | None => return call(),
            Some(Written::Done) => return size as ssize_t,
            Some(Written::Failed(errno)) => {
                guard::set_errno(errno);
                return -1;
            }
            // As the kernel does: until there is an event, restarted or interrupted by signals as any read is, and a
            // cancellation point. Nothing is taken by looking.
            Some(Written::Wait) => {
                let mut byte = 0u8;
                let peek = (&raw mut byte).cast::<c_void>();
                let got = real!(recv: fn(c_int, *mut c_void, size_t, c_int) -> ssize_t; -1;
                    (fd, peek, 1, libc::MSG_PEEK));
                let closed = got < 0 && [libc::EBADF, libc::ENOTSOCK].contains(&guard::errno());
                if closed {
                    return wait_for_ever();
                }
                if got <= 0 {
                    if got == 0 {
                        guard::set_errno(libc::EBADF);
                    }
                    return -1;
                }
                has_waited = true;
            }
        }
    }
}

/// What becomes of a reader whose descriptor another thread closes: the kernel lets it wait, for a signal. Programs
/// that end count on that: an error would make rping's event thread exit with it.
fn wait_for_ever() -> ssize_t {
    real!(pause: fn() -> c_int; -1; ()) as ssize_t
}

/// Whether a failed write was a wait for events on a channel that is closed by now.
///
/// # Safety
/// `data` is null or valid for `size`.
#[cold]
unsafe fn waits_for_closed(data: *const c_void, size: size_t) -> bool {
    // SAFETY: not null, so valid by contract.
    !data.is_null() && rdmacm::is_wait(unsafe { std::slice::from_raw_parts(data.cast::<u8>(), size) })
}

/// Delays an error by a second. A thread that asks for events the moment after another closed the channel gets EBADF
/// from a kernel too, but hardly ever: it is back in its wait before. Where processors are shared it is not, and rping
/// takes its process down with the error instead of ending well. Others see the error a little later.
fn linger() {
    let second = libc::timespec { tv_sec: 1, tv_nsec: 0 };
    let errno = guard::errno();
    real!(nanosleep: fn(*const libc::timespec, *mut libc::timespec) -> c_int; -1; (&raw const second, ptr::null_mut()));
    guard::set_errno(errno);
}

/// The device number under which the node appears everywhere.
fn show_as_node(fd: c_int, mode: &mut libc::mode_t, rdev: &mut libc::dev_t) {
    if *mode & libc::S_IFMT == libc::S_IFSOCK
        && rdmacm::any_channels()
        && let Some(Some(device)) = guard::run(|| device::current().filter(|_| rdmacm::is_channel(fd)))
    {
        *mode = libc::S_IFCHR | 0o666;
        *rdev = device.rdev;
    }
}

/// Defines fstat and its relatives, which all fill in the same structure on 64-bit Linux.
macro_rules! fstat_hooks {
    ($(fn $name:ident($($pre:ident: $pre_ty:ty),*; fd))*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($pre: $pre_ty,)* fd: c_int, stat: *mut libc::stat) -> c_int {
            let result = real!($name: fn($($pre_ty,)* c_int, *mut libc::stat) -> c_int; -1; ($($pre,)* fd, stat));
            if result == 0 && !guard::active() {
                // SAFETY: the real function succeeded, so `stat` points to a filled-in structure.
                unsafe {
                    let (mode, rdev) = (ptr::addr_of_mut!((*stat).st_mode), ptr::addr_of_mut!((*stat).st_rdev));
                    show_as_node(fd, &mut *mode, &mut *rdev);
                }
            }
            result
        }
    )*};
}

fstat_hooks! {
    fn fstat(; fd)
    fn fstat64(; fd)
    fn __fxstat(version: c_int; fd)
    fn __fxstat64(version: c_int; fd)
}
