//! Fork and exit: a child never waits for a lock that a thread of its parent held, and peers hear of an orderly end.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{MutexGuard, Once};

use super::service::Service;
use super::{RUNNING, lock, os};
use crate::guard;

/// This process is a child that has not used the device yet.
static IS_CHILD: AtomicBool = AtomicBool::new(false);
/// This process has forked, so that its end need not be the end of its connections.
static HAS_FORKED: AtomicBool = AtomicBool::new(false);

/// The lock while a fork is on its way.
struct Held(UnsafeCell<Option<MutexGuard<'static, Option<Service>>>>);

// SAFETY: only the thread that forks touches it, between `prepare` and `in_parent` or `in_child`, and libc runs the
// handlers of one fork at a time in that thread; the lock itself keeps a second forking thread out of `prepare`.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(None));

/// Whether this process inherited what the service has.
pub(super) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Acquire)
}

/// Ends being a child: from now on what is there is this process's own.
pub(super) fn begin_as_parent() {
    IS_CHILD.store(false, Ordering::Release);
}

/// Arranges for all this, once.
pub(super) fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handlers are functions of this library, which is never unloaded.
        unsafe {
            libc::pthread_atfork(Some(prepare), Some(in_parent), Some(in_child));
            libc::atexit(at_exit);
        }
    });
}

extern "C" fn prepare() {
    // The thread that forks may hold no lock of ours: it is not inside a hook.
    let held = lock();
    // SAFETY: see `Held`; we have the lock.
    unsafe { *HELD.0.get() = Some(held) };
}

extern "C" fn in_parent() {
    HAS_FORKED.store(true, Ordering::Release);
    // SAFETY: see `Held`; this thread still has the lock.
    unsafe { *HELD.0.get() = None };
}

extern "C" fn in_child() {
    IS_CHILD.store(true, Ordering::Release);
    HAS_FORKED.store(false, Ordering::Release);
    // Threads are not inherited.
    RUNNING.store(false, Ordering::Release);
    // SAFETY: see `Held`; this thread is the copy of the one that has the lock.
    unsafe { *HELD.0.get() = None };
}

/// Says goodbye, once, without waiting for answers; a packet that is lost is made up for by the peers' watching.
extern "C" fn at_exit() {
    if is_child() || HAS_FORKED.load(Ordering::Acquire) {
        return;
    }
    let _ = guard::run(|| {
        if let Some(service) = lock().as_mut().filter(|service| service.is_intact()) {
            service.machine.farewell();
            service.flush(os::now_us());
        }
    });
}
