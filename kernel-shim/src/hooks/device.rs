//! Hooks of the calls that reach the device itself: its ioctls, and RDMA netlink.

use std::ffi::{c_int, c_ulong, c_void};

use libc::{msghdr, size_t, sockaddr, sockaddr_nl, socklen_t, ssize_t};

use super::symbol::real;
use crate::{guard, netlink, uverbs};

/// `ioctl` is variadic in C; its one optional argument arrives as a fixed one does.
#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    if uverbs::is_verbs_request(request) {
        // SAFETY: with this request number the kernel interface demands what uverbs::ioctl does.
        if let Some(Some(answer)) = guard::run(|| unsafe { uverbs::ioctl(fd, argument) }) {
            return answer.map_or_else(failed, |()| 0);
        }
    }
    real!(ioctl: fn(c_int, c_ulong, *mut c_void) -> c_int; -1; (fd, request, argument))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let open = |protocol| real!(socket: fn(c_int, c_int, c_int) -> c_int; -1; (domain, kind, protocol));
    if domain == libc::AF_NETLINK
        && protocol == netlink::NETLINK_RDMA
        && let Some(Some(stand_in)) = guard::run(netlink::stand_in)
    {
        let fd = open(stand_in);
        if fd >= 0 {
            return fd;
        }
    }
    open(protocol)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendto(
    fd: c_int,
    data: *const c_void,
    size: size_t,
    flags: c_int,
    address: *const sockaddr,
    address_bytes: socklen_t,
) -> ssize_t {
    // SAFETY: the caller passes an address of that length and data of that size.
    let answer = unsafe {
        if is_to_kernel(address, address_bytes) && !data.is_null() {
            let data = std::slice::from_raw_parts(data.cast::<u8>(), size);
            guard::run(|| netlink::send(fd, data)).flatten()
        } else {
            None
        }
    };
    match answer {
        Some(answer) => answer.map_or_else(failed, |sent| sent as ssize_t),
        None => {
            real!(sendto: fn(c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t; -1;
            (fd, data, size, flags, address, address_bytes))
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller passes null or a message with a valid address and vector.
    let answer = unsafe {
        match message.as_ref() {
            Some(message) if is_to_kernel(message.msg_name.cast(), message.msg_namelen) => {
                guard::run(|| netlink::send(fd, &gather(message))).flatten()
            }
            _ => None,
        }
    };
    match answer {
        Some(answer) => answer.map_or_else(failed, |sent| sent as ssize_t),
        None => real!(sendmsg: fn(c_int, *const msghdr, c_int) -> ssize_t; -1; (fd, message, flags)),
    }
}

/// Whether an address is that of a netlink in the kernel; everything else a process sends stops at this test.
///
/// # Safety
/// `address` is null or valid for `bytes`.
#[inline]
unsafe fn is_to_kernel(address: *const sockaddr, bytes: socklen_t) -> bool {
    if address.is_null() || (bytes as usize) < size_of::<sockaddr_nl>() {
        return false;
    }
    // SAFETY: at least as long as a sockaddr_nl by the test above, and read without assuming its alignment.
    netlink::is_to_kernel(&unsafe { address.cast::<sockaddr_nl>().read_unaligned() })
}

/// The bytes of a message in one piece.
///
/// # Safety
/// The message's vector is valid.
unsafe fn gather(message: &msghdr) -> Vec<u8> {
    let mut data = Vec::new();
    for index in 0..message.msg_iovlen {
        // SAFETY: by contract there are msg_iovlen parts, each valid for its length.
        unsafe {
            let part = &*message.msg_iov.add(index);
            if !part.iov_base.is_null() {
                data.extend_from_slice(std::slice::from_raw_parts(part.iov_base.cast::<u8>(), part.iov_len));
            }
        }
    }
    data
}

/// -1 with errno, in the result type of any of these calls.
fn failed<R: From<i8>>(errno: c_int) -> R {
    guard::set_errno(errno);
    R::from(-1)
}
