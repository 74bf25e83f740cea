//! The device's planes and GID table under changes of addresses and links, which the kernel-shim and the provider both
//! follow.
//!
//! GIDs keep their index as long as their address exists; a new address takes the first empty place, as in the kernel's
//! table.

use std::net::IpAddr;

use crate::resolve::rank;
use crate::{DeviceConfig, GID_TABLE_LEN, NetView, Plane, gid_table};

/// A device as it is after some changes.
#[derive(Debug, Clone, PartialEq)]
pub struct Followed {
    /// The configuration with addresses, links and MTUs as they are now.
    pub config: DeviceConfig,
    /// The GID table; `None` where an address is gone and no other has come.
    pub gids: Vec<Option<IpAddr>>,
    /// Whether each plane was configured by addresses: it gets no others.
    pinned: Vec<bool>,
}

impl Followed {
    /// The beginning: the configuration as resolved against `here`.
    #[must_use]
    pub fn new(config: &DeviceConfig, here: Option<&NetView>) -> Self {
        let pinned = |plane: &Plane| {
            let interface = here.and_then(|net| net.interfaces.iter().find(|i| i.name == plane.ifname));
            interface.is_none_or(|i| i.addrs.iter().any(|address| !plane.addrs.contains(address)))
        };
        Self {
            pinned: config.planes.iter().map(pinned).collect(),
            gids: gid_table(config).iter().map(|entry| Some(entry.ip)).collect(),
            config: config.clone(),
        }
    }

    /// Length of the table to report, empty entries included; at least one is empty.
    #[must_use]
    pub fn gid_table_len(&self) -> usize {
        (self.gids.len() + 1).max(GID_TABLE_LEN)
    }

    /// Takes over how things are now.
    pub fn follow(&mut self, here: &NetView) {
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
        let now: Vec<IpAddr> = gid_table(&self.config).iter().map(|entry| entry.ip).filter(exists).collect();
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
