//! Address vectors: from a GID and a GID index to IP addresses.

use std::net::{IpAddr, Ipv6Addr};

use rdma_core_sys::ibv_ah_attr;

use crate::ffi::{Result, gid_bytes};
use crate::limits::PORT;
use crate::net::Watched;

/// Both ends of a path, from an address vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Addresses {
    /// The peer's, from the destination GID.
    pub(crate) remote: IpAddr,
    /// Ours, from the source GID index.
    pub(crate) local: IpAddr,
}

impl Addresses {
    /// EINVAL for another port than 1, without GRH, with an empty or mismatched GID. A group may be of another family
    /// than the source: RNICs do not mind, and perftest counts on it.
    pub(crate) fn resolve(net: &Watched, attr: &ibv_ah_attr) -> Result<Self> {
        if attr.is_global == 0 {
            log::warn!("RoCE needs GRH: set is_global=1 and the destination GID in the address vector");
            return Err(libc::EINVAL);
        }
        if attr.port_num != PORT {
            return Err(libc::EINVAL);
        }
        let remote = address_of(gid_bytes(&attr.grh.dgid));
        match net.gid_address(attr.grh.sgid_index) {
            Some(local)
                if remote.is_multicast()
                    || !remote.is_unspecified() && local.is_ipv4() == remote.is_ipv4() =>
            {
                Ok(Self { remote, local })
            }
            _ => Err(libc::EINVAL),
        }
    }
}

/// The address a GID stands for: IPv4 when it is IPv4-mapped.
pub(crate) fn address_of(gid: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_of_maps_ipv4_and_keeps_ipv6() {
        let mapped: [u8; 16] = "::ffff:192.0.2.7".parse::<Ipv6Addr>().expect("address").octets();
        assert_eq!(address_of(mapped), "192.0.2.7".parse::<IpAddr>().expect("address"));
        let v6: Ipv6Addr = "2001:db8::7".parse().expect("address");
        assert_eq!(address_of(v6.octets()), v6);
        // ::1 is an address of its own, not IPv4-compatible 0.0.0.1.
        assert_eq!(address_of(Ipv6Addr::LOCALHOST.octets()), Ipv6Addr::LOCALHOST);
    }
}
