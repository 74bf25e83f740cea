//! RDMA netlink (NETLINK_RDMA), carried by a socket of the kernel's own NETLINK_USERSOCK.
//!
//! A program's RDMA netlink socket is really a NETLINK_USERSOCK socket, which bind, getsockname, recvmsg, poll and close
//! serve without our help. Only sending to the kernel is answered here: each reply is a message that the socket gets
//! from itself. So there is nothing to remember per descriptor. Where the kernel has RDMA netlink, requests are passed
//! on to it as well and our device is added to what it says. Numbers are those of rdma/rdma_netlink.h.

use std::ffi::c_int;
use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::device::{self, Device};

mod answer;
mod message;

pub(crate) const NETLINK_RDMA: c_int = 20;

/// The protocol to open in place of NETLINK_RDMA; `None` when there is no device to add. Call under a guard.
pub(crate) fn stand_in() -> Option<c_int> {
    device::current().map(|_| libc::NETLINK_USERSOCK)
}

/// Whether a destination is the kernel's netlink; what goes anywhere else is none of ours, and most is not netlink.
pub(crate) fn is_to_kernel(address: &libc::sockaddr_nl) -> bool {
    c_int::from(address.nl_family) == libc::AF_NETLINK && address.nl_pid == 0 && address.nl_groups == 0
}

/// Answers what a program sends to RDMA netlink; `None` when the socket is another one. Call under a guard.
pub(crate) fn send(fd: c_int, data: &[u8]) -> Option<Result<usize, c_int>> {
    let option = |name| {
        let (mut value, mut length): (c_int, _) = (0, size_of::<c_int>() as libc::socklen_t);
        // SAFETY: `value` and `length` are valid for the call.
        let result =
            unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, name, (&raw mut value).cast(), &mut length) };
        (result == 0).then_some(value)
    };
    if option(libc::SO_DOMAIN)? != libc::AF_NETLINK || option(libc::SO_PROTOCOL)? != libc::NETLINK_USERSOCK {
        return None;
    }
    let device = device::current()?;
    // A program may use NETLINK_USERSOCK for itself, but then not to talk to the kernel in RDMA's terms.
    let requests = message::parse(data).filter(|requests| requests.iter().all(message::Request::is_nldev))?;
    let result = own_port(fd).and_then(|port| {
        for request in &requests {
            for reply in answer::replies(device, request, port, &ask_kernel) {
                send_to(fd, &reply, port)?;
            }
        }
        Ok(data.len())
    });
    Some(result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)))
}

/// Whether the kernel has RDMA netlink.
pub(crate) fn kernel_has_it() -> bool {
    open_kernel().is_ok()
}

/// The socket's netlink port, which it gets now if it has none yet.
fn own_port(fd: c_int) -> io::Result<u32> {
    let port = || {
        // SAFETY: all zero is a valid sockaddr_nl.
        let mut address: libc::sockaddr_nl = unsafe { zeroed() };
        let mut length = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
        // SAFETY: `address` and `length` are valid for the call.
        let result = unsafe { libc::getsockname(fd, (&raw mut address).cast(), &mut length) };
        if result == 0 { Ok(address.nl_pid) } else { Err(io::Error::last_os_error()) }
    };
    match port()? {
        0 => {
            bind(fd)?;
            port()
        }
        bound => Ok(bound),
    }
}

fn address(port: u32) -> libc::sockaddr_nl {
    // SAFETY: all zero is a valid sockaddr_nl.
    let mut address: libc::sockaddr_nl = unsafe { zeroed() };
    address.nl_family = libc::AF_NETLINK as libc::sa_family_t;
    address.nl_pid = port;
    address
}

fn bind(fd: c_int) -> io::Result<()> {
    let address = address(0);
    // SAFETY: `address` is valid for its length.
    let result = unsafe {
        libc::bind(fd, (&raw const address).cast(), size_of::<libc::sockaddr_nl>() as libc::socklen_t)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn send_to(fd: c_int, data: &[u8], port: u32) -> io::Result<()> {
    let address = address(port);
    // SAFETY: `data` and `address` are valid for their lengths.
    let sent = unsafe {
        libc::sendto(
            fd,
            data.as_ptr().cast(),
            data.len(),
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            (&raw const address).cast(),
            size_of::<libc::sockaddr_nl>() as libc::socklen_t,
        )
    };
    if sent >= 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn open_kernel() -> io::Result<OwnedFd> {
    // SAFETY: plain system call.
    let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, NETLINK_RDMA) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Passes a request on to the kernel and gives its datagrams, as they came; empty when it has no answer.
fn ask_kernel(request: &[u8]) -> Vec<Vec<u8>> {
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
            let Ok(received @ 1..) = usize::try_from(received) else {
                return Err(io::Error::last_os_error());
            };
            datagram.truncate(received);
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

/// The device as netlink sees it, for [`answer`].
impl Device {
    pub(crate) fn chardev(&self) -> u64 {
        // huge_encode_dev of the kernel: minor bits 8 and up lie above the major.
        let (major, minor) = (u64::from(libc::major(self.rdev)), u64::from(libc::minor(self.rdev)));
        minor & 0xff | major << 8 | (minor & !0xff) << 12
    }
}
