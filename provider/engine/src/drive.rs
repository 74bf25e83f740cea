//! Who runs steps: whoever is awake. A poster runs one for its doorbell, a poller on an empty CQ runs a full one, and
//! the background thread (`thread.rs`) is the only driver while the application sleeps or spins on memory.
//!
//! No wake-up is lost because of three rules. (1) A doorbell is rung before the lock is tried; whoever unlocks looks at
//! it again and steps once more. (2) What a step leaves for later has a time (`Done::next`); a driver that finds the
//! thread sleeping beyond it wakes the thread. (3) Before it sleeps, the thread writes down, under the lock, until
//! when; everything that could change the core's mind happens under the lock after that.

use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use metaroce_config::DeviceConfig;
use metaroce_proto::{Config, Endpoint, Nanos};
use parking_lot::{Mutex, MutexGuard};

use crate::Errno;
use crate::depth::Depths;
use crate::doorbell::{Doorbell, Queue};
use crate::engine::{Core, Done, Io, Work};
use crate::impair::Impair;
use crate::limits::*;
use crate::rates::Rates;
use crate::snapshot::Snapshot;
use crate::udp::groups::Groups;
use crate::udp::rx::Rx;
use crate::udp::slot;
use crate::udp::socket::{self, Wake};
use crate::udp::tx::Tx;

/// The engine of one device: the core behind its lock, and what is shared without it.
pub(crate) struct Engine {
    pub(crate) config: DeviceConfig,
    pub(crate) clock: Clock,
    pub(crate) core: Mutex<Core>,
    pub(crate) bell: Doorbell,
    pub(crate) depths: Depths,
    /// The core's bytes in flight after the last step.
    pub(crate) in_flight: AtomicU64,
    pub(crate) park: Park,
    pub(crate) thread: Mutex<Option<JoinHandle<()>>>,
    /// This is a copy in the child of a fork: nothing behind it works any more.
    dead: AtomicBool,
    /// `close` has begun.
    closing: AtomicBool,
    /// Descriptors of others that the child of a fork has no business with.
    pub(crate) aside: Mutex<Vec<RawFd>>,
}

/// Nanoseconds since the engine was made; never decreases.
#[derive(Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn now(&self) -> Nanos {
        // 584 years fit.
        self.0.elapsed().as_nanos() as u64
    }
}

/// What drivers and the background thread know of each other.
#[derive(Debug, Default)]
pub(crate) struct Park {
    /// Wakes the thread; there once the sockets are.
    pub(crate) wake: OnceLock<Wake>,
    /// The socket for multicast groups, once there is one; it stays until the device ends.
    pub(crate) groups: OnceLock<RawFd>,
    /// Until when the thread sleeps on the socket; 0: it looks again by itself soon enough.
    pub(crate) sleeps_until: AtomicU64,
    /// The thread leaves the socket to the pollers.
    pub(crate) backed_off: AtomicBool,
    /// Steps run by pollers that found their CQ empty.
    pub(crate) polls: AtomicU64,
    /// When the last of them was.
    pub(crate) last_poll: AtomicU64,
    /// CQs armed for notification: somebody may be asleep for it.
    pub(crate) armed: AtomicU32,
    /// The thread is to end.
    pub(crate) stop: AtomicBool,
}

impl Park {
    /// Wakes the background thread.
    pub(crate) fn signal(&self) {
        if let Some(wake) = self.wake.get() {
            wake.signal();
        }
    }
    /// A CQ is not armed any more.
    pub(crate) fn disarmed(&self) {
        self.armed.fetch_sub(1, Ordering::SeqCst);
    }
    /// Wakes the thread if it would sleep past `next`.
    fn cover(&self, next: Option<Nanos>) {
        let Some(next) = next else { return };
        if next < self.sleeps_until.load(Ordering::SeqCst) && self.sleeps_until.swap(0, Ordering::SeqCst) != 0
        {
            self.signal();
        }
    }
}

impl Engine {
    pub(crate) fn new(config: DeviceConfig) -> Engine {
        Engine {
            config,
            clock: Clock(Instant::now()),
            core: Mutex::new(Core::default()),
            bell: Doorbell::new(QPS_MAX),
            depths: Depths::new(),
            in_flight: AtomicU64::new(0),
            park: Park::default(),
            thread: Mutex::new(None),
            dead: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            aside: Mutex::default(),
        }
    }

    /// A copy in the child of a fork: take no lock of it.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Relaxed)
    }
    /// Called in the child of a fork.
    pub(crate) fn die(&self) {
        self.dead.store(true, Ordering::Relaxed);
    }
    /// The device was closed.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Runs a control verb under the lock, after what was posted before it, and sends and publishes what it causes.
    /// EIO in the child of a fork.
    pub(crate) fn control<R>(
        &self,
        verb: impl FnOnce(&mut Core, Nanos) -> Result<R, Errno>,
    ) -> Result<R, Errno> {
        if self.is_dead() {
            return Err(libc::EIO);
        }
        let mut core = self.core.lock();
        let now = self.clock.now();
        core.out.now = now;
        if let Core { out, io: Some(io), .. } = &mut *core {
            io.take_doorbells(now, self, out);
        }
        let result = verb(&mut core, now);
        let done = core.step(self, Work::Send);
        self.unlock(core, done);
        result
    }

    /// A look at the core that changes nothing, under the lock; `None` before the first use and in the child of a fork.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&Io, Nanos) -> R) -> Option<R> {
        if self.is_dead() {
            return None;
        }
        let core = self.core.lock();
        let seen = core.io.as_deref().map(|io| look(io, self.clock.now()));
        self.unlock(core, Done::default());
        seen
    }

    /// A poster has something in a stage: rings, and runs a step if nobody else does.
    pub(crate) fn ring(&self, queue: Queue, index: usize) {
        self.bell.ring(queue, index);
        if let Some(mut core) = self.core.try_lock() {
            core.app_steps += 1;
            let done = core.step(self, Work::Send);
            self.unlock(core, done);
        }
    }

    /// As [`Engine::ring`] for a small send behind many others: while something is in flight an acknowledgement will
    /// cause a step, and posts that wait for it share packets. Ringing comes before looking: the step that brings
    /// the flight to an end looks at the bell after it has said so.
    pub(crate) fn ring_lazily(&self, queue: Queue, index: usize) {
        self.bell.ring(queue, index);
        if self.in_flight.load(Ordering::SeqCst) > 0 {
            return;
        }
        self.ring(queue, index);
    }

    /// A poller found its CQ empty: runs a full step, or lets others run when somebody else does or when there was
    /// nothing to do (spinning without yielding costs whole time slices where two share a core).
    pub(crate) fn poll_drive(&self) {
        self.park.polls.fetch_add(1, Ordering::Relaxed);
        let Some(mut core) = self.core.try_lock() else {
            std::thread::yield_now();
            return;
        };
        core.app_steps += 1;
        let done = core.step(self, Work::All);
        self.park.last_poll.store(done.now, Ordering::Relaxed);
        let idle = done.received == 0 && done.sent == 0 && !done.completed;
        core.idle_polls = if idle { core.idle_polls + 1 } else { 0 };
        let yields = core.idle_polls >= IDLE_POLLS_BEFORE_YIELD;
        if yields {
            core.idle_polls = 0;
        }
        self.unlock(core, done);
        if yields {
            std::thread::yield_now();
        }
    }

    /// Unlocks after a step: goes on for those who rang meanwhile, and sees to it that the thread covers the rest.
    pub(crate) fn unlock(&self, core: MutexGuard<'_, Core>, mut done: Done) {
        drop(core);
        for _ in 0..HANDOVER_ROUNDS {
            if !self.bell.is_rung() {
                self.park.cover(done.next);
                return;
            }
            // Failing to get the lock hands the duty to whoever has it, the timing of what we left included: the
            // core's next time-out covers all its work.
            let Some(mut core) = self.core.try_lock() else { return };
            done = core.step(self, Work::Send);
        }
        self.park.signal();
    }

    /// A CQ was armed: somebody may go to sleep, so the thread must be at the socket.
    pub(crate) fn armed(&self) {
        self.park.armed.fetch_add(1, Ordering::SeqCst);
        if self.park.backed_off.load(Ordering::SeqCst) {
            self.park.signal();
        }
    }

    /// Claims a slot and opens the sockets.
    pub(crate) fn open_io(&self) -> Result<Io, Errno> {
        if self.is_closing() {
            return Err(libc::ENODEV);
        }
        self.try_open_io().map_err(|error| {
            log::error!("cannot open metaroce0: {error}");
            error.raw_os_error().unwrap_or(libc::EIO)
        })
    }

    fn try_open_io(&self) -> std::io::Result<Io> {
        let config = &self.config;
        let slot = slot::claim(config.base_port, config.rcvbuf_bytes, config.gso)?;
        let entropies = entropies(config);
        let tx = Tx::open(&config.planes, entropies, config.gso)?;
        if self.park.wake.get().is_none() {
            // Another opener cannot be at it: we hold the lock.
            let _ = self.park.wake.set(Wake::new()?);
        }
        let mut impairment = config.impairment;
        if impairment.seed == 0 {
            impairment.seed = socket::random_u64()? | 1;
        }
        let impair = Impair::new(&impairment);
        if impair.is_some() {
            log::debug!("impairment: {impairment:?}");
        }
        log::debug!("slot {}, receive budget {} bytes", slot.number, slot.receive_budget_bytes);
        let rates = Rates::new(config);
        let endpoint = Endpoint::new(core_config(config, &rates, &slot, entropies)?);
        let snapshot = Snapshot::new(config, slot.number);
        Ok(Io::new(endpoint, rates, (Rx::new(slot.socket), tx), impair, snapshot))
    }

    /// Opens the socket for multicast groups, which live on plane 0, and has the thread look at it.
    pub(crate) fn open_groups(&self) -> Result<Groups, Errno> {
        let config = &self.config;
        let port = metaroce_proto::groups::group_port(config.base_port);
        let plane = config.planes.first().ok_or(libc::EOPNOTSUPP)?;
        let opened = Groups::open(port, plane.ifindex, config.rcvbuf_bytes, config.gso);
        let groups = opened.map_err(|error| {
            log::error!("cannot receive for multicast groups on UDP port {port}: {error}");
            error.raw_os_error().unwrap_or(libc::EIO)
        })?;
        // Another opener cannot be at it: we hold the lock.
        let _ = self.park.groups.set(groups.rx.fd());
        self.park.signal();
        Ok(groups)
    }

    /// Ends the device in order: the thread, then CLOSE to every peer and at most 50 ms for their answers.
    /// A second call does nothing.
    pub(crate) fn close(&self) {
        if self.is_dead() || self.closing.swap(true, Ordering::SeqCst) {
            return;
        }
        self.park.stop.store(true, Ordering::SeqCst);
        self.park.signal();
        if let Some(thread) = self.thread.lock().take() {
            // A panic in it was reported when it happened.
            let _ = thread.join();
        }
        let limit = std::time::Duration::from_nanos(CLOSE_NS_MAX);
        let Some(mut core) = self.core.try_lock_for(limit) else { return };
        let deadline = self.clock.now() + CLOSE_NS_MAX;
        if let Some(io) = &mut core.io {
            io.endpoint.close(self.clock.now());
        }
        loop {
            let done = core.step(self, Work::All);
            let now = self.clock.now();
            let Some(io) = &mut core.io else { return };
            if io.endpoint.closed() && done.sent == 0 || now >= deadline {
                break;
            }
            if let Some(wake) = self.park.wake.get() {
                wake.clear();
                let until = done.next.unwrap_or(deadline).min(deadline);
                let timeout = std::time::Duration::from_nanos(until.saturating_sub(now));
                socket::wait(wake.fd(), [Some(io.rx.fd()), None], Some(timeout));
            }
        }
        let Core { out, io: Some(io), .. } = &mut *core else { return };
        io.publish_last_counters(out);
    }
}

/// Source ports per plane and family: one per path and some more to change to.
pub(crate) fn entropies(config: &DeviceConfig) -> u8 {
    config.paths_per_plane.saturating_mul(2).max(ENTROPIES_MIN)
}

/// The core's settings.
fn core_config(
    config: &DeviceConfig,
    rates: &Rates,
    slot: &slot::Slot,
    entropies: u8,
) -> std::io::Result<Config> {
    let planes =
        config.planes.iter().zip(rates.links()).map(|(plane, rate)| metaroce_proto::config::PlaneConfig {
            label: plane.label.clone(),
            addrs: plane.addrs.clone(),
            mtu: plane.mtu,
            rate_bps: *rate,
        });
    Ok(Config {
        slot: slot.number,
        base_port: config.base_port,
        incarnation: socket::random_u64()?.max(1),
        seed: socket::random_u64()?,
        planes: planes.collect(),
        paths_per_plane: config.paths_per_plane,
        entropies_per_plane: entropies,
        segment_bytes_max: config.segment_bytes_max,
        burst_packets_max: match config.burst_packets_max {
            0 => BURST_PACKETS_DEFAULT,
            packets => packets,
        },
        first_psn: 0,
        first_cpn: 0,
        datagram_bytes_max: metaroce_config::active_mtu(config),
        receive_budget_bytes: slot.receive_budget_bytes,
        tuning: metaroce_proto::config::Tuning {
            link_ahead_ns: LINK_AHEAD_NS,
            link_ahead_bytes: LINK_AHEAD_BYTES,
            host_slack_ns: HOST_SLACK_NS,
            ..metaroce_proto::config::Tuning::default()
        },
    })
}
