//! Flow steering: the fields of an Ethernet frame, rules over them, and the hash that spreads flows over queues.

use crate::types::{Qpn, SrqId};

/// Places of fields in [`Fields`]; multi-byte fields are in network order.
pub mod field {
    #![expect(missing_docs, reason = "names are those of the headers' fields")]
    use std::ops::Range;
    pub const DST_MAC: Range<usize> = 0..6;
    pub const SRC_MAC: Range<usize> = 6..12;
    pub const ETHER_TYPE: Range<usize> = 12..14;
    pub const VLAN_TAG: Range<usize> = 14..16;
    pub const V4_SRC: Range<usize> = 16..20;
    pub const V4_DST: Range<usize> = 20..24;
    pub const V4_PROTO: Range<usize> = 24..25;
    pub const V4_TOS: Range<usize> = 25..26;
    pub const V4_TTL: Range<usize> = 26..27;
    pub const V4_FLAGS: Range<usize> = 27..28;
    pub const V6_SRC: Range<usize> = 28..44;
    pub const V6_DST: Range<usize> = 44..60;
    pub const V6_FLOW_LABEL: Range<usize> = 60..64;
    pub const V6_NEXT_HEADER: Range<usize> = 64..65;
    pub const V6_CLASS: Range<usize> = 65..66;
    pub const V6_HOP_LIMIT: Range<usize> = 66..67;
    pub const DST_PORT: Range<usize> = 68..70;
    pub const SRC_PORT: Range<usize> = 70..72;
    /// `has::*` bits.
    pub const KINDS: Range<usize> = 72..73;
}

/// Headers a frame has.
pub mod has {
    #![expect(missing_docs, reason = "names are those of the protocols")]
    pub const V4: u8 = 1;
    pub const V6: u8 = 2;
    pub const TCP: u8 = 4;
    pub const UDP: u8 = 8;
}

/// The fields of a frame's headers, or the values or masks of a rule; fields of headers that are not there are 0.
pub type Fields = [u8; 80];

/// Reads a frame's headers as far as they go.
pub fn dissect(frame: &[u8]) -> Fields {
    let mut out = [0; 80];
    let _ = read(frame, &mut out);
    out
}

fn read(frame: &[u8], out: &mut Fields) -> Option<()> {
    let mut put = |place: std::ops::Range<usize>, bytes: &[u8]| out[place].copy_from_slice(bytes);
    put(field::DST_MAC, frame.get(0..6)?);
    put(field::SRC_MAC, frame.get(6..12)?);
    let (mut ether_type, mut rest) = (frame.get(12..14)?, frame.get(14..)?);
    if ether_type == [0x81, 0] {
        put(field::VLAN_TAG, rest.get(0..2)?);
        (ether_type, rest) = (rest.get(2..4)?, rest.get(4..)?);
    }
    put(field::ETHER_TYPE, ether_type);
    let (kind, proto, rest) = match ether_type {
        [0x08, 0] => {
            put(field::V4_SRC, rest.get(12..16)?);
            put(field::V4_DST, rest.get(16..20)?);
            put(field::V4_PROTO, &rest[9..10]);
            put(field::V4_TOS, &rest[1..2]);
            put(field::V4_TTL, &rest[8..9]);
            put(field::V4_FLAGS, &[rest[6] >> 5]);
            // Later fragments have no ports.
            let first = u16::from_be_bytes([rest[6], rest[7]]) & 0x1fff == 0;
            let proto = if first { rest[9] } else { 0 };
            (has::V4, proto, rest.get(usize::from(rest[0] & 15) * 4..))
        }
        [0x86, 0xdd] => {
            put(field::V6_SRC, rest.get(8..24)?);
            put(field::V6_DST, rest.get(24..40)?);
            put(field::V6_FLOW_LABEL, &[0, rest[1] & 15, rest[2], rest[3]]);
            put(field::V6_NEXT_HEADER, &rest[6..7]);
            put(field::V6_CLASS, &[rest[0] << 4 | rest[1] >> 4]);
            put(field::V6_HOP_LIMIT, &rest[7..8]);
            (has::V6, rest[6], rest.get(40..))
        }
        _ => return None,
    };
    let ports = match proto {
        6 => has::TCP,
        17 => has::UDP,
        _ => 0,
    };
    match rest.and_then(|rest| rest.get(0..4)).filter(|_| ports != 0) {
        Some(both) => {
            put(field::SRC_PORT, &both[0..2]);
            put(field::DST_PORT, &both[2..4]);
            put(field::KINDS, &[kind | ports]);
        }
        None => put(field::KINDS, &[kind]),
    }
    Some(())
}

/// Which frames a rule takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowKind {
    /// Those whose fields match.
    Normal,
    /// Those that no normal rule takes.
    Default,
    /// Of those the ones sent to many.
    MulticastDefault,
    /// A copy of all.
    Sniffer,
}

/// A steering rule.
#[derive(Debug, Clone, Copy)]
pub struct Flow {
    /// Where the frames go.
    pub qpn: Qpn,
    /// Which frames.
    pub kind: FlowKind,
    /// Lower ones are asked first.
    pub priority: u16,
    /// Frames it takes end here.
    pub drop: bool,
    /// What the fields must be ...
    pub value: Fields,
    /// ... where the mask has ones.
    pub mask: Fields,
}

impl Flow {
    fn matches(&self, fields: &Fields) -> bool {
        fields.iter().zip(&self.value).zip(&self.mask).all(|((f, v), m)| f & m == v & m)
    }
}

/// All rules, in the order they are asked.
#[derive(Debug, Default)]
pub struct FlowTable {
    rules: Vec<(u32, Flow)>,
    next: u32,
}

impl FlowTable {
    /// Adds a rule behind those of its priority; gives its number.
    pub fn add(&mut self, flow: Flow) -> u32 {
        let at = self.rules.partition_point(|(_, rule)| rule.priority <= flow.priority);
        self.next = self.next.wrapping_add(1);
        self.rules.insert(at, (self.next, flow));
        self.next
    }
    /// Takes a rule out; false: there is none of that number.
    pub fn remove(&mut self, number: u32) -> bool {
        let before = self.rules.len();
        self.rules.retain(|(n, _)| *n != number);
        self.rules.len() < before
    }
    /// Takes the rules of a QP out.
    pub fn remove_qp(&mut self, qpn: Qpn) {
        self.rules.retain(|(_, rule)| rule.qpn != qpn);
    }
    /// Where a frame goes: sniffers, and the first rule that matches (of a multicast frame every one of its priority),
    /// else the defaults.
    pub fn targets(&self, fields: &Fields, out: &mut Vec<Qpn>) {
        out.clear();
        let multicast = fields[0] & 1 != 0;
        let of =
            |kind: FlowKind| self.rules.iter().map(|(_, rule)| rule).filter(move |rule| rule.kind == kind);
        out.extend(of(FlowKind::Sniffer).map(|rule| rule.qpn));
        let mut matched = of(FlowKind::Normal).filter(|rule| rule.matches(fields)).peekable();
        if let Some(first) = matched.peek().copied() {
            let equals = matched.take_while(|rule| rule.priority == first.priority);
            let taken = equals.take(if multicast { usize::MAX } else { 1 });
            out.extend(taken.filter(|rule| !rule.drop).map(|rule| rule.qpn));
        } else {
            let special = if multicast { of(FlowKind::MulticastDefault).next() } else { None };
            let default = special.or_else(|| of(FlowKind::Default).next());
            out.extend(default.filter(|rule| !rule.drop).map(|rule| rule.qpn));
        }
        out.sort_unstable();
        out.dedup();
    }
}

/// Fields that go into the hash, in this order.
pub mod hashed {
    #![expect(missing_docs, reason = "names and values are those of ibv_rx_hash_fields")]
    pub const SRC_V4: u64 = 1;
    pub const DST_V4: u64 = 2;
    pub const SRC_V6: u64 = 4;
    pub const DST_V6: u64 = 8;
    pub const SRC_PORT_TCP: u64 = 16;
    pub const DST_PORT_TCP: u64 = 32;
    pub const SRC_PORT_UDP: u64 = 64;
    pub const DST_PORT_UDP: u64 = 128;
}

/// How frames of one QP are spread over queues.
#[derive(Debug, Clone)]
pub struct Rss {
    /// The queues; a power of two of them, repeats allowed.
    pub table: Vec<SrqId>,
    /// Key of the Toeplitz hash.
    pub key: [u8; 40],
    /// `hashed::*` bits.
    pub fields: u64,
}

impl Rss {
    /// The queue of a frame; frames without the fields go to the first one.
    pub fn queue(&self, fields: &Fields) -> Option<SrqId> {
        let kinds = fields[field::KINDS.start];
        let places = [
            (hashed::SRC_V4, has::V4, field::V4_SRC),
            (hashed::DST_V4, has::V4, field::V4_DST),
            (hashed::SRC_V6, has::V6, field::V6_SRC),
            (hashed::DST_V6, has::V6, field::V6_DST),
            (hashed::SRC_PORT_TCP, has::TCP, field::SRC_PORT),
            (hashed::DST_PORT_TCP, has::TCP, field::DST_PORT),
            (hashed::SRC_PORT_UDP, has::UDP, field::SRC_PORT),
            (hashed::DST_PORT_UDP, has::UDP, field::DST_PORT),
        ];
        let chosen = places.into_iter().filter(|(bit, kind, _)| self.fields & bit != 0 && kinds & kind != 0);
        let hash = toeplitz(&self.key, chosen.flat_map(|(_, _, place)| &fields[place]));
        self.table.get(hash as usize & self.table.len().saturating_sub(1)).copied()
    }
}

fn toeplitz<'a>(key: &[u8; 40], input: impl Iterator<Item = &'a u8>) -> u32 {
    let mut hash = 0;
    for (i, byte) in input.enumerate().take(36) {
        let window = u64::from_be_bytes(std::array::from_fn(|k| key.get(i + k).copied().unwrap_or(0)));
        for bit in 0..8 {
            if byte & (0x80 >> bit) != 0 {
                hash ^= (window >> (32 - bit)) as u32;
            }
        }
    }
    hash
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ethernet, optionally VLAN, IPv4, UDP.
    fn frame(vlan: Option<u16>, dst_port: u16) -> Vec<u8> {
        let mut f = vec![1, 0, 94, 0, 0, 1, 2, 0, 0, 0, 0, 9];
        if let Some(tag) = vlan {
            f.extend([0x81, 0]);
            f.extend(tag.to_be_bytes());
        }
        f.extend([0x08, 0, 0x45, 3, 0, 40, 0, 0, 0x40, 0, 64, 17, 0, 0, 66, 9, 149, 187, 161, 142, 100, 80]);
        f.extend(2794u16.to_be_bytes());
        f.extend(dst_port.to_be_bytes());
        f.extend([0, 20, 0, 0]);
        f
    }

    #[test]
    fn dissect__finds_fields_with_and_without_vlan() {
        for vlan in [None, Some(0x6123)] {
            let f = dissect(&frame(vlan, 1766));
            assert_eq!(f[field::ETHER_TYPE], [8, 0]);
            assert_eq!(f[field::VLAN_TAG], vlan.unwrap_or(0).to_be_bytes());
            assert_eq!(f[field::V4_DST], [161, 142, 100, 80]);
            assert_eq!((f[field::V4_TOS.start], f[field::V4_FLAGS.start]), (3, 2));
            assert_eq!(f[field::DST_PORT], 1766u16.to_be_bytes());
            assert_eq!(f[field::KINDS], [has::V4 | has::UDP]);
        }
        for len in 0..frame(None, 1).len() {
            dissect(&frame(None, 1)[..len]);
        }
    }

    #[test]
    fn toeplitz__agrees_with_the_published_vectors() {
        // From the RSS specification's verification suite.
        let key = [
            0x6d, 0x5a, 0x56, 0xda, 0x25, 0x5b, 0x0e, 0xc2, 0x41, 0x67, 0x25, 0x3d, 0x43, 0xa3, 0x8f, 0xb0,
            0xd0, 0xca, 0x2b, 0xcb, 0xae, 0x7b, 0x30, 0xb4, 0x77, 0xcb, 0x2d, 0xa3, 0x80, 0x30, 0xf2, 0x0c,
            0x6a, 0x42, 0xb7, 0x3b, 0xbe, 0xac, 0x01, 0xfa,
        ];
        let input = [66, 9, 149, 187, 161, 142, 100, 80];
        assert_eq!(toeplitz(&key, input.iter()), 0x323e_8fc2);
        let with_ports = [66, 9, 149, 187, 161, 142, 100, 80, 0x0a, 0xea, 0x06, 0xe6];
        assert_eq!(toeplitz(&key, with_ports.iter()), 0x51cc_c178);
    }

    #[test]
    fn targets__follow_priority_kind_and_drop() {
        let rule = |qpn: u32, kind, priority, drop, port: u16| {
            let (mut value, mut mask) = ([0; 80], [0; 80]);
            value[field::DST_PORT].copy_from_slice(&port.to_be_bytes());
            mask[field::DST_PORT].fill(0xff);
            Flow { qpn: Qpn(qpn), kind, priority, drop, value, mask }
        };
        let mut table = FlowTable::default();
        let low = table.add(rule(1, FlowKind::Normal, 5, false, 7));
        table.add(rule(2, FlowKind::Normal, 1, false, 7));
        table.add(rule(3, FlowKind::Normal, 1, false, 7));
        table.add(rule(4, FlowKind::Default, 0, false, 0));
        table.add(rule(5, FlowKind::MulticastDefault, 0, false, 0));
        table.add(rule(6, FlowKind::Normal, 0, true, 9));
        let sniffer = table.add(rule(7, FlowKind::Sniffer, 0, false, 0));
        let mut out = Vec::new();
        let mut ask = |table: &FlowTable, unicast: bool, port| {
            let mut f = frame(None, port);
            f[0] -= u8::from(unicast);
            table.targets(&dissect(&f), &mut out);
            out.iter().map(|q| q.0).collect::<Vec<_>>()
        };
        assert_eq!(ask(&table, false, 7), [2, 3, 7]);
        assert_eq!(ask(&table, true, 7), [2, 7]);
        assert_eq!(ask(&table, false, 8), [5, 7]);
        assert_eq!(ask(&table, true, 8), [4, 7]);
        assert_eq!(ask(&table, true, 9), [7]);
        assert!(table.remove(sniffer) && !table.remove(sniffer));
        table.remove_qp(Qpn(2));
        table.remove_qp(Qpn(3));
        assert_eq!(ask(&table, true, 7), [1]);
        assert!(table.remove(low));
        assert_eq!(ask(&table, true, 7), [4]);
    }
}
