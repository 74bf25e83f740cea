//! An open device: what `ibv_open_device` makes and every verb finds its way by.

use std::collections::HashMap;
use std::mem::ManuallyDrop;
use std::os::fd::{IntoRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use metaroce_engine::Device;
use parking_lot::Mutex;
use rdma_core_sys::verbs_context;

use crate::channel::{AsyncChannel, CompChannel};
use crate::ffi::{CPart, Result};
use crate::logger;
use crate::net::Watched;
use crate::open::OpenObjects;

/// The open device as safe code sees it; objects made from it keep it alive.
pub(crate) struct Context {
    /// The process's device, shared by all contexts.
    pub(crate) device: Arc<Device>,
    /// Where asynchronous events go.
    pub(crate) events: Arc<AsyncChannel>,
    /// Node GUID in network order, as libibverbs reports it.
    pub(crate) node_guid: u64,
    /// Completion vectors offered (one per CPU; they all are the same engine).
    pub(crate) comp_vectors: u32,
    /// The addresses and links as they are now.
    pub(crate) net: Watched,
    /// QPs and MRs that exist.
    pub(crate) open: OpenObjects,
    /// The event channel is made by libibverbs, after the context, and must still be adopted.
    events_later: AtomicBool,
    /// Our sides of the completion channels in use, by the address of `ibv_comp_channel`.
    channels: Mutex<HashMap<usize, Weak<CompChannel>>>,
}

/// The memory libibverbs allocates for us: its part first, ours behind it.
#[repr(C)]
pub(crate) struct ContextMemory {
    /// libibverbs' part.
    pub(crate) verbs: CPart<verbs_context>,
    /// Ours; `None` (all zero bytes) until the context is open.
    pub(crate) state: ManuallyDrop<Option<Arc<Context>>>,
}

/// The process's device, for the destructor of the library.
static OPENED: Mutex<Weak<Device>> = Mutex::new(Weak::new());

impl Context {
    /// Opens the process's device. Gives the context and the descriptor of its event channel, which libibverbs owns.
    pub(crate) fn open(node_guid: u64) -> Result<(Arc<Self>, RawFd)> {
        let device = Device::get().map_err(|e| {
            logger::init_early();
            log::error!("{e}");
            e.errno()
        })?;
        logger::init(&device.config().log);
        *OPENED.lock() = Arc::downgrade(&device);
        Self::over(device, node_guid)
    }

    /// A context over a given device.
    pub(crate) fn over(device: Arc<Device>, node_guid: u64) -> Result<(Arc<Self>, RawFd)> {
        let (events, async_fd) = AsyncChannel::pipe().map_err(|e| {
            log::error!("no event channel: {e}");
            e.raw_os_error().unwrap_or(libc::EIO)
        })?;
        let events = Arc::new(events);
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        let context = Self {
            net: Watched::begin(&device, &events),
            open: OpenObjects::default(),
            device,
            events,
            node_guid,
            comp_vectors: cpus,
            events_later: AtomicBool::new(false),
            channels: Mutex::default(),
        };
        Ok((Arc::new(context), async_fd.into_raw_fd()))
    }

    /// The context is imported: its event channel is known when it is used first.
    pub(crate) fn events_come_later(&self) {
        self.events_later.store(true, Ordering::Release);
    }

    /// Looks whether the event channel is to be adopted; `fd` is what libibverbs has now.
    pub(crate) fn adopt_events(&self, fd: RawFd) {
        if self.events_later.load(Ordering::Acquire)
            && self.events_later.swap(false, Ordering::AcqRel)
            && let Err(error) = self.events.adopt(fd)
        {
            log::error!("no event channel in an imported context: {error}");
        }
    }

    /// EIO in the child of a fork: to be asked before any lock is taken, which a thread that is not there may hold.
    pub(crate) fn alive(&self) -> Result<()> {
        if self.device.is_dead() { Err(libc::EIO) } else { Ok(()) }
    }

    /// The application has closed the device.
    pub(crate) fn close(&self) {
        if self.alive().is_ok() {
            self.open.close(&self.device);
        }
        self.net.end();
    }

    /// Our side of the completion channel at `address` whose descriptor is `fd`.
    ///
    /// A channel cannot be destroyed while a CQ uses it, so a live entry is always the channel of that address.
    pub(crate) fn comp_channel(&self, address: usize, fd: RawFd) -> Result<Arc<CompChannel>> {
        let mut channels = self.channels.lock();
        if let Some(channel) = channels.get(&address).and_then(Weak::upgrade) {
            return Ok(channel);
        }
        let channel = Arc::new(CompChannel::open(fd).map_err(|e| {
            log::error!("cannot open the completion channel's FIFO: {e}");
            e.raw_os_error().unwrap_or(libc::EIO)
        })?);
        channels.retain(|_, channel| channel.strong_count() > 0);
        channels.insert(address, Arc::downgrade(&channel));
        Ok(channel)
    }
}

/// Ends the process's connections in good order; called by the library's destructor.
pub(crate) fn exit() {
    // try_lock: a thread may have been stopped while it held the lock.
    if let Some(device) = OPENED.try_lock().and_then(|opened| opened.upgrade()) {
        device.exit();
    }
}
