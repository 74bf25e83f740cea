//! Frames of Data and Control packets: acknowledgements, refusals, credits, requests, responses, voids.

use super::Reader;
use crate::types::{Opcode, Qpn, SrqId};

const PADDING: u8 = 0x00;
const ACK: u8 = 0x01;
const REFUSE: u8 = 0x02;
const CREDIT: u8 = 0x03;
const HINT: u8 = 0x04;
const PLANES: u8 = 0x05;
const CLOSE: u8 = 0x06;
const CLOSE_ACK: u8 = 0x07;
const PING: u8 = 0x08;
const REQUEST: u8 = 0x10;
const RESPONSE: u8 = 0x11;
const VOID: u8 = 0x12;

/// Bytes of an ACK frame.
pub const ACK_BYTES: usize = 48;
/// Bytes of a REFUSE frame.
pub const REFUSE_BYTES: usize = 20;
/// Bytes of a CREDIT frame.
pub const CREDIT_BYTES: usize = 16;
/// Bytes of a HINT frame.
pub const HINT_BYTES: usize = 8;
/// Bytes of a PLANES frame.
pub const PLANES_BYTES: usize = 4;
/// Bytes of the fixed part of a request frame.
pub const REQUEST_BYTES: usize = 40;
/// The largest header of a request frame (atomics).
pub const REQUEST_BYTES_MAX: usize = REQUEST_BYTES + 4 + 28;
/// Bytes of a response frame's header.
pub const RESPONSE_BYTES: usize = 32;
/// Bytes of a VOID frame.
pub const VOID_BYTES: usize = 20;

/// Request flag: the message was sent with IBV_SEND_SOLICITED.
const SOLICITED: u8 = 0x80;
/// Request flag: the number of the SRQ it is for follows the fixed part.
const FOR_SRQ: u8 = 0x40;

/// What one path of the peer's has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ack {
    /// The path slot (of the receiver of this frame).
    pub path: u8,
    /// Its generation.
    pub generation: u8,
    /// Low 32 bits of the highest PSN received.
    pub highest: u32,
    /// Packets received with CE since the generation began, modulo 2^32.
    pub ce: u32,
    /// Microseconds between the arrival of `highest` and the sending of this frame, saturated.
    pub delay_us: u16,
    /// Bit i (of word i / 64): `highest - i` was received. Bit 0 is set.
    pub sack: [u64; 4],
}

/// Why a message was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RefuseCode {
    /// No receive is posted for receive index `number`.
    Rnr = 1,
    /// The QP is not there, not ready, or bound to another; `number` is the message.
    NotReady = 2,
    /// IBV_WC_REM_INV_REQ_ERR for message `number`.
    InvalidRequest = 3,
    /// IBV_WC_REM_ACCESS_ERR.
    Access = 4,
    /// IBV_WC_REM_OP_ERR.
    Operation = 5,
}

impl RefuseCode {
    /// The stream ends here; Rnr and NotReady are tried again.
    pub fn is_fatal(self) -> bool {
        !matches!(self, RefuseCode::Rnr | RefuseCode::NotReady)
    }
}

/// Closes a stream at a message, for attempts up to `attempt`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refuse {
    /// Why.
    pub code: RefuseCode,
    /// Attempts up to and including this one are refused.
    pub attempt: u16,
    /// The requester's QP.
    pub qpn: Qpn,
    /// The stream.
    pub life: u32,
    /// Receive index (Rnr) or message number.
    pub number: u32,
    /// 5-bit RNR timer code of the responder (Rnr).
    pub timer: u8,
}

/// A packet of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request<'a> {
    /// Operation.
    pub opcode: Opcode,
    /// Solicited event wanted.
    pub solicited: bool,
    /// Destination QP.
    pub dst_qpn: Qpn,
    /// Source QP.
    pub src_qpn: Qpn,
    /// Stream id: this RTS life of the source QP.
    pub life: u32,
    /// Connection packet number (request space), low 32 bits.
    pub cpn: u32,
    /// Numbers covered.
    pub units: u16,
    /// Attempt of the message.
    pub attempt: u16,
    /// Message number, low 32 bits.
    pub msn: u32,
    /// Message length in bytes (Read: bytes to read).
    pub total: u32,
    /// Offset of this payload.
    pub offset: u32,
    /// Receives consumed by earlier messages of the stream: the index this one consumes, if it does.
    pub recv_index: u32,
    /// The SRQ it is for (XRC).
    pub srq: Option<SrqId>,
    /// Remote address of the message's first byte (Write, Read, atomics).
    pub raddr: u64,
    /// Remote key.
    pub rkey: u32,
    /// Immediate; with SendInv the key to invalidate.
    pub imm: u32,
    /// Compare value or addend.
    pub compare_add: u64,
    /// Swap value.
    pub swap: u64,
    /// Data.
    pub payload: &'a [u8],
}

/// Kind of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RespKind {
    /// Data of a Read.
    Read = 0,
    /// The old value of an atomic, 8 bytes big-endian.
    Atomic = 1,
}

/// A packet of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Response<'a> {
    /// Read or atomic.
    pub kind: RespKind,
    /// The requester's QP.
    pub qpn: Qpn,
    /// Its stream.
    pub life: u32,
    /// Connection packet number (response space).
    pub cpn: u32,
    /// Numbers covered.
    pub units: u16,
    /// Attempt of the request answered.
    pub attempt: u16,
    /// Message answered.
    pub msn: u32,
    /// Offset of the payload in the message.
    pub offset: u32,
    /// Message length.
    pub total: u32,
    /// Data.
    pub payload: &'a [u8],
}

/// Fills connection packet numbers whose data will never come, and confirms refusals of its stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Void {
    /// The number space: false requests, true responses.
    pub response: bool,
    /// First number.
    pub cpn: u32,
    /// How many.
    pub units: u16,
    /// Source QP of the stream.
    pub src_qpn: Qpn,
    /// Stream.
    pub life: u32,
    /// Refusals that may be tried again (RNR, NOT_READY) below this attempt are confirmed, if `CONFIRMS_RETRY`.
    pub attempt: u16,
    /// `CONFIRMS_*` bits.
    pub confirms: u16,
}

/// VOID bit: confirms refusals that may be tried again.
pub const CONFIRMS_RETRY: u16 = 1;
/// VOID bit: confirms the refusal that ends the stream.
pub const CONFIRMS_FATAL: u16 = 2;

/// Any frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame<'a> {
    /// Path acknowledgement.
    Ack(Ack),
    /// Refusal.
    Refuse(Refuse),
    /// Receives posted so far on the responder's side of a stream: `limit` is the first index not posted.
    Credit {
        /// The requester's QP.
        qpn: Qpn,
        /// Its stream.
        life: u32,
        /// First receive index not posted yet.
        limit: u32,
    },
    /// Receiver's steering.
    Hint {
        /// Counts up with each change of opinion.
        epoch: u8,
        /// Rate, 5-bit exponent and 11-bit mantissa in Mb/s; 0xffff: no opinion.
        rate: u16,
        /// Bytes the sender may have in flight.
        budget: u32,
    },
    /// Which of the sender's planes are not to be used.
    Planes {
        /// Counts the changes.
        epoch: u8,
        /// A bit per plane, in the order of the HELLO.
        down: u16,
    },
    /// The peer ends the connection.
    Close,
    /// ... and this confirms it.
    CloseAck,
    /// Wants an acknowledgement.
    Ping,
    /// Part of a message.
    Request(Request<'a>),
    /// Part of a response.
    Response(Response<'a>),
    /// Filler.
    Void(Void),
}

/// Iterator over the frames behind a header. A broken frame ends it with `None` and sets `broken` (MR-FRAME-1).
#[derive(Debug)]
pub struct Frames<'a> {
    reader: Reader<'a>,
    /// The packet was malformed.
    pub broken: bool,
}

impl<'a> Frames<'a> {
    /// Frames in `bytes`, which begin behind the header.
    pub fn new(bytes: &'a [u8]) -> Self {
        Frames { reader: Reader(bytes), broken: false }
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Frame<'a>;
    fn next(&mut self) -> Option<Frame<'a>> {
        let kind = *self.reader.0.first()?;
        if kind == PADDING {
            return None;
        }
        let frame = parse(kind, &mut self.reader);
        self.broken |= frame.is_none();
        frame
    }
}

/// The high byte is to be 0: it is not ignored, so that a later version may use it (MR-FRAME-3).
fn qpn(r: &mut Reader<'_>) -> Option<Qpn> {
    qpn_of(r.u32()?)
}

fn qpn_of(word: u32) -> Option<Qpn> {
    (word < 1 << 24).then_some(Qpn(word))
}

/// 32 bits of a fixed part.
fn word<const N: usize>(fixed: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]])
}

/// 16 bits of a fixed part.
fn half<const N: usize>(fixed: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([fixed[at], fixed[at + 1]])
}

fn parse<'a>(kind: u8, r: &mut Reader<'a>) -> Option<Frame<'a>> {
    match kind {
        REQUEST => parse_request(r).map(Frame::Request),
        RESPONSE => parse_response(r).map(Frame::Response),
        ACK => parse_ack(r).map(Frame::Ack),
        REFUSE => parse_refuse(r).map(Frame::Refuse),
        CREDIT => {
            r.u32()?;
            Some(Frame::Credit { qpn: qpn(r)?, life: r.u32()?, limit: r.u32()? })
        }
        HINT => {
            r.u8()?;
            Some(Frame::Hint { epoch: r.u8()?, rate: r.u16()?, budget: r.u32()? })
        }
        PLANES => {
            r.u8()?;
            Some(Frame::Planes { epoch: r.u8()?, down: r.u16()? })
        }
        CLOSE => r.u32().map(|_| Frame::Close),
        CLOSE_ACK => r.u32().map(|_| Frame::CloseAck),
        PING => r.u32().map(|_| Frame::Ping),
        VOID => {
            r.u8()?;
            let response = r.u8()? != 0;
            let units = r.u16()?;
            let void = Void {
                response,
                units,
                cpn: r.u32()?,
                src_qpn: qpn(r)?,
                life: r.u32()?,
                attempt: r.u16()?,
                confirms: r.u16()?,
            };
            (units > 0).then_some(Frame::Void(void))
        }
        // Nothing says how long it is: no sender uses a type that both ends have not announced (MR-FRAME-2).
        _ => None,
    }
}

fn parse_ack(r: &mut Reader<'_>) -> Option<Ack> {
    r.u8()?;
    let (path, generation) = (r.u8()?, r.u8()?);
    r.u8()?;
    let (highest, ce) = (r.u32()?, r.u32()?);
    let delay_us = r.u16()?;
    r.u16()?;
    let sack = [r.u64()?, r.u64()?, r.u64()?, r.u64()?];
    (sack[0] & 1 == 1).then_some(Ack { path, generation, highest, ce, delay_us, sack })
}

fn parse_refuse(r: &mut Reader<'_>) -> Option<Refuse> {
    r.u8()?;
    let code = match r.u8()? {
        1 => RefuseCode::Rnr,
        2 => RefuseCode::NotReady,
        3 => RefuseCode::InvalidRequest,
        4 => RefuseCode::Access,
        5 => RefuseCode::Operation,
        _ => return None,
    };
    let attempt = r.u16()?;
    Some(Refuse {
        code,
        attempt,
        qpn: qpn(r)?,
        life: r.u32()?,
        number: r.u32()?,
        timer: (r.u32()? >> 24) as u8 & 31,
    })
}

fn opcode(value: u8) -> Option<Opcode> {
    Some(match value {
        0 => Opcode::Write,
        1 => Opcode::WriteImm,
        2 => Opcode::Send,
        3 => Opcode::SendImm,
        4 => Opcode::Read,
        5 => Opcode::CompareSwap,
        6 => Opcode::FetchAdd,
        7 => Opcode::SendInv,
        8 => Opcode::Nop,
        9 => Opcode::AtomicWrite,
        _ => return None,
    })
}

/// The number of an operation on the wire.
fn opcode_number(opcode: Opcode) -> u8 {
    match opcode {
        Opcode::SendInv => 7,
        Opcode::AtomicWrite => 9,
        Opcode::Nop | Opcode::LocalInv | Opcode::BindWindow => 8,
        // The first seven are numbered as in the verbs API.
        _ => opcode as u8,
    }
}

/// A remote address and key follow the fixed part.
fn has_remote(opcode: Opcode) -> bool {
    use Opcode::*;
    matches!(opcode, Write | WriteImm | AtomicWrite | Read | CompareSwap | FetchAdd)
}

/// An immediate, or the key to invalidate, follows.
fn has_imm(opcode: Opcode) -> bool {
    matches!(opcode, Opcode::WriteImm | Opcode::SendImm | Opcode::SendInv)
}

fn parse_request<'a>(r: &mut Reader<'a>) -> Option<Request<'a>> {
    // One check of the length for all of the fixed part: this is done for every packet.
    let fixed: &[u8; REQUEST_BYTES] = r.bytes(REQUEST_BYTES)?.first_chunk()?;
    let op = fixed[1];
    let opcode = opcode(op & !(SOLICITED | FOR_SRQ))?;
    let length = usize::from(half(fixed, 2));
    let (dst_qpn, src_qpn) = (qpn_of(word(fixed, 4))?, qpn_of(word(fixed, 8))?);
    let (life, cpn) = (word(fixed, 12), word(fixed, 16));
    let (units, attempt) = (half(fixed, 20), half(fixed, 22));
    let (msn, total, offset, recv_index) =
        (word(fixed, 24), word(fixed, 28), word(fixed, 32), word(fixed, 36));
    let srq = if op & FOR_SRQ != 0 { Some(r.u32()?) } else { None };
    let (mut raddr, mut rkey, mut imm, mut compare_add, mut swap) = (0, 0, 0, 0, 0);
    if has_remote(opcode) {
        raddr = r.u64()?;
        rkey = r.u32()?;
    }
    if has_imm(opcode) {
        imm = r.u32()?;
    }
    if matches!(opcode, Opcode::CompareSwap | Opcode::FetchAdd) {
        compare_add = r.u64()?;
        swap = r.u64()?;
    }
    let payload = r.bytes(length)?;
    let fits = if opcode.has_response() {
        length == 0 && offset == 0
    } else {
        // An empty packet is only legal for an empty message: it could never complete another (MR-REQ-1).
        u64::from(offset) + length as u64 <= u64::from(total) && (length > 0 || total == 0)
    };
    let atomic = matches!(opcode, Opcode::CompareSwap | Opcode::FetchAdd | Opcode::AtomicWrite);
    let atomic_sized = !atomic || total == 8;
    let placeless = opcode != Opcode::Nop || total == 0;
    (fits && atomic_sized && placeless && units > 0).then_some(Request {
        opcode,
        solicited: op & SOLICITED != 0,
        dst_qpn,
        src_qpn,
        life,
        cpn,
        units,
        attempt,
        msn,
        total,
        offset,
        recv_index,
        srq,
        raddr,
        rkey,
        imm,
        compare_add,
        swap,
        payload,
    })
}

fn parse_response<'a>(r: &mut Reader<'a>) -> Option<Response<'a>> {
    let fixed: &[u8; RESPONSE_BYTES] = r.bytes(RESPONSE_BYTES)?.first_chunk()?;
    let kind = match fixed[1] {
        0 => RespKind::Read,
        1 => RespKind::Atomic,
        _ => return None,
    };
    let length = usize::from(half(fixed, 2));
    let qpn = qpn_of(word(fixed, 4))?;
    let (life, cpn) = (word(fixed, 8), word(fixed, 12));
    let (units, attempt) = (half(fixed, 16), half(fixed, 18));
    let (msn, offset, total) = (word(fixed, 20), word(fixed, 24), word(fixed, 28));
    let payload = r.bytes(length)?;
    // As of requests (MR-RESP-1).
    let fits = u64::from(offset) + length as u64 <= u64::from(total) && (length > 0 || total == 0);
    let sized = kind == RespKind::Read || length == 8;
    (fits && sized && units > 0).then_some(Response {
        kind,
        qpn,
        life,
        cpn,
        units,
        attempt,
        msn,
        offset,
        total,
        payload,
    })
}

/// Header bytes of a request frame of this opcode; those of XRC name an SRQ.
pub fn request_header_bytes(opcode: Opcode, xrc: bool) -> usize {
    REQUEST_BYTES
        + if xrc { 4 } else { 0 }
        + match opcode {
            Opcode::Send | Opcode::Nop | Opcode::LocalInv | Opcode::BindWindow => 0,
            Opcode::SendImm | Opcode::SendInv => 4,
            Opcode::Write | Opcode::AtomicWrite | Opcode::Read => 12,
            Opcode::WriteImm => 16,
            Opcode::CompareSwap | Opcode::FetchAdd => 28,
        }
}

impl Request<'_> {
    /// Appends the frame's header; `length` payload bytes follow it (the `payload` field is not written).
    pub fn write_header(&self, length: u16, out: &mut Vec<u8>) {
        let solicited = if self.solicited { SOLICITED } else { 0 };
        let for_srq = if self.srq.is_some() { FOR_SRQ } else { 0 };
        // Built aside and appended at once: room is looked for once per packet and not once per field.
        let mut b = [0; REQUEST_BYTES_MAX];
        b[0] = REQUEST;
        b[1] = opcode_number(self.opcode) | solicited | for_srq;
        b[2..4].copy_from_slice(&length.to_be_bytes());
        b[4..8].copy_from_slice(&self.dst_qpn.0.to_be_bytes());
        b[8..12].copy_from_slice(&self.src_qpn.0.to_be_bytes());
        b[12..16].copy_from_slice(&self.life.to_be_bytes());
        b[16..20].copy_from_slice(&self.cpn.to_be_bytes());
        b[20..22].copy_from_slice(&self.units.to_be_bytes());
        b[22..24].copy_from_slice(&self.attempt.to_be_bytes());
        b[24..28].copy_from_slice(&self.msn.to_be_bytes());
        b[28..32].copy_from_slice(&self.total.to_be_bytes());
        b[32..36].copy_from_slice(&self.offset.to_be_bytes());
        b[36..40].copy_from_slice(&self.recv_index.to_be_bytes());
        let mut end = REQUEST_BYTES;
        let mut put = |field: &[u8]| {
            b[end..end + field.len()].copy_from_slice(field);
            end += field.len();
        };
        if let Some(srq) = self.srq {
            put(&srq.to_be_bytes());
        }
        if has_remote(self.opcode) {
            put(&self.raddr.to_be_bytes());
            put(&self.rkey.to_be_bytes());
        }
        if has_imm(self.opcode) {
            put(&self.imm.to_be_bytes());
        }
        if matches!(self.opcode, Opcode::CompareSwap | Opcode::FetchAdd) {
            put(&self.compare_add.to_be_bytes());
            put(&self.swap.to_be_bytes());
        }
        out.extend_from_slice(&b[..end]);
    }
}

impl Response<'_> {
    /// Appends the frame's header; `length` payload bytes follow.
    pub fn write_header(&self, length: u16, out: &mut Vec<u8>) {
        let mut b = [0; RESPONSE_BYTES];
        b[0] = RESPONSE;
        b[1] = self.kind as u8;
        b[2..4].copy_from_slice(&length.to_be_bytes());
        b[4..8].copy_from_slice(&self.qpn.0.to_be_bytes());
        b[8..12].copy_from_slice(&self.life.to_be_bytes());
        b[12..16].copy_from_slice(&self.cpn.to_be_bytes());
        b[16..18].copy_from_slice(&self.units.to_be_bytes());
        b[18..20].copy_from_slice(&self.attempt.to_be_bytes());
        b[20..24].copy_from_slice(&self.msn.to_be_bytes());
        b[24..28].copy_from_slice(&self.offset.to_be_bytes());
        b[28..32].copy_from_slice(&self.total.to_be_bytes());
        out.extend_from_slice(&b);
    }
}

impl Frame<'_> {
    /// It wants acknowledgement, and so travels in Data packets only (MR-HDR-2).
    pub fn wants_ack(&self) -> bool {
        matches!(self, Frame::Request(_) | Frame::Response(_) | Frame::Void(_) | Frame::Ping)
    }

    /// Appends a frame without payload. Requests and responses have `write_header`.
    pub fn write(&self, out: &mut Vec<u8>) {
        match *self {
            Frame::Ack(a) => {
                out.extend_from_slice(&[ACK, a.path, a.generation, 0]);
                out.extend_from_slice(&a.highest.to_be_bytes());
                out.extend_from_slice(&a.ce.to_be_bytes());
                out.extend_from_slice(&a.delay_us.to_be_bytes());
                out.extend_from_slice(&[0, 0]);
                a.sack.iter().for_each(|w| out.extend_from_slice(&w.to_be_bytes()));
            }
            Frame::Refuse(f) => {
                out.extend_from_slice(&[REFUSE, f.code as u8]);
                out.extend_from_slice(&f.attempt.to_be_bytes());
                for word in [f.qpn.0, f.life, f.number, u32::from(f.timer) << 24] {
                    out.extend_from_slice(&word.to_be_bytes());
                }
            }
            Frame::Credit { qpn, life, limit } => {
                for word in [u32::from(CREDIT) << 24, qpn.0, life, limit] {
                    out.extend_from_slice(&word.to_be_bytes());
                }
            }
            Frame::Hint { epoch, rate, budget } => {
                out.extend_from_slice(&[HINT, epoch]);
                out.extend_from_slice(&rate.to_be_bytes());
                out.extend_from_slice(&budget.to_be_bytes());
            }
            Frame::Planes { epoch, down } => {
                out.extend_from_slice(&[PLANES, epoch]);
                out.extend_from_slice(&down.to_be_bytes());
            }
            Frame::Close => out.extend_from_slice(&[CLOSE, 0, 0, 0]),
            Frame::CloseAck => out.extend_from_slice(&[CLOSE_ACK, 0, 0, 0]),
            Frame::Ping => out.extend_from_slice(&[PING, 0, 0, 0]),
            Frame::Void(v) => {
                out.extend_from_slice(&[VOID, u8::from(v.response)]);
                out.extend_from_slice(&v.units.to_be_bytes());
                for word in [v.cpn, v.src_qpn.0, v.life, u32::from(v.attempt) << 16 | u32::from(v.confirms)] {
                    out.extend_from_slice(&word.to_be_bytes());
                }
            }
            Frame::Request(r) => {
                r.write_header(r.payload.len() as u16, out);
                out.extend_from_slice(r.payload);
            }
            Frame::Response(r) => {
                r.write_header(r.payload.len() as u16, out);
                out.extend_from_slice(r.payload);
            }
        }
    }
}
