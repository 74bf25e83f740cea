//! The body of a Datagram packet.

use super::Reader;
use crate::types::Qpn;
use std::net::{IpAddr, Ipv6Addr};

/// Bytes before the payload.
pub const DATAGRAM_BYTES: usize = 20;
/// Bytes of the name of a group, between those and the payload.
pub const GROUP_BYTES: usize = 16;

const WITH_IMM: u8 = 1;
const SOLICITED: u8 = 2;
const WITH_GROUP: u8 = 4;

/// An unreliable datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Destination QP.
    pub dst_qpn: Qpn,
    /// Source QP.
    pub src_qpn: Qpn,
    /// Q_Key.
    pub qkey: u32,
    /// Immediate data, if any.
    pub imm: Option<u32>,
    /// Solicited event wanted.
    pub solicited: bool,
    /// The group it is for, where another one carries it.
    pub group: Option<IpAddr>,
    /// Data.
    pub payload: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// Reads the body behind the header.
    pub fn parse(bytes: &'a [u8]) -> Option<Datagram<'a>> {
        let mut r = Reader(bytes);
        let flags = r.u8()?;
        r.u8()?;
        let length = usize::from(r.u16()?);
        let (dst, src, qkey, imm) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        let group = if flags & WITH_GROUP == 0 {
            None
        } else {
            let octets: [u8; GROUP_BYTES] = r.bytes(GROUP_BYTES)?.try_into().ok()?;
            Some(Ipv6Addr::from(octets).to_canonical())
        };
        let sane = dst < 1 << 24 && src < 1 << 24;
        let payload = r.bytes(length)?;
        sane.then_some(Datagram {
            dst_qpn: Qpn(dst),
            src_qpn: Qpn(src),
            qkey,
            imm: (flags & WITH_IMM != 0).then_some(imm),
            solicited: flags & SOLICITED != 0,
            group,
            payload,
        })
    }
    /// Appends the body's header; `length` payload bytes follow.
    pub fn write_header(&self, length: u16, out: &mut Vec<u8>) {
        let imm = if self.imm.is_some() { WITH_IMM } else { 0 };
        let solicited = if self.solicited { SOLICITED } else { 0 };
        let group = if self.group.is_some() { WITH_GROUP } else { 0 };
        out.extend_from_slice(&[imm | solicited | group, 0]);
        out.extend_from_slice(&length.to_be_bytes());
        for word in [self.dst_qpn.0, self.src_qpn.0, self.qkey, self.imm.unwrap_or(0)] {
            out.extend_from_slice(&word.to_be_bytes());
        }
        match self.group {
            Some(IpAddr::V4(ip)) => out.extend_from_slice(&ip.to_ipv6_mapped().octets()),
            Some(IpAddr::V6(ip)) => out.extend_from_slice(&ip.octets()),
            None => {}
        }
    }
}
