//! Receives: `recvmmsg` into buffers large enough for a GRO run, and what the control messages say about it.

use std::mem::size_of;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use metaroce_proto::RxMeta;

use super::socket::RawAddr;
use crate::limits::{RX_BUFFER_BYTES, RX_MESSAGES};

/// Words of control buffer per message: packet info (40 bytes with IPv6), TOS, GRO size and overflow count (24
/// each) fit with room to spare.
const CONTROL_WORDS: usize = 32;

/// The receiving socket of a slot and its buffers.
pub(crate) struct Rx {
    socket: OwnedFd,
    buffers: Box<[Buffer]>,
    headers: Box<[libc::mmsghdr]>,
    /// Datagrams the kernel dropped because the socket's buffer was full.
    overflows: u64,
    /// The kernel's 32-bit count as last seen.
    overflows_seen: u32,
    /// Messages dropped here because they were cut off or came from no IP address.
    unreadable: u64,
}

// SAFETY: the pointers in `headers` and `iovec` point into the boxed `buffers` of the same value, which never move
// and are used by one thread at a time, the one that has `&mut Rx`.
unsafe impl Send for Rx {}

/// Where the kernel puts one message. Boxed once; the headers point into it.
struct Buffer {
    iovec: libc::iovec,
    name: RawAddr,
    control: [u64; CONTROL_WORDS],
    bytes: Box<[u8]>,
}

/// One message received: a datagram, or a run of equal datagrams of which the last may be shorter.
#[derive(Debug)]
pub(crate) struct Message<'a> {
    /// Facts that hold for all of them.
    pub(crate) meta: RxMeta,
    /// All bytes.
    pub(crate) bytes: &'a [u8],
    /// Size of each datagram but the last.
    pub(crate) segment_bytes: usize,
}

impl Message<'_> {
    /// The datagrams.
    pub(crate) fn datagrams(&self) -> impl Iterator<Item = &[u8]> {
        self.bytes.chunks(self.segment_bytes)
    }
}

impl Rx {
    /// Receives from `socket`.
    pub(crate) fn new(socket: OwnedFd) -> Rx {
        let mut buffers: Box<[Buffer]> = (0..RX_MESSAGES)
            .map(|_| Buffer {
                iovec: libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 },
                name: RawAddr::EMPTY,
                control: [0; CONTROL_WORDS],
                bytes: vec![0; RX_BUFFER_BYTES].into_boxed_slice(),
            })
            .collect();
        let headers = buffers
            .iter_mut()
            .map(|buffer| {
                buffer.iovec.iov_base = buffer.bytes.as_mut_ptr().cast();
                buffer.iovec.iov_len = buffer.bytes.len();
                let msg_hdr = libc::msghdr {
                    msg_name: (&raw mut buffer.name.storage).cast(),
                    msg_namelen: RawAddr::EMPTY.len,
                    msg_iov: &raw mut buffer.iovec,
                    msg_iovlen: 1,
                    msg_control: buffer.control.as_mut_ptr().cast(),
                    msg_controllen: size_of::<[u64; CONTROL_WORDS]>(),
                    msg_flags: 0,
                };
                libc::mmsghdr { msg_hdr, msg_len: 0 }
            })
            .collect();
        Rx { socket, buffers, headers, overflows: 0, overflows_seen: 0, unreadable: 0 }
    }

    /// The socket, to wait for and for the child of a fork to close.
    pub(crate) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
    /// The same, to set options of.
    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.socket
    }
    /// Datagrams the kernel dropped because the socket's buffer was full.
    pub(crate) fn overflows(&self) -> u64 {
        self.overflows
    }
    /// Messages that could not be understood.
    pub(crate) fn unreadable(&self) -> u64 {
        self.unreadable
    }

    /// Takes what is there, at most [`RX_MESSAGES`] messages, to be read with [`Rx::message`]. Errors count as
    /// "nothing": the socket is not connected, so none speaks about a peer.
    pub(crate) fn receive(&mut self) -> usize {
        // SAFETY: the headers point into `buffers` (see the impl of Send) with their true sizes; the null pointer
        // means no time-out. `syscall` is no cancellation point.
        let count = unsafe {
            libc::syscall(
                libc::SYS_recvmmsg,
                self.socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                self.headers.len(),
                libc::MSG_DONTWAIT,
                std::ptr::null_mut::<libc::timespec>(),
            )
        };
        usize::try_from(count).unwrap_or(0)
    }

    /// Message `i` of the last [`Rx::receive`], once. `None` if it is of no use.
    pub(crate) fn message(&mut self, i: usize) -> Option<Message<'_>> {
        let header = &mut self.headers[i];
        let buffer = &mut self.buffers[i];
        let len = header.msg_len as usize;
        let cut = header.msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
        let control_len = header.msg_hdr.msg_controllen.min(size_of::<[u64; CONTROL_WORDS]>());
        // The kernel has overwritten these; make the header ready for the next call.
        header.msg_hdr.msg_namelen = RawAddr::EMPTY.len;
        header.msg_hdr.msg_controllen = size_of::<[u64; CONTROL_WORDS]>();

        let facts = Facts::parse(&buffer.control[..control_len.div_ceil(8)], control_len);
        if let Some(count) = facts.overflows {
            self.overflows += u64::from(count.wrapping_sub(self.overflows_seen));
            self.overflows_seen = count;
        }
        let src = buffer.name.to_addr();
        let (Some(src), Some(dst_ip), false) = (src, facts.dst_ip, cut) else {
            self.unreadable += 1;
            return None;
        };
        let bytes = &buffer.bytes[..len.min(buffer.bytes.len())];
        let segment_bytes = facts.segment_bytes.unwrap_or(bytes.len()).max(1);
        Some(Message {
            meta: RxMeta { src: without_scope(src), dst_ip, ecn: facts.ecn },
            bytes,
            segment_bytes,
        })
    }
}

/// The core compares addresses with those of GIDs, which have no scope.
fn without_scope(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip(), addr.port())
}

/// What the control messages say.
#[derive(Debug, Default, PartialEq, Eq)]
struct Facts {
    dst_ip: Option<IpAddr>,
    ecn: u8,
    segment_bytes: Option<usize>,
    overflows: Option<u32>,
}

impl Facts {
    /// Reads the messages in the first `len` bytes of `control`: each a header of two words (length; level and
    /// kind) and data padded to a word.
    fn parse(control: &[u64], len: usize) -> Facts {
        let mut facts = Facts::default();
        let mut at = 0;
        while at + 2 <= control.len() {
            let cmsg_len = control[at] as usize;
            let [level, kind] = halves(control[at + 1]);
            if cmsg_len < 16 || at * 8 + cmsg_len > len {
                break;
            }
            facts.take(level as i32, kind as i32, &control[at + 2..at + cmsg_len.div_ceil(8)]);
            at += cmsg_len.div_ceil(8);
        }
        facts
    }

    fn take(&mut self, level: i32, kind: i32, data: &[u64]) {
        let Some(&first) = data.first() else { return };
        let [int, _] = halves(first);
        match (level, kind) {
            // One byte; the kernel pads it with nothing defined.
            (libc::IPPROTO_IP, libc::IP_TOS) => self.ecn = first.to_ne_bytes()[0] & 3,
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => self.ecn = int as u8 & 3,
            (libc::SOL_UDP, libc::UDP_GRO) => self.segment_bytes = Some(int as usize),
            (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => self.overflows = Some(int),
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // in_pktinfo: interface, local address, address in the header.
                if let Some(&word) = data.get(1) {
                    let [addr, _] = halves(word);
                    self.dst_ip = Some(Ipv4Addr::from(addr.to_ne_bytes()).into());
                }
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                if let [high, low, ..] = *data {
                    let mut octets = [0; 16];
                    octets[..8].copy_from_slice(&high.to_ne_bytes());
                    octets[8..].copy_from_slice(&low.to_ne_bytes());
                    self.dst_ip = Some(Ipv6Addr::from(octets).to_canonical());
                }
            }
            _ => {}
        }
    }
}

/// The two 32-bit values of a word in memory order.
fn halves(word: u64) -> [u32; 2] {
    let b = word.to_ne_bytes();
    [u32::from_ne_bytes([b[0], b[1], b[2], b[3]]), u32::from_ne_bytes([b[4], b[5], b[6], b[7]])]
}
