//! Packets on their way, kept in a slab so that an event names one by number.

use std::net::SocketAddr;

/// Ports a packet passes at most: host, edge, aggregation, core, aggregation, edge; or a chain of switches.
pub const HOPS_MAX: usize = 8;
/// Bytes beside the UDP payload that occupy a link: IPv4, UDP, Ethernet, preamble and gap.
pub const WIRE_OVERHEAD: u64 = 66;

/// A part of a packet: bytes that are kept, or payload of which only the length is.
#[derive(Debug, Clone, Copy)]
pub enum Part {
    /// So many of the kept bytes.
    Kept(u32),
    /// So many bytes nobody looks at.
    Blank(u32),
}

/// One packet.
#[derive(Debug, Clone)]
pub struct Packet {
    /// Headers, frames and, with real memory, payload.
    pub bytes: Vec<u8>,
    /// How `bytes` and blank payload alternate.
    pub parts: Vec<Part>,
    /// UDP payload bytes.
    pub len: u32,
    /// Source address.
    pub src: SocketAddr,
    /// Sender, for conservation.
    pub from: u32,
    /// Receiver.
    pub to: u32,
    /// Plane.
    pub plane: u8,
    /// Marked by a queue.
    pub ce: bool,
    /// Damaged on the way: the receiver's checksum finds it.
    pub corrupt: bool,
    /// Ports it passes.
    pub route: [u32; HOPS_MAX],
    /// Number of ports.
    pub hops: u8,
    /// Ports passed.
    pub passed: u8,
}

impl Packet {
    /// The datagram in one piece; blank payload keeps whatever `out` held before.
    pub fn assemble<'a>(&self, out: &'a mut Vec<u8>) -> &'a [u8] {
        let len = self.len as usize;
        if out.len() < len {
            out.resize(len, 0);
        }
        let (mut at, mut from) = (0, 0);
        for part in &self.parts {
            match *part {
                Part::Kept(n) => {
                    let n = n as usize;
                    out[at..at + n].copy_from_slice(&self.bytes[from..from + n]);
                    (at, from) = (at + n, from + n);
                }
                Part::Blank(n) => at += n as usize,
            }
        }
        &out[..len]
    }
}

/// All packets on their way.
#[derive(Debug, Default)]
pub struct Slab {
    packets: Vec<Packet>,
    free: Vec<u32>,
    /// Packets alive.
    pub alive: usize,
}

impl Slab {
    /// A packet with empty contents, its buffers reused.
    pub fn take(&mut self) -> u32 {
        self.alive += 1;
        if let Some(i) = self.free.pop() {
            let p = &mut self.packets[i as usize];
            p.bytes.clear();
            p.parts.clear();
            (p.ce, p.corrupt, p.passed, p.hops) = (false, false, 0, 0);
            return i;
        }
        self.packets.push(Packet {
            bytes: Vec::new(),
            parts: Vec::new(),
            len: 0,
            src: SocketAddr::from(([0, 0, 0, 0], 0)),
            from: 0,
            to: 0,
            plane: 0,
            ce: false,
            corrupt: false,
            route: [0; HOPS_MAX],
            hops: 0,
            passed: 0,
        });
        self.packets.len() as u32 - 1
    }
    /// A copy of a packet.
    pub fn copy(&mut self, i: u32) -> u32 {
        let copy = self.packets[i as usize].clone();
        let at = self.take();
        self.packets[at as usize] = copy;
        at
    }
    /// By number.
    pub fn get(&mut self, i: u32) -> &mut Packet {
        &mut self.packets[i as usize]
    }
    /// It is gone.
    pub fn release(&mut self, i: u32) {
        self.alive -= 1;
        self.free.push(i);
    }
}
