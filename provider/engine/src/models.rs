//! Loom models of what is shared without a lock: ring, arming, doorbell, and memory under deregistration. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p metaroce-engine --lib --release models`.

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::sync::{Arc, Mutex};
use loom::thread;
use metaroce_proto::{Completion, Qpn, WcOpcode};

use crate::arm::Armed;
use crate::doorbell::{Doorbell, Queue};
use crate::ring;

fn completion(wr_id: u64) -> Completion {
    let number = wr_id as u32;
    Completion { byte_len: number, sq_release: number, ..Completion::new(wr_id, WcOpcode::Recv, Qpn(number)) }
}

#[test]
fn ring__entries_are_whole_and_in_order() {
    loom::model(|| {
        let (mut producer, mut consumer) = ring::ring(2, false).unwrap();
        let filler = thread::spawn(move || {
            let mut pushed = 0;
            for wr_id in 1..=3 {
                pushed += u64::from(producer.push(&completion(wr_id), 0));
                producer.publish();
            }
            pushed
        });
        let mut seen = 0;
        for _ in 0..2 {
            while let Some(c) = consumer.pop() {
                let word = c.wr_id as u32;
                assert!(c.wr_id > seen && c.byte_len == word && c.qpn.0 == word && c.sq_release == word);
                seen = c.wr_id;
            }
            consumer.release();
        }
        assert!(filler.join().unwrap() >= 2);
    });
}

#[test]
fn arm__poll_sees_the_entry_or_the_step_sees_the_arming() {
    loom::model(|| {
        let (mut producer, mut consumer) = ring::ring(1, false).unwrap();
        let armed = Arc::new(Armed::new());
        let step = {
            let armed = armed.clone();
            thread::spawn(move || {
                assert!(producer.push(&completion(1), 0));
                producer.publish();
                Armed::published();
                armed.fire(false)
            })
        };
        armed.arm(false);
        let polled = consumer.pop().is_some();
        assert!(step.join().unwrap() || polled);
    });
}

#[test]
fn doorbell__whoever_unlocks_does_it() {
    loom::model(|| {
        let bell = Arc::new(Doorbell::new(64));
        let posted = Arc::new([AtomicU32::new(0), AtomicU32::new(0)]);
        let taken = Arc::new(Mutex::new([0u32; 2]));
        let post = |me: usize| {
            let (bell, posted, taken) = (bell.clone(), posted.clone(), taken.clone());
            move || {
                posted[me].store(1, Ordering::Relaxed);
                bell.ring(Queue::Send, me);
                loop {
                    let Ok(mut taken) = taken.try_lock() else { break };
                    if bell.answer() {
                        bell.take(Queue::Send, |i| taken[i] = posted[i].load(Ordering::Relaxed));
                    }
                    drop(taken);
                    if !bell.is_rung() {
                        break;
                    }
                }
            }
        };
        let other = thread::spawn(post(0));
        post(1)();
        other.join().unwrap();
        assert_eq!(*taken.lock().unwrap(), [1, 1]);
    });
}

/// A lock made of what loom watches: its own mutex is released without being looked at, so that a try-lock that fails
/// is never explored.
struct Lock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through `try_with` alone, by whoever has the lock.
unsafe impl<T: Send> Sync for Lock<T> {}

impl<T> Lock<T> {
    fn new(value: T) -> Lock<T> {
        Lock { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// `None` when somebody else has it.
    fn try_with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.held.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // SAFETY: we have the lock.
        let result = self.value.with_mut(|value| unsafe { work(&mut *value) });
        self.held.store(false, Ordering::Release);
        Some(result)
    }
}

/// A device as deregistration and steps see it: the key and the posted Write that names it are under the steps' lock,
/// the memory behind the key is under none.
struct Registered {
    bell: Doorbell,
    posted: AtomicU32,
    core: Lock<Key>,
    memory: UnsafeCell<u32>,
}

// SAFETY: the memory is touched by steps under the lock while the key lives and by its owner afterwards; that this
// keeps them apart is what the model shows, by loom's own check of the cell.
unsafe impl Sync for Registered {}

/// What the lock guards.
#[derive(Default)]
struct Key {
    is_dead: bool,
    placed: u32,
    refused: u32,
}

impl Registered {
    fn new() -> Arc<Registered> {
        Arc::new(Registered {
            bell: Doorbell::new(64),
            posted: AtomicU32::new(0),
            core: Lock::new(Key::default()),
            memory: UnsafeCell::new(0),
        })
    }

    /// As `Core::step`: what was posted touches memory if its key lives, and fails if not.
    fn step(&self, key: &mut Key) {
        if !self.bell.answer() {
            return;
        }
        let mut found = false;
        self.bell.take(Queue::Send, |_| found = self.posted.load(Ordering::Relaxed) != 0);
        if found && key.is_dead {
            key.refused += 1;
        } else if found {
            // SAFETY: see `Registered`.
            self.memory.with_mut(|byte| unsafe { *byte += 1 });
            key.placed += 1;
        }
    }

    /// As `Engine::ring` behind a post, and as `Engine::unlock` after it.
    fn post(&self) {
        self.posted.store(1, Ordering::Relaxed);
        self.bell.ring(Queue::Send, 0);
        while self.core.try_with(|key| self.step(key)).is_some() && self.bell.is_rung() {}
    }

    /// As `Device::deregister_mr`, behind what was posted before it, or as one that does not wait for a step.
    fn deregister(&self, waits: bool) {
        let kill = |key: &mut Key| {
            self.step(key);
            key.is_dead = true;
        };
        while self.core.try_with(kill).is_none() && waits {
            thread::yield_now();
        }
        while self.bell.is_rung() && self.core.try_with(|key| self.step(key)).is_some() {}
    }
}

/// One thread posts; the other deregisters, and takes the memory for something else.
fn deregistration(waits: bool) {
    loom::model(move || {
        let device = Registered::new();
        let poster = {
            let device = device.clone();
            thread::spawn(move || device.post())
        };
        device.deregister(waits);
        // SAFETY: the key is dead. Loom fails the model if a step's access is not ordered before this one.
        let placed = device.memory.with_mut(|byte| unsafe { std::mem::replace(&mut *byte, 77) });
        poster.join().unwrap();
        let seen = device.core.try_with(|key| (key.placed, key.placed + key.refused));
        assert_eq!(seen, Some((placed, 1)));
        // SAFETY: the other thread has ended.
        assert_eq!(device.memory.with(|byte| unsafe { *byte }), 77);
    });
}

#[test]
fn deregistration__no_step_touches_memory_after_it_and_no_post_is_lost() {
    deregistration(true);
}

#[test]
#[should_panic]
fn deregistration__that_does_not_wait_for_a_step_is_found_out() {
    deregistration(false);
}
