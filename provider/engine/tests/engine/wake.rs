//! Notification, idleness, forks and the end of a device.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::common::*;
use metaroce_config::Impairment;
use metaroce_engine::{CqNotify, Device};
use metaroce_proto::{Opcode, WcStatus};

const CLEAN: Impairment = Impairment { loss: 0.0, reorder: 0.0, dup: 0.0, delay_us: 0, seed: 1 };

/// Passes events on to a channel, as the verbs edge does to a FIFO.
struct Channel {
    events: mpsc::Sender<()>,
    errors: Arc<AtomicU32>,
}

impl CqNotify for Channel {
    fn completion_event(&self) {
        // The test may have ended.
        let _ = self.events.send(());
    }
    fn error(&self) {
        self.errors.fetch_add(1, Ordering::SeqCst);
    }
}

/// An end whose QP completes on a CQ of `cqe` entries with a channel.
fn end_with_channel(base_port: u16, cqe: u32) -> (End, mpsc::Receiver<()>, Arc<AtomicU32>) {
    let mut end = End::new(config(base_port, CLEAN), 4096);
    let (events, receiver) = mpsc::channel();
    let errors = Arc::new(AtomicU32::new(0));
    let notify = Channel { events, errors: errors.clone() };
    end.cq = end.device.create_cq(cqe, Some(Box::new(notify))).unwrap();
    end.qp = end.device.create_qp(&qp_of(end.pd, &end.cq, None), None).unwrap();
    (end, receiver, errors)
}

#[test]
fn arm__no_event_is_lost_between_arming_and_polling() {
    // The usual discipline: wait for the event, arm again, poll until empty. Every round trip sleeps on both sides.
    let (a, a_events, _) = end_with_channel(51_000, 64);
    let (b, b_events, _) = end_with_channel(51_000, 64);
    connect(&a.qp, &b.qp);
    let wait = |end: &End, events: &mpsc::Receiver<()>, count: usize| {
        let mut got = 0;
        while got < count {
            events.recv_timeout(Duration::from_secs(10)).expect("an event for every completion after arming");
            end.cq.arm(false);
            while end.cq.poll(16, |c| assert_eq!(c.status, WcStatus::Success)) > 0 {
                got += 1;
            }
        }
    };
    a.cq.arm(false);
    b.cq.arm(false);
    const ROUNDS: usize = 500;
    std::thread::scope(|s| {
        let (b, wait) = (&b, &wait);
        s.spawn(move || {
            for _ in 0..ROUNDS {
                b.qp.post_recv(1, [b.sge(0, 8)].into_iter()).unwrap();
                wait(b, &b_events, 1);
            }
        });
        for _ in 0..ROUNDS {
            a.post(Opcode::Send, a.sge(0, 8), (0, 0));
            wait(&a, &a_events, 1);
        }
    });
}

#[test]
fn arm__one_event_per_arming_and_none_for_what_came_before() {
    let (a, a_events, _) = end_with_channel(52_000, 64);
    let b = End::new(config(52_000, CLEAN), 4096);
    connect(&a.qp, &b.qp);
    a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    assert_eq!(a.completions(1).len(), 1);
    assert!(a_events.try_recv().is_err(), "not armed");
    a.cq.arm(false);
    for _ in 0..3 {
        a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    }
    assert_eq!(a.completions(3).len(), 3);
    assert!(a_events.try_recv().is_ok());
    assert!(a_events.try_recv().is_err(), "one event per arming");
    // Writes are not solicited.
    a.cq.arm(true);
    a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    assert_eq!(a.completions(1).len(), 1);
    assert!(a_events.try_recv().is_err());
}

#[test]
fn cq__overrun_is_told_once() {
    let (a, _events, errors) = end_with_channel(53_000, 4);
    let b = End::new(config(53_000, CLEAN), 4096);
    connect(&a.qp, &b.qp);
    for _ in 0..10 {
        a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    }
    // Another CQ drives without taking anything from the full one.
    let since = Instant::now();
    // The event comes at the end of the step that overran, which may be the background thread's.
    while a.cq.overruns() < 6 || errors.load(Ordering::SeqCst) == 0 {
        b.cq.poll(1, |_| panic!("nothing completes at the target of a Write"));
        assert!(since.elapsed() < Duration::from_secs(10));
    }
    assert_eq!(errors.load(Ordering::SeqCst), 1);
    assert_eq!(a.cq.capacity(), 4);
    assert_eq!(a.completions(4).len(), 4);
}

#[test]
fn cq__resize_keeps_what_waits() {
    let (a, _events, _) = end_with_channel(54_000, 8);
    let b = End::new(config(54_000, CLEAN), 4096);
    connect(&a.qp, &b.qp);
    for _ in 0..8 {
        a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    }
    let since = Instant::now();
    // Eight are pending once it cannot shrink to seven any more; until then the attempt changes nothing that counts.
    while a.cq.resize(7).is_ok() {
        assert!(since.elapsed() < Duration::from_secs(10));
    }
    assert_eq!(a.cq.resize(100), Ok(128));
    assert_eq!(a.completions(8).len(), 8);
}

/// Voluntary context switches of the engine's threads in this process.
fn engine_switches() -> u64 {
    let mut sum = 0;
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let read = |file| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
        if read("comm").trim() == "metaroce" {
            let status = read("status");
            let line = status.lines().find(|l| l.starts_with("voluntary_ctxt_switches")).unwrap_or("0 0");
            sum += line.split_whitespace().last().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    sum
}

/// Runs the named test of this file alone, in a process of its own.
fn in_own_process(test: &str) -> bool {
    if std::env::var_os("METAROCE_TEST_ALONE").is_some() {
        return false;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture", "--test-threads", "1"])
        .env("METAROCE_TEST_ALONE", "1")
        .status()
        .unwrap();
    assert!(status.success());
    true
}

#[test]
fn idle__connected_device_wakes_nobody() {
    if in_own_process("wake::idle__connected_device_wakes_nobody") {
        return;
    }
    let (a, b) = pair(55_000, CLEAN, 4096);
    for _ in 0..100 {
        a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
        a.completions(1);
    }
    // What is left to do after the last packet (late acknowledgements, counters) ends soon; then nothing happens.
    let since = Instant::now();
    loop {
        let before = engine_switches();
        std::thread::sleep(Duration::from_millis(500));
        let after = engine_switches();
        if after == before {
            break;
        }
        assert!(since.elapsed() < Duration::from_secs(20), "{} wake-ups in half a second", after - before);
    }
    a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    assert_eq!(a.completions(1).len(), 1);
}

#[test]
fn fork__child_gets_errors_and_a_device_of_its_own() {
    if in_own_process("wake::fork__child_gets_errors_and_a_device_of_its_own") {
        return;
    }
    let (a, b) = pair(56_000, CLEAN, 4096);
    a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    assert_eq!(a.completions(1).len(), 1);
    // SAFETY: the child does only what the test is about and leaves with _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            assert_eq!(a.cq.poll(1, |_| ()), 0);
            let mut post = a.qp.send();
            let refused = post.push(wqe(Opcode::Write, 8, (b.va(), b.key)), [a.sge(0, 8)].into_iter());
            assert_eq!(refused, Err(libc::EIO));
            drop(post);
            assert_eq!(a.qp.post_recv(1, [a.sge(0, 8)].into_iter()), Err(libc::EIO));
            assert_eq!(a.qp.destroy(), Err(libc::EIO));
            a.cq.arm(false);
            a.device.exit();
            let (c, d) = pair(56_000, CLEAN, 4096);
            c.post(Opcode::Write, c.sge(0, 8), (d.va(), d.key));
            assert_eq!(c.completions(1)[0].status, WcStatus::Success);
            drop((a.device.clone(), a.qp.clone()));
        }));
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(outcome.is_err())) };
    }
    let mut status = 0;
    // SAFETY: waits for our own child, with room for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child failed");
    a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
}

#[test]
fn exit__tells_the_peer_and_stops() {
    let (a, b) = pair(57_000, CLEAN, 4096);
    a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    assert_eq!(a.completions(1).len(), 1);
    let since = Instant::now();
    b.device.exit();
    assert!(since.elapsed() < Duration::from_millis(500), "the peer's thread confirms the CLOSE");
    b.device.exit();
    assert_eq!(b.device.create_qp(&qp_of(b.pd, &b.cq, None), None).map(drop), Err(libc::ENODEV));
}

#[test]
fn device__types_may_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Device>();
    shared::<metaroce_engine::Cq>();
    shared::<metaroce_engine::Qp>();
    shared::<metaroce_engine::Srq>();
}
