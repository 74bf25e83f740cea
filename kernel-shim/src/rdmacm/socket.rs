//! UDP sockets of the connection manager: local addresses with every datagram, and the network's refusals.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::zeroed;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::os::{check, out_of_the_way};

/// One socket, of IPv6 where the host has it, which then carries IPv4 too.
#[derive(Debug)]
pub(super) struct Socket {
    pub fd: OwnedFd,
    is_v6: bool,
}

/// What a socket gave.
#[derive(Debug)]
pub(super) enum Received {
    /// A datagram of so many bytes.
    Datagram { bytes: usize, from: SocketAddr, local: SocketAddr },
    /// The network returned a datagram to this destination; the buffer has its beginning.
    Undeliverable { bytes: usize, to: SocketAddr, errno: c_int },
}

/// Room for the control messages of one datagram.
#[repr(C, align(8))]
struct Control([u8; 256]);

impl Socket {
    /// A socket on a free port that sends to and receives from both families.
    pub(super) fn any() -> io::Result<Socket> {
        let v6 = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0);
        let v4 = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
        Socket::bind(v6, false).or_else(|_| Socket::bind(v4, false))
    }

    /// A socket on this address; `only_v6`: no IPv4 even on the wildcard address.
    pub(super) fn bind(address: SocketAddr, only_v6: bool) -> io::Result<Socket> {
        let is_v6 = address.is_ipv6();
        let family = if is_v6 { libc::AF_INET6 } else { libc::AF_INET };
        // SAFETY: a system call without pointers.
        let fd = check(unsafe {
            libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0)
        })?;
        // SAFETY: the descriptor is new and nobody else's.
        let fd = out_of_the_way(unsafe { OwnedFd::from_raw_fd(fd) })?;
        let socket = Socket { fd, is_v6 };
        if is_v6 {
            socket.set(libc::SOL_IPV6, libc::IPV6_V6ONLY, only_v6.into())?;
            socket.set(libc::SOL_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
            socket.set(libc::SOL_IPV6, libc::IPV6_RECVERR, 1)?;
        } else {
            socket.set(libc::SOL_IP, libc::IP_PKTINFO, 1)?;
        }
        // Also on a socket of IPv6: its IPv4 datagrams are refused by IPv4's rules.
        socket.set(libc::SOL_IP, libc::IP_RECVERR, 1)?;
        // A burst of requests must fit; the kernel grants what it grants.
        let _ = socket.set(libc::SOL_SOCKET, libc::SO_RCVBUF, RCVBUF_BYTES);
        let (storage, length) = to_storage(address);
        // SAFETY: `storage` is valid for `length`.
        check(unsafe { libc::bind(socket.fd.as_raw_fd(), (&raw const storage).cast(), length) })?;
        Ok(socket)
    }

    fn set(&self, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
        let (value, length) = (&raw const value, size_of::<c_int>() as libc::socklen_t);
        // SAFETY: the value is valid for its length.
        check(unsafe { libc::setsockopt(self.fd.as_raw_fd(), level, name, value.cast(), length) })?;
        Ok(())
    }

    /// The port it is bound to.
    pub(super) fn port(&self) -> io::Result<u16> {
        local_address(&self.fd).map(|address| address.port())
    }

    /// Sends a datagram from a local address, if that is one.
    pub(super) fn send(&self, from: IpAddr, to: SocketAddr, data: &[u8]) -> io::Result<()> {
        let (mut storage, length) = to_storage(if self.is_v6 { mapped(to) } else { to });
        let mut part = libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() };
        let mut control = Control([0; 256]);
        // SAFETY: all zero is a valid msghdr.
        let mut message: libc::msghdr = unsafe { zeroed() };
        message.msg_name = (&raw mut storage).cast();
        message.msg_namelen = length;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        if !from.is_unspecified() {
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = control.0.len() as _;
            message.msg_controllen = self.put_source(&message, from, to) as _;
        }
        // SAFETY: all pointers in `message` are valid for the call.
        let sent = unsafe {
            libc::sendmsg(self.fd.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        };
        if sent >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Writes the control message that chooses the source address; gives the length of the control data.
    fn put_source(&self, message: &libc::msghdr, from: IpAddr, to: SocketAddr) -> usize {
        // SAFETY: the control buffer is aligned and has room for either structure; CMSG_FIRSTHDR points into it.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(message);
            let payload = libc::CMSG_DATA(header);
            let bytes = if self.is_v6 {
                let ip = match from {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                };
                let scope = match to {
                    SocketAddr::V6(to) => to.scope_id(),
                    SocketAddr::V4(_) => 0,
                };
                let info = libc::in6_pktinfo {
                    ipi6_addr: libc::in6_addr { s6_addr: ip.octets() },
                    ipi6_ifindex: scope,
                };
                (*header).cmsg_level = libc::SOL_IPV6;
                (*header).cmsg_type = libc::IPV6_PKTINFO;
                payload.cast::<libc::in6_pktinfo>().write_unaligned(info);
                size_of::<libc::in6_pktinfo>()
            } else {
                let IpAddr::V4(ip) = from else { return 0 };
                let address = libc::in_addr { s_addr: u32::from_ne_bytes(ip.octets()) };
                let any = libc::in_addr { s_addr: 0 };
                let info = libc::in_pktinfo { ipi_ifindex: 0, ipi_spec_dst: address, ipi_addr: any };
                (*header).cmsg_level = libc::SOL_IP;
                (*header).cmsg_type = libc::IP_PKTINFO;
                payload.cast::<libc::in_pktinfo>().write_unaligned(info);
                size_of::<libc::in_pktinfo>()
            };
            (*header).cmsg_len = libc::CMSG_LEN(bytes as u32) as _;
            libc::CMSG_SPACE(bytes as u32) as usize
        }
    }

    /// Takes one datagram, or one that the network returned; `None` when there is neither.
    pub(super) fn receive(&self, data: &mut [u8]) -> Option<Received> {
        // A pending error is reported once by recvmsg; the datagram that caused it is in the error queue.
        for flags in [libc::MSG_ERRQUEUE, 0, libc::MSG_ERRQUEUE, 0] {
            if let Some(received) = self.receive_with(data, flags) {
                return Some(received);
            }
        }
        None
    }

    fn receive_with(&self, data: &mut [u8], flags: c_int) -> Option<Received> {
        // SAFETY: all zero is a valid sockaddr_storage and msghdr.
        let (mut storage, mut message): (libc::sockaddr_storage, libc::msghdr) =
            unsafe { (zeroed(), zeroed()) };
        let mut control = Control([0; 256]);
        let mut part = libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: data.len() };
        message.msg_name = (&raw mut storage).cast();
        message.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control.0.len() as _;
        // SAFETY: all pointers in `message` are valid for the call.
        let received =
            unsafe { libc::recvmsg(self.fd.as_raw_fd(), &raw mut message, flags | libc::MSG_DONTWAIT) };
        let bytes = usize::try_from(received).ok()?;
        let name = from_storage(&storage);
        let (mut local, mut errno) = (SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0), 0);
        // SAFETY: the kernel has filled in the control buffer; the macros stay within its length, and each structure is
        // read from a message of its type.
        unsafe {
            let mut header = libc::CMSG_FIRSTHDR(&raw const message);
            while let Some(found) = header.as_ref() {
                let payload: *const c_void = libc::CMSG_DATA(header).cast();
                match (found.cmsg_level, found.cmsg_type) {
                    (libc::SOL_IPV6, libc::IPV6_PKTINFO) => {
                        let info = payload.cast::<libc::in6_pktinfo>().read_unaligned();
                        let ip = Ipv6Addr::from(info.ipi6_addr.s6_addr);
                        let scope = if ip.is_unicast_link_local() { info.ipi6_ifindex } else { 0 };
                        local = plain(SocketAddrV6::new(ip, 0, 0, scope));
                    }
                    (libc::SOL_IP, libc::IP_PKTINFO) => {
                        let info = payload.cast::<libc::in_pktinfo>().read_unaligned();
                        let ip = Ipv4Addr::from(info.ipi_addr.s_addr.to_ne_bytes());
                        local = SocketAddr::new(ip.into(), 0);
                    }
                    (libc::SOL_IPV6, libc::IPV6_RECVERR) | (libc::SOL_IP, libc::IP_RECVERR) => {
                        errno = payload.cast::<libc::sock_extended_err>().read_unaligned().ee_errno as c_int;
                    }
                    _ => {}
                }
                header = libc::CMSG_NXTHDR(&raw const message, header);
            }
        }
        let name = name?;
        if flags & libc::MSG_ERRQUEUE != 0 {
            return Some(Received::Undeliverable { bytes, to: name, errno });
        }
        // A datagram that did not fit is longer than any of ours; its parser will say so.
        let bytes = if message.msg_flags & libc::MSG_TRUNC != 0 { 0 } else { bytes };
        Some(Received::Datagram { bytes, from: name, local })
    }
}

const RCVBUF_BYTES: c_int = 4 << 20;

/// The local address from which this host would send to `to`.
pub(super) fn source_for(to: SocketAddr) -> io::Result<SocketAddr> {
    let family = if to.is_ipv6() { libc::AF_INET6 } else { libc::AF_INET };
    // SAFETY: a system call without pointers.
    let fd = check(unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the descriptor is new and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // Any port does, and the scope of a link-local address stays.
    let mut to = to;
    to.set_port(9);
    let (storage, length) = to_storage(to);
    // SAFETY: `storage` is valid for `length`; connecting a datagram socket sends nothing.
    check(unsafe { libc::connect(fd.as_raw_fd(), (&raw const storage).cast(), length) })?;
    local_address(&fd)
}

fn local_address(fd: &OwnedFd) -> io::Result<SocketAddr> {
    // SAFETY: all zero is a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    let mut length = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: `storage` is valid for `length`.
    check(unsafe { libc::getsockname(fd.as_raw_fd(), (&raw mut storage).cast(), &raw mut length) })?;
    from_storage(&storage).ok_or_else(|| io::ErrorKind::Unsupported.into())
}

fn mapped(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) => SocketAddr::new(v4.ip().to_ipv6_mapped().into(), v4.port()),
        v6 => v6,
    }
}

/// An IPv4 address that came as a mapped one, as what it is.
fn plain(address: SocketAddrV6) -> SocketAddr {
    match address.ip().to_ipv4_mapped() {
        Some(ip) => SocketAddr::V4(SocketAddrV4::new(ip, address.port())),
        None => SocketAddr::V6(address),
    }
}

fn to_storage(address: SocketAddr) -> (libc::sockaddr_storage, libc::socklen_t) {
    // SAFETY: all zero is a valid sockaddr_storage.
    let mut storage: libc::sockaddr_storage = unsafe { zeroed() };
    let raw = super::address::to_raw(Some(address));
    // SAFETY: a sockaddr_storage is larger than the 28 bytes of either address.
    unsafe { std::ptr::copy_nonoverlapping(raw.as_ptr(), (&raw mut storage).cast::<u8>(), raw.len()) };
    let length = if address.is_ipv6() { 28 } else { 16 };
    (storage, length)
}

fn from_storage(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let mut raw = [0u8; 28];
    // SAFETY: as in `to_storage`.
    unsafe {
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(storage).cast::<u8>(), raw.as_mut_ptr(), raw.len())
    };
    match super::address::from_raw(&raw).ok()?? {
        SocketAddr::V6(address) => Some(plain(address)),
        v4 => Some(v4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagram__carries_its_addresses_and_refusal_comes_back() {
        let (sender, receiver) = (Socket::any().unwrap(), Socket::any().unwrap());
        let ip: IpAddr = Ipv4Addr::new(127, 0, 0, 3).into();
        let to = SocketAddr::new(Ipv4Addr::new(127, 0, 0, 2).into(), receiver.port().unwrap());
        sender.send(ip, to, b"hello").unwrap();
        let mut buffer = [0; 64];
        let Some(Received::Datagram { bytes, from, local }) = receiver.receive(&mut buffer) else { panic!() };
        assert_eq!(&buffer[..bytes], b"hello");
        assert_eq!((from.ip(), from.port()), (ip, sender.port().unwrap()));
        assert_eq!(local.ip(), to.ip());
        drop(receiver);
        sender.send(ip, to, b"lost").unwrap();
        let Some(Received::Undeliverable { bytes, to: returned, errno }) = sender.receive(&mut buffer) else {
            panic!()
        };
        assert_eq!((&buffer[..bytes], returned, errno), (&b"lost"[..], to, libc::ECONNREFUSED));
        assert!(sender.receive(&mut buffer).is_none());
    }
}
