//! The packet format: one fixed header and frames behind it. Layout and meaning are normative in `docs/protocol.md`.
//!
//! [`Header::parse`], [`frame::Frames`] and [`hello::Hello::parse`] are the only ways to obtain header fields; what
//! they give is complete and in range. All numbers are big-endian.

pub mod datagram;
pub mod frame;
pub mod hello;

pub use datagram::Datagram;
pub use frame::{Ack, Frame, Frames, Refuse, RefuseCode, Request, RespKind, Response, Void};
pub use hello::Hello;

/// Protocol version in every packet.
pub const VERSION: u8 = 1;
/// Bytes of [`Header`].
pub const HEADER_BYTES: usize = 20;

/// What a packet is; low nibble of its first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PacketType {
    /// Frames that want acknowledgement; consumes a path PSN (MR-HDR-2).
    Data = 1,
    /// Frames that do not; no PSN.
    Control = 2,
    /// Connection set-up.
    Hello = 3,
    /// The destination does not know the connection id.
    Reset = 4,
    /// An unreliable datagram (UD): no connection, no PSN.
    Datagram = 5,
}

/// Backlog field: data waits, and only the receiver's rate hint holds it back.
pub const HUNGRY: u16 = 0xffff;
/// Backlog field: data waits for something else: a window, a link of the sender's, its turn.
pub const WAITING: u16 = 1;
/// HELLO feature: the sender of the HELLO gives rate hints.
pub const FEATURE_HINTS: u32 = 1;
/// HELLO feature: the sender of the HELLO understands PLANES frames.
pub const FEATURE_PLANES: u32 = 2;
/// Header flag: the sender wants an acknowledgement at once.
pub const FLAG_ACK_REQUEST: u8 = 1;

/// The 20 bytes every packet begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What follows.
    pub kind: PacketType,
    /// `FLAG_*` bits.
    pub flags: u8,
    /// Path slot of the sender's transmit direction.
    pub path: u8,
    /// Generation of the path: changes with its source port.
    pub generation: u8,
    /// Connection id chosen by the destination; 0 in a first HELLO; in a RESET the id that was not known.
    pub dcid: u64,
    /// Low 32 bits of the path PSN (Data), else 0.
    pub psn: u32,
    /// Slot of the sender: it receives on base port + slot.
    pub src_slot: u16,
    /// What the sender still has: 0 nothing, [`WAITING`] or [`HUNGRY`].
    pub backlog: u16,
}

impl Header {
    /// Reads the header; `None` if this is not a packet of our version (MR-HDR-1).
    pub fn parse(bytes: &[u8]) -> Option<Header> {
        let b: &[u8; HEADER_BYTES] = bytes.first_chunk()?;
        if b[0] >> 4 != VERSION {
            return None;
        }
        let kind = match b[0] & 15 {
            1 => PacketType::Data,
            2 => PacketType::Control,
            3 => PacketType::Hello,
            4 => PacketType::Reset,
            5 => PacketType::Datagram,
            _ => return None,
        };
        let src_slot = u16::from_be_bytes([b[16], b[17]]);
        if src_slot >= 1024 {
            return None;
        }
        Some(Header {
            kind,
            flags: b[1],
            path: b[2],
            generation: b[3],
            dcid: u64::from_be_bytes([b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11]]),
            psn: u32::from_be_bytes([b[12], b[13], b[14], b[15]]),
            src_slot,
            backlog: u16::from_be_bytes([b[18], b[19]]),
        })
    }
    /// Appends the header.
    pub fn write(&self, out: &mut Vec<u8>) {
        let mut b = [0u8; HEADER_BYTES];
        b[0] = VERSION << 4 | self.kind as u8;
        b[1] = self.flags;
        b[2] = self.path;
        b[3] = self.generation;
        b[4..12].copy_from_slice(&self.dcid.to_be_bytes());
        b[12..16].copy_from_slice(&self.psn.to_be_bytes());
        b[16..18].copy_from_slice(&self.src_slot.to_be_bytes());
        b[18..20].copy_from_slice(&self.backlog.to_be_bytes());
        out.extend_from_slice(&b);
    }
}

/// The datagram is a Data packet (for the driver's counters of injected loss).
pub fn is_data(bytes: &[u8]) -> bool {
    bytes.first() == Some(&(VERSION << 4 | PacketType::Data as u8))
}

/// Cursor over received bytes; every read may fail, none panics.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn bytes(&mut self, count: usize) -> Option<&'a [u8]> {
        let (head, tail) = self.0.split_at_checked(count)?;
        self.0 = tail;
        Some(head)
    }
    pub fn u8(&mut self) -> Option<u8> {
        Some(self.bytes(1)?[0])
    }
    pub fn u16(&mut self) -> Option<u16> {
        Some(u16::from_be_bytes(*self.bytes(2)?.first_chunk()?))
    }
    pub fn u32(&mut self) -> Option<u32> {
        Some(u32::from_be_bytes(*self.bytes(4)?.first_chunk()?))
    }
    pub fn u64(&mut self) -> Option<u64> {
        Some(u64::from_be_bytes(*self.bytes(8)?.first_chunk()?))
    }
}
