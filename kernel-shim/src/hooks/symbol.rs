//! Finds the function that a hook stands in front of.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The next definition of a symbol after ours; looked up at its first use, without lock or allocation.
pub(super) struct Symbol {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
}

impl Symbol {
    pub(super) const fn new(name: &'static CStr) -> Symbol {
        Symbol { name, address: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The function's address; null, with errno ENOSYS, when this libc has none.
    #[inline]
    pub(super) fn get(&self) -> *mut c_void {
        let known = self.address.load(Ordering::Relaxed);
        if known.is_null() { self.find() } else { known }
    }

    #[cold]
    fn find(&self) -> *mut c_void {
        // SAFETY: the names are C strings; a lookup changes nothing but the loader's own state.
        let found = unsafe {
            let newest = libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr());
            // Symbols that only old programs use have no default version.
            if newest.is_null() {
                libc::dlvsym(libc::RTLD_NEXT, self.name.as_ptr(), OLDEST_VERSION.as_ptr())
            } else {
                newest
            }
        };
        if found.is_null() {
            crate::guard::set_errno(libc::ENOSYS);
        }
        self.address.store(found, Ordering::Relaxed);
        found
    }
}

/// The first symbol version of glibc on this architecture.
const OLDEST_VERSION: &CStr = if cfg!(target_arch = "x86_64") { c"GLIBC_2.2.5" } else { c"GLIBC_2.17" };

/// Calls the real function of hook `$name` with its C type; `$fail` when this libc has none.
macro_rules! real {
    ($name:ident: fn($($ty:ty),*) -> $ret:ty; $fail:expr; ($($arg:expr),*)) => {{
        static SYMBOL: $crate::hooks::symbol::Symbol = $crate::hooks::symbol::Symbol::new(
            match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("an identifier contains no NUL"),
            },
        );
        let address = SYMBOL.get();
        if address.is_null() {
            $fail
        } else {
            // SAFETY: the symbol of this name has this type in libc, and the arguments are those of the hook's caller
            // or, for a path, a C string that outlives the call.
            unsafe {
                std::mem::transmute::<*mut std::ffi::c_void, unsafe extern "C-unwind" fn($($ty),*) -> $ret>(address)(
                    $($arg),*
                )
            }
        }
    }};
}
pub(super) use real;
