//! The libc symbols: C signatures, the real function behind each, and calls into the logic; nothing is decided here.
//!
//! A hook may be called before any constructor ran, in a signal handler or after fork, and most calls are none of ours.
//! So a hook first makes a cheap test, and only then runs logic, under [`crate::guard`]. The real functions may be
//! cancellation points: hooks are "C-unwind" and hold nothing that would need to be dropped while one runs.

mod device;
mod files;
mod names;
mod rdmacm;
mod symbol;

use std::ffi::{CStr, c_char, c_int};

use crate::guard;
use crate::ops::{self, Intent, PathBuffer, Route};

/// Calls `real` with the path that `path` stands for.
///
/// # Safety
/// `path` is null or a C string, as the hooked function demands.
#[inline]
unsafe fn with_path<R>(
    dirfd: c_int,
    path: *const c_char,
    intent: Intent,
    fail: R,
    real: impl FnOnce(*const c_char) -> R,
) -> R {
    // SAFETY: not null, so a C string by contract.
    if path.is_null() || guard::active() || !ops::mentions_device(unsafe { CStr::from_ptr(path) }.to_bytes())
    {
        return real(path);
    }
    // SAFETY: passed on from our caller.
    unsafe { with_own_path(dirfd, path, intent, fail, real) }
}

/// The rare half of [`with_path`], apart so that other calls do not pay for the buffer on the stack.
///
/// # Safety
/// `path` is a C string.
#[inline(never)]
unsafe fn with_own_path<R>(
    dirfd: c_int,
    path: *const c_char,
    intent: Intent,
    fail: R,
    real: impl FnOnce(*const c_char) -> R,
) -> R {
    let mut buffer = PathBuffer::new();
    // SAFETY: a C string by contract.
    let name = unsafe { CStr::from_ptr(path) };
    match guard::run(|| ops::route(dirfd, name, intent, &mut buffer)) {
        None | Some(Route::Pass) => real(path),
        Some(Route::Redirected) => real(buffer.as_ptr()),
        Some(Route::Fail(errno)) => {
            guard::set_errno(errno);
            fail
        }
    }
}
