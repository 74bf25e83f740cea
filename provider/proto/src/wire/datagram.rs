//! The body of a Datagram packet.

use super::Reader;
use crate::types::Qpn;

/// Bytes before the payload.
pub const DATAGRAM_BYTES: usize = 20;

const WITH_IMM: u8 = 1;
const SOLICITED: u8 = 2;

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
        let sane = dst < 1 << 24 && src < 1 << 24;
        let payload = r.bytes(length)?;
        sane.then_some(Datagram {
            dst_qpn: Qpn(dst),
            src_qpn: Qpn(src),
            qkey,
            imm: (flags & WITH_IMM != 0).then_some(imm),
            solicited: flags & SOLICITED != 0,
            payload,
        })
    }
    /// Appends the body's header; `length` payload bytes follow.
    pub fn write_header(&self, length: u16, out: &mut Vec<u8>) {
        let imm = if self.imm.is_some() { WITH_IMM } else { 0 };
        let solicited = if self.solicited { SOLICITED } else { 0 };
        out.extend_from_slice(&[imm | solicited, 0]);
        out.extend_from_slice(&length.to_be_bytes());
        for word in [self.dst_qpn.0, self.src_qpn.0, self.qkey, self.imm.unwrap_or(0)] {
            out.extend_from_slice(&word.to_be_bytes());
        }
    }
}
