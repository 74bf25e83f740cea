//! The device's GID table and MTU, both derived from its planes.

use std::net::{IpAddr, Ipv6Addr};

use crate::{DeviceConfig, Plane};

/// Smallest length of the GID table; see [`gid_table_len`].
pub const GID_TABLE_LEN: usize = 16;

/// One populated entry of the GID table; its index is its place in [`gid_table`]'s result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidEntry {
    /// The GID, network order: an IPv6 address or an IPv4-mapped one.
    pub gid: [u8; 16],
    /// The address it stands for.
    pub ip: IpAddr,
    /// Index of its plane.
    pub plane: usize,
    /// Kernel index of the plane's interface.
    pub ifindex: u32,
    /// Name of the plane's interface.
    pub ifname: String,
}

/// The populated entries, dense from index 0: plane by plane, each plane's addresses in its own order.
///
/// An address that several planes have appears once, for the first of them.
#[must_use]
pub fn gid_table(config: &DeviceConfig) -> Vec<GidEntry> {
    let mut table: Vec<GidEntry> = Vec::new();
    for (index, plane) in config.planes.iter().enumerate() {
        for &ip in &plane.addrs {
            if table.iter().all(|entry| entry.ip != ip) {
                let (ifindex, ifname) = (plane.ifindex, plane.ifname.clone());
                table.push(GidEntry { gid: gid_of(ip), ip, plane: index, ifindex, ifname });
            }
        }
    }
    table
}

/// Length of the table to report: at least [`GID_TABLE_LEN`], and at least one empty entry at its end.
#[must_use]
pub fn gid_table_len(config: &DeviceConfig) -> usize {
    (gid_table(config).len() + 1).max(GID_TABLE_LEN)
}

/// The largest IB MTU in bytes (256 to 4096) that one packet of plane 0 can carry.
#[must_use]
pub fn active_mtu(config: &DeviceConfig) -> u32 {
    /// UDP header, transport header and frames around the data.
    const PROTOCOL_BYTES: u32 = 8 + 80;
    let ip_bytes = |plane: &Plane| if plane.addrs.first().is_some_and(IpAddr::is_ipv4) { 20 } else { 40 };
    let room =
        config.planes.first().map_or(0, |plane| plane.mtu.saturating_sub(ip_bytes(plane) + PROTOCOL_BYTES));
    [4096, 2048, 1024, 512].into_iter().find(|&mtu| mtu <= room).unwrap_or(256)
}

fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => Ipv6Addr::octets(&v6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolve::tests::{device, interface};

    #[test]
    fn gid_table__is_dense_plane_by_plane_without_repeats() {
        let mut config =
            device(&[interface("eth0", &["192.0.2.1", "2001:db8::1"]), interface("eth1", &["192.0.2.9"])]);
        config.planes[1].addrs.push("2001:db8::1".parse().unwrap());
        let table = gid_table(&config);
        let seen: Vec<(String, usize)> = table.iter().map(|e| (e.ip.to_string(), e.plane)).collect();
        assert_eq!(seen, [("192.0.2.1".into(), 0), ("2001:db8::1".into(), 0), ("192.0.2.9".into(), 1)]);
        assert_eq!(table[0].gid, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 192, 0, 2, 1]);
        assert_eq!(table[2].ifname, "eth1");
        assert_eq!(gid_table_len(&config), 16);
    }

    #[test]
    fn gid_table_len__keeps_an_empty_entry_at_the_end() {
        let mut config = device(&[interface("eth0", &["192.0.2.1"])]);
        config.planes[0].addrs = (0..40).map(|i| IpAddr::from([192, 0, 2, i])).collect();
        assert_eq!(gid_table_len(&config), 41);
    }

    #[test]
    fn active_mtu__is_what_fits_the_first_plane() {
        let with = |mtu, address: &str| {
            let mut config = device(&[interface("eth0", &[address])]);
            config.planes[0].mtu = mtu;
            active_mtu(&config)
        };
        assert_eq!(with(1500, "192.0.2.1"), 1024);
        assert_eq!(with(9000, "192.0.2.1"), 4096);
        assert_eq!(with(65536, "127.0.0.1"), 4096);
        assert_eq!(with(4252, "192.0.2.1"), 4096);
        assert_eq!(with(4096 + 128 - 1, "2001:db8::1"), 2048);
        assert_eq!(with(68, "192.0.2.1"), 256);
    }
}
