//! Sends a burst: one `sendmsg` with GSO, or `sendmmsg` packet by packet. Payload goes from the application's
//! memory straight into the socket: the second place (beside `memory.rs`) where addresses become pointers.

use std::io;
use std::mem::size_of;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::ptr;

use metaroce_config::Plane;
use metaroce_proto::{Piece, TxBurst};

use super::socket::{self, Family, RawAddr};
use crate::impair::SplitMix64;
use crate::limits::{
    ENTROPY_BIND_TRIES, ENTROPY_PORTS, GSO_BYTES_MAX, GSO_PACKETS_MAX, IOVECS_MAX, SNDBUF_BYTES,
};

/// ECT(0) in the low bits of the TOS byte: every packet may be marked instead of dropped (MR-CC-2).
const TOS_ECT0: i32 = 2;
/// Bytes of a control message with a u16: header (16) and value padded to 8.
const SEGMENT_CMSG_BYTES: usize = 24;

/// What became of a burst.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sent {
    /// All of it left, or was lost on the way out (counted), which is the network's right.
    All,
    /// Only the packets before this one; the socket is full.
    Blocked(usize),
    /// Nothing: some memory of the first packets is not readable.
    Fault,
}

/// Counters of the sending side.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct TxCounters {
    /// Packets the kernel refused (no route, too big, out of buffers): lost on the way out.
    pub(crate) refused: u64,
}

/// The sending sockets of all planes.
pub(crate) struct Tx {
    planes: Vec<PlaneSockets>,
    gso: bool,
    counters: TxCounters,
    scratch: Scratch,
}

/// Sockets of one plane, indexed by entropy; empty where the plane has no address of the family.
#[derive(Debug)]
struct PlaneSockets {
    ifindex: u32,
    v4: Vec<OwnedFd>,
    v6: Vec<OwnedFd>,
}

/// Arrays for the system calls, kept to avoid allocating.
struct Scratch {
    iovecs: Vec<libc::iovec>,
    messages: Vec<libc::mmsghdr>,
}

// SAFETY: the pointers in the scratch arrays are written and used within one call of `Tx::send` and mean nothing
// outside of it, so the arrays may move between threads with the engine's core.
unsafe impl Send for Scratch {}

impl Tx {
    /// Opens `entropies` sockets per plane and address family. A plane whose family cannot be bound is skipped with
    /// a warning as long as one socket exists at all.
    pub(crate) fn open(planes: &[Plane], entropies: u8, gso: bool) -> io::Result<Tx> {
        let mut random = SplitMix64(socket::random_u64()?);
        let mut last_error = io::Error::from_raw_os_error(libc::EADDRNOTAVAIL);
        let mut open = |plane: &Plane, family: Family| {
            let Some(ip) = plane.addrs.iter().copied().find(|ip| Family::of(*ip) == family) else {
                return Vec::new();
            };
            (0..entropies)
                .map(|_| entropy_socket(ip, plane.ifindex, &mut random))
                .collect::<io::Result<_>>()
                .unwrap_or_else(|error| {
                    log::warn!("plane {}: cannot send from {ip}: {error}", plane.label);
                    last_error = error;
                    Vec::new()
                })
        };
        let planes: Vec<PlaneSockets> = planes
            .iter()
            .map(|plane| PlaneSockets {
                ifindex: plane.ifindex,
                v4: open(plane, Family::V4),
                v6: open(plane, Family::V6),
            })
            .collect();
        if planes.iter().all(|p| p.v4.is_empty() && p.v6.is_empty()) {
            return Err(last_error);
        }
        let scratch =
            Scratch { iovecs: Vec::with_capacity(256), messages: Vec::with_capacity(GSO_PACKETS_MAX) };
        Ok(Tx { planes, gso, counters: TxCounters::default(), scratch })
    }

    /// Counters so far.
    pub(crate) fn counters(&self) -> TxCounters {
        self.counters
    }

    /// All descriptors, for the child of a fork to close.
    pub(crate) fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.planes.iter().flat_map(|p| p.v4.iter().chain(&p.v6)).map(AsRawFd::as_raw_fd)
    }

    /// Sends a burst. The core guarantees that its memory pieces were checked in this step.
    pub(crate) fn send(&mut self, burst: &TxBurst) -> Sent {
        let count = burst.packets.len();
        let Some((fd, name)) = self.target(burst) else {
            self.counters.refused += count as u64;
            return Sent::All;
        };
        let mut next = 0;
        while next < count {
            let chunk = chunk(burst, next, self.gso);
            let result = if self.gso || chunk.len() == 1 {
                self.scratch.send_segmented(fd, &name, burst, chunk.clone())
            } else {
                self.scratch.send_packets(fd, &name, burst, chunk.clone())
            };
            match result {
                Ok(sent) => next += sent,
                Err(libc::EINTR) => {}
                Err(libc::EAGAIN) => return Sent::Blocked(next),
                Err(libc::EFAULT) if next == 0 => return Sent::Fault,
                // What went before is sent; the core comes back with the rest and finds the fault at its start.
                Err(libc::EFAULT) => return Sent::Blocked(next),
                Err(libc::EINVAL | libc::EIO) if self.gso && chunk.len() > 1 => {
                    log::info!("this kernel or interface refuses UDP GSO: sending packet by packet");
                    self.gso = false;
                }
                Err(_) => {
                    // With sendmmsg it is the first packet that failed.
                    let lost = if self.gso { chunk.len() } else { 1 };
                    self.counters.refused += lost as u64;
                    next += lost;
                }
            }
        }
        Sent::All
    }

    /// Socket and destination of a burst; `None` when the plane cannot send to that family.
    fn target(&self, burst: &TxBurst) -> Option<(RawFd, RawAddr)> {
        let plane = self.planes.get(usize::from(burst.plane))?;
        let sockets = match Family::of(burst.dst.ip()) {
            Family::V4 => &plane.v4,
            Family::V6 => &plane.v6,
        };
        let fd = sockets.get(usize::from(burst.entropy))?.as_raw_fd();
        Some((fd, RawAddr::new(burst.dst, plane.ifindex)))
    }
}

/// The packets from `start` that one system call can take.
fn chunk(burst: &TxBurst, start: usize, gso: bool) -> Range<usize> {
    let first_piece = if start == 0 { 0 } else { burst.packets[start - 1].0 as usize };
    let mut bytes = 0;
    let mut end = start;
    while end < burst.packets.len() && end - start < GSO_PACKETS_MAX {
        let (pieces_end, len) = burst.packets[end];
        bytes += len as usize;
        let too_much = pieces_end as usize - first_piece > IOVECS_MAX || gso && bytes > GSO_BYTES_MAX;
        if too_much && end > start {
            break;
        }
        end += 1;
    }
    start..end
}

fn pieces_of(burst: &TxBurst, packets: &Range<usize>) -> Range<usize> {
    let start = if packets.start == 0 { 0 } else { burst.packets[packets.start - 1].0 as usize };
    start..burst.packets[packets.end - 1].0 as usize
}

fn iovec(burst: &TxBurst, piece: &Piece) -> libc::iovec {
    match *piece {
        Piece::Bytes { start, len } => {
            let bytes = &burst.bytes[start as usize..(start + len) as usize];
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
        }
        Piece::Zeros { len } => {
            // No piece is longer than a packet.
            let bytes = &ZEROS[..(len as usize).min(ZEROS.len())];
            libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }
        }
        Piece::Memory { va, len } => libc::iovec { iov_base: va as *mut libc::c_void, iov_len: len as usize },
    }
}

/// What null regions read as.
static ZEROS: [u8; 1 << 16] = [0; 1 << 16];

impl Scratch {
    /// One `sendmsg`; several packets as one GSO datagram. Gives the number of packets, or an errno.
    fn send_segmented(
        &mut self,
        fd: RawFd,
        name: &RawAddr,
        burst: &TxBurst,
        packets: Range<usize>,
    ) -> Result<usize, i32> {
        let count = packets.len();
        self.iovecs.clear();
        self.iovecs.extend(burst.pieces[pieces_of(burst, &packets)].iter().map(|p| iovec(burst, p)));
        let segment_bytes = burst.packets[packets.start].1 as u16;
        let mut control = Control::segment(segment_bytes);
        let message = libc::msghdr {
            msg_name: ptr::from_ref(&name.storage).cast_mut().cast(),
            msg_namelen: name.len,
            msg_iov: self.iovecs.as_mut_ptr(),
            msg_iovlen: self.iovecs.len(),
            msg_control: if count > 1 { (&raw mut control).cast() } else { ptr::null_mut() },
            msg_controllen: if count > 1 { SEGMENT_CMSG_BYTES } else { 0 },
            msg_flags: 0,
        };
        // SAFETY: name, control and iovecs live through the call. `Bytes` iovecs point into the burst; `Memory`
        // iovecs were checked against MRs by the core in this step, under the lock that deregistration takes, and
        // the kernel reads them with EFAULT instead of a fault. `syscall` is no cancellation point.
        let result = unsafe {
            libc::syscall(libc::SYS_sendmsg, fd, &raw const message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)
        };
        if result < 0 { Err(errno()) } else { Ok(count) }
    }

    /// `sendmmsg`, a message per packet. Gives the number sent (at least one), or an errno for the first.
    fn send_packets(
        &mut self,
        fd: RawFd,
        name: &RawAddr,
        burst: &TxBurst,
        packets: Range<usize>,
    ) -> Result<usize, i32> {
        self.iovecs.clear();
        self.messages.clear();
        let pieces = pieces_of(burst, &packets);
        let mut start = pieces.start;
        self.iovecs.extend(burst.pieces[pieces.clone()].iter().map(|p| iovec(burst, p)));
        for packet in packets {
            let end = burst.packets[packet].0 as usize;
            let msg_hdr = libc::msghdr {
                msg_name: ptr::from_ref(&name.storage).cast_mut().cast(),
                msg_namelen: name.len,
                msg_iov: self.iovecs[start - pieces.start..].as_mut_ptr(),
                msg_iovlen: end - start,
                msg_control: ptr::null_mut(),
                msg_controllen: 0,
                msg_flags: 0,
            };
            self.messages.push(libc::mmsghdr { msg_hdr, msg_len: 0 });
            start = end;
        }
        // SAFETY: as in `send_segmented`; the iovecs are not touched between taking their addresses and the call.
        let result = unsafe {
            libc::syscall(
                libc::SYS_sendmmsg,
                fd,
                self.messages.as_mut_ptr(),
                self.messages.len(),
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        if result < 0 { Err(errno()) } else { Ok(result as usize) }
    }
}

/// A control message saying "cut this into segments of so many bytes".
#[repr(C, align(8))]
struct Control {
    len: usize,
    level: i32,
    kind: i32,
    value: u16,
    /// What aligns the next message: the kernel is handed no byte that was never written.
    padding: [u8; 6],
}

const _: () = assert!(size_of::<Control>() == SEGMENT_CMSG_BYTES);

impl Control {
    fn segment(bytes: u16) -> Control {
        let len = size_of::<libc::cmsghdr>() + size_of::<u16>();
        Control { len, level: libc::SOL_UDP, kind: libc::UDP_SEGMENT, value: bytes, padding: [0; 6] }
    }
}

fn errno() -> i32 {
    match io::Error::last_os_error().raw_os_error() {
        // EWOULDBLOCK is the same number; be sure of it where it is not.
        Some(libc::EWOULDBLOCK) => libc::EAGAIN,
        Some(e) => e,
        None => libc::EIO,
    }
}

/// A sending socket on `ip` and a free port of the entropy range.
fn entropy_socket(ip: IpAddr, ifindex: u32, random: &mut SplitMix64) -> io::Result<OwnedFd> {
    let socket = socket::udp(Family::of(ip))?;
    match Family::of(ip) {
        Family::V4 => {
            socket::set_option(&socket, libc::IPPROTO_IP, libc::IP_TOS, TOS_ECT0)?;
            socket::set_option(&socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
        }
        Family::V6 => {
            socket::set_option(&socket, libc::IPPROTO_IPV6, libc::IPV6_TCLASS, TOS_ECT0)?;
            let probe = libc::IPV6_PMTUDISC_PROBE;
            socket::set_option(&socket, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, probe)?;
        }
    }
    // Where that fails there are no groups to send to.
    let _ = socket::send_groups_by(&socket, Family::of(ip), ifindex);
    let _ = socket::set_option(&socket, libc::SOL_SOCKET, libc::SO_SNDBUF, SNDBUF_BYTES);
    // It only sends: what strays in shall not fill memory.
    let _ = socket::set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUF, 0);
    let ports = u64::from(*ENTROPY_PORTS.end() - *ENTROPY_PORTS.start()) + 1;
    let mut result = Err(io::Error::from_raw_os_error(libc::EADDRINUSE));
    for _ in 0..ENTROPY_BIND_TRIES {
        let port = ENTROPY_PORTS.start() + (random.next() % ports) as u16;
        result = socket::bind(&socket, SocketAddr::new(ip, port), ifindex);
        match &result {
            Ok(()) => return Ok(socket),
            Err(e) if e.raw_os_error() == Some(libc::EADDRINUSE) => {}
            Err(_) => break,
        }
    }
    result.map(|()| socket)
}
