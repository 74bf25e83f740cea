//! The packets that connection managers exchange: layout, and the only way to read one.
//!
//! Version 1, big endian. Header, 32 bytes: magic "MRCM", version, type, two zero bytes, source connection (64 bits,
//! chosen by the sender), destination connection (64 bits, 0 in a REQ), incarnation of the sender's process (64 bits).
//! The header is the same in all versions, so that an unknown version can be refused.
//! REQ: port space (16), service port (16), source port (16), QP type (8), zero (8), then as REP.
//! REP: GID (16 bytes), [`Terms`] (32 bytes), private data. REJ: reason (16), private data. PING: connections that the
//! sender believes to have with the receiver (64 bits each, the receiver's ids); PONG: those the receiver does not have.
//! MRA, RTU, DREQ, DREP: nothing more.

/// Largest packet; a datagram that is longer is not one of ours.
pub(super) const PACKET_BYTES_MAX: usize = 576;
/// Connections that one PING asks after.
pub(super) const PING_CONNECTIONS_MAX: usize = 64;

const MAGIC: &[u8; 4] = b"MRCM";
pub(super) const VERSION: u8 = 1;
const HEADER_BYTES: usize = 32;
const TERMS_BYTES: usize = 32;
/// No message carries more private data (InfiniBand's RTU has the most).
const DATA_BYTES_MAX: usize = 224;

/// The fixed part of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    /// The sender's name for the connection.
    pub src: u64,
    /// The receiver's name for the connection; 0 when the sender does not know it.
    pub dst: u64,
    /// Differs for every life of every process.
    pub incarnation: u64,
}

/// What one side tells the other about its QP and what it wants of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Terms {
    pub qpn: u32,
    pub psn: u32,
    pub qkey: u32,
    /// Reads and atomics that the sender can serve at once.
    pub responder_resources: u8,
    /// Reads and atomics that the sender wants to have outstanding.
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    /// Largest path MTU, as enum ibv_mtu.
    pub mtu: u8,
    pub traffic_class: u8,
    pub ece_vendor_id: u32,
    pub ece_attr_mod: u32,
}

/// A connection request's own fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Service {
    pub port_space: u16,
    /// Where the listener is.
    pub port: u16,
    /// The requester's port, which no socket need be bound to.
    pub source_port: u16,
    pub qp_type: u8,
}

/// One message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message<'a> {
    Req {
        service: Service,
        gid: [u8; 16],
        terms: Terms,
        data: &'a [u8],
    },
    /// The receiver has the REQ or REP; its application has not decided yet.
    Mra,
    Rep {
        gid: [u8; 16],
        terms: Terms,
        data: &'a [u8],
    },
    Rtu,
    Rej {
        reason: u16,
        data: &'a [u8],
    },
    Dreq,
    Drep,
    Ping(Connections<'a>),
    Pong(Connections<'a>),
}

/// A list of connection ids, eight bytes each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Connections<'a>(pub &'a [u8]);

impl Connections<'_> {
    pub(super) fn iter(&self) -> impl Iterator<Item = u64> {
        self.0.chunks_exact(8).map(|id| u64::from_be_bytes(id.try_into().unwrap_or_default()))
    }
}

/// Why a datagram is not a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WireError {
    /// Not one of ours, or broken.
    Malformed,
    /// A connection request of a version that we do not speak.
    Version(Header),
}

const REQ: u8 = 1;
const MRA: u8 = 2;
const REP: u8 = 3;
const RTU: u8 = 4;
const REJ: u8 = 5;
const DREQ: u8 = 6;
const DREP: u8 = 7;
const PING: u8 = 8;
const PONG: u8 = 9;

/// Reads a packet.
pub(super) fn parse(bytes: &[u8]) -> Result<(Header, Message<'_>), WireError> {
    let (header, body) = bytes.split_at_checked(HEADER_BYTES).ok_or(WireError::Malformed)?;
    if &header[..4] != MAGIC || bytes.len() > PACKET_BYTES_MAX {
        return Err(WireError::Malformed);
    }
    let (version, kind) = (header[4], header[5]);
    let header = Header { src: u64_at(header, 8), dst: u64_at(header, 16), incarnation: u64_at(header, 24) };
    if version != VERSION {
        return Err(if kind == REQ { WireError::Version(header) } else { WireError::Malformed });
    }
    let message = message(kind, body).ok_or(WireError::Malformed)?;
    Ok((header, message))
}

fn message(kind: u8, body: &[u8]) -> Option<Message<'_>> {
    let empty = |message| body.is_empty().then_some(message);
    let list = || {
        let fits = body.len().is_multiple_of(8) && body.len() <= 8 * PING_CONNECTIONS_MAX;
        fits.then_some(Connections(body))
    };
    match kind {
        REQ => {
            let (service, rest) = body.split_at_checked(8)?;
            let (gid, terms, data) = terms(rest)?;
            let service = Service {
                port_space: u16_at(service, 0),
                port: u16_at(service, 2),
                source_port: u16_at(service, 4),
                qp_type: service[6],
            };
            Some(Message::Req { service, gid, terms, data })
        }
        REP => terms(body).map(|(gid, terms, data)| Message::Rep { gid, terms, data }),
        REJ => {
            let (reason, data) = body.split_at_checked(2)?;
            (data.len() <= DATA_BYTES_MAX).then_some(Message::Rej { reason: u16_at(reason, 0), data })
        }
        MRA => empty(Message::Mra),
        RTU => empty(Message::Rtu),
        DREQ => empty(Message::Dreq),
        DREP => empty(Message::Drep),
        PING => list().map(Message::Ping),
        PONG => list().map(Message::Pong),
        _ => None,
    }
}

fn terms(body: &[u8]) -> Option<([u8; 16], Terms, &[u8])> {
    let (gid, rest) = body.split_at_checked(16)?;
    let (terms, data) = rest.split_at_checked(TERMS_BYTES)?;
    if data.len() > DATA_BYTES_MAX {
        return None;
    }
    let read = Terms {
        qpn: u32_at(terms, 0) & 0xff_ffff,
        psn: u32_at(terms, 4) & 0xff_ffff,
        qkey: u32_at(terms, 8),
        responder_resources: terms[12],
        initiator_depth: terms[13],
        flow_control: terms[14],
        retry_count: terms[15] & 7,
        rnr_retry_count: terms[16] & 7,
        srq: terms[17],
        mtu: terms[18].clamp(1, 5),
        traffic_class: terms[19],
        ece_vendor_id: u32_at(terms, 20),
        ece_attr_mod: u32_at(terms, 24),
    };
    Some((gid.try_into().ok()?, read, data))
}

/// Writes a packet.
pub(super) fn write(header: &Header, message: &Message) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES + 64);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&[VERSION, kind(message), 0, 0]);
    for id in [header.src, header.dst, header.incarnation] {
        out.extend_from_slice(&id.to_be_bytes());
    }
    match message {
        Message::Req { service, gid, terms, data } => {
            for number in [service.port_space, service.port, service.source_port] {
                out.extend_from_slice(&number.to_be_bytes());
            }
            out.extend_from_slice(&[service.qp_type, 0]);
            write_terms(&mut out, gid, terms, data);
        }
        Message::Rep { gid, terms, data } => write_terms(&mut out, gid, terms, data),
        Message::Rej { reason, data } => {
            out.extend_from_slice(&reason.to_be_bytes());
            out.extend_from_slice(data);
        }
        Message::Ping(list) | Message::Pong(list) => out.extend_from_slice(list.0),
        Message::Mra | Message::Rtu | Message::Dreq | Message::Drep => {}
    }
    out
}

fn kind(message: &Message) -> u8 {
    match message {
        Message::Req { .. } => REQ,
        Message::Mra => MRA,
        Message::Rep { .. } => REP,
        Message::Rtu => RTU,
        Message::Rej { .. } => REJ,
        Message::Dreq => DREQ,
        Message::Drep => DREP,
        Message::Ping(_) => PING,
        Message::Pong(_) => PONG,
    }
}

fn write_terms(out: &mut Vec<u8>, gid: &[u8; 16], terms: &Terms, data: &[u8]) {
    out.extend_from_slice(gid);
    for number in [terms.qpn, terms.psn, terms.qkey] {
        out.extend_from_slice(&number.to_be_bytes());
    }
    out.extend_from_slice(&[
        terms.responder_resources,
        terms.initiator_depth,
        terms.flow_control,
        terms.retry_count,
        terms.rnr_retry_count,
        terms.srq,
        terms.mtu,
        terms.traffic_class,
    ]);
    for number in [terms.ece_vendor_id, terms.ece_attr_mod, 0] {
        out.extend_from_slice(&number.to_be_bytes());
    }
    out.extend_from_slice(data);
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) << 16 | u32::from(u16_at(bytes, at + 2))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) << 32 | u64::from(u32_at(bytes, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Header = Header { src: 0x0102_0304_0506_0708, dst: 9, incarnation: u64::MAX };

    fn messages(data: &[u8]) -> Vec<Message<'_>> {
        let terms =
            Terms { qpn: 7, psn: 8, qkey: 9, mtu: 3, retry_count: 7, rnr_retry_count: 6, ..Terms::default() };
        let service = Service { port_space: 0x106, port: 7471, source_port: 40000, qp_type: 2 };
        let (gid, reason) = ([3; 16], 28);
        vec![
            Message::Req { service, gid, terms, data },
            Message::Mra,
            Message::Rep { gid, terms, data },
            Message::Rtu,
            Message::Rej { reason, data },
            Message::Dreq,
            Message::Drep,
            Message::Ping(Connections(&data[..data.len() / 8 * 8])),
            Message::Pong(Connections(&[])),
        ]
    }

    #[test]
    fn write__is_read_back() {
        let data = [5u8; 148];
        for message in messages(&data) {
            let bytes = write(&HEADER, &message);
            assert!(bytes.len() <= PACKET_BYTES_MAX);
            assert_eq!(parse(&bytes), Ok((HEADER, message)));
        }
    }

    #[test]
    fn parse__survives_every_truncation_and_flip() {
        for message in messages(&[5u8; 56]) {
            let bytes = write(&HEADER, &message);
            for length in 0..bytes.len() {
                let _ = parse(&bytes[..length]);
            }
            for bit in 0..bytes.len() * 8 {
                let mut broken = bytes.clone();
                broken[bit / 8] ^= 1 << (bit % 8);
                let _ = parse(&broken);
            }
        }
        assert_eq!(parse(&[]), Err(WireError::Malformed));
        assert_eq!(parse(&[0; 600]), Err(WireError::Malformed));
    }

    #[test]
    fn parse__tells_a_request_of_another_version() {
        let mut bytes = write(&HEADER, &messages(&[])[0]);
        bytes[4] = 2;
        assert_eq!(parse(&bytes), Err(WireError::Version(HEADER)));
        let mut bytes = write(&HEADER, &Message::Dreq);
        bytes[4] = 2;
        assert_eq!(parse(&bytes), Err(WireError::Malformed));
    }
}
