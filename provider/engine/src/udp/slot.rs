//! Claims a slot: the kernel's port table is the registry of processes, so binding `base_port + slot` is the claim
//! and the death of the process gives it back.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use super::socket::{self, Family};
use crate::impair::SplitMix64;
use crate::limits::{RECEIVE_BUDGET_BYTES_MAX, RECEIVE_BUDGET_PERCENT, SLOTS};

/// A claimed slot.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Its number.
    pub(crate) number: u16,
    /// The socket on which everything for it arrives.
    pub(crate) socket: OwnedFd,
    /// Bytes all peers may have in flight towards it.
    pub(crate) receive_budget_bytes: u32,
}

/// Claims a free slot of the range at `base_port`, trying them in random order.
/// Errors: EINVAL when the range passes port 65535, EADDRINUSE when every slot is taken, others from the kernel.
pub(crate) fn claim(base_port: u16, rcvbuf_bytes: u32, gso: bool) -> io::Result<Slot> {
    if base_port == 0 || u32::from(base_port) + u32::from(SLOTS) > 1 << 16 {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let (socket, family) = receive_socket(rcvbuf_bytes, gso)?;
    let mut random = SplitMix64(socket::random_u64()?);
    let start = (random.next() % u64::from(SLOTS)) as u16;
    // Any odd stride visits all of a power of two.
    let stride = (random.next() | 1) as u16;
    for i in 0..SLOTS {
        let number = start.wrapping_add(i.wrapping_mul(stride)) % SLOTS;
        match socket::bind(&socket, wildcard(family, base_port + number), 0) {
            Ok(()) => {
                let receive_budget_bytes = receive_budget(&socket)?;
                return Ok(Slot { number, socket, receive_budget_bytes });
            }
            // EACCES: a port the administrator keeps for others.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EADDRINUSE | libc::EACCES)) => {}
            Err(e) => return Err(e),
        }
    }
    Err(io::Error::from_raw_os_error(libc::EADDRINUSE))
}

/// The unspecified address of a family, at `port`.
pub(crate) fn wildcard(family: Family, port: u16) -> SocketAddr {
    match family {
        Family::V4 => (Ipv4Addr::UNSPECIFIED, port).into(),
        Family::V6 => (Ipv6Addr::UNSPECIFIED, port).into(),
    }
}

/// A socket that receives both families, or IPv4 only where IPv6 is switched off, with all the options a receiver
/// wants. Only those without which packets could not be understood are errors when missing.
pub(crate) fn receive_socket(rcvbuf_bytes: u32, gso: bool) -> io::Result<(OwnedFd, Family)> {
    let (socket, family) = match dual_stack() {
        Ok(socket) => (socket, Family::V6),
        Err(_) => (socket::udp(Family::V4)?, Family::V4),
    };
    if family == Family::V6 {
        socket::set_option(&socket, libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
        socket::set_option(&socket, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
    } else {
        socket::set_option(&socket, libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
    }
    socket::set_option(&socket, libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
    if gso {
        let _ = socket::set_option(&socket, libc::SOL_UDP, libc::UDP_GRO, 1);
    }
    let _ = socket::set_option(&socket, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1);
    let wanted = i32::try_from(rcvbuf_bytes).unwrap_or(i32::MAX / 2);
    if socket::set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, wanted).is_err() {
        let _ = socket::set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUF, wanted);
    }
    Ok((socket, family))
}

/// An IPv6 socket that also receives IPv4; fails where IPv6 is off, built out or without any address.
fn dual_stack() -> io::Result<OwnedFd> {
    let socket = socket::udp(Family::V6)?;
    socket::set_option(&socket, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 0)?;
    Ok(socket)
}

/// What the buffer really granted can hold of payload. The kernel reports twice what was asked for, the second half
/// being its own bookkeeping.
fn receive_budget(socket: &OwnedFd) -> io::Result<u32> {
    let granted = socket::option(socket, libc::SOL_SOCKET, libc::SO_RCVBUF)? as u64 / 2;
    let budget = granted * RECEIVE_BUDGET_PERCENT / 100;
    Ok(budget.min(RECEIVE_BUDGET_BYTES_MAX) as u32)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A range of ports no other test uses.
    const BASE: u16 = 40_000;

    #[test]
    fn claim__different_slots_and_free_after_close() {
        let slots: Vec<Slot> = (0..40).map(|_| claim(BASE, 1 << 16, true).unwrap()).collect();
        let mut numbers: Vec<u16> = slots.iter().map(|s| s.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 40);
        let number = slots[0].number;
        drop(slots);
        let (socket, family) = receive_socket(1 << 16, false).unwrap();
        socket::bind(&socket, wildcard(family, BASE + number), 0).unwrap();
    }

    #[test]
    fn claim__budget_follows_what_is_granted() {
        let small = claim(BASE, 212_992, true).unwrap().receive_budget_bytes;
        assert_eq!(small, 159_744);
        assert!(claim(BASE, 1 << 30, true).unwrap().receive_budget_bytes as u64 <= RECEIVE_BUDGET_BYTES_MAX);
    }

    #[test]
    fn claim__range_must_fit() {
        assert_eq!(claim(64_513, 1 << 16, true).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(claim(0, 1 << 16, true).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}
