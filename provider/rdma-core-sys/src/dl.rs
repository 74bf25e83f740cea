//! The provider's way to the copy of libibverbs that loaded it: by `dlsym`, never by linking.
//!
//! Linking would bind to the wrong symbol versions when libibverbs came in by an `RTLD_LOCAL` dlopen, or to a second
//! copy when the program bundles its own.

use std::ffi::{CStr, c_void};

use crate::private::{verbs_context_ops, verbs_device_ops};
use crate::{__be64, ibv_context, ibv_device, verbs_context};

/// The functions of libibverbs a provider calls, resolved once by its constructor.
#[derive(Debug, Clone, Copy)]
pub struct Libibverbs {
    /// `verbs_register_driver_34`: makes the driver known.
    pub register_driver: unsafe extern "C" fn(*const verbs_device_ops),
    /// `_verbs_init_and_alloc_context(device, cmd_fd, size, offset, driver_id)`: zeroed memory of `size` bytes with
    /// an initialised `verbs_context` at `offset`; NULL with errno (and `cmd_fd` closed) on failure.
    pub init_and_alloc_context:
        unsafe extern "C" fn(*mut ibv_device, i32, usize, *mut verbs_context, u32) -> *mut c_void,
    /// `verbs_set_ops`: takes over every op that is not NULL.
    pub set_ops: unsafe extern "C" fn(*mut verbs_context, *const verbs_context_ops),
    /// `verbs_uninit_context`: closes the fds; the memory stays with the provider (`free`).
    pub uninit_context: unsafe extern "C" fn(*mut verbs_context),
    /// `ibv_get_device_guid`.
    pub get_device_guid: unsafe extern "C" fn(*mut ibv_device) -> __be64,
}

/// Why libibverbs cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DlError {
    /// No libibverbs.so.1 is loaded and the program exports none either.
    NotLoaded,
    /// It lacks this symbol: another private ABI.
    Missing(&'static CStr),
}

impl Libibverbs {
    /// Resolves the functions in the libibverbs that is loaded already.
    ///
    /// # Errors
    /// [`DlError`] when none is loaded or it speaks another private ABI.
    pub fn resolve() -> Result<Self, DlError> {
        // SAFETY: plain dlopen of a constant, NUL-terminated name; NOLOAD runs no initialiser.
        let loaded = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
        // A program that bundles libibverbs has it under another name, or inside itself.
        let handle = if loaded.is_null() { libc::RTLD_DEFAULT } else { loaded };
        // SAFETY: a dlopen handle or RTLD_DEFAULT.
        unsafe { Self::resolve_in(handle) }.map_err(|e| if loaded.is_null() { DlError::NotLoaded } else { e })
    }

    /// # Safety
    /// `handle` is a dlopen handle or RTLD_DEFAULT.
    unsafe fn resolve_in(handle: *mut c_void) -> Result<Self, DlError> {
        // SAFETY: each symbol has, in every libibverbs that exports it, the type of the field it is put into.
        unsafe {
            Ok(Self {
                register_driver: symbol(handle, c"verbs_register_driver_34")?,
                init_and_alloc_context: symbol(handle, c"_verbs_init_and_alloc_context")?,
                set_ops: symbol(handle, c"verbs_set_ops")?,
                uninit_context: symbol(handle, c"verbs_uninit_context")?,
                get_device_guid: symbol(handle, c"ibv_get_device_guid")?,
            })
        }
    }
}

/// Looks up a function.
///
/// # Safety
/// `F` is a function pointer type and the right one for `name`.
unsafe fn symbol<F: Copy>(handle: *mut c_void, name: &'static CStr) -> Result<F, DlError> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: handle is a dlopen handle or RTLD_DEFAULT, name is NUL-terminated.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if address.is_null() {
        return Err(DlError::Missing(name));
    }
    // SAFETY: same size (asserted); the caller vouches for the type.
    Ok(unsafe { std::mem::transmute_copy::<*mut c_void, F>(&address) })
}

/// `ibv_context` is the last member of `verbs_context`; gives the outer one.
///
/// # Safety
/// `context` lies in a `verbs_context` of the layout these bindings were made from.
pub unsafe fn verbs_context_of(context: *mut ibv_context) -> *mut verbs_context {
    // SAFETY: upheld by the caller; stays inside one allocation.
    unsafe { context.byte_sub(std::mem::offset_of!(verbs_context, context)).cast() }
}
