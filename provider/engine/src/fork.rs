//! Fork: the child's copy of a device is dead (its calls give EIO and never hang), its sockets are closed there, and
//! the child may open a device of its own.
//!
//! The fork happens with every engine's lock held, so no step is half done in the child; the parent unlocks, the child
//! leaves its copies locked for ever and does not touch them.

use std::cell::RefCell;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};

use crate::device::Device;
use crate::drive::Engine;
use crate::engine::Core;

/// All engines of the process.
pub(crate) struct Registry {
    /// The process's device.
    pub(crate) device: Weak<Device>,
    engines: Vec<Weak<Engine>>,
}

/// The registry. A lock of the standard library, because that one can be unlocked in the child of a fork.
pub(crate) fn registry() -> &'static Mutex<Registry> {
    static REGISTRY: Mutex<Registry> = Mutex::new(Registry { device: Weak::new(), engines: Vec::new() });
    &REGISTRY
}

impl Registry {
    /// Takes a new engine in; from the first on, forks are watched.
    pub(crate) fn add(&mut self, engine: &Arc<Engine>) {
        static HANDLERS: Once = Once::new();
        HANDLERS.call_once(|| {
            // SAFETY: the three functions are safe to call at any time from any thread, and the library that holds
            // them is never unloaded (libibverbs does not close providers).
            let error = unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
            if error != 0 {
                log::warn!("forks are not watched: pthread_atfork gave errno {error}");
            }
        });
        self.engines.retain(|engine| engine.strong_count() > 0);
        self.engines.push(Arc::downgrade(engine));
    }
}

/// What the forking thread holds across the fork.
struct Held {
    registry: MutexGuard<'static, Registry>,
    engines: Vec<(Arc<Engine>, Vec<RawFd>)>,
}

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

extern "C" fn prepare() {
    let registry = registry().lock().unwrap_or_else(PoisonError::into_inner);
    let mut engines = Vec::new();
    for engine in registry.engines.iter().filter_map(Weak::upgrade).filter(|engine| !engine.is_dead()) {
        let core = engine.core.lock();
        let fds = descriptors(&engine, &core);
        std::mem::forget(core);
        engines.push((engine, fds));
    }
    // A thread whose local storage is gone does not fork.
    let _ = HELD.try_with(|held| held.replace(Some(Held { registry, engines })));
}

extern "C" fn parent() {
    let held = HELD.try_with(RefCell::take).ok().flatten();
    let Some(Held { engines, registry }) = held else { return };
    drop(registry);
    for (engine, _) in engines {
        // SAFETY: `prepare` locked it on this thread and forgot the guard.
        unsafe { engine.core.force_unlock() };
        if engine.bell.is_rung() {
            // Posters who failed to get the lock rely on the one who had it.
            engine.park.signal();
        }
    }
}

extern "C" fn child() {
    let held = HELD.try_with(RefCell::take).ok().flatten();
    let Some(Held { engines, mut registry }) = held else { return };
    registry.device = Weak::new();
    for (engine, fds) in engines {
        engine.die();
        for fd in fds {
            // SAFETY: the descriptors belong to the dead copy, which nobody uses or drops any more: `die` stops all
            // calls, and the reference forgotten here keeps it from being dropped.
            unsafe { libc::close(fd) };
        }
        std::mem::forget(engine);
    }
    registry.engines.clear();
}

fn descriptors(engine: &Engine, core: &Core) -> Vec<RawFd> {
    let io = core.io.iter().flat_map(|io| io.tx.fds().chain([io.rx.fd()]));
    let groups = core.io.iter().flat_map(|io| io.groups.iter().flat_map(|groups| groups.fds()));
    let aside = engine.aside.lock();
    io.chain(groups)
        .chain(engine.park.wake.get().map(|wake| wake.fd()))
        .chain(aside.iter().copied())
        .collect()
}
