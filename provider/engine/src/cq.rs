//! Completion queues: polling, arming, resizing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use metaroce_proto::{Completion, CqId, Nanos, Qpn};
use parking_lot::Mutex;

use crate::Errno;
use crate::arm::Armed;
use crate::depth::Returns;
use crate::device::Device;
use crate::drive::Engine;
use crate::limits::CQE_MAX;
use crate::outbox::Outbox;
use crate::ring::{self, Consumer};

/// Receives notifications for one CQ; implemented by the verbs edge, which writes them into FIFOs.
///
/// Called from engine steps, on any thread, with the engine's lock held: must neither block nor call the engine.
pub trait CqNotify: Send + Sync {
    /// The CQ was armed and a completion of the kind asked for came.
    fn completion_event(&self);
    /// The CQ overflowed (`IBV_EVENT_CQ_ERR`); raised once.
    fn error(&self);
}

/// A completion queue.
///
/// [`Cq::destroy`] ends it; dropping it does the same if nothing uses it any more.
pub struct Cq {
    shared: Arc<CqShared>,
    device: Arc<Device>,
}

/// The part of a CQ that the engine's step knows too.
pub(crate) struct CqShared {
    id: CqId,
    notify: Option<Box<dyn CqNotify>>,
    /// Never taken by a step.
    consumer: Mutex<Consumer>,
    armed: Armed,
    capacity: AtomicU32,
    /// QPs (send and receive side) that complete here; changed under the engine's lock.
    users: AtomicU32,
    overruns: AtomicU64,
    /// Notification after so many completions at the latest; at most 1: after each.
    moderation_count: AtomicU32,
    /// Notification so long (nanoseconds) after the first completion at the latest; 0: at once.
    moderation_ns: AtomicU64,
    /// Completions since the last notification while one was held back; a step's own.
    held: AtomicU32,
}

impl CqShared {
    pub(crate) fn id(&self) -> CqId {
        self.id
    }
    pub(crate) fn add_user(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }
    pub(crate) fn remove_user(&self) {
        self.users.fetch_sub(1, Ordering::Relaxed);
    }
    pub(crate) fn count_overrun(&self) {
        self.overruns.fetch_add(1, Ordering::Relaxed);
    }
    pub(crate) fn notify_error(&self) {
        log::warn!("CQ {} overflowed: completions are lost", self.id);
        if let Some(notify) = &self.notify {
            notify.error();
        }
    }

    /// `fresh` entries have just been published, `solicited` ones among them or not: tells who asked, once. Gives
    /// how long to hold the notification back, if it is moderated and not due.
    pub(crate) fn fire(&self, solicited: bool, fresh: u32, engine: &Engine) -> Option<Nanos> {
        let period = self.moderation_ns.load(Ordering::Relaxed);
        if period > 0 {
            if !self.armed.would_fire(solicited) {
                return None;
            }
            let held = self.held.load(Ordering::Relaxed).saturating_add(fresh);
            self.held.store(held, Ordering::Relaxed);
            if held < self.moderation_count.load(Ordering::Relaxed) {
                return Some(period);
            }
        }
        if self.armed.fire(solicited) {
            self.notify_completion(engine);
        }
        None
    }
    /// A notification held back is due.
    pub(crate) fn fire_held(&self, engine: &Engine) {
        if self.armed.disarm() {
            self.notify_completion(engine);
        }
    }
    fn notify_completion(&self, engine: &Engine) {
        self.held.store(0, Ordering::Relaxed);
        engine.park.disarmed();
        if let Some(notify) = &self.notify {
            notify.completion_event();
        }
    }
}

impl Cq {
    pub(crate) fn create(
        device: &Arc<Device>,
        cqe: u32,
        stamped: bool,
        notify: Option<Box<dyn CqNotify>>,
    ) -> Result<Arc<Cq>, Errno> {
        if cqe == 0 || cqe > CQE_MAX {
            return Err(libc::EINVAL);
        }
        let (producer, consumer) = ring::ring(cqe, stamped)?;
        let capacity = ring::capacity(&producer);
        let shared = device.engine().control(|core, _| {
            Ok(core.out.add_cq(producer, |id| CqShared {
                id,
                notify,
                consumer: Mutex::new(consumer),
                armed: Armed::new(),
                capacity: AtomicU32::new(capacity),
                users: AtomicU32::new(0),
                overruns: AtomicU64::new(0),
                moderation_count: AtomicU32::new(0),
                moderation_ns: AtomicU64::new(0),
                held: AtomicU32::new(0),
            }))
        })?;
        Ok(Arc::new(Cq { shared, device: device.clone() }))
    }

    pub(crate) fn shared(&self) -> &Arc<CqShared> {
        &self.shared
    }

    /// Hands up to `max` completions to `f`, oldest first, and gives their number. When none is there, drives the
    /// engine once and looks again; when that brought nothing either, the processor was offered to others.
    /// `f` must not poll the same CQ.
    pub fn poll(&self, max: usize, mut f: impl FnMut(&Completion)) -> usize {
        self.poll_stamped(max, |completion, _| f(completion))
    }

    /// As [`Cq::poll`], and says when each completion came (as [`Device::clock_ns`]; 0 unless the CQ was made for it).
    pub fn poll_stamped(&self, max: usize, mut f: impl FnMut(&Completion, Nanos)) -> usize {
        let engine = self.device.engine();
        if engine.is_dead() || max == 0 {
            return 0;
        }
        let taken = self.take(max, &mut f);
        if taken > 0 {
            return taken;
        }
        engine.poll_drive();
        self.take(max, &mut f)
    }

    fn take(&self, max: usize, f: &mut impl FnMut(&Completion, Nanos)) -> usize {
        let depths = &self.device.engine().depths;
        let mut consumer = self.shared.consumer.lock();
        let mut taken = 0;
        let mut returns = Returns::default();
        while taken < max {
            let Some(completion) = consumer.pop() else { break };
            if !returns.add(&completion) {
                consumer.release();
                depths.release(std::mem::replace(&mut returns, Returns::of(&completion)));
            }
            f(&completion, consumer.stamp());
            taken += 1;
        }
        if taken > 0 {
            // The entries first: who finds room in a queue may complete in the slot of what it takes the place of.
            consumer.release();
            depths.release(returns);
        }
        taken
    }

    /// Asks to be told of the next completion (`solicited_only`: the next solicited or failed one), once. A request
    /// for any is not weakened by one for solicited ones. Completions that came before are not told of: poll after
    /// arming, as the manual says; between the two nothing is lost.
    pub fn arm(&self, solicited_only: bool) {
        let engine = self.device.engine();
        if engine.is_dead() {
            return;
        }
        if self.shared.armed.arm(solicited_only) {
            engine.armed();
        }
    }

    /// Changes the capacity to at least `cqe`; gives the new one. EINVAL when it is out of range or below the number
    /// of completions pending, ENOMEM.
    pub fn resize(&self, cqe: u32) -> Result<u32, Errno> {
        if cqe == 0 || cqe > CQE_MAX {
            return Err(libc::EINVAL);
        }
        let engine = self.device.engine();
        engine.control(|core, _| {
            // What was posted just before may have completed and not be shown; moving wants all of it shown.
            core.out.publish(engine);
            let slot = core.out.cq(self.shared.id).ok_or(libc::EINVAL)?;
            let mut consumer = self.shared.consumer.lock();
            let capacity = ring::replace(&mut slot.producer, &mut consumer, cqe)?;
            self.shared.capacity.store(capacity, Ordering::Relaxed);
            Ok(capacity)
        })
    }

    /// Holds notifications back until `count` completions have come or `period_us` microseconds have passed since the
    /// first; a period of 0 ends it.
    pub fn moderate(&self, count: u16, period_us: u16) -> Result<(), Errno> {
        self.device.engine().control(|_, _| {
            self.shared.moderation_count.store(count.into(), Ordering::Relaxed);
            self.shared.moderation_ns.store(u64::from(period_us) * 1000, Ordering::Relaxed);
            Ok(())
        })
    }

    /// Completions it can hold.
    pub fn capacity(&self) -> u32 {
        self.shared.capacity.load(Ordering::Relaxed)
    }

    /// Completions lost because the CQ was full.
    pub fn overruns(&self) -> u64 {
        self.shared.overruns.load(Ordering::Relaxed)
    }

    /// Ends the CQ. EBUSY while QPs use it.
    pub fn destroy(&self) -> Result<(), Errno> {
        let engine = self.device.engine();
        engine.control(|core, _| {
            if self.shared.users.load(Ordering::Relaxed) > 0 {
                return Err(libc::EBUSY);
            }
            let is_ours =
                core.out.cq(self.shared.id).is_some_and(|slot| Arc::ptr_eq(&slot.shared, &self.shared));
            if is_ours {
                core.out.remove_cq(self.shared.id);
                if self.shared.armed.disarm() {
                    engine.park.disarmed();
                }
            }
            Ok(())
        })
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // Whoever still needs it holds an Arc; in the child of a fork there is nothing to end.
        let _ = self.destroy();
    }
}

/// Removes a QP's completions from a CQ. Gives how many of them held a slot of a receive queue (`rq_release`).
pub(crate) fn purge(out: &mut Outbox, cq: &CqShared, qpn: Qpn) -> u32 {
    let mut released = 0;
    if let Some(slot) = out.cq(cq.id) {
        ring::purge(&mut slot.producer, &mut cq.consumer.lock(), |completion| {
            let doomed = completion.qpn == qpn;
            released += if doomed { completion.rq_release } else { 0 };
            doomed
        });
    }
    released
}
