//! The background thread: drives while the application sleeps or spins on memory, parks when nothing is to do, and
//! leaves the socket to the application's pollers while they drive.
//!
//! Parked, it sleeps on the receive socket and the eventfd until the core's next time-out, or without any limit: an
//! idle device causes no wake-ups. When its wake-ups prove unneeded (pollers drove meanwhile), it backs off: it sleeps
//! on the eventfd alone for [`BACKOFF_NS`] and comes back when the pollers have stopped. It never backs off while a
//! CQ is armed, for then the application may sleep.
//!
//! While the application does nothing at all (the target of Writes, Reads and atomics), the thread looks at the socket
//! a little longer before it parks: a wake-up across cores costs more than the whole round trip. It stops doing so
//! when offering the processor cost it a time slice, for then it shares a core with something that spins.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use metaroce_proto::Nanos;
use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};

use crate::Errno;
use crate::drive::Engine;
use crate::engine::{Done, Work};
use crate::guard;
use crate::limits::*;
use crate::udp::socket::{self, Ready, Wake};

impl Engine {
    /// Starts the background thread, and opens the sockets, if that has not happened yet.
    pub(crate) fn ensure_thread(self: &Arc<Self>) -> Result<(), Errno> {
        if self.is_closing() {
            return Err(libc::ENODEV);
        }
        let rx = self.control(|core, _| Ok(core.io(self)?.rx.fd()))?;
        let mut thread = self.thread.lock();
        if thread.is_some() {
            return Ok(());
        }
        // A thread inherits the mask: signals are the application's, and perftest relies on where SIGALRM lands. But
        // what a bad address raises is ours to take.
        let mut before = SigSet::empty();
        let mut mask = SigSet::all();
        guard::signals().iter().for_each(|signal| mask.remove(signal));
        pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&mask), Some(&mut before)).map_err(|e| e as i32)?;
        let engine = self.clone();
        let spawned = std::thread::Builder::new()
            .name("metaroce".into())
            .stack_size(256 << 10)
            .spawn(move || Background::new(&engine, rx).run());
        pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None).map_err(|e| e as i32)?;
        *thread = Some(spawned.map_err(|e| e.raw_os_error().unwrap_or(libc::EAGAIN))?);
        Ok(())
    }
}

/// The thread's state.
struct Background<'a> {
    engine: &'a Engine,
    wake: Option<&'a Wake>,
    rx: i32,
    /// Wake-ups in a row, roughly, that were not needed.
    unneeded: u32,
    polls_seen: u64,
    linger: Linger,
}

impl<'a> Background<'a> {
    fn new(engine: &'a Engine, rx: i32) -> Self {
        Background {
            engine,
            wake: engine.park.wake.get(),
            rx,
            unneeded: 0,
            polls_seen: 0,
            linger: Linger::default(),
        }
    }

    fn run(mut self) {
        // Time-outs are exact to the microsecond, not to the default 50.
        let _ = nix::sys::prctl::set_timerslack(1);
        let Some(wake) = self.wake else { return };
        let park = &self.engine.park;
        let mut ready = Ready::default();
        while !park.stop.load(Ordering::SeqCst) {
            let (done, sleep) = self.drive();
            self.judge(ready, &done);
            self.linger.saw(&done);
            let Some(sleep) = sleep else {
                ready = Ready::default();
                continue;
            };
            if self.linger.wanted(&done) {
                park.sleeps_until.store(0, Ordering::SeqCst);
                std::thread::yield_now();
                self.linger.yielded(&done, self.engine.clock.now());
                ready = Ready::default();
                continue;
            }
            if self.unneeded >= UNNEEDED_WAKEUPS {
                self.back_off(wake);
                ready = Ready::default();
                continue;
            }
            let sockets = [Some(self.rx), park.groups.get().copied()];
            ready = socket::wait(wake.fd(), sockets, sleep.timeout(self.engine.clock.now()));
            park.sleeps_until.store(0, Ordering::SeqCst);
            if ready.woken {
                wake.clear();
            }
        }
    }

    /// One step; says how long to sleep after it, or `None` to go on at once.
    fn drive(&self) -> (Done, Option<Sleep>) {
        let mut core = self.engine.core.lock();
        let done = core.step(self.engine, Work::All);
        let sleep = Sleep(done.next.unwrap_or(Nanos::MAX));
        let go_on = done.received > 0 || done.more_rx || sleep.0 == 0;
        if !go_on && self.unneeded < UNNEEDED_WAKEUPS {
            // Under the lock: whoever changes something from here on compares with it.
            self.engine.park.sleeps_until.store(sleep.0, Ordering::SeqCst);
        }
        drop(core);
        if go_on || self.engine.bell.is_rung() {
            self.engine.park.sleeps_until.store(0, Ordering::SeqCst);
            return (done, None);
        }
        (done, Some(sleep))
    }

    /// Was the last wake-up needed? Not if pollers drive at a rate that would have done the work as soon, or have
    /// done it.
    fn judge(&mut self, woken_by: Ready, done: &Done) {
        let polls = self.engine.park.polls.load(Ordering::Relaxed);
        let between = polls.wrapping_sub(self.polls_seen);
        if !woken_by.readable && !woken_by.woken {
            return;
        }
        self.polls_seen = polls;
        let taken = woken_by.readable && done.received == 0 && between > 0;
        if taken || between >= u64::from(POLLS_AT_WORK) {
            self.unneeded += 1;
        } else {
            self.unneeded = self.unneeded.saturating_sub(2);
        }
    }

    /// Leaves the socket to the pollers until they stop, a CQ is armed or the thread is to end.
    fn back_off(&mut self, wake: &Wake) {
        let park = &self.engine.park;
        park.backed_off.store(true, Ordering::SeqCst);
        while park.armed.load(Ordering::SeqCst) == 0 && !park.stop.load(Ordering::SeqCst) {
            let ready = socket::wait(wake.fd(), [None; 2], Some(Duration::from_nanos(BACKOFF_NS)));
            if ready.woken {
                wake.clear();
                break;
            }
            let last_poll = park.last_poll.load(Ordering::Relaxed);
            if last_poll + POLL_RECENT_NS < self.engine.clock.now() {
                break;
            }
        }
        park.backed_off.store(false, Ordering::SeqCst);
        // Half-way: one more unneeded pair brings it back here.
        self.unneeded = UNNEEDED_WAKEUPS / 2;
        self.polls_seen = park.polls.load(Ordering::Relaxed);
    }
}

/// Until when to sleep; the largest value: without limit.
#[derive(Debug, Clone, Copy)]
struct Sleep(Nanos);

impl Sleep {
    fn timeout(self, now: Nanos) -> Option<Duration> {
        (self.0 != Nanos::MAX).then(|| Duration::from_nanos(self.0.saturating_sub(now)))
    }
}

/// Decides whether to look at the socket once more before parking.
#[derive(Debug, Default)]
struct Linger {
    last_received: Nanos,
    /// Steps the application ran, as last seen, and when that changed last.
    app_steps: u64,
    last_app: Nanos,
    /// Not before this time, because lingering was dear.
    barred_until: Nanos,
    bar_ns: Nanos,
}

impl Linger {
    /// A step of ours was run.
    fn saw(&mut self, done: &Done) {
        if done.received > 0 {
            self.last_received = done.now;
        }
        if done.app_steps != self.app_steps || done.posted {
            self.app_steps = done.app_steps;
            self.last_app = done.now;
        }
    }
    /// Packets came a moment ago and the application is passive.
    fn wanted(&self, done: &Done) -> bool {
        self.last_received > 0
            && done.now < self.last_received + LINGER_NS
            && done.now > self.last_app + PASSIVE_NS
            && done.now >= self.barred_until
    }
    /// The processor was offered to others after the step and is ours again.
    fn yielded(&mut self, done: &Done, now: Nanos) {
        if now > done.now + SLICE_LOST_NS {
            self.bar_ns = (self.bar_ns * 2).clamp(LINGER_BAR_NS_MIN, LINGER_BAR_NS_MAX);
            self.barred_until = now + self.bar_ns;
        } else if now > self.barred_until + self.bar_ns {
            self.bar_ns = 0;
        }
    }
}
