//! `/dev/infiniband/rdma_cm`: connection management in the process, so that librdmacm programs need no kernel's.
//!
//! An open descriptor of the device is one end of a socket pair ([`channel`]), known by its inode number; there is no
//! table of descriptors. Commands are written to it ([`command`], [`abi`]) and act on ids ([`id`]) and on the
//! connections' state machine ([`machine`]), which speaks to other processes' by UDP ([`wire`], [`socket`]). A thread
//! takes packets and keeps time; it sleeps while there is neither, and while no connection has a peer to watch, for
//! ever.
//!
//! One lock covers everything; it is held for the time of one command or one batch of packets, never while waiting.
//!
//! After fork the child finds what its parent had. If its first use is of a descriptor it inherited (a daemon), it takes
//! everything over; if it opens the device anew (a worker), it begins with nothing and the parent's descriptors are
//! dead to it. Parent and child cannot both go on with the same connections.

use std::ffi::{CStr, c_int};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use self::abi::Plain;
use self::command::{Command, Outcome};
use self::service::Service;
use crate::guard;

mod abi;
mod address;
mod channel;
mod command;
mod fork;
mod id;
mod machine;
mod multicast;
mod os;
mod places;
mod service;
mod socket;
mod wire;

pub(crate) use abi::ABI_VERSION;
pub(crate) use command::NODE;

static SERVICE: Mutex<Option<Service>> = Mutex::new(None);
/// Channels that are open, so that a process without any pays nothing.
static CHANNELS: AtomicUsize = AtomicUsize::new(0);
/// The thread is running in this process.
static RUNNING: AtomicBool = AtomicBool::new(false);

/// Counts services, so that a thread knows whether the one it serves is still there.
static LIFE: AtomicUsize = AtomicUsize::new(0);

fn lock() -> MutexGuard<'static, Option<Service>> {
    // A panic is contained by the guard; what it left behind is as good as what a failed command leaves.
    SERVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a path can be the device's node; the cheap test before [`open`].
pub(crate) fn may_be_node(path: &CStr) -> bool {
    path.to_bytes().ends_with(NODE.as_bytes())
}

/// Opens the device: gives a descriptor. Call under [`guard::run`].
///
/// # Errors
/// errno.
pub(crate) fn open(flags: c_int) -> Result<c_int, c_int> {
    let mut locked = lock();
    if fork::is_child() {
        // What the parent had is the parent's.
        *locked = None;
        CHANNELS.store(0, Ordering::Release);
        fork::begin_as_parent();
    }
    if locked.as_ref().is_some_and(|service| !service.is_intact()) {
        // Without closing anything: the numbers may be others' by now. The thread waits on what is gone, for ever.
        std::mem::forget(locked.take());
        RUNNING.store(false, Ordering::Release);
    }
    if locked.is_none() {
        LIFE.fetch_add(1, Ordering::AcqRel);
        fork::register();
        *locked = Some(Service::new()?);
    }
    let service = locked.as_mut().ok_or(libc::ENODEV)?;
    let fd = service.open(flags)?;
    CHANNELS.store(service.channels.len(), Ordering::Release);
    ensure_thread();
    Ok(fd)
}

/// Whether a descriptor is one of ours. Call under [`guard::run`].
pub(crate) fn is_channel(fd: c_int) -> bool {
    any_channels()
        && os::socket_inode(fd)
            .is_some_and(|inode| lock().as_ref().is_some_and(|service| service.channels.contains_key(&inode)))
}

/// Whether there are any channels at all.
#[inline]
pub(crate) fn any_channels() -> bool {
    CHANNELS.load(Ordering::Acquire) != 0
}

/// Whether a write can be a command; all others of the process stop here.
#[inline]
pub(crate) fn looks_like_command(bytes: &[u8]) -> bool {
    any_channels() && command::looks_like_one(bytes)
}

/// Whether a write is a wait for events, in a process that has had channels.
pub(crate) fn is_wait(bytes: &[u8]) -> bool {
    LIFE.load(Ordering::Acquire) != 0
        && command::looks_like_one(bytes)
        && abi::Header::read(bytes).cmd == abi::cmd::GET_EVENT
        && bytes.len() == abi::HEADER_BYTES + size_of::<abi::GetEvent>()
}

/// What became of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Written {
    /// The descriptor is none of ours.
    Foreign,
    Done,
    Failed(c_int),
    /// Wait until the descriptor is readable, then try again.
    Wait,
}

/// Carries out a command that was written to `fd`. Call under [`guard::run`].
pub(crate) fn write(fd: c_int, bytes: &[u8]) -> Written {
    let Some(inode) = os::socket_inode(fd) else { return Written::Foreign };
    let mut locked = lock();
    let Some(service) = locked.as_mut().filter(|service| service.channels.contains_key(&inode)) else {
        return Written::Foreign;
    };
    if !service.is_intact() {
        return Written::Failed(libc::EBADF);
    }
    if fork::is_child() {
        if let Err(errno) = service.adopt_after_fork() {
            return Written::Failed(errno);
        }
        fork::begin_as_parent();
    }
    ensure_thread();
    let now = os::now_us();
    let header = abi::Header::read(bytes);
    let command = Command { channel: inode, fd, header, payload: &bytes[abi::HEADER_BYTES..], now };
    let outcome = command.run(service);
    service.flush(now);
    match outcome {
        Ok(Outcome::Done) => Written::Done,
        Ok(Outcome::NoEvent) if os::is_nonblocking(fd) => Written::Failed(libc::EAGAIN),
        Ok(Outcome::NoEvent) => Written::Wait,
        Err(errno) => Written::Failed(errno),
    }
}

/// Starts the thread if it does not run. Without it (no memory) packets wait until the next command tries again.
fn ensure_thread() {
    if RUNNING.swap(true, Ordering::AcqRel) {
        return;
    }
    let life = LIFE.load(Ordering::Acquire);
    let body = move || {
        // For good: nothing that this thread does is a program's.
        let _ = guard::run(|| run_thread(life));
        if LIFE.load(Ordering::Acquire) == life {
            RUNNING.store(false, Ordering::Release);
        }
    };
    let start = || {
        std::thread::Builder::new().name("metaroce-cm".to_owned()).stack_size(THREAD_STACK_BYTES).spawn(body)
    };
    if os::with_signals_blocked(start).is_err() {
        RUNNING.store(false, Ordering::Release);
    }
}

const THREAD_STACK_BYTES: usize = 256 << 10;

fn run_thread(life: usize) {
    let mut tokens = Vec::new();
    loop {
        let (epoll, timeout) = {
            let mut locked = lock();
            let alive = LIFE.load(Ordering::Acquire) == life;
            let Some(service) = locked.as_mut().filter(|service| alive && service.is_intact()) else {
                return;
            };
            let timeout = service.step(&tokens);
            CHANNELS.store(service.channels.len(), Ordering::Release);
            (service.epoll.fd(), timeout)
        };
        os::wait(epoll, timeout, &mut tokens);
    }
}
