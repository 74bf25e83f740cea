//! Where ids are: what the kernel announces of addresses and interfaces, and what ids hear of it.
//!
//! As rdma_get_cm_event(3) has it, an id hears of an address change when the hardware behind its address is another,
//! and of a device removal when there is no device any more: for this one, when the last interface of its planes has
//! been taken away. An address that vanishes or moves to another interface is a change of that kind, too. Wildcard
//! listeners are on no device and hear of neither; a link that is merely down is the port's matter.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use metaroce_config::NetView;

use super::abi::event;
use super::os;
use super::service::Service;
use crate::device;

/// The addresses of the host, each with the index of its interface and the hardware address there.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Places(Vec<(IpAddr, u32, [u8; 6])>);

impl Places {
    pub(super) fn of(here: &NetView) -> Places {
        let of = |i: &metaroce_config::Interface| {
            let (index, mac) = (i.index, i.mac);
            i.addrs.iter().map(move |ip| (*ip, index, mac)).collect::<Vec<_>>()
        };
        Places(here.interfaces.iter().flat_map(of).collect())
    }

    /// The interface that has an address, and the hardware address there.
    fn find(&self, address: SocketAddr) -> Option<(u32, [u8; 6])> {
        let scope = match address {
            SocketAddr::V6(address) => address.scope_id(),
            SocketAddr::V4(_) => 0,
        };
        let ip = address.ip().to_canonical();
        let is_it = |place: &&(IpAddr, u32, [u8; 6])| place.0 == ip && (scope == 0 || scope == place.1);
        self.0.iter().find(is_it).map(|place| (place.1, place.2))
    }
}

/// The kernel's announcements of changes of links and addresses, out of the application's way.
pub(super) fn announcements() -> io::Result<OwnedFd> {
    os::out_of_the_way(metaroce_config::announcements()?)
}

impl Service {
    /// The index of the device's GID for a local address, one that has just come included.
    pub(super) fn gid_index_now(&mut self, now: u64, ip: IpAddr) -> Option<usize> {
        self.gid_index(ip).or_else(|| {
            self.look_around(now);
            self.gid_index(ip)
        })
    }

    /// Takes over how the host is now, and tells the ids that it concerns.
    pub(super) fn look_around(&mut self, now: u64) {
        let Ok(here) = NetView::of_this_host() else { return };
        self.device = device::fresh().unwrap_or(self.device);
        let before = std::mem::replace(&mut self.places, Places::of(&here));
        let is_gone = self.device.is_gone(&here);
        let on_device: Vec<u32> =
            self.ids.iter().filter(|(_, id)| id.gid_index.is_some()).map(|(number, _)| *number).collect();
        for number in on_device {
            if is_gone {
                self.take_device_from(now, number);
                continue;
            }
            let Some(src) = self.ids.get(&number).and_then(|id| id.src) else { continue };
            let was = before.find(src);
            if was.is_some() && was != self.places.find(src) {
                self.tell(number, event::ADDR_CHANGE);
            }
        }
    }

    /// An id has lost its device: all that is left to be done with it is to destroy it.
    fn take_device_from(&mut self, now: u64, number: u32) {
        let Some(id) = self.ids.get_mut(&number) else { return };
        (id.gid_index, id.routed, id.listening) = (None, false, false);
        let key = id.key.take();
        self.machine.unlisten(number);
        if let Some(key) = key {
            self.machine.destroy(now, key);
        }
        self.tell(number, event::DEVICE_REMOVAL);
    }

    /// As in the kernel, nothing is said of a request before the application accepts it.
    fn tell(&mut self, number: u32, event: u32) {
        if self.ids.get(&number).is_some_and(|id| id.uid != 0) {
            self.post(number, event, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metaroce_config::Interface;

    #[test]
    fn places__are_found_by_address_and_scope() {
        let interface = |index: u32, addrs: &[&str]| Interface {
            index,
            mac: [2, 0, 0, 0, 0, index as u8],
            addrs: addrs.iter().map(|ip| ip.parse().unwrap()).collect(),
            ..Interface::default()
        };
        let interfaces = vec![interface(1, &["192.0.2.1", "fe80::1"]), interface(2, &["fe80::1"])];
        let places = Places::of(&NetView { interfaces, default_route: None });
        let find = |address: &str| places.find(address.parse().unwrap()).map(|(index, _)| index);
        assert_eq!(find("192.0.2.1:5"), Some(1));
        assert_eq!(find("[::ffff:192.0.2.1]:5"), Some(1));
        assert_eq!(find("[fe80::1%2]:5"), Some(2));
        assert_eq!(find("192.0.2.2:5"), None);
        assert_ne!(places, Places::default());
    }
}
