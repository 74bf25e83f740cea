//! RDMA netlink (NETLINK_RDMA), carried by a socket of the kernel's own NETLINK_USERSOCK.
//!
//! A program's RDMA netlink socket is really a NETLINK_USERSOCK socket, which bind, getsockname, recvmsg, poll and
//! close serve without our help. Only sending to the kernel is answered here: each reply is a message that the socket
//! gets from itself. So there is nothing to remember per descriptor. Where the kernel has RDMA netlink, requests are
//! passed on to it as well and our device is added to what it says. Numbers are those of rdma/rdma_netlink.h.

use std::ffi::c_int;

use crate::device;

mod answer;
mod message;
mod socket;

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
    if !socket::is_stand_in(fd) {
        return None;
    }
    let device = device::current()?;
    // A program may use NETLINK_USERSOCK for itself, but then not to talk to the kernel in RDMA's terms.
    let requests = message::parse(data).filter(|requests| requests.iter().all(message::Request::is_nldev))?;
    let result = socket::own_port(fd).and_then(|port| {
        for request in &requests {
            for reply in answer::replies(device, request, port, &socket::ask_kernel) {
                socket::send_to(fd, &reply, port)?;
            }
        }
        Ok(data.len())
    });
    Some(result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO)))
}

/// Whether the kernel has RDMA netlink. Call under a guard.
pub(crate) fn kernel_has_it() -> bool {
    socket::kernel_has_it()
}
