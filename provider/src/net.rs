//! The device's addresses and links as they are now, and the events that tell of their changes.
//!
//! A thread sleeps on the kernel's announcements (`netlink.rs`) and costs nothing while nothing changes. GIDs keep
//! their index as long as their address exists; a new address takes the first empty place, as in the kernel's table.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::thread::JoinHandle;

use metaroce_config::{DeviceConfig, GID_TABLE_LEN, NetView, Plane};
use parking_lot::{Mutex, RwLock};
use rdma_core_sys::{IBV_EVENT_GID_CHANGE, IBV_EVENT_PORT_ACTIVE, IBV_EVENT_PORT_ERR};

use crate::channel::AsyncChannel;
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
    state: RwLock<State>,
    events: Arc<AsyncChannel>,
}

#[derive(Debug, Clone)]
struct State {
    config: DeviceConfig,
    /// Whether each plane was configured by addresses: it gets no others.
    pinned: Vec<bool>,
    gids: Vec<Option<IpAddr>>,
}

struct Watcher {
    announcements: Arc<Announcements>,
    thread: JoinHandle<()>,
    /// The process it runs in; in the child of a fork there is no thread.
    process: u32,
}

impl Watched {
    /// Begins watching. Without the kernel's announcements the state stays as it was when the device was opened.
    pub(crate) fn begin(config: &DeviceConfig, events: &Arc<AsyncChannel>) -> Self {
        let here = NetView::of_this_host().ok();
        let state = RwLock::new(State::new(config, here.as_ref()));
        let view = Arc::new(View { state, events: Arc::clone(events) });
        let watcher = Watcher::start(&view).inspect_err(|e| log::info!("changes of links go unnoticed: {e}"));
        Self { view, watcher: Mutex::new(watcher.ok()) }
    }

    /// The address of a GID; `None` where the table has none.
    pub(crate) fn gid_address(&self, index: u8) -> Option<IpAddr> {
        self.view.state.read().gids.get(usize::from(index)).copied().flatten()
    }

    /// The port now.
    pub(crate) fn port(&self) -> Port {
        self.view.state.read().port()
    }

    /// Ends watching.
    pub(crate) fn end(&self) {
        let Some(watcher) = self.watcher.lock().take() else { return };
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
    fn start(view: &Arc<View>) -> std::io::Result<Self> {
        let announcements = Arc::new(Announcements::open()?);
        let (view, heard) = (Arc::clone(view), Arc::clone(&announcements));
        let thread = crate::netlink::spawn_without_signals("metaroce-net", move || {
            while heard.wait() {
                if let Ok(here) = NetView::of_this_host() {
                    view.update(&here);
                }
            }
        })?;
        Ok(Self { announcements, thread, process: std::process::id() })
    }
}

impl View {
    /// Takes the new state over and tells the application what has changed.
    fn update(&self, here: &NetView) {
        let mut state = self.state.write();
        let (was, gids) = (state.port(), state.gids.clone());
        state.follow(here);
        let (now, moved) = (state.port(), state.gids != gids);
        drop(state);
        if was.up != now.up {
            self.tell(if now.up { IBV_EVENT_PORT_ACTIVE } else { IBV_EVENT_PORT_ERR });
        }
        if moved {
            self.tell(IBV_EVENT_GID_CHANGE);
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

impl State {
    fn new(config: &DeviceConfig, here: Option<&NetView>) -> Self {
        let pinned = |plane: &Plane| {
            let interface = here.and_then(|net| net.interfaces.iter().find(|i| i.name == plane.ifname));
            interface.is_none_or(|i| i.addrs.iter().any(|address| !plane.addrs.contains(address)))
        };
        Self {
            pinned: config.planes.iter().map(pinned).collect(),
            gids: metaroce_config::gid_table(config).iter().map(|entry| Some(entry.ip)).collect(),
            config: config.clone(),
        }
    }

    fn port(&self) -> Port {
        Port {
            up: self.config.planes.iter().any(|plane| plane.up),
            mtu: metaroce_config::active_mtu(&self.config),
            gid_table_len: (self.gids.len() + 1).max(GID_TABLE_LEN),
        }
    }

    fn follow(&mut self, here: &NetView) {
        for (plane, pinned) in self.config.planes.iter_mut().zip(&self.pinned) {
            let Some(interface) = here.interfaces.iter().find(|i| i.name == plane.ifname) else {
                (plane.up, plane.addrs) = (false, Vec::new());
                continue;
            };
            plane.up = interface.up && interface.running;
            plane.mtu = interface.mtu;
            plane.ifindex = interface.index;
            // A pinned address that is gone may come back, so it is not forgotten here but left out of the table.
            if !pinned {
                plane.addrs.clone_from(&interface.addrs);
                plane.addrs.sort_by_key(rank);
            }
        }
        let exists = |ip: &IpAddr| here.interfaces.iter().any(|i| i.addrs.contains(ip));
        let now: Vec<IpAddr> =
            metaroce_config::gid_table(&self.config).iter().map(|entry| entry.ip).filter(exists).collect();
        for place in &mut self.gids {
            *place = place.filter(|ip| now.contains(ip));
        }
        for ip in now {
            if self.gids.contains(&Some(ip)) {
                continue;
            }
            match self.gids.iter_mut().find(|place| place.is_none()) {
                Some(place) => *place = Some(ip),
                None => self.gids.push(Some(ip)),
            }
        }
    }
}

/// GID order within a plane: IPv4, global IPv6, link-local IPv6.
fn rank(ip: &IpAddr) -> u8 {
    match ip {
        IpAddr::V4(_) => 0,
        IpAddr::V6(v6) if !Ipv6Addr::is_unicast_link_local(v6) => 1,
        IpAddr::V6(_) => 2,
    }
}

#[cfg(test)]
mod tests;
