//! HELLO: how two endpoints learn of each other. Idempotent by (incarnation, ordinal).

use super::Reader;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Planes an endpoint may announce.
pub const PLANES_MAX: usize = 16;
/// Addresses per plane it may announce.
pub const ADDRS_MAX: usize = 8;

const TLV_END: u8 = 0;
const TLV_PARAMS: u8 = 1;
const TLV_PLANE: u8 = 2;

/// Body of a HELLO packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The receiver is to answer with its own HELLO.
    pub wants_answer: bool,
    /// Identity of the sender's life.
    pub incarnation: u64,
    /// The id the sender wants in packets to it.
    pub scid: u64,
    /// The receiver's id the sender is bound to; 0 if none yet. It differs from the id the packet is addressed to
    /// when the receiver asks by another of its connections: those two are one.
    pub bound: u64,
    /// Counts the sender's HELLOs on this connection.
    pub ordinal: u32,
    /// Largest UDP payload the sender proposes; the packet is padded to it.
    pub segment: u16,
    /// Bytes one connection packet number stands for in the sender's packets.
    pub unit: u16,
    /// Bytes the receiver of this may have in flight towards the sender, at first.
    pub budget: u32,
    /// Messages per stream the sender accepts beyond the oldest incomplete one.
    pub message_window: u16,
    /// Paths the sender transmits on.
    pub paths: u8,
    /// First connection packet number of requests and of responses.
    pub first_cpn: [u32; 2],
    /// Optional features: `FEATURE_*` bits.
    pub features: u32,
    /// The sender's planes.
    pub planes: Vec<HelloPlane>,
}

/// One plane in a HELLO.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelloPlane {
    /// Label, at most 15 bytes.
    pub label: String,
    /// Addresses the sender receives on.
    pub addrs: Vec<IpAddr>,
}

impl Hello {
    /// Reads the body behind the header. Unknown TLVs are skipped (MR-HELLO-1).
    pub fn parse(bytes: &[u8]) -> Option<Hello> {
        let mut r = Reader(bytes);
        let wants_answer = r.u32()? & 1 != 0;
        let (incarnation, scid, bound, ordinal) = (r.u64()?, r.u64()?, r.u64()?, r.u32()?);
        let mut hello = Hello {
            wants_answer,
            incarnation,
            scid,
            bound,
            ordinal,
            segment: 0,
            unit: 0,
            budget: 0,
            message_window: 0,
            paths: 0,
            first_cpn: [0; 2],
            features: 0,
            planes: Vec::new(),
        };
        loop {
            let kind = r.u8()?;
            if kind == TLV_END {
                break;
            }
            let length = usize::from(r.u16()?);
            let mut body = Reader(r.bytes(length)?);
            match kind {
                TLV_PARAMS => hello.parse_params(&mut body)?,
                TLV_PLANE if hello.planes.len() < PLANES_MAX => hello.planes.push(parse_plane(&mut body)?),
                _ => {}
            }
        }
        let sane = hello.incarnation != 0
            && hello.scid != 0
            && hello.segment >= 512
            && hello.unit >= 64
            && hello.unit.is_power_of_two()
            && hello.message_window >= 1
            && (1..=64).contains(&hello.paths);
        sane.then_some(hello)
    }

    fn parse_params(&mut self, r: &mut Reader<'_>) -> Option<()> {
        self.segment = r.u16()?;
        self.unit = r.u16()?;
        self.budget = r.u32()?;
        self.message_window = r.u16()?;
        self.paths = r.u8()?;
        r.u8()?;
        self.first_cpn = [r.u32()?, r.u32()?];
        self.features = r.u32()?;
        Some(())
    }

    /// Appends the body and pads the packet, which began at `start` in `out`, to the proposed segment.
    pub fn write(&self, start: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(&u32::from(self.wants_answer).to_be_bytes());
        out.extend_from_slice(&self.incarnation.to_be_bytes());
        out.extend_from_slice(&self.scid.to_be_bytes());
        out.extend_from_slice(&self.bound.to_be_bytes());
        out.extend_from_slice(&self.ordinal.to_be_bytes());
        out.extend_from_slice(&[TLV_PARAMS, 0, 24]);
        out.extend_from_slice(&self.segment.to_be_bytes());
        out.extend_from_slice(&self.unit.to_be_bytes());
        out.extend_from_slice(&self.budget.to_be_bytes());
        out.extend_from_slice(&self.message_window.to_be_bytes());
        out.extend_from_slice(&[self.paths, 0]);
        out.extend_from_slice(&self.first_cpn[0].to_be_bytes());
        out.extend_from_slice(&self.first_cpn[1].to_be_bytes());
        out.extend_from_slice(&self.features.to_be_bytes());
        for plane in &self.planes {
            write_plane(plane, out);
        }
        out.push(TLV_END);
        let padded = start + usize::from(self.segment);
        if out.len() < padded {
            out.resize(padded, 0);
        }
    }
}

fn parse_plane(r: &mut Reader<'_>) -> Option<HelloPlane> {
    let label_bytes = usize::from(r.u8()?);
    let label = std::str::from_utf8(r.bytes(label_bytes)?).ok()?.to_owned();
    let count = r.u8()?;
    let mut addrs = Vec::new();
    for _ in 0..count.min(ADDRS_MAX as u8) {
        let v6 = Ipv6Addr::from(*r.bytes(16)?.first_chunk::<16>()?);
        addrs.push(v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4));
    }
    Some(HelloPlane { label, addrs })
}

fn write_plane(plane: &HelloPlane, out: &mut Vec<u8>) {
    let label = &plane.label.as_bytes()[..plane.label.len().min(15)];
    let addrs = &plane.addrs[..plane.addrs.len().min(ADDRS_MAX)];
    let length = (2 + label.len() + 16 * addrs.len()) as u16;
    out.push(TLV_PLANE);
    out.extend_from_slice(&length.to_be_bytes());
    out.push(label.len() as u8);
    out.extend_from_slice(label);
    out.push(addrs.len() as u8);
    for addr in addrs {
        out.extend_from_slice(&mapped(*addr).octets());
    }
}

fn mapped(addr: IpAddr) -> Ipv6Addr {
    match addr {
        IpAddr::V4(v4) => Ipv4Addr::to_ipv6_mapped(&v4),
        IpAddr::V6(v6) => v6,
    }
}
