//! Loom models of what is shared without a lock: ring, arming, doorbell. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p metaroce-engine --lib --release models`.

use loom::sync::atomic::{AtomicU32, Ordering};
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
        let (mut producer, mut consumer) = ring::ring(2, false);
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
        let (mut producer, mut consumer) = ring::ring(1, false);
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
