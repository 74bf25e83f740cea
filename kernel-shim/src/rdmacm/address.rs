//! Addresses as the ABI carries them: a sockaddr_in or sockaddr_in6 in 28 bytes, all zero for none.

use std::ffi::c_int;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

const BYTES: usize = 28;

/// Reads an address; `None` for the family 0.
///
/// # Errors
/// EAFNOSUPPORT for every other family than IPv4 and IPv6.
pub(super) fn from_raw(raw: &[u8; BYTES]) -> Result<Option<SocketAddr>, c_int> {
    let family = c_int::from(u16::from_ne_bytes([raw[0], raw[1]]));
    let port = u16::from_be_bytes([raw[2], raw[3]]);
    match family {
        0 => Ok(None),
        libc::AF_INET => {
            let ip = Ipv4Addr::new(raw[4], raw[5], raw[6], raw[7]);
            Ok(Some(SocketAddr::V4(SocketAddrV4::new(ip, port))))
        }
        libc::AF_INET6 => {
            let mut ip = [0; 16];
            ip.copy_from_slice(&raw[8..24]);
            let scope = u32::from_ne_bytes([raw[24], raw[25], raw[26], raw[27]]);
            Ok(Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope))))
        }
        _ => Err(libc::EAFNOSUPPORT),
    }
}

/// Writes an address.
pub(super) fn to_raw(address: Option<SocketAddr>) -> [u8; BYTES] {
    let mut raw = [0; BYTES];
    match address {
        None => {}
        Some(SocketAddr::V4(address)) => {
            raw[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
            raw[2..4].copy_from_slice(&address.port().to_be_bytes());
            raw[4..8].copy_from_slice(&address.ip().octets());
        }
        Some(SocketAddr::V6(address)) => {
            raw[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
            raw[2..4].copy_from_slice(&address.port().to_be_bytes());
            raw[8..24].copy_from_slice(&address.ip().octets());
            raw[24..].copy_from_slice(&address.scope_id().to_ne_bytes());
        }
    }
    raw
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address__comes_back_as_it_was() {
        for text in ["192.0.2.1:7471", "[2001:db8::1]:1", "[fe80::1%3]:65535"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(from_raw(&to_raw(Some(address))), Ok(Some(address)));
        }
        assert_eq!(from_raw(&to_raw(None)), Ok(None));
        // AF_IB, which librdmacm tries.
        let mut raw = [0; BYTES];
        raw[0] = 27;
        assert_eq!(from_raw(&raw), Err(libc::EAFNOSUPPORT));
    }
}
