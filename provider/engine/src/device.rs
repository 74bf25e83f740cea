//! The device: one per process, shared by all verbs contexts.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};

use metaroce_config::DeviceConfig;
use metaroce_proto::snapshot::{ConnView, MrView, Page, QpView};
use metaroce_proto::stats::PathStats;
use metaroce_proto::steer::Flow;
use metaroce_proto::steering::{Admin, PlaneState};
use metaroce_proto::{Endpoint, Nanos, Qpn, Refused, Sge};

use crate::cq::{Cq, CqNotify};
use crate::drive::{self, Engine};
use crate::engine::Core;
use crate::fork;
use crate::guard;
use crate::outbox::Outbox;
use crate::qp::{Qp, QpCreate, QpNotify};
use crate::rates;
use crate::srq::{Kind, Srq};
use crate::watch::Watch;
use crate::{Errno, errno_of};

/// Why the device cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The configuration is wrong; the text names what and how to correct it.
    #[error(transparent)]
    Config(#[from] metaroce_config::ConfigError),
}

impl OpenError {
    /// The errno that says it best.
    pub fn errno(&self) -> Errno {
        match self {
            OpenError::Config(_) => libc::EINVAL,
        }
    }
}

/// The process's MetaRoCE device.
pub struct Device {
    engine: Arc<Engine>,
    next_pd: AtomicU32,
}

impl Device {
    /// The process's device; made on first use, closed with the last `Arc` or by [`Device::exit`].
    /// Cheap: reads the configuration only. Slot port and sockets are claimed by the first MR, SRQ or QP, the
    /// background thread is started by the first QP. The child of a fork gets a device of its own.
    pub fn get() -> Result<Arc<Device>, OpenError> {
        let mut current = fork::registry().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = current.device.upgrade() {
            return Ok(device);
        }
        let device = Device::make(metaroce_config::load()?, &mut current);
        current.device = Arc::downgrade(&device);
        Ok(device)
    }

    /// A device of its own, beside the process's: for tests and tools that hold both ends of a connection.
    pub fn with_config(config: DeviceConfig) -> Arc<Device> {
        let mut current = fork::registry().lock().unwrap_or_else(PoisonError::into_inner);
        Device::make(config, &mut current)
    }

    fn make(config: DeviceConfig, registry: &mut fork::Registry) -> Arc<Device> {
        let engine = Arc::new(Engine::new(config));
        registry.add(&engine);
        Arc::new(Device { engine, next_pd: AtomicU32::new(1) })
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// What the device was configured to be.
    pub fn config(&self) -> &DeviceConfig {
        &self.engine.config
    }

    /// A fresh protection domain number. Counting its users is the caller's business.
    pub fn alloc_pd(&self) -> u32 {
        self.next_pd.fetch_add(1, Ordering::Relaxed)
    }

    /// Registers `len` bytes at `va`, reachable as `iova..iova + len`; gives the key (lkey and rkey).
    pub fn register_mr(&self, pd: u32, va: u64, iova: u64, len: u64, access: u32) -> Result<u32, Errno> {
        guard::install();
        self.engine.control(|core, _| {
            core.io(&self.engine)?.endpoint.register_mr(pd, va, iova, len, access).map_err(errno_of)
        })
    }

    /// Registers memory that reads as zeros and takes writes without a trace; gives its key, for local use.
    pub fn register_null_mr(&self, pd: u32) -> Result<u32, Errno> {
        self.engine.control(|core, _| core.io(&self.engine)?.endpoint.register_null_mr(pd).map_err(errno_of))
    }

    /// Makes a memory window of type 1 or 2 that shows nothing yet; gives its first key.
    pub fn create_window(&self, pd: u32, type2: bool) -> Result<u32, Errno> {
        self.engine
            .control(|core, _| core.io(&self.engine)?.endpoint.create_window(pd, type2).map_err(errno_of))
    }

    /// Ends the window that this is, or was, a key of. When this returns, no byte passes through it any more.
    pub fn destroy_window(&self, key: u32) -> Result<(), Errno> {
        self.engine.control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            io.endpoint.destroy_window(key).map_err(errno_of)
        })
    }

    /// The address behind a local SGE, if it lies in a region of the PD that grants `rights`.
    pub fn local_memory(&self, pd: u32, sge: &Sge, rights: u32) -> Option<u64> {
        let found = self.engine.control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            io.endpoint.local_memory(pd, sge, rights).ok_or(libc::EFAULT)
        });
        found.ok()
    }

    /// Kills a key. When this returns, no byte passes under it any more. EBUSY while a window is bound to the region.
    pub fn deregister_mr(&self, key: u32) -> Result<(), Errno> {
        self.engine.control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            io.endpoint.deregister_mr(key).map_err(errno_of)
        })
    }

    /// Changes PD, memory (address, address in the iova space, length) or rights behind a key; `None` leaves as is.
    /// When this returns, no byte passes on the old terms any more.
    pub fn reregister_mr(
        &self,
        key: u32,
        pd: Option<u32>,
        range: Option<(u64, u64, u64)>,
        access: Option<u32>,
    ) -> Result<(), Errno> {
        self.engine.control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            io.endpoint.reregister_mr(key, pd, range, access).map_err(errno_of)
        })
    }

    /// The device's clock in nanoseconds, which stamps completions. It begins with the device and never goes back.
    pub fn clock_ns(&self) -> u64 {
        self.engine.clock.now()
    }

    /// As [`Device::create_cq`], for a CQ that remembers when each completion came, and tags.
    pub fn create_extended_cq(
        self: &Arc<Self>,
        cqe: u32,
        notify: Option<Box<dyn CqNotify>>,
    ) -> Result<Arc<Cq>, Errno> {
        Cq::create(self, cqe, true, notify)
    }

    /// Makes a CQ of at least `cqe` entries.
    pub fn create_cq(
        self: &Arc<Self>,
        cqe: u32,
        notify: Option<Box<dyn CqNotify>>,
    ) -> Result<Arc<Cq>, Errno> {
        Cq::create(self, cqe, false, notify)
    }

    /// Connections from number `from` on; `None` while the device is unused.
    pub fn view_connections(&self, from: u32) -> Option<Page<ConnView>> {
        self.engine.look(|io, now| io.endpoint.view_connections(now, from))
    }

    /// Queue pairs from index `from` on; `None` while the device is unused.
    pub fn view_qps(&self, from: u32) -> Option<Page<QpView>> {
        self.engine.look(|io, _| io.endpoint.view_qps(from))
    }

    /// Keys from index `from` on; `None` while the device is unused.
    pub fn view_mrs(&self, from: u32) -> Option<Page<MrView>> {
        self.engine.look(|io, _| io.endpoint.view_mrs(from))
    }

    /// The queue pair of this number; `None` when there is none.
    pub fn view_qp(&self, qpn: Qpn) -> Option<QpView> {
        self.engine.look(|io, _| io.endpoint.view_qp(qpn))?
    }

    /// Planes, connections and queue pairs; `None` while the device is unused. The first page of each is of one moment,
    /// further ones are taken after it, so that the engine is never held for long.
    pub fn view_all(&self) -> Option<Everything> {
        let (mut all, conns, qps) = self.engine.look(|io, now| {
            let conns = io.endpoint.view_connections(now, 0);
            let qps = io.endpoint.view_qps(0);
            let all = Everything {
                taken_ns: now,
                one_moment: conns.next.is_none() && qps.next.is_none(),
                counters: self.sums_of_planes(&io.endpoint),
                wanted: io.endpoint.plane_states().to_vec(),
                connections: conns.items,
                qps: qps.items,
            };
            (all, conns.next, qps.next)
        })?;
        follow(&mut all.connections, conns, |from| self.view_connections(from));
        follow(&mut all.qps, qps, |from| self.view_qps(from));
        Some(all)
    }

    /// Begins to listen for what happens to planes and paths.
    pub fn watch(self: &Arc<Self>) -> Result<Watch, Errno> {
        Watch::begin(self)
    }

    /// Source ports per plane that paths choose from.
    pub fn entropies_per_plane(&self) -> u8 {
        drive::entropies(self.config())
    }

    /// Counters per plane, summed over its paths and all connections there were; `None` while the device is unused.
    pub fn view_planes(&self) -> Option<Vec<PathStats>> {
        self.engine.look(|io, _| self.sums_of_planes(&io.endpoint))
    }

    fn sums_of_planes(&self, endpoint: &Endpoint) -> Vec<PathStats> {
        let mut slots = Vec::new();
        endpoint.path_stats(&mut slots);
        let per_plane = usize::from(self.config().paths_per_plane).max(1);
        slots.chunks(per_plane).map(PathStats::sum).collect()
    }

    /// How planes and source ports are to be used; `None` while the device is unused.
    pub fn plane_states(&self) -> Option<Vec<PlaneState>> {
        self.engine.look(|io, _| io.endpoint.plane_states().to_vec())
    }

    /// The link of a plane went up or down: its paths are probed, or left, at once.
    pub fn set_plane_link(&self, plane: u8, up: bool) -> Result<(), Errno> {
        let rate = self.config().planes.get(usize::from(plane)).filter(|_| up).map(rates::of_plane);
        self.engine.control(|Core { io, out, links_down, .. }, now| {
            let bit = 1u64.checked_shl(plane.into()).unwrap_or(0);
            *links_down = if up { *links_down & !bit } else { *links_down | bit };
            if let Some(io) = io {
                io.endpoint.set_plane_state(now, plane, up, out);
                if let Some(bps) = rate {
                    io.rates.set(plane, bps);
                }
                io.rates.apply(&mut io.endpoint, *links_down);
            }
            Ok(())
        })
    }

    /// An operator wants a plane used, drained or left. Gives the number of connections that go on using it because no
    /// other path of theirs answers. EBUSY: it is the last plane in use; ENODEV: the device is unused.
    pub fn set_plane_admin(&self, plane: u8, admin: Admin) -> Result<usize, Errno> {
        self.steer(|endpoint, now, out| endpoint.set_plane_admin(now, plane, admin, out))
    }

    /// A source port of a plane is not to be used, or may be again. EBUSY: too few would be left; EINVAL: there is none
    /// of that number; ENODEV: the device is unused.
    pub fn deny_entropy(&self, plane: u8, entropy: u8, deny: bool) -> Result<(), Errno> {
        self.steer(|endpoint, now, out| endpoint.deny_entropy(now, plane, entropy, deny, out))
    }

    /// Changes the source port of a path of a connection. EINVAL: there is none of these numbers; ENODEV: the device is
    /// unused.
    pub fn rehash(&self, connection: u32, path: u8) -> Result<(), Errno> {
        self.steer(|endpoint, now, out| endpoint.rehash(now, connection, path, out))
    }

    /// What an operator wants of the core; ENODEV while the device is unused.
    fn steer<R>(
        &self,
        want: impl FnOnce(&mut Endpoint, Nanos, &mut Outbox) -> Result<R, Refused>,
    ) -> Result<R, Errno> {
        self.engine.control(|Core { io, out, .. }, now| {
            let io = io.as_mut().ok_or(libc::ENODEV)?;
            want(&mut io.endpoint, now, out).map_err(errno_of)
        })
    }

    /// The slot the device receives on; `None` while it is unused.
    pub fn slot(&self) -> Option<u16> {
        self.engine.look(|io, _| io.snapshot.slot())
    }

    /// Nanoseconds since the device was opened.
    pub fn now_ns(&self) -> u64 {
        self.engine.clock.now()
    }

    /// Keeps a descriptor out of the child of a fork, where it is closed: for what must end with this process. Take it
    /// back with [`Device::release_descriptor`] before it is closed here.
    pub fn keep_from_children(&self, fd: RawFd) {
        self.engine.aside.lock().push(fd);
    }

    /// The descriptor is about to be closed.
    pub fn release_descriptor(&self, fd: RawFd) {
        self.engine.aside.lock().retain(|kept| *kept != fd);
    }

    /// This is the copy in the child of a fork: nothing behind it works.
    pub fn is_dead(&self) -> bool {
        self.engine.is_dead()
    }

    /// Makes an SRQ.
    pub fn create_srq(
        self: &Arc<Self>,
        pd: u32,
        max_wr: u32,
        max_sge: u32,
        notify: Option<Box<dyn QpNotify>>,
    ) -> Result<Arc<Srq>, Errno> {
        Srq::create(self, pd, max_wr, max_sge, Kind::Basic, notify)
    }

    /// Makes an SRQ that serves the XRC connections of domain `xrcd`, which the caller numbers; its receives complete
    /// on `cq`.
    pub fn create_xrc_srq(
        self: &Arc<Self>,
        pd: u32,
        (max_wr, max_sge): (u32, u32),
        xrcd: u32,
        cq: &Arc<Cq>,
        notify: Option<Box<dyn QpNotify>>,
    ) -> Result<Arc<Srq>, Errno> {
        Srq::create(self, pd, max_wr, max_sge, Kind::Xrc(xrcd, cq.clone()), notify)
    }

    /// Makes a work queue, whose receives complete on `cq`. It takes frames when it is set ready.
    pub fn create_work_queue(
        self: &Arc<Self>,
        pd: u32,
        (max_wr, max_sge): (u32, u32),
        cq: &Arc<Cq>,
    ) -> Result<Arc<Srq>, Errno> {
        Srq::create(self, pd, max_wr, max_sge, Kind::Work(cq.clone()), None)
    }

    /// Makes an SRQ that matches tags against at most `max_tags` expected messages; its receives complete on `cq`,
    /// which should be an extended one.
    pub fn create_tag_srq(
        self: &Arc<Self>,
        pd: u32,
        (max_wr, max_sge): (u32, u32),
        max_tags: u32,
        cq: &Arc<Cq>,
        notify: Option<Box<dyn QpNotify>>,
    ) -> Result<Arc<Srq>, Errno> {
        Srq::create(self, pd, max_wr, max_sge, Kind::Tags(max_tags, cq.clone()), notify)
    }

    /// Adds a steering rule for a raw packet QP; gives its number.
    pub fn add_flow(&self, flow: Flow) -> Result<u32, Errno> {
        self.engine.control(|core, _| core.io(&self.engine)?.endpoint.add_flow(flow).map_err(errno_of))
    }

    /// Takes a steering rule out.
    pub fn remove_flow(&self, number: u32) -> Result<(), Errno> {
        self.engine.control(|core, _| core.io(&self.engine)?.endpoint.remove_flow(number).map_err(errno_of))
    }

    /// Makes a QP in RESET.
    pub fn create_qp(
        self: &Arc<Self>,
        init: &QpCreate,
        notify: Option<Box<dyn QpNotify>>,
    ) -> Result<Arc<Qp>, Errno> {
        Qp::create(self, init, notify)
    }

    /// Ends the device: tells all peers the final state and waits for them at most 50 ms. To be called when the
    /// process exits; afterwards nothing moves any more.
    pub fn exit(&self) {
        self.engine.close();
    }
}

/// All that can be seen of a device.
#[derive(Debug, Clone, Default)]
pub struct Everything {
    /// When, by the device's clock.
    pub taken_ns: Nanos,
    /// All of it belongs to that moment.
    pub one_moment: bool,
    /// Counters per plane.
    pub counters: Vec<PathStats>,
    /// How planes and source ports are to be used.
    pub wanted: Vec<PlaneState>,
    /// Connections with their paths.
    pub connections: Vec<ConnView>,
    /// Queue pairs.
    pub qps: Vec<QpView>,
}

/// Takes the pages that follow.
fn follow<T>(items: &mut Vec<T>, mut next: Option<u32>, page: impl Fn(u32) -> Option<Page<T>>) {
    while let Some(found) = next.and_then(&page) {
        items.extend(found.items);
        next = found.next;
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.engine.close();
        if self.engine.is_dead() {
            // In the child of a fork the descriptors are closed and the lock is held by nobody: leave it all alone.
            std::mem::forget(self.engine.clone());
        }
    }
}
