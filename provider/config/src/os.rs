//! Asks the kernel for the interfaces (getifaddrs, SIOCGIFMTU), and to be told of changes (netlink); this crate's one
//! file with unsafe code.

use std::ffi::CStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::Interface;

/// The interfaces of the calling thread's network namespace, in kernel order.
pub(crate) fn interfaces() -> io::Result<Vec<Interface>> {
    let list = IfAddrs::new()?;
    let mut found: Vec<Interface> = Vec::new();
    for entry in list.iter() {
        if entry.ifa_name.is_null() {
            continue;
        }
        // SAFETY: getifaddrs gives a NUL-terminated name that lives as long as `list`.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy();
        // An IPv4 alias is listed under its label (`eth0:1`); the part before the colon is the interface.
        let name = name.split(':').next().unwrap_or_default();
        let position = found.iter().position(|i| i.name == name).unwrap_or_else(|| {
            let flags = entry.ifa_flags;
            let has = |flag: libc::c_int| flags & flag as u32 != 0;
            found.push(Interface {
                name: name.to_owned(),
                up: has(libc::IFF_UP),
                running: has(libc::IFF_RUNNING),
                loopback: has(libc::IFF_LOOPBACK),
                ..Interface::default()
            });
            found.len() - 1
        });
        match Address::of(entry) {
            Some(Address::Link(index, mac)) => (found[position].index, found[position].mac) = (index, mac),
            Some(Address::Ip(ip)) if !found[position].addrs.contains(&ip) => found[position].addrs.push(ip),
            _ => {}
        }
    }
    complete(&mut found)?;
    Ok(found)
}

/// Fills in what getifaddrs does not say: the MTU, and the index of an interface without a link-layer entry.
fn complete(found: &mut [Interface]) -> io::Result<()> {
    let socket = ControlSocket::new()?;
    for interface in found {
        interface.mtu = socket.mtu(&interface.name).unwrap_or(0);
        if interface.index == 0 {
            let mut name = [0u8; libc::IFNAMSIZ];
            let length = interface.name.len().min(name.len() - 1);
            name[..length].copy_from_slice(&interface.name.as_bytes()[..length]);
            // SAFETY: `name` is NUL-terminated because its last byte is never written.
            interface.index = unsafe { libc::if_nametoindex(name.as_ptr().cast()) };
        }
    }
    Ok(())
}

enum Address {
    Link(u32, [u8; 6]),
    Ip(IpAddr),
}

impl Address {
    fn of(entry: &libc::ifaddrs) -> Option<Address> {
        if entry.ifa_addr.is_null() {
            return None;
        }
        // SAFETY: a non-null ifa_addr points to a sockaddr that lives as long as the list `entry` belongs to.
        let family = i32::from(unsafe { (*entry.ifa_addr).sa_family });
        match family {
            libc::AF_INET => {
                // SAFETY: the family says that this is a sockaddr_in; read_unaligned asks for no alignment.
                let sin = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                Some(Address::Ip(Ipv4Addr::from(u32::from_be(sin.sin_addr.s_addr)).into()))
            }
            libc::AF_INET6 => {
                // SAFETY: the family says that this is a sockaddr_in6.
                let sin6 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                Some(Address::Ip(Ipv6Addr::from(sin6.sin6_addr.s6_addr).into()))
            }
            libc::AF_PACKET => {
                // SAFETY: the family says that this is a sockaddr_ll.
                let sll = unsafe { entry.ifa_addr.cast::<libc::sockaddr_ll>().read_unaligned() };
                let mut mac = [0; 6];
                if sll.sll_halen == 6 {
                    mac.copy_from_slice(&sll.sll_addr[..6]);
                }
                Some(Address::Link(u32::try_from(sll.sll_ifindex).ok()?, mac))
            }
            _ => None,
        }
    }
}

/// Owner of a getifaddrs list.
struct IfAddrs(*mut libc::ifaddrs);

impl IfAddrs {
    fn new() -> io::Result<IfAddrs> {
        let mut head = std::ptr::null_mut();
        // SAFETY: `head` is a valid place for the list's address.
        if unsafe { libc::getifaddrs(&mut head) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(IfAddrs(head))
    }

    fn iter(&self) -> impl Iterator<Item = &libc::ifaddrs> {
        // SAFETY: head and ifa_next are null or valid entries until freeifaddrs, which waits for `self` to drop.
        let deref = |entry: *mut libc::ifaddrs| unsafe { entry.as_ref() };
        std::iter::successors(deref(self.0), move |entry| deref(entry.ifa_next))
    }
}

impl Drop for IfAddrs {
    fn drop(&mut self) {
        // SAFETY: the list came from getifaddrs and is freed once, here.
        unsafe { libc::freeifaddrs(self.0) }
    }
}

/// Opens a socket that is readable when links or addresses of the calling thread's network namespace have changed. It
/// does not wait, and is closed on exec.
///
/// # Errors
/// The kernel's.
pub fn announcements() -> io::Result<OwnedFd> {
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: plain system call without pointers.
    let fd = unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor nobody else knows.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: all-zero bytes are a valid address.
    let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
    address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    address.nl_groups = (libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR) as u32;
    let length = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
    // SAFETY: the address lives through the call and has the size given.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if bound == 0 { Ok(socket) } else { Err(io::Error::last_os_error()) }
}

/// Takes everything that is there, including the note that some was lost (ENOBUFS). What was announced is not looked at:
/// several at once, and lost ones, all mean "look again".
pub fn take_announcements(socket: &impl AsFd) {
    let socket = socket.as_fd().as_raw_fd();
    let mut buffer = [0u8; 8192];
    loop {
        // SAFETY: the buffer is writable for its length.
        let n = unsafe { libc::recv(socket, buffer.as_mut_ptr().cast(), buffer.len(), libc::MSG_DONTWAIT) };
        let lost = n < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ENOBUFS);
        if n <= 0 && !lost {
            return;
        }
    }
}

/// A socket for interface ioctls.
struct ControlSocket(libc::c_int);

impl ControlSocket {
    fn new() -> io::Result<ControlSocket> {
        // Any family serves these ioctls; IPv4 may be absent.
        for family in [libc::AF_INET, libc::AF_INET6, libc::AF_UNIX] {
            // SAFETY: plain system call without pointers.
            let fd = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
            if fd >= 0 {
                return Ok(ControlSocket(fd));
            }
        }
        Err(io::Error::last_os_error())
    }

    fn mtu(&self, name: &str) -> Option<u32> {
        // SAFETY: ifreq is a plain C struct for which all zero is a valid value.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (to, from) in request.ifr_name[..libc::IFNAMSIZ - 1].iter_mut().zip(name.bytes()) {
            *to = from as libc::c_char;
        }
        // SAFETY: `request` is a valid ifreq with a NUL-terminated name for the duration of the call.
        let result = unsafe { libc::ioctl(self.0, libc::SIOCGIFMTU as _, &mut request) };
        // SAFETY: after success the kernel has written ifru_mtu.
        (result == 0).then(|| u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok()).flatten()
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours and is closed once.
        unsafe { libc::close(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announcements__are_taken_without_waiting() {
        if let Ok(socket) = announcements() {
            take_announcements(&socket);
        }
    }

    #[test]
    fn interfaces__every_one_has_name_index_and_mtu() {
        let found = interfaces().unwrap();
        assert!(found.iter().all(|i| !i.name.is_empty() && i.index != 0 && i.mtu >= 68), "{found:?}");
        assert!(found.iter().any(|i| i.loopback));
    }
}
