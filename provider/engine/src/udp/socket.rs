//! Sockets and their options, the eventfd that wakes the background thread, and the wait: system calls as safe
//! functions. Nothing in here is a cancellation point.

use std::io;
use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

/// Address families this machine offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    /// The family of an address.
    pub(crate) fn of(ip: IpAddr) -> Family {
        if ip.is_ipv4() { Family::V4 } else { Family::V6 }
    }
}

/// A non-blocking UDP socket, closed on exec.
pub(crate) fn udp(family: Family) -> io::Result<OwnedFd> {
    let domain = match family {
        Family::V4 => libc::AF_INET,
        Family::V6 => libc::AF_INET6,
    };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers; the descriptor returned is ours alone.
    unsafe {
        let fd = check(libc::socket(domain, kind, 0))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

/// Sets an option whose value is an int.
pub(crate) fn set_option(fd: &OwnedFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    set(fd.as_raw_fd(), level, name, &value)
}

/// Sets an option; the kernel refuses values of another size than it wants.
fn set<T: Copy>(fd: RawFd, level: i32, name: i32, value: &T) -> io::Result<()> {
    let value = ptr::from_ref(value).cast();
    // SAFETY: the value lives through the call and its size is given.
    let result = unsafe { libc::setsockopt(fd, level, name, value, size_of::<T>() as libc::socklen_t) };
    check(result).map(drop)
}

/// Makes `fd` a member of an IP group on an interface.
pub(crate) fn join(fd: RawFd, group: IpAddr, ifindex: u32) -> io::Result<()> {
    change_membership(fd, group, ifindex, [libc::IP_ADD_MEMBERSHIP, libc::IPV6_ADD_MEMBERSHIP])
}

/// Ends a membership.
pub(crate) fn leave(fd: RawFd, group: IpAddr, ifindex: u32) -> io::Result<()> {
    change_membership(fd, group, ifindex, [libc::IP_DROP_MEMBERSHIP, libc::IPV6_DROP_MEMBERSHIP])
}

fn change_membership(fd: RawFd, group: IpAddr, ifindex: u32, [v4, v6]: [i32; 2]) -> io::Result<()> {
    match group {
        IpAddr::V4(ip) => set(fd, libc::IPPROTO_IP, v4, &interface_of_group(ip, ifindex)),
        IpAddr::V6(ip) => {
            let addr = libc::in6_addr { s6_addr: ip.octets() };
            let membership = libc::ipv6_mreq { ipv6mr_multiaddr: addr, ipv6mr_interface: ifindex };
            set(fd, libc::IPPROTO_IPV6, v6, &membership)
        }
    }
}

/// What `fd` sends to groups leaves by this interface, as far as the next host and to members on this one.
pub(crate) fn send_groups_by(fd: &OwnedFd, family: Family, ifindex: u32) -> io::Result<()> {
    match family {
        Family::V4 => {
            let by = interface_of_group(Ipv4Addr::UNSPECIFIED, ifindex);
            set(fd.as_raw_fd(), libc::IPPROTO_IP, libc::IP_MULTICAST_IF, &by)?;
            set_option(fd, libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, 1)
        }
        Family::V6 => {
            set(fd.as_raw_fd(), libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, &ifindex)?;
            set_option(fd, libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, 1)
        }
    }
}

fn interface_of_group(group: Ipv4Addr, ifindex: u32) -> libc::ip_mreqn {
    libc::ip_mreqn {
        imr_multiaddr: libc::in_addr { s_addr: u32::from_ne_bytes(group.octets()) },
        imr_address: libc::in_addr { s_addr: 0 },
        imr_ifindex: ifindex as i32,
    }
}

/// Reads an option whose value is an int.
pub(crate) fn option(fd: &OwnedFd, level: i32, name: i32) -> io::Result<i32> {
    let mut value = 0i32;
    let mut len = size_of::<i32>() as libc::socklen_t;
    // SAFETY: value and length live through the call, and the length is the value's.
    let result =
        unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut len) };
    check(result).map(|_| value)
}

/// Binds to `addr` (with `ifindex` as scope for link-local IPv6).
pub(crate) fn bind(fd: &OwnedFd, addr: SocketAddr, ifindex: u32) -> io::Result<()> {
    let name = RawAddr::new(addr, ifindex);
    // SAFETY: the name lives through the call and its length is that of its family.
    let result =
        unsafe { libc::bind(fd.as_raw_fd(), (&raw const name.storage).cast(), name.len as libc::socklen_t) };
    check(result).map(drop)
}

/// A socket address as the kernel reads and writes it; large enough for IPv4 and IPv6.
#[derive(Clone, Copy)]
pub(crate) struct RawAddr {
    /// An IPv6 address, or an IPv4 one in its first bytes.
    pub(crate) storage: libc::sockaddr_in6,
    /// Bytes of it in use.
    pub(crate) len: u32,
}

impl RawAddr {
    /// Room for an address to be written by the kernel.
    pub(crate) const EMPTY: RawAddr = RawAddr {
        storage: libc::sockaddr_in6 {
            sin6_family: 0,
            sin6_port: 0,
            sin6_flowinfo: 0,
            sin6_addr: libc::in6_addr { s6_addr: [0; 16] },
            sin6_scope_id: 0,
        },
        len: size_of::<libc::sockaddr_in6>() as u32,
    };

    /// The kernel's form of `addr`; a link-local IPv6 address or group without scope gets `ifindex`.
    pub(crate) fn new(addr: SocketAddr, ifindex: u32) -> RawAddr {
        let mut raw = RawAddr::EMPTY;
        match addr {
            SocketAddr::V4(v4) => {
                // `sockaddr_in` in the first bytes: family and port lie where sockaddr_in6 has them, the address
                // where it has the flow info.
                raw.storage.sin6_family = libc::AF_INET as libc::sa_family_t;
                raw.storage.sin6_port = v4.port().to_be();
                raw.storage.sin6_flowinfo = u32::from_ne_bytes(v4.ip().octets());
                raw.len = size_of::<libc::sockaddr_in>() as u32;
            }
            SocketAddr::V6(v6) => {
                raw.storage.sin6_family = libc::AF_INET6 as libc::sa_family_t;
                raw.storage.sin6_port = v6.port().to_be();
                raw.storage.sin6_addr.s6_addr = v6.ip().octets();
                let of_link = v6.ip().is_unicast_link_local() || v6.ip().is_multicast();
                let needs_scope = v6.scope_id() == 0 && of_link;
                raw.storage.sin6_scope_id = if needs_scope { ifindex } else { v6.scope_id() };
            }
        }
        raw
    }

    /// The address in Rust's form; IPv4-mapped ones as IPv4. `None` for other families.
    pub(crate) fn to_addr(self) -> Option<SocketAddr> {
        let port = u16::from_be(self.storage.sin6_port);
        match i32::from(self.storage.sin6_family) {
            libc::AF_INET => {
                let ip = self.storage.sin6_flowinfo.to_ne_bytes().into();
                Some(SocketAddr::V4(SocketAddrV4::new(ip, port)))
            }
            libc::AF_INET6 => {
                let ip = std::net::Ipv6Addr::from(self.storage.sin6_addr.s6_addr);
                Some(match ip.to_ipv4_mapped() {
                    Some(v4) => SocketAddr::V4(SocketAddrV4::new(v4, port)),
                    None => SocketAddr::V6(SocketAddrV6::new(ip, port, 0, self.storage.sin6_scope_id)),
                })
            }
            _ => None,
        }
    }
}

/// An eventfd: anyone wakes the one who waits for it.
#[derive(Debug)]
pub(crate) struct Wake(OwnedFd);

impl Wake {
    /// A fresh one, not signalled.
    pub(crate) fn new() -> io::Result<Wake> {
        // SAFETY: no pointers; the descriptor returned is ours alone.
        unsafe {
            let fd = check(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))?;
            Ok(Wake(OwnedFd::from_raw_fd(fd)))
        }
    }
    /// Wakes the waiter. A full counter means it is awake already.
    pub(crate) fn signal(&self) {
        let one = 1u64;
        // SAFETY: the eight bytes live through the call. The result does not matter, see above.
        unsafe { libc::syscall(libc::SYS_write, self.0.as_raw_fd(), &raw const one, size_of::<u64>()) };
    }
    /// Takes the signal back.
    pub(crate) fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: the eight bytes live through the call; an error means there was no signal.
        unsafe { libc::syscall(libc::SYS_read, self.0.as_raw_fd(), &raw mut count, size_of::<u64>()) };
    }
    /// The descriptor.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// What ended a wait.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Ready {
    /// The eventfd was signalled.
    pub(crate) woken: bool,
    /// A socket has something.
    pub(crate) readable: bool,
}

/// Waits until `wake` is signalled, one of `sockets` (those given) is readable or `timeout` (`None`: never) is over.
pub(crate) fn wait(wake: RawFd, sockets: [Option<RawFd>; 2], timeout: Option<Duration>) -> Ready {
    let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // A negative descriptor is ignored.
    let [first, second] = sockets.map(|socket| entry(socket.unwrap_or(-1)));
    let mut fds = [entry(wake), first, second];
    let limit = timeout.map(|t| libc::timespec {
        tv_sec: t.as_secs() as libc::time_t,
        tv_nsec: t.subsec_nanos() as libc::c_long,
    });
    let limit_ptr = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the descriptors' array and the time-out live through the call; the null mask leaves signals alone.
    let count = unsafe {
        libc::syscall(
            libc::SYS_ppoll,
            fds.as_mut_ptr(),
            fds.len(),
            limit_ptr,
            std::ptr::null::<libc::sigset_t>(),
            0usize,
        )
    };
    if count <= 0 {
        return Ready::default();
    }
    Ready { woken: fds[0].revents != 0, readable: fds[1..].iter().any(|fd| fd.revents != 0) }
}

/// Random bytes from the kernel, as a word.
pub(crate) fn random_u64() -> io::Result<u64> {
    let mut word = 0u64;
    // SAFETY: the eight bytes live through the call.
    let got = unsafe { libc::syscall(libc::SYS_getrandom, &raw mut word, size_of::<u64>(), 0) };
    if got == size_of::<u64>() as libc::c_long { Ok(word) } else { Err(io::Error::last_os_error()) }
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn raw_addr__round_trip() {
        for text in ["127.0.0.1:4791", "[::1]:24576", "[2001:db8::5]:1"] {
            let addr: SocketAddr = text.parse().unwrap();
            assert_eq!(RawAddr::new(addr, 0).to_addr(), Some(addr));
        }
    }

    #[test]
    fn raw_addr__mapped_is_v4_and_link_local_gets_scope() {
        let mapped: SocketAddr = "[::ffff:10.0.0.1]:7".parse().unwrap();
        assert_eq!(RawAddr::new(mapped, 0).to_addr(), Some("10.0.0.1:7".parse().unwrap()));
        let local: SocketAddr = "[fe80::1]:7".parse().unwrap();
        assert_eq!(RawAddr::new(local, 3).storage.sin6_scope_id, 3);
    }

    #[test]
    fn wait__signal_is_seen_and_cleared() {
        let wake = Wake::new().unwrap();
        wake.signal();
        assert!(wait(wake.fd(), [None; 2], None).woken);
        wake.clear();
        assert_eq!(wait(wake.fd(), [None; 2], Some(Duration::ZERO)), Ready::default());
    }
}
