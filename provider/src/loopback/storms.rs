//! The device under bad weather: objects that come and go beside traffic, memory that disappears, cancelled threads.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdma_core_sys::*;

use super::world::*;
use super::{PATIENCE, Published};
use crate::cq::Cq;
use crate::mr::Mr;
use crate::qp::Qp;

/// How long each storm lasts: half a second, or `METAROCE_TEST_STORM_MS` milliseconds.
fn storm_time() -> Duration {
    let set = std::env::var("METAROCE_TEST_STORM_MS").ok().and_then(|ms| ms.parse().ok());
    Duration::from_millis(set.unwrap_or(500))
}

/// Writes one after another until told to stop; gives their number. Every one must succeed, exactly once.
fn traffic(world: &World, two: &Two, stop: &AtomicBool) -> u64 {
    let write = at(request(0, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
    let (mut posted, mut done) = (0, 0);
    let mut last = Instant::now();
    while !stop.load(Ordering::Acquire) || done < posted {
        if !stop.load(Ordering::Acquire) && posted < done + 32 {
            send(&two.a, ibv_send_wr { wr_id: posted, ..write }, world.sge(0, 512)).expect("post");
            posted += 1;
        }
        for wc in some(&two.cqs[0], 8) {
            assert_eq!((wc.wr_id, wc.status), (done, IBV_WC_SUCCESS));
            done += 1;
            last = Instant::now();
        }
        assert!(last.elapsed() < PATIENCE, "stalled at {done}");
    }
    done
}

#[test]
fn objects_come_and_go_beside_traffic() {
    let world = World::new(24_700);
    let two = world.connected(IBV_QPT_RC, Link::default());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (world, two, stop) = (&world, &two, &stop);
        let running = scope.spawn(move || traffic(world, two, stop));
        let storms: Vec<_> = (0..2)
            .map(|storm| {
                scope.spawn(move || {
                    let begin = Instant::now();
                    let mut rounds = 0;
                    while begin.elapsed() < storm_time() {
                        let srq = (storm == 1).then(|| world.srq(16));
                        if let Some(srq) = &srq {
                            srq_recv(srq, 1, world.sge(0, 64)).expect("receive");
                        }
                        let other = world.two(IBV_QPT_RC, srq);
                        world.connect(&other.a, &other.b, Link::default());
                        world.connect(&other.b, &other.a, Link::default());
                        let mr = world.other_mr(&world.pd, IBV_ACCESS_LOCAL_WRITE);
                        // Some are destroyed with everything under way, some when it is done.
                        let message = request(1, IBV_WR_SEND);
                        send(&other.a, message, world.sge(0, 64)).expect("post");
                        if storm == 1 && rounds % 2 == 0 {
                            assert_eq!(other.take(3, 1), [(1, IBV_WC_SUCCESS)]);
                        }
                        mr.get().deregister().expect("deregister");
                        other.destroy();
                        rounds += 1;
                    }
                    rounds
                })
            })
            .collect();
        let rounds: Vec<u64> = storms.into_iter().map(|s| s.join().expect("storm")).collect();
        stop.store(true, Ordering::Release);
        let written = running.join().expect("traffic");
        assert!(written > 0 && rounds.iter().all(|n| *n > 0), "{written} Writes, {rounds:?} rounds");
    });
    two.destroy();
}

#[test]
fn memory_may_go_as_soon_as_it_is_deregistered() {
    const LENGTH: usize = 1 << 16;
    let world = World::new(24_800);
    let two = world.connected(IBV_QPT_RC, Link::default());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (world, two, stop) = (&world, &two, &stop);
        let running = scope.spawn(move || traffic(world, two, stop));
        let begin = Instant::now();
        while begin.elapsed() < storm_time() {
            // SAFETY: a fresh mapping, unmapped once below, and used by nobody but the device.
            let memory = unsafe {
                let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                libc::mmap(ptr::null_mut(), LENGTH, libc::PROT_READ | libc::PROT_WRITE, anonymous, -1, 0)
            };
            assert_ne!(memory, libc::MAP_FAILED);
            let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
            let address = memory as u64;
            let mr = Mr::register(world.pd.get(), address, LENGTH as u64, address, access).expect("MR");
            let mr = Published::new(mr);
            let victim = world.connected(IBV_QPT_RC, Link::default());
            let write = at(request(1, IBV_WR_RDMA_WRITE), address, key(&mr));
            (0..16).for_each(|_| {
                send(&victim.a, write, world.sge(0, LENGTH as u32 / 4)).expect("post");
            });
            mr.get().deregister().expect("deregister");
            // SAFETY: mapped above; the key is dead, so the device does not touch it any more.
            assert_eq!(unsafe { libc::munmap(memory, LENGTH) }, 0);
            let statuses = victim.take(0, 16);
            let known = [IBV_WC_SUCCESS, IBV_WC_REM_ACCESS_ERR, IBV_WC_WR_FLUSH_ERR];
            assert!(statuses.iter().all(|(_, status)| known.contains(status)), "{statuses:?}");
            // Not reported to anybody: the events' readers would wait for us.
            acknowledge_events(world, &victim.b);
            victim.destroy();
        }
        stop.store(true, Ordering::Release);
        assert!(running.join().expect("traffic") > 0);
    });
    two.destroy();
}

/// Reads the events of a QP that may have raised one.
fn acknowledge_events(world: &World, qp: &Published<Qp>) {
    if qp.get().query().0.qp_state == IBV_QPS_ERR {
        assert_eq!(world.event(), (qp.0 as u64, IBV_EVENT_QP_ACCESS_ERR));
        // SAFETY: a live QP that no other thread uses: the event is acknowledged.
        unsafe { (*qp.0).events_completed += 1 };
    }
}

/// What a thread that is going to be cancelled works with.
struct Doomed<'a> {
    world: &'a World,
    qp: &'a Published<Qp>,
    cq: &'a Published<Cq>,
    rounds: AtomicU64,
}

unsafe extern "C-unwind" {
    fn pthread_testcancel();
}

/// Posts and polls until it is cancelled. The frame has nothing to drop where it can end.
extern "C-unwind" fn work_until_cancelled(doomed: *mut c_void) -> *mut c_void {
    // SAFETY: the test keeps it alive until the thread is joined.
    let doomed = unsafe { &*doomed.cast::<Doomed<'_>>() };
    loop {
        one_round(doomed);
        // SAFETY: a cancellation point; the frames up to here are plain.
        unsafe { pthread_testcancel() };
    }
}

fn one_round(doomed: &Doomed<'_>) {
    let world = doomed.world;
    let write = at(request(3, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
    // Full at times: the thread does not wait.
    let _ = send(doomed.qp, write, world.sge(0, 64));
    some(doomed.cq, 4);
    doomed.cq.get().arm(false);
    // A control verb with system calls in it, through its boundary.
    let _ = crate::ffi::guarded("test", || {
        let mr = world.other_mr(&world.pd, IBV_ACCESS_LOCAL_WRITE);
        log::warn!(target: "cancel", "messages are written in verbs");
        mr.get().deregister()
    });
    doomed.rounds.fetch_add(1, Ordering::Relaxed);
}

#[test]
fn a_cancelled_thread_leaves_the_device_usable() {
    let world = World::new(24_900);
    let two = world.connected(IBV_QPT_RC, Link::default());
    for round in 0..100u64 {
        let doomed = Doomed { world: &world, qp: &two.a, cq: &two.cqs[0], rounds: AtomicU64::new(0) };
        let mut thread = 0;
        // SAFETY: the thread ends before `doomed` does: it is joined below. Its function has the type wanted, but
        // for the ABI's word on unwinding.
        unsafe {
            let run = std::mem::transmute::<
                extern "C-unwind" fn(*mut c_void) -> *mut c_void,
                extern "C" fn(*mut c_void) -> *mut c_void,
            >(work_until_cancelled);
            let argument = (&raw const doomed).cast_mut().cast();
            assert_eq!(libc::pthread_create(&mut thread, ptr::null(), run, argument), 0);
        }
        let begin = Instant::now();
        while doomed.rounds.load(Ordering::Relaxed) <= round % 5 {
            assert!(begin.elapsed() < PATIENCE);
            std::hint::spin_loop();
        }
        // SAFETY: a thread that was not joined yet.
        unsafe {
            assert_eq!(libc::pthread_cancel(thread), 0);
            assert_eq!(libc::pthread_join(thread, ptr::null_mut()), 0);
        }
    }
    // The device lives: no lock is held, nothing is lost.
    let begin = Instant::now();
    let write = at(request(9, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
    while send(&two.a, write, world.sge(0, 8)).is_err() {
        assert!(begin.elapsed() < PATIENCE);
        some(&two.cqs[0], 4);
    }
    while !some(&two.cqs[0], 64).iter().any(|wc| wc.wr_id == 9 && wc.status == IBV_WC_SUCCESS) {
        assert!(begin.elapsed() < PATIENCE);
    }
    two.destroy();
}
