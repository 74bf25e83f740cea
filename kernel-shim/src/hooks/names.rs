//! Hooks of functions that give a path back: what lies in our tree is shown under the name it stands for.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;

use libc::{AT_FDCWD, size_t, ssize_t};

use super::symbol::real;
use super::with_path;
use crate::guard;
use crate::ops::{self, Intent::Read};

/// Rewrites a C string that leads into the tree to the visible path, in place; gives it back.
///
/// # Safety
/// `path` is null or a C string that may be written to.
unsafe fn shown(path: *mut c_char) -> *mut c_char {
    if path.is_null() || guard::active() {
        return path;
    }
    // SAFETY: a C string by contract; the visible part is within it and moves to its beginning with its terminator.
    unsafe {
        let bytes = CStr::from_ptr(path).to_bytes_with_nul();
        let length = bytes.len();
        if let Some(offset) = ops::visible_offset(&bytes[..length - 1]) {
            ptr::copy(path.add(offset), path, length - offset);
        }
    }
    path
}

/// Shows the results of a glob.
///
/// # Safety
/// `result` is the result of a glob that was called with `flags` and returned `code`.
pub(super) unsafe fn show_glob(code: c_int, flags: c_int, result: *mut libc::glob_t) {
    if code != 0 || result.is_null() {
        return;
    }
    // SAFETY: after success gl_pathv has gl_pathc strings after gl_offs reserved places.
    unsafe {
        let reserved = if flags & libc::GLOB_DOOFFS != 0 { (*result).gl_offs } else { 0 };
        for index in 0..(*result).gl_pathc {
            shown(*(*result).gl_pathv.add(reserved + index));
        }
    }
}

macro_rules! readlink_hooks {
    ($(fn $name:ident($($pre:ident: $pre_ty:ty),*; path, target, size $(, $post:ident: $post_ty:ty)*) { $dirfd:expr })*)
    => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            $($pre: $pre_ty,)* path: *const c_char, target: *mut c_char, size: size_t $(, $post: $post_ty)*
        ) -> ssize_t {
            let read = |path: *const c_char, target: *mut c_char, size: size_t| {
                real!($name: fn($($pre_ty,)* *const c_char, *mut c_char, size_t $(, $post_ty)*) -> ssize_t; -1;
                    ($($pre,)* path, target, size $(, $post)*))
            };
            // SAFETY: the caller passes a C string and room for `size` bytes.
            unsafe { with_path($dirfd, path, Read, -1, |path| shown_link(path, target, size, read)) }
        }
    )*};
}

readlink_hooks! {
    fn readlink(; path, target, size) { AT_FDCWD }
    fn readlinkat(dirfd: c_int; path, target, size) { dirfd }
    fn __readlink_chk(; path, target, size, room: size_t) { AT_FDCWD }
    fn __readlinkat_chk(dirfd: c_int; path, target, size, room: size_t) { dirfd }
}

/// Reads a link and shows its target.
///
/// # Safety
/// `target` has room for `size` bytes.
unsafe fn shown_link(
    path: *const c_char,
    target: *mut c_char,
    size: size_t,
    read: impl Fn(*const c_char, *mut c_char, size_t) -> ssize_t,
) -> ssize_t {
    let length = read(path, target, size);
    let Ok(used @ 1..) = usize::try_from(length) else { return length };
    if guard::active() {
        return length;
    }
    // SAFETY: the real function has written `used` bytes.
    let found = unsafe { std::slice::from_raw_parts(target.cast::<u8>(), used) };
    if used < size {
        let Some(offset) = ops::visible_offset(found) else { return length };
        // SAFETY: both ranges lie within the bytes that were written.
        unsafe { ptr::copy(target.add(offset), target, used - offset) };
        return (used - offset) as ssize_t;
    }
    // Cut off: what matters may lie behind the end. Trees have long names, so this is rare without one.
    // SAFETY: passed on from our caller.
    unsafe { shown_long_link(path, target, size, read) }.unwrap_or(length)
}

/// Reads a link that did not fit and shows as much of its target as fits; `None` when it does not lead into the tree.
///
/// # Safety
/// `target` has room for `size` bytes.
#[inline(never)]
unsafe fn shown_long_link(
    path: *const c_char,
    target: *mut c_char,
    size: size_t,
    read: impl Fn(*const c_char, *mut c_char, size_t) -> ssize_t,
) -> Option<ssize_t> {
    let mut all = [0u8; ops::PATH_BYTES_MAX];
    let length = usize::try_from(read(path, all.as_mut_ptr().cast(), all.len())).ok()?;
    let visible = &all[ops::visible_offset(&all[..length])?..length];
    let fits = visible.len().min(size);
    // SAFETY: `target` has room for `size` bytes by contract.
    unsafe { ptr::copy_nonoverlapping(visible.as_ptr().cast(), target, fits) };
    Some(fits as ssize_t)
}

macro_rules! realpath_hooks {
    ($(fn $name:ident($($resolved:ident)? $(; $post:ident: $post_ty:ty)?))*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            path: *const c_char $(, $resolved: *mut c_char)? $(, $post: $post_ty)?
        ) -> *mut c_char {
            let out = [$($resolved,)? ptr::null_mut()][0];
            let call = |path| {
                real!($name: fn(*const c_char $(, realpath_hooks!(@pointer $resolved))? $(, $post_ty)?) -> *mut c_char;
                    ptr::null_mut(); (path $(, $resolved)? $(, $post)?))
            };
            // SAFETY: the caller passes a C string, and null or room for PATH_MAX bytes.
            unsafe {
                if let Some(name) = node_path(path, out) {
                    return name;
                }
                shown(with_path(AT_FDCWD, path, Read, ptr::null_mut(), call))
            }
        }
    )*};
    (@pointer $resolved:ident) => { *mut c_char };
}

realpath_hooks! {
    fn realpath(resolved)
    fn __realpath_chk(resolved; room: size_t)
    fn canonicalize_file_name()
}

/// The result of realpath for our device node, which must not betray what it is made of.
///
/// # Safety
/// `path` is null or a C string, `out` null or room for PATH_MAX bytes.
unsafe fn node_path(path: *const c_char, out: *mut c_char) -> Option<*mut c_char> {
    if path.is_null() || guard::active() {
        return None;
    }
    // SAFETY: a C string by contract.
    let name = unsafe { CStr::from_ptr(path) };
    if !ops::mentions_device(name.to_bytes()) {
        return None;
    }
    guard::run(|| {
        let node = ops::node_name(name)?;
        // SAFETY: the name fits into PATH_MAX bytes, as a path that reached us through one does after normalisation;
        // malloc's result is checked, and the caller frees it as realpath's.
        unsafe {
            let out = if out.is_null() { libc::malloc(node.len() + 1).cast::<c_char>() } else { out };
            if !out.is_null() {
                ptr::copy_nonoverlapping(node.as_ptr().cast(), out, node.len());
                *out.add(node.len()) = 0;
            }
            Some(out)
        }
    })?
}

macro_rules! getcwd_hooks {
    ($(fn $name:ident($($arg:ident: $ty:ty),*))*) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name($($arg: $ty),*) -> *mut c_char {
            let path = real!($name: fn($($ty),*) -> *mut c_char; ptr::null_mut(); ($($arg),*));
            // SAFETY: the real function gives null or a C string that belongs to the caller.
            unsafe { shown(path) }
        }
    )*};
}

getcwd_hooks! {
    fn getcwd(buffer: *mut c_char, size: size_t)
    fn __getcwd_chk(buffer: *mut c_char, size: size_t, room: size_t)
    fn get_current_dir_name()
}
