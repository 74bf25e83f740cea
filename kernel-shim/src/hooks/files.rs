//! Hooks of functions that take a path and give something other than a path: they differ in their arguments only.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use libc::{AT_FDCWD, mode_t, size_t, ssize_t};

use super::symbol::real;
use super::with_path;
use crate::ops::Intent::{self, Pattern, Read};

/// Defines hooks. Each line: arguments before the path; after it; result; directory descriptor, intent, failure value.
macro_rules! path_hooks {
    ($(fn $name:ident($($pre:ident: $pre_ty:ty),*; path $(, $arg:ident: $ty:ty)*) -> $ret:ty
        { $dirfd:expr, $intent:expr, $fail:expr })*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($pre: $pre_ty,)* path: *const c_char $(, $arg: $ty)*) -> $ret {
            let call = |path| {
                real!($name: fn($($pre_ty,)* *const c_char $(, $ty)*) -> $ret; $fail; ($($pre,)* path $(, $arg)*))
            };
            // SAFETY: the caller of a libc function passes C strings or null.
            unsafe { with_path($dirfd, path, $intent, $fail, call) }
        }
    )*};
}

/// Defines the opens, which are the only way to an rdma_cm descriptor.
macro_rules! open_hooks {
    ($(fn $name:ident($($pre:ident: $pre_ty:ty),*; path, flags $(, $arg:ident: $ty:ty)*) { $dirfd:expr })*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            $($pre: $pre_ty,)*
            path: *const c_char,
            flags: c_int
            $(, $arg: $ty)*
        ) -> c_int {
            // SAFETY: the caller of a libc function passes C strings or null.
            if let Some(fd) = unsafe { super::rdmacm::open_node($dirfd, path, flags) } {
                return fd;
            }
            let call = |path| {
                real!($name: fn($($pre_ty,)* *const c_char, c_int $(, $ty)*) -> c_int; -1;
                    ($($pre,)* path, flags $(, $arg)*))
            };
            // SAFETY: as above.
            unsafe { with_path($dirfd, path, for_flags(flags), -1, call) }
        }
    )*};
}

// `open` and its relatives are variadic in C; on this platform's ABIs an optional third argument arrives as a fixed one
// does, and the real function reads it only if its flags say that it is there.
open_hooks! {
    fn open(; path, flags, mode: mode_t) { AT_FDCWD }
    fn open64(; path, flags, mode: mode_t) { AT_FDCWD }
    fn openat(dirfd: c_int; path, flags, mode: mode_t) { dirfd }
    fn openat64(dirfd: c_int; path, flags, mode: mode_t) { dirfd }
    fn __open_2(; path, flags) { AT_FDCWD }
    fn __open64_2(; path, flags) { AT_FDCWD }
    fn __openat_2(dirfd: c_int; path, flags) { dirfd }
    fn __openat64_2(dirfd: c_int; path, flags) { dirfd }
}

path_hooks! {
    fn fopen(; path, mode: *const c_char) -> *mut c_void { AT_FDCWD, for_mode(mode), ptr::null_mut() }
    fn fopen64(; path, mode: *const c_char) -> *mut c_void { AT_FDCWD, for_mode(mode), ptr::null_mut() }
    fn freopen(; path, mode: *const c_char, file: *mut c_void) -> *mut c_void {
        AT_FDCWD, for_mode(mode), ptr::null_mut()
    }
    fn freopen64(; path, mode: *const c_char, file: *mut c_void) -> *mut c_void {
        AT_FDCWD, for_mode(mode), ptr::null_mut()
    }

    fn opendir(; path) -> *mut c_void { AT_FDCWD, Read, ptr::null_mut() }
    fn scandir(; path, list: *mut c_void, select: *mut c_void, compare: *mut c_void) -> c_int { AT_FDCWD, Read, -1 }
    fn scandir64(; path, list: *mut c_void, select: *mut c_void, compare: *mut c_void) -> c_int { AT_FDCWD, Read, -1 }
    fn chdir(; path) -> c_int { AT_FDCWD, Read, -1 }

    fn stat(; path, stat: *mut c_void) -> c_int { AT_FDCWD, Read, -1 }
    fn stat64(; path, stat: *mut c_void) -> c_int { AT_FDCWD, Read, -1 }
    fn lstat(; path, stat: *mut c_void) -> c_int { AT_FDCWD, Read, -1 }
    fn lstat64(; path, stat: *mut c_void) -> c_int { AT_FDCWD, Read, -1 }
    fn fstatat(dirfd: c_int; path, stat: *mut c_void, flags: c_int) -> c_int { dirfd, Read, -1 }
    fn fstatat64(dirfd: c_int; path, stat: *mut c_void, flags: c_int) -> c_int { dirfd, Read, -1 }
    fn statx(dirfd: c_int; path, flags: c_int, mask: c_uint, stat: *mut c_void) -> c_int { dirfd, Read, -1 }
    // Programs linked before glibc 2.33 come here instead.
    fn __xstat(version: c_int; path, stat: *mut c_void) -> c_int { AT_FDCWD, Read, -1 }
    fn __xstat64(version: c_int; path, stat: *mut c_void) -> c_int { AT_FDCWD, Read, -1 }
    fn __lxstat(version: c_int; path, stat: *mut c_void) -> c_int { AT_FDCWD, Read, -1 }
    fn __lxstat64(version: c_int; path, stat: *mut c_void) -> c_int { AT_FDCWD, Read, -1 }
    fn __fxstatat(version: c_int, dirfd: c_int; path, stat: *mut c_void, flags: c_int) -> c_int { dirfd, Read, -1 }
    fn __fxstatat64(version: c_int, dirfd: c_int; path, stat: *mut c_void, flags: c_int) -> c_int { dirfd, Read, -1 }

    fn access(; path, mode: c_int) -> c_int { AT_FDCWD, Read, -1 }
    fn faccessat(dirfd: c_int; path, mode: c_int, flags: c_int) -> c_int { dirfd, Read, -1 }
    fn eaccess(; path, mode: c_int) -> c_int { AT_FDCWD, Read, -1 }
    fn euidaccess(; path, mode: c_int) -> c_int { AT_FDCWD, Read, -1 }
    // `ls -l` asks for these and complains when a file it has just listed is not there.
    fn getxattr(; path, name: *const c_char, value: *mut c_void, size: size_t) -> ssize_t { AT_FDCWD, Read, -1 }
    fn lgetxattr(; path, name: *const c_char, value: *mut c_void, size: size_t) -> ssize_t { AT_FDCWD, Read, -1 }
    fn listxattr(; path, list: *mut c_char, size: size_t) -> ssize_t { AT_FDCWD, Read, -1 }
    fn llistxattr(; path, list: *mut c_char, size: size_t) -> ssize_t { AT_FDCWD, Read, -1 }
}

/// `glob` gives paths, too, but as many as it likes.
macro_rules! glob_hooks {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            pattern: *const c_char,
            flags: c_int,
            error: *mut c_void,
            result: *mut libc::glob_t,
        ) -> c_int {
            let call = |pattern| {
                real!($name: fn(*const c_char, c_int, *mut c_void, *mut libc::glob_t) -> c_int;
                    libc::GLOB_NOMATCH; (pattern, flags, error, result))
            };
            // SAFETY: the caller passes a C string; `result` is what the real function has filled in.
            unsafe {
                let code = with_path(AT_FDCWD, pattern, Pattern, libc::GLOB_NOMATCH, call);
                super::names::show_glob(code, flags, result);
                code
            }
        }
    )*};
}
glob_hooks! { glob glob64 }

/// What an open with these flags wants.
fn for_flags(flags: c_int) -> Intent {
    if flags & libc::O_ACCMODE != libc::O_RDONLY || flags & (libc::O_CREAT | libc::O_TRUNC) != 0 {
        Intent::Write
    } else {
        Read
    }
}

/// What an fopen with this mode wants.
///
/// # Safety
/// `mode` is null or a C string.
unsafe fn for_mode(mode: *const c_char) -> Intent {
    // SAFETY: not null, so a C string by contract.
    let writes =
        !mode.is_null() && unsafe { CStr::from_ptr(mode) }.to_bytes().iter().any(|b| b"wa+".contains(b));
    if writes { Intent::Write } else { Read }
}
