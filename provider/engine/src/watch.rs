//! Listeners to what happens to planes and paths: a descriptor each that is readable while there is something to hear.

use std::os::fd::RawFd;
use std::sync::{Arc, Weak};

use metaroce_proto::journal::{Journal, PlaneEvent};

use crate::device::Device;
use crate::engine::Core;
use crate::udp::socket::Wake;
use crate::{Errno, drive::Engine};

/// The listeners of a device; under the engine's lock.
#[derive(Default)]
pub(crate) struct Watchers {
    all: Vec<(Arc<Wake>, u64)>,
    /// Number of the first event nobody was told of.
    told: u64,
}

impl Watchers {
    /// Somebody listens.
    pub(crate) fn any(&self) -> bool {
        !self.all.is_empty()
    }
    /// Wakes the listeners if there is something new.
    pub(crate) fn tell(&mut self, journal: &Journal) {
        if journal.next() != self.told {
            self.told = journal.next();
            self.all.iter().for_each(|(wake, _)| wake.signal());
        }
    }
    /// Where the listener with this descriptor is.
    fn cursor(&mut self, fd: RawFd) -> Option<&mut u64> {
        self.all.iter_mut().find(|(wake, _)| wake.fd() == fd).map(|(_, cursor)| cursor)
    }
}

/// An event, and how many before it were lost because the listener was too far behind.
#[derive(Debug, Clone, Copy)]
pub struct Heard {
    /// The event.
    pub event: PlaneEvent,
    /// Events lost before it.
    pub lost: u64,
}

/// A listener. It hears what happens from its beginning on.
pub struct Watch {
    device: Weak<Device>,
    wake: Arc<Wake>,
}

impl Watch {
    pub(crate) fn begin(device: &Arc<Device>) -> Result<Watch, Errno> {
        let wake = Wake::new().map_err(|error| error.raw_os_error().unwrap_or(libc::EMFILE))?;
        let wake = Arc::new(wake);
        device.engine().control(|Core { io, watchers, .. }, _| {
            let mut cursor = 0;
            if let Some(io) = io {
                io.endpoint.journal.wanted = true;
                cursor = io.endpoint.journal.next();
            }
            watchers.all.push((wake.clone(), cursor));
            Ok(())
        })?;
        device.keep_from_children(wake.fd());
        Ok(Watch { device: Arc::downgrade(device), wake })
    }

    /// Readable while there is an event to take.
    pub fn fd(&self) -> RawFd {
        self.wake.fd()
    }

    /// The next event. EAGAIN: there is none now; ENODEV: the device is closed; EIO: in the child of a fork.
    pub fn next(&self) -> Result<Heard, Errno> {
        let device = self.device.upgrade().ok_or(libc::ENODEV)?;
        let engine: &Engine = device.engine();
        engine.control(|Core { io, watchers, .. }, _| {
            let io = io.as_ref().ok_or(libc::EAGAIN)?;
            let journal = &io.endpoint.journal;
            let cursor = watchers.cursor(self.wake.fd()).ok_or(libc::EINVAL)?;
            let found = journal.read(*cursor);
            let heard = found.map(|(number, event)| Heard {
                event: *event,
                lost: number - std::mem::replace(cursor, number + 1),
            });
            if *cursor == journal.next() {
                // Under the lock that signals are sent under: none is taken back that stands for something new.
                self.wake.clear();
            }
            heard.ok_or(libc::EAGAIN)
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(device) = self.device.upgrade() else { return };
        if device.is_dead() {
            // The descriptor is closed already, and its number may be another's.
            std::mem::forget(self.wake.clone());
            return;
        }
        device.release_descriptor(self.wake.fd());
        // Fails only in the child of a fork.
        let _ = device.engine().control(|Core { io, watchers, .. }, _| {
            watchers.all.retain(|(wake, _)| !Arc::ptr_eq(wake, &self.wake));
            if let Some(io) = io {
                io.endpoint.journal.wanted = watchers.any();
            }
            Ok(())
        });
    }
}
