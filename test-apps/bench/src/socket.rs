//! A UDP socket with segmentation offload: the only unsafe code of the bench, one system call per function.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

/// Largest payload of one sendmsg with UDP_SEGMENT (IPv4 and IPv6 both take it).
pub const GSO_BYTES_MAX: usize = 65_000;
/// Room for the control messages of one message: a UDP_SEGMENT (u16) or UDP_GRO (int) header.
const CONTROL_BYTES: usize = 64;

/// Control buffer with the alignment cmsg headers need.
#[repr(align(8))]
struct Control([u8; CONTROL_BYTES]);

/// A UDP socket bound to `address` with large buffers and GRO on.
pub fn open(address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(address)?;
    for (level, name, value) in [
        (libc::SOL_SOCKET, libc::SO_RCVBUF, 4 << 20),
        (libc::SOL_SOCKET, libc::SO_SNDBUF, 4 << 20),
        (libc::SOL_UDP, libc::UDP_GRO, 1),
    ] {
        set_option(&socket, level, name, value)?;
    }
    Ok(socket)
}

/// Blocks until something is readable or `limit` has passed; true when readable.
pub fn wait_readable(socket: &UdpSocket, limit: Duration) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let millis = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: `poll` is one valid pollfd, and the count says one.
    match unsafe { libc::poll(&mut poll, 1, millis) } {
        -1 => Err(io::Error::last_os_error()),
        n => Ok(n > 0),
    }
}

/// Sends `parts` (concatenated) as datagrams of `segment` bytes each, the last one maybe shorter, in one
/// call.
pub fn send_segments(socket: &UdpSocket, parts: &[&[u8]], segment: u16) -> io::Result<usize> {
    const PARTS_MAX: usize = 64;
    assert!(parts.len() <= PARTS_MAX, "more parts than a burst has");
    let mut iov = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; PARTS_MAX];
    for (slot, part) in iov.iter_mut().zip(parts) {
        *slot = libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() };
    }
    let mut control = Control([0; CONTROL_BYTES]);
    // SAFETY: all-zero is a valid msghdr (null pointers, zero lengths).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_mut_ptr();
    message.msg_iovlen = parts.len();
    message.msg_control = control.0.as_mut_ptr().cast();
    // SAFETY: CMSG_SPACE/CMSG_LEN only compute; CMSG_FIRSTHDR points into `control`, which is large and
    // aligned enough for one header with a u16 (CONTROL_BYTES, repr(align)); the kernel only reads iov and
    // control.
    let sent = unsafe {
        message.msg_controllen = libc::CMSG_SPACE(size_of::<u16>() as u32) as usize;
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_UDP;
        (*header).cmsg_type = libc::UDP_SEGMENT;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as usize;
        libc::CMSG_DATA(header).cast::<u16>().write_unaligned(segment);
        libc::sendmsg(socket.as_raw_fd(), &message, 0)
    };
    usize::try_from(sent).map_err(|_| io::Error::last_os_error())
}

/// What one receive call brought.
pub struct Received {
    /// Bytes in the buffer: one datagram, or several of `segment` bytes glued together by GRO.
    pub bytes: usize,
    /// Size of each datagram in it but the last.
    pub segment: usize,
}

/// Receives one message, GRO-merged if the kernel merged it. `Ok(None)` when nothing is there.
pub fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<Option<Received>> {
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut control = Control([0; CONTROL_BYTES]);
    // SAFETY: all-zero is a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_BYTES;
    // SAFETY: the message points at `iov` over `buffer` and at `control`, both alive and writable during the
    // call.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_DONTWAIT) };
    let Ok(bytes) = usize::try_from(got) else {
        let error = io::Error::last_os_error();
        // ECONNREFUSED is the ICMP echo of an earlier send to a peer that is gone: nothing was received.
        let nothing = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ConnectionRefused);
        return if nothing { Ok(None) } else { Err(error) };
    };
    let mut segment = bytes;
    // SAFETY: the kernel filled msg_control with msg_controllen bytes of well-formed headers; the CMSG macros
    // stay inside them. UDP_GRO carries an int.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_UDP && (*header).cmsg_type == libc::UDP_GRO {
                segment = libc::CMSG_DATA(header).cast::<i32>().read_unaligned() as usize;
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    Ok(Some(Received { bytes, segment: segment.max(1) }))
}

/// Gives the processor to whoever is ready.
pub fn yield_now() {
    // SAFETY: sched_yield takes nothing and touches no memory.
    unsafe { libc::sched_yield() };
}

fn set_option(socket: &UdpSocket, level: i32, name: i32, value: i32) -> io::Result<()> {
    // SAFETY: the option value is one i32 and its size is passed.
    let code = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<i32>() as libc::socklen_t,
        )
    };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
