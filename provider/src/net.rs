//! The device's addresses and links as they are now, and the events that tell of their changes.
//!
//! A thread sleeps on the kernel's announcements (`netlink.rs`) and on the control socket (`control.rs`), and costs
//! nothing while nothing changes and nobody asks. GIDs keep
//! their index as long as their address exists; a new address takes the first empty place, as in the kernel's table.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use metaroce_config::{DeviceConfig, Followed, NetView};
use metaroce_engine::Device;
use parking_lot::{Mutex, RwLock};
use rdma_core_sys::{IBV_EVENT_GID_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR};

use crate::channel::AsyncChannel;
use crate::control::{ControlSocket, Server};
use crate::limits::PORT;
use crate::netlink::Announcements;

/// The watched state of one context.
pub(crate) struct Watched {
    view: Arc<View>,
    watcher: Mutex<Option<Watcher>>,
}

/// What the port is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Port {
    /// A plane is up.
    pub(crate) up: bool,
    /// Active MTU in bytes.
    pub(crate) mtu: u32,
    /// Entries of the GID table, empty ones included.
    pub(crate) gid_table_len: usize,
}

/// Shared with the thread.
struct View {
    state: RwLock<Followed>,
    device: Weak<Device>,
    events: Arc<AsyncChannel>,
}

struct Watcher {
    announcements: Arc<Announcements>,
    thread: JoinHandle<()>,
    /// The process it runs in; in the child of a fork there is no thread.
    process: u32,
}

impl Watched {
    /// Begins watching. Without the kernel's announcements the state stays as it was when the device was opened.
    pub(crate) fn begin(device: &Arc<Device>, events: &Arc<AsyncChannel>) -> Self {
        let config = device.config();
        let here = NetView::of_this_host().ok();
        let state = RwLock::new(Followed::new(config, here.as_ref()));
        let view = Arc::new(View { state, device: Arc::downgrade(device), events: Arc::clone(events) });
        for (plane, _) in (0u8..).zip(&config.planes).filter(|(_, plane)| !plane.up) {
            view.steer(plane, false);
        }
        let control = ControlSocket::of(device);
        let watcher =
            Watcher::start(&view, control).inspect_err(|e| log::info!("changes of links go unnoticed: {e}"));
        Self { view, watcher: Mutex::new(watcher.ok()) }
    }

    /// The address of a GID; `None` where the table has none.
    pub(crate) fn gid_address(&self, index: u8) -> Option<IpAddr> {
        let known = || self.view.state.read().gids.get(usize::from(index)).copied().flatten();
        // The program may have seen a new one before its announcement came here.
        known().or_else(|| {
            self.view.update(&NetView::of_this_host().ok()?);
            known()
        })
    }

    /// The port now.
    pub(crate) fn port(&self) -> Port {
        port(&self.view.state.read())
    }

    /// The configuration, with links and addresses as they are now.
    pub(crate) fn config(&self) -> DeviceConfig {
        self.view.state.read().config.clone()
    }

    /// Ends watching.
    pub(crate) fn end(&self) {
        // In the child of a fork a thread that is not there may have the lock; here nobody else is to end it.
        let Some(watcher) = self.watcher.try_lock().and_then(|mut watcher| watcher.take()) else { return };
        if watcher.process == std::process::id() {
            watcher.announcements.stop();
            // A panic in it was reported when it happened.
            let _ = watcher.thread.join();
        } else {
            // The eventfd is the parent's too, and so is the thread.
            std::mem::forget(watcher);
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.end();
    }
}

impl Watcher {
    fn start(view: &Arc<View>, control: Option<Arc<ControlSocket>>) -> std::io::Result<Self> {
        let announcements = Arc::new(Announcements::open()?);
        let (view, heard) = (Arc::clone(view), Arc::clone(&announcements));
        let thread = crate::netlink::spawn_without_signals("metaroce-net", move || {
            let (mut server, mut fds) = (Server::new(control), Vec::new());
            loop {
                fds.clear();
                server.list(&mut fds);
                let woken = heard.wait(&mut fds);
                if woken.stopped {
                    return;
                }
                if woken.announced
                    && let Ok(here) = NetView::of_this_host()
                {
                    view.update(&here);
                }
                server.serve(&fds, &view.state);
            }
        })?;
        Ok(Self { announcements, thread, process: std::process::id() })
    }
}

impl View {
    /// Takes the new state over and tells the application what has changed.
    fn update(&self, here: &NetView) {
        let mut state = self.state.write();
        let (was, gids) = (port(&state), state.gids.clone());
        let links: Vec<bool> = state.config.planes.iter().map(|plane| plane.up).collect();
        state.follow(here);
        if let Some(gids) = kernel_gids(state.gid_table_len()) {
            state.gids = gids;
        }
        let (now, moved) = (port(&state), state.gids != gids);
        let planes = (0u8..).zip(state.config.planes.iter().map(|plane| plane.up).zip(links));
        let changed: Vec<(u8, bool)> =
            planes.filter(|(_, (now, was))| now != was).map(|(plane, (now, _))| (plane, now)).collect();
        drop(state);
        changed.into_iter().for_each(|(plane, up)| self.steer(plane, up));
        if was.up != now.up {
            self.tell(if now.up { IBV_EVENT_PORT_ACTIVE } else { IBV_EVENT_PORT_ERR });
        }
        if moved {
            self.tell(IBV_EVENT_GID_CHANGE);
        }
    }

    /// The engine leaves a plane whose link is down, and looks for one that is up again, at once.
    fn steer(&self, plane: u8, up: bool) {
        if let Some(device) = self.device.upgrade()
            && let Err(errno) = device.set_plane_link(plane, up)
        {
            log::debug!("plane {plane}: link event not taken, errno {errno}");
        }
    }

    /// An event of the port (`struct ib_uverbs_async_event_desc`); those are not acknowledged.
    fn tell(&self, event_type: u32) {
        let mut record = [0; 16];
        record[..8].copy_from_slice(&u64::from(PORT).to_ne_bytes());
        record[8..12].copy_from_slice(&event_type.to_ne_bytes());
        self.events.send(record);
    }
}

/// The port as it is in this state.
fn port(state: &Followed) -> Port {
    Port {
        up: state.config.planes.iter().any(|plane| plane.up),
        mtu: metaroce_config::active_mtu(&state.config),
        gid_table_len: state.gid_table_len(),
    }
}

/// The table as the kernel has it. Where it is another's (the shim answers for it), that is the one the program sees
/// when it asks for GIDs, and an index must mean the same here.
fn kernel_gids(len: usize) -> Option<Vec<Option<IpAddr>>> {
    let mut table = Vec::with_capacity(len);
    for index in 0..len {
        let text = std::fs::read_to_string(format!("{GIDS}/{index}")).ok()?;
        let ip: Ipv6Addr = text.trim().parse().ok()?;
        table.push((!ip.is_unspecified()).then(|| IpAddr::V6(ip).to_canonical()));
    }
    while table.last() == Some(&None) {
        table.pop();
    }
    Some(table)
}

/// Where the kernel shows the GIDs of the only port.
const GIDS: &str = "/sys/class/infiniband/metaroce0/ports/1/gids";

#[cfg(test)]
mod tests;
