//! Runs the shim's own logic inside a hook: not re-entered, not cancelled, with the caller's errno, panics contained.

use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    // Const and without destructor: usable in every thread at any time, and never allocated lazily.
    static ACTIVE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside [`run`]: hooks then do what libc does and nothing else.
pub(crate) fn active() -> bool {
    ACTIVE.get()
}

/// Runs `logic`; `None` when this thread already runs some, or when it panicked.
///
/// Cancellation is off meanwhile, because a forced unwind must not cross frames that have destructors. The caller has
/// to reach the real function after this returned, with nothing to drop.
pub(crate) fn run<R>(logic: impl FnOnce() -> R) -> Option<R> {
    if ACTIVE.replace(true) {
        return None;
    }
    let errno = errno();
    let cancel = set_cancel_state(PTHREAD_CANCEL_DISABLE);
    let result = catch_unwind(AssertUnwindSafe(logic)).ok();
    set_cancel_state(cancel);
    set_errno(errno);
    ACTIVE.set(false);
    result
}

/// The calling thread's errno.
pub(crate) fn errno() -> c_int {
    // SAFETY: libc returns the address of the thread's errno, valid while the thread runs.
    unsafe { *libc::__errno_location() }
}

/// Sets the calling thread's errno.
pub(crate) fn set_errno(value: c_int) {
    // SAFETY: as in `errno`.
    unsafe { *libc::__errno_location() = value }
}

/// PTHREAD_CANCEL_DISABLE of pthread.h.
const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

fn set_cancel_state(state: c_int) -> c_int {
    let mut old = 0;
    // SAFETY: `old` is valid for the call; an invalid state is refused without effect.
    unsafe { pthread_setcancelstate(state, &mut old) };
    old
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn run__is_not_reentered_and_keeps_errno() {
        set_errno(7);
        let inner = run(|| {
            set_errno(9);
            (active(), run(|| ()))
        });
        assert_eq!(inner, Some((true, None)));
        assert_eq!(errno(), 7);
        assert!(!active());
    }

    #[test]
    fn run__contains_a_panic() {
        assert_eq!(run(|| panic!("expected in this test")), None::<()>);
        assert!(!active());
    }
}
