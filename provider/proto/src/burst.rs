//! What the core hands to the driver: packets for one path, as header bytes plus references to payload.

use std::net::SocketAddr;

/// A part of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece {
    /// Bytes `start..start + len` of [`TxBurst::bytes`].
    Bytes {
        /// Offset.
        start: u32,
        /// Length.
        len: u32,
    },
    /// Application memory, checked by the core, valid until the end of the step.
    Memory {
        /// Address.
        va: u64,
        /// Length.
        len: u32,
    },
    /// Zeros (what a null region reads as).
    Zeros {
        /// Length.
        len: u32,
    },
}

/// Packets for one path. All packets but the last have the same size, the last is not larger: one GSO datagram.
/// Made once by the driver and reused; it allocates only until it has grown.
#[derive(Debug)]
pub struct TxBurst {
    /// Plane (index into the endpoint's planes) to send on.
    pub plane: u8,
    /// Entropy value (index of the source port) to send from.
    pub entropy: u8,
    /// Where to.
    pub dst: SocketAddr,
    /// Headers, frames and inline payload of all packets.
    pub bytes: Vec<u8>,
    /// All packets' parts in order.
    pub pieces: Vec<Piece>,
    /// Per packet: end index in `pieces` and length in bytes.
    pub packets: Vec<(u32, u32)>,
    /// Connection and path it belongs to, for [`crate::Endpoint::unsend`]; opaque to the driver.
    pub(crate) origin: Option<(u32, u8)>,
}

impl TxBurst {
    /// An empty burst.
    pub fn new() -> Self {
        TxBurst {
            plane: 0,
            entropy: 0,
            dst: SocketAddr::from(([0, 0, 0, 0], 0)),
            bytes: Vec::with_capacity(32 << 10),
            pieces: Vec::with_capacity(256),
            packets: Vec::with_capacity(64),
            origin: None,
        }
    }
    /// Size of all packets but the last.
    pub fn segment_bytes(&self) -> u32 {
        self.packets.first().map_or(0, |p| p.1)
    }
    /// Bytes of all packets together.
    pub fn total_bytes(&self) -> u32 {
        self.packets.iter().map(|p| p.1).sum()
    }
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.pieces.clear();
        self.packets.clear();
        self.origin = None;
    }
}

impl Default for TxBurst {
    fn default() -> Self {
        Self::new()
    }
}
