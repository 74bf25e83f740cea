//! Doorbells: which QPs and SRQs have posted work the core has not seen. Lock-free, allocation-free: one bit per
//! queue under a summary, and one flag over everything.
//!
//! A poster sets the bit, then the flag, then tries to drive. A step clears the flag, then takes the bits. So a bit
//! set after the step looked leaves the flag set, and whoever unlocks the engine re-reads the flag: no ring is lost.

use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};

/// What has work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Send queue of the QP with this index.
    Send,
    /// Receive queue of the QP with this index.
    Recv,
    /// Shared receive queue with this number.
    Srq,
}

/// All doorbells of an engine.
#[derive(Debug)]
pub(crate) struct Doorbell {
    rung: AtomicBool,
    send: Bits,
    recv: Bits,
    srq: Bits,
}

impl Doorbell {
    /// Doorbells for queue numbers below `queues`.
    pub(crate) fn new(queues: usize) -> Self {
        Doorbell {
            rung: AtomicBool::new(false),
            send: Bits::new(queues),
            recv: Bits::new(queues),
            srq: Bits::new(queues),
        }
    }
    fn bits(&self, queue: Queue) -> &Bits {
        match queue {
            Queue::Send => &self.send,
            Queue::Recv => &self.recv,
            Queue::Srq => &self.srq,
        }
    }
    /// Says that queue `index` has work. After it, try to drive.
    pub(crate) fn ring(&self, queue: Queue, index: usize) {
        self.bits(queue).set(index);
        self.rung.store(true, Ordering::SeqCst);
        // Pairs with the fence in `is_rung`: either the try-lock that follows sees the engine unlocked, or the
        // unlocker sees the flag.
        fence(Ordering::SeqCst);
    }
    /// To be asked after every unlock of the engine: somebody rang and may have failed to get the lock.
    pub(crate) fn is_rung(&self) -> bool {
        fence(Ordering::SeqCst);
        self.rung.load(Ordering::SeqCst)
    }
    /// Clears the flag; `true` if it was set, and then all bits have to be taken.
    pub(crate) fn answer(&self) -> bool {
        self.rung.load(Ordering::Relaxed) && self.rung.swap(false, Ordering::SeqCst)
    }
    /// Takes the bits of one kind of queue, calling `f` with each number.
    pub(crate) fn take(&self, queue: Queue, f: impl FnMut(usize)) {
        self.bits(queue).take(f);
    }
}

/// A set of small numbers: words, and a summary bit per word.
#[derive(Debug)]
struct Bits {
    summary: Box<[AtomicU64]>,
    words: Box<[AtomicU64]>,
}

impl Bits {
    fn new(len: usize) -> Self {
        let zeros = |n: usize| (0..n).map(|_| AtomicU64::new(0)).collect();
        let words = len.div_ceil(64);
        Bits { summary: zeros(words.div_ceil(64)), words: zeros(words) }
    }
    fn set(&self, index: usize) {
        let word = index / 64;
        self.words[word].fetch_or(1 << (index % 64), Ordering::SeqCst);
        // After the word, because `take` reads in the opposite order.
        self.summary[word / 64].fetch_or(1 << (word % 64), Ordering::SeqCst);
    }
    fn take(&self, mut f: impl FnMut(usize)) {
        for (s, summary) in self.summary.iter().enumerate() {
            if summary.load(Ordering::Relaxed) == 0 {
                continue;
            }
            for_each_bit(summary.swap(0, Ordering::SeqCst), |bit| {
                let word = s * 64 + bit;
                for_each_bit(self.words[word].swap(0, Ordering::SeqCst), |bit| f(word * 64 + bit));
            });
        }
    }
}

fn for_each_bit(mut word: u64, mut f: impl FnMut(usize)) {
    while word != 0 {
        f(word.trailing_zeros() as usize);
        word &= word - 1;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn taken(bell: &Doorbell, queue: Queue) -> Vec<usize> {
        let mut all = Vec::new();
        bell.take(queue, |i| all.push(i));
        all
    }

    #[test]
    fn ring__taken_once() {
        let bell = Doorbell::new(1 << 14);
        assert!(!bell.answer());
        for i in [0, 63, 64, 4095, 4096, 16383] {
            bell.ring(Queue::Send, i);
            bell.ring(Queue::Send, i);
        }
        bell.ring(Queue::Recv, 5);
        assert!(bell.is_rung() && bell.answer() && !bell.is_rung());
        assert_eq!(taken(&bell, Queue::Send), [0, 63, 64, 4095, 4096, 16383]);
        assert_eq!(taken(&bell, Queue::Send), []);
        assert_eq!(taken(&bell, Queue::Recv), [5]);
        assert_eq!(taken(&bell, Queue::Srq), []);
    }

    #[test]
    fn ring__none_lost_between_try_lockers() {
        // Two posters ring and drive under a try-lock as the engine does; every item must be taken in the end.
        use parking_lot::Mutex;
        use std::sync::atomic::{AtomicU64, Ordering};
        let bell = Doorbell::new(128);
        let posted = [AtomicU64::new(0), AtomicU64::new(0)];
        let seen = Mutex::new([0u64; 2]);
        std::thread::scope(|s| {
            for me in 0..2usize {
                let (bell, posted, seen) = (&bell, &posted, &seen);
                s.spawn(move || {
                    for _ in 0..100_000 {
                        posted[me].fetch_add(1, Ordering::SeqCst);
                        bell.ring(Queue::Send, me * 64);
                        loop {
                            let Some(mut seen) = seen.try_lock() else { break };
                            if bell.answer() {
                                bell.take(Queue::Send, |i| {
                                    seen[i / 64] = posted[i / 64].load(Ordering::SeqCst);
                                });
                            }
                            drop(seen);
                            if !bell.is_rung() {
                                break;
                            }
                        }
                    }
                });
            }
        });
        assert!(!bell.is_rung());
        assert_eq!(*seen.lock(), [100_000; 2]);
    }
}
