//! Netlink sockets as the answers need them: what a descriptor is, sending to itself, asking the kernel.

use std::ffi::c_int;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use super::{NETLINK_RDMA, message};

const ADDRESS_BYTES: libc::socklen_t = size_of::<libc::sockaddr_nl>() as libc::socklen_t;

/// Whether a descriptor is a socket that stands in for one of RDMA netlink.
pub(super) fn is_stand_in(fd: c_int) -> bool {
    option(fd, libc::SO_DOMAIN) == Some(libc::AF_NETLINK)
        && option(fd, libc::SO_PROTOCOL) == Some(libc::NETLINK_USERSOCK)
}

fn option(fd: c_int, name: c_int) -> Option<c_int> {
    let (mut value, mut length): (c_int, _) = (0, size_of::<c_int>() as libc::socklen_t);
    // SAFETY: `value` and `length` are valid for the call.
    let result =
        unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &mut length) };
    (result == 0).then_some(value)
}

/// The socket's netlink port, which it gets now if it has none yet.
pub(super) fn own_port(fd: c_int) -> io::Result<u32> {
    let port = || {
        let (mut address, mut length) = (address(0), ADDRESS_BYTES);
        // SAFETY: `address` and `length` are valid for the call.
        check(unsafe { libc::getsockname(fd, (&raw mut address).cast(), &mut length) }.into())?;
        Ok(address.nl_pid)
    };
    match port()? {
        0 => {
            bind(fd)?;
            port()
        }
        bound => Ok(bound),
    }
}

/// Sends to a netlink port, 0 being the kernel.
pub(super) fn send_to(fd: c_int, data: &[u8], port: u32) -> io::Result<()> {
    let (address, flags) = (address(port), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
    // SAFETY: `data` and `address` are valid for their lengths.
    check(unsafe {
        libc::sendto(fd, data.as_ptr().cast(), data.len(), flags, (&raw const address).cast(), ADDRESS_BYTES)
    } as i64)
}

/// Whether the kernel has RDMA netlink.
pub(super) fn kernel_has_it() -> bool {
    open_kernel().is_ok()
}

/// Passes a request on to the kernel and gives its datagrams, as they came; empty when it has no answer.
pub(super) fn ask_kernel(request: &[u8]) -> Vec<Vec<u8>> {
    let ask = || -> io::Result<Vec<Vec<u8>>> {
        let socket = open_kernel()?;
        let fd = socket.as_raw_fd();
        bind(fd)?;
        let patience = libc::timeval { tv_sec: KERNEL_PATIENCE_S, tv_usec: 0 };
        let length = size_of::<libc::timeval>() as libc::socklen_t;
        // SAFETY: `patience` is valid for its length.
        unsafe {
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, (&raw const patience).cast(), length)
        };
        send_to(fd, request, 0)?;
        let mut datagrams = Vec::new();
        loop {
            let mut datagram = vec![0; DATAGRAM_BYTES_MAX];
            // SAFETY: `datagram` is valid for its length.
            let received = unsafe { libc::recv(fd, datagram.as_mut_ptr().cast(), datagram.len(), 0) };
            check(received as i64)?;
            datagram.truncate(received as usize);
            let last = message::is_last(&datagram);
            datagrams.push(datagram);
            if last {
                return Ok(datagrams);
            }
        }
    };
    ask().unwrap_or_default()
}

const KERNEL_PATIENCE_S: libc::time_t = 2;
/// The kernel fills dump datagrams up to 16 KiB, or to the size of the reader's buffer up to 32 KiB.
const DATAGRAM_BYTES_MAX: usize = 32768;

fn open_kernel() -> io::Result<OwnedFd> {
    // SAFETY: a system call without pointers.
    let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, NETLINK_RDMA) };
    check(fd.into())?;
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn bind(fd: c_int) -> io::Result<()> {
    let address = address(0);
    // SAFETY: `address` is valid for its length.
    check(unsafe { libc::bind(fd, (&raw const address).cast(), ADDRESS_BYTES) }.into())
}

fn address(port: u32) -> libc::sockaddr_nl {
    // SAFETY: all zero is a valid sockaddr_nl.
    let mut address: libc::sockaddr_nl = unsafe { zeroed() };
    address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    address.nl_pid = port;
    address
}

fn check(result: i64) -> io::Result<()> {
    if result >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
