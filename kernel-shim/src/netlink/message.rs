//! Netlink messages and attributes: read the requests, write the replies. Layout of linux/netlink.h.

use std::ffi::c_int;

/// Client number of device requests (RDMA_NL_NLDEV); the type of a message is client << 10 | operation.
const RDMA_NL_NLDEV: u16 = 5;
const HEADER_BYTES: usize = 16;

/// One message that a program sent.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request<'a> {
    pub kind: u16,
    pub flags: u16,
    pub seq: u32,
    /// The whole message, header included.
    pub bytes: &'a [u8],
}

impl Request<'_> {
    pub(crate) fn is_nldev(&self) -> bool {
        self.kind >> 10 == RDMA_NL_NLDEV
    }

    pub(crate) fn operation(&self) -> u16 {
        self.kind & 0x3ff
    }

    pub(crate) fn is_dump(&self) -> bool {
        let dump = libc::NLM_F_DUMP as u16;
        self.flags & dump == dump
    }

    pub(crate) fn wants_ack(&self) -> bool {
        self.flags & libc::NLM_F_ACK as u16 != 0
    }

    /// The payload of an attribute.
    pub(crate) fn attr(&self, id: u16) -> Option<&[u8]> {
        let mut rest = &self.bytes[HEADER_BYTES..];
        while rest.len() >= 4 {
            let (length, kind) = (usize::from(u16_at(rest, 0)), u16_at(rest, 2));
            let payload = rest.get(4..length)?;
            if kind & NLA_TYPE_MASK == id {
                return Some(payload);
            }
            rest = rest.get(align(length)..).unwrap_or_default();
        }
        None
    }

    /// An attribute of four bytes.
    pub(crate) fn attr_u32(&self, id: u16) -> Option<u32> {
        Some(u32::from_ne_bytes(self.attr(id)?.get(..4)?.try_into().ok()?))
    }
}

/// The upper two bits of an attribute's type are flags.
const NLA_TYPE_MASK: u16 = 0x3fff;

/// Splits a datagram into its messages; `None` when it is malformed or empty.
pub(crate) fn parse(mut data: &[u8]) -> Option<Vec<Request<'_>>> {
    let mut requests = Vec::new();
    while data.len() >= HEADER_BYTES {
        let length = u32_at(data, 0) as usize;
        if length < HEADER_BYTES {
            return None;
        }
        let bytes = data.get(..length)?;
        requests.push(Request { kind: u16_at(data, 4), flags: u16_at(data, 6), seq: u32_at(data, 8), bytes });
        data = data.get(align(length)..).unwrap_or_default();
    }
    (!requests.is_empty()).then_some(requests)
}

/// Whether a datagram of the kernel's ends the answer: an error, an acknowledgement, the end of a dump, or no dump.
pub(crate) fn is_last(datagram: &[u8]) -> bool {
    let ends = |message: &Request| is_end(message) || message.flags & libc::NLM_F_MULTI as u16 == 0;
    parse(datagram).is_none_or(|messages| messages.last().is_some_and(ends))
}

/// A message that carries no data but ends an answer.
pub(crate) fn is_end(message: &Request) -> bool {
    matches!(c_int::from(message.kind), libc::NLMSG_DONE | libc::NLMSG_ERROR)
}

/// Builder of one datagram of replies to one request.
pub(crate) struct Reply {
    bytes: Vec<u8>,
    seq: u32,
    port: u32,
    /// Where the current message begins.
    start: usize,
}

impl Reply {
    pub(crate) fn new(seq: u32, port: u32) -> Reply {
        Reply { bytes: Vec::with_capacity(512), seq, port, start: 0 }
    }

    /// Begins a message.
    pub(crate) fn message(mut self, kind: u16, flags: u16) -> Reply {
        self.start = self.bytes.len();
        self.bytes.extend_from_slice(&(HEADER_BYTES as u32).to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(&flags.to_ne_bytes());
        self.bytes.extend_from_slice(&self.seq.to_ne_bytes());
        self.bytes.extend_from_slice(&self.port.to_ne_bytes());
        self
    }

    /// Adds bytes to the current message, padded.
    fn raw(mut self, parts: &[&[u8]]) -> Reply {
        for part in parts {
            self.bytes.extend_from_slice(part);
        }
        let length = (self.bytes.len() - self.start) as u32;
        self.bytes[self.start..self.start + 4].copy_from_slice(&length.to_ne_bytes());
        self.bytes.resize(align(self.bytes.len()), 0);
        self
    }

    /// Adds an attribute.
    pub(crate) fn attr(self, id: u16, payload: &[u8]) -> Reply {
        // The message's length includes the padding of its attributes, as the kernel writes it.
        let padding = &[0; 4][..align(payload.len()) - payload.len()];
        self.raw(&[&(4 + payload.len() as u16).to_ne_bytes(), &id.to_ne_bytes(), payload, padding])
    }

    /// Adds a string attribute, with its terminator.
    pub(crate) fn attr_str(self, id: u16, text: &str) -> Reply {
        self.attr(id, &[text.as_bytes(), b"\0"].concat())
    }

    /// Adds the end of a dump.
    pub(crate) fn done(self) -> Reply {
        self.message(libc::NLMSG_DONE as u16, libc::NLM_F_MULTI as u16).raw(&[&0u32.to_ne_bytes()])
    }

    /// Adds an error (positive errno) or an acknowledgement (0), with the header of the request.
    pub(crate) fn error(self, errno: c_int, request: &Request) -> Reply {
        self.message(libc::NLMSG_ERROR as u16, 0)
            .raw(&[&(-errno).to_ne_bytes(), &request.bytes[..HEADER_BYTES]])
    }

    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

/// Rewrites the port of every message of a datagram that the kernel sent to another socket, and drops the messages
/// that end a dump if more is to follow.
pub(crate) fn readdress(datagram: &[u8], port: u32, keep_end: bool) -> Vec<u8> {
    let mut result = Vec::with_capacity(datagram.len());
    for message in parse(datagram).unwrap_or_default() {
        if keep_end || !is_end(&message) {
            let start = result.len();
            result.extend_from_slice(message.bytes);
            result[start + 12..start + 16].copy_from_slice(&port.to_ne_bytes());
            result.resize(align(result.len()), 0);
        }
    }
    result
}

fn align(length: usize) -> usize {
    length.next_multiple_of(4)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_ne_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply__reads_back() {
        let bytes =
            Reply::new(9, 44).message(5 << 10 | 1, 2).attr_str(2, "abcd").attr(1, &7u32.to_ne_bytes()).done();
        let bytes = bytes.finish();
        let messages = parse(&bytes).unwrap();
        assert_eq!(messages.len(), 2);
        assert_eq!((messages[0].seq, messages[0].operation(), messages[0].is_nldev()), (9, 1, true));
        assert_eq!(messages[0].attr(2), Some(&b"abcd\0"[..]));
        assert_eq!(messages[0].attr_u32(1), Some(7));
        assert_eq!(messages[0].attr(3), None);
        assert!(is_end(&messages[1]) && is_last(&bytes));
    }

    #[test]
    fn parse__refuses_what_is_malformed() {
        assert!(parse(&[]).is_none() && parse(&[0; 15]).is_none() && parse(&[0; 16]).is_none());
        let mut long = Reply::new(1, 1).message(1, 0).finish();
        long[0] = 200;
        assert!(parse(&long).is_none());
        let mut bad = Reply::new(1, 1).message(1, 0).attr(1, &[0; 4]).finish();
        bad[16] = 0;
        assert_eq!(parse(&bad).unwrap()[0].attr(1), None);
    }

    #[test]
    fn readdress__changes_the_port_and_drops_the_end() {
        let bytes = Reply::new(9, 44).message(5 << 10 | 1, 2).attr_str(2, "x").done().finish();
        let kept = readdress(&bytes, 45, true);
        assert_eq!(kept.len(), bytes.len());
        assert_eq!(kept[12..16], 45u32.to_ne_bytes());
        let messages = readdress(&bytes, 45, false);
        assert_eq!(parse(&messages).unwrap().len(), 1);
    }
}
