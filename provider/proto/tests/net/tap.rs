//! A tap between two endpoints: packets are watched, held back, changed and put in.

use std::cell::RefCell;
use std::rc::Rc;

use metaroce_proto::wire::{Frame, Frames, HEADER_BYTES, Header, PacketType, RefuseCode};
use metaroce_proto::*;

use super::*;

pub const US: u64 = 1000;
pub const MS: u64 = 1_000_000;
pub const SECOND: u64 = 1_000_000_000;

/// What a tap does with a packet (from, bytes): true drops it.
pub type Valve = Rc<RefCell<Box<dyn FnMut(usize, &[u8]) -> bool>>>;

/// Who sent a packet, and its bytes.
pub type Seen = (usize, Vec<u8>);

/// Packets seen on the wire, dropped ones included: who sent them, and their bytes.
#[derive(Clone)]
pub struct Tap {
    seen: Rc<RefCell<Vec<Seen>>>,
    valve: Valve,
}

impl Tap {
    pub fn on(net: &mut Net) -> Tap {
        let tap = Tap { seen: Rc::default(), valve: Rc::new(RefCell::new(Box::new(|_, _| false))) };
        let mine = tap.clone();
        net.filter = Some(Box::new(move |from, _, bytes| {
            mine.seen.borrow_mut().push((from, bytes.to_vec()));
            mine.valve.borrow_mut()(from, bytes)
        }));
        tap
    }
    pub fn drop_if(&self, valve: impl FnMut(usize, &[u8]) -> bool + 'static) {
        *self.valve.borrow_mut() = Box::new(valve);
    }
    pub fn open(&self) {
        self.drop_if(|_, _| false);
    }
    /// What has passed since the last call.
    pub fn take(&self) -> Vec<Seen> {
        std::mem::take(&mut self.seen.borrow_mut())
    }
}

pub fn header(bytes: &[u8]) -> Header {
    Header::parse(bytes).expect("header")
}

pub fn frames(bytes: &[u8]) -> Vec<Frame<'_>> {
    Frames::new(&bytes[HEADER_BYTES..]).collect()
}

pub fn carries(bytes: &[u8], kind: impl Fn(&Frame<'_>) -> bool) -> bool {
    matches!(header(bytes).kind, PacketType::Data | PacketType::Control) && frames(bytes).iter().any(kind)
}

/// The first packet with a frame of this kind.
pub fn first_of(seen: &[Seen], kind: impl Fn(&Frame<'_>) -> bool) -> &[u8] {
    let (_, bytes) = seen.iter().find(|(_, bytes)| carries(bytes, &kind)).expect("a packet of this kind");
    bytes
}

pub fn is_request(frame: &Frame<'_>) -> bool {
    matches!(frame, Frame::Request(_))
}

pub fn is_void(frame: &Frame<'_>) -> bool {
    matches!(frame, Frame::Void(_))
}

/// Refusals in a packet with acknowledgements; `None` if it has none of these.
pub fn refusals(bytes: &[u8]) -> Option<Vec<(RefuseCode, Qpn, u32)>> {
    carries(bytes, |frame| matches!(frame, Frame::Ack(_))).then(|| {
        let refuse = |frame: &Frame<'_>| match frame {
            Frame::Refuse(r) => Some((r.code, r.qpn, r.number)),
            _ => None,
        };
        frames(bytes).iter().filter_map(refuse).collect()
    })
}

/// The packet with other frames behind its header.
pub fn rewritten(header: Header, frames: &[Frame<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    header.write(&mut bytes);
    frames.iter().for_each(|frame| frame.write(&mut bytes));
    bytes
}

/// Gives a packet to a host now, as from another.
pub fn inject(net: &mut Net, from: usize, to: usize, bytes: &[u8]) {
    let meta = RxMeta {
        src: std::net::SocketAddr::new(net.hosts[from].ip, 50_000),
        dst_ip: net.hosts[to].ip,
        ecn: 2,
    };
    let (now, host) = (net.now, &mut net.hosts[to]);
    host.ep.on_datagram(now, &meta, bytes, &mut host.mem, &mut host.log);
}

pub fn at_far(id: u64, opcode: Opcode, len: u32, rkey: u32) -> SendWqe {
    SendWqe { remote_addr: MEM_BASE, rkey, ..wr(id, opcode, len, 1) }
}

pub fn reset_and_reconnect(net: &mut Net, host: usize, qpn: Qpn, peer: usize, to: Qpn) {
    net.modify(host, qpn, QpModify { state: Some(QpState::Reset), ..Default::default() });
    net.make_rtr(host, qpn, peer, to);
    net.make_rts(host, qpn, 14, 1, 7);
}
