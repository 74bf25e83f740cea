//! A connection: everything shared by the streams between two endpoints.
//!
//! `handshake` makes it, `requester` fills bursts of packets that `packet` builds, `responder` takes requests in (`unreliable` those of UC), `response` sends and takes their
//! answers, `completer` digests acknowledgements.

pub mod completer;
pub mod deliver;
pub mod handshake;
mod overlap;
pub mod packet;
pub mod requester;
pub mod responder;
pub mod response;
pub mod tags;
pub mod unreliable;
mod xrc;

use crate::config::{Config, Tuning, limits};
use crate::path::{PathRx, PathTx, Rtt, TxFrame};
use crate::plane_status::PlaneStatus;
use crate::rate_hint::{Allowance, Demand};
use crate::seq::{ORIGIN, Window};
use crate::types::*;
use crate::wire::Refuse;
use std::collections::VecDeque;
use std::net::IpAddr;

/// Index of the request space in per-space arrays: requests and responses are numbered apart (MR-CPN-1).
pub const REQUESTS: usize = 0;
/// Index of the response space.
pub const RESPONSES: usize = 1;

/// Where a connection is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnState {
    /// We look for the peer.
    Connecting,
    /// Both ids are known and the peer has echoed ours.
    Established,
    /// We have said CLOSE.
    Closing,
    /// Over: the peer is gone, restarted or closed. Streams of it fail or open a new one.
    Dead,
    /// The same peer was found behind another address: the connection with this id serves.
    Alias(u64),
}

/// A frame to be sent again.
#[derive(Debug, Clone, Copy)]
pub struct Retransmit {
    /// What.
    pub frame: TxFrame,
    /// Path it was on.
    pub path: u8,
    /// It left before (false: the driver could not send it).
    pub left: bool,
}

/// A refusal waiting to be confirmed.
#[derive(Debug, Clone, Copy)]
pub struct PendingRefusal {
    /// As it is sent.
    pub refuse: Refuse,
    /// Local QP it was meant for.
    pub local: Qpn,
}

/// Progress of the HELLO exchange.
#[derive(Debug, Clone, Copy, Default)]
pub struct HelloState {
    /// When to send the next HELLO of ours.
    pub due: Option<Nanos>,
    /// The peer asked: the id of its to answer to.
    pub answer_to: Option<u64>,
    /// When the last HELLO that asks left.
    pub asked_at: Nanos,
    /// HELLOs sent without an answer.
    pub tries: u32,
    /// Of the next HELLO.
    pub ordinal: u32,
}

/// Acknowledgements owed.
#[derive(Debug, Clone, Copy, Default)]
pub struct AckState {
    /// Data packets since the last acknowledgement.
    pub packets: u32,
    /// Leave at once.
    pub now: bool,
    /// Leave by then at the latest.
    pub deadline: Option<Nanos>,
}

/// One connection.
#[derive(Debug)]
pub struct Conn {
    /// Index in the endpoint.
    pub index: u32,
    /// Our id: what the peer puts into packets to us.
    pub cid: u64,
    /// The peer's id; 0 unknown.
    pub peer_cid: u64,
    /// State.
    pub state: ConnState,
    /// Peer address the connection was made for.
    pub peer_ip: IpAddr,
    /// All addresses the peer is known by.
    pub peer_ips: Vec<IpAddr>,
    /// Addresses the peer announced, until it is established.
    pub announced_ips: Vec<IpAddr>,
    /// A stranger made it: given up at this time unless it is established or wanted.
    pub expires: Nanos,
    /// Peer slot.
    pub peer_slot: u16,
    /// Peer's life; 0 unknown.
    pub peer_incarnation: u64,
    /// The accepting end of an endpoint's connection to itself.
    pub self_accepting: bool,
    /// HELLO exchange.
    pub hello: HelloState,
    /// UDP payload we propose.
    pub proposed_segment: u16,
    /// Negotiated UDP payload.
    pub segment: u32,
    /// Data bytes of a full packet.
    pub payload_max: u32,
    /// Bytes per connection packet number.
    pub unit: u32,
    /// Messages per stream the peer accepts.
    pub message_window: u64,
    /// Bytes the peer lets us have in flight.
    pub budget: u32,
    /// Transmit paths.
    pub paths: Vec<PathTx>,
    /// The peer's paths.
    pub rx_paths: Vec<PathRx>,
    /// Next connection packet number per space.
    pub next_cpn: [u64; 2],
    /// Numbers of ours that are resolved.
    pub tx_windows: [Window; 2],
    /// Numbers of the peer's that are accepted.
    pub rx_windows: [Window; 2],
    /// Bytes in flight on all paths.
    pub in_flight_bytes: u32,
    /// The part of `in_flight_bytes` that the endpoint's total includes.
    pub settled_bytes: u32,
    /// To be sent again.
    pub retransmits: VecDeque<Retransmit>,
    /// QPs with requests to send, in turn.
    pub round: VecDeque<u16>,
    /// The next burst begins with requests, not with responses: they take turns.
    pub requests_first: bool,
    /// QPs with responses to send, in turn.
    pub responders: VecDeque<u16>,
    /// Refusals not confirmed.
    pub refusals: Vec<PendingRefusal>,
    /// QPs with a CREDIT to tell.
    pub credits: VecDeque<u16>,
    /// Acknowledgements owed.
    pub ack: AckState,
    /// A PING is due.
    pub ping_due: bool,
    /// A CLOSE is due / a CLOSE_ACK is due.
    pub close_due: bool,
    /// A CLOSE_ACK is due.
    pub close_ack_due: bool,
    /// When CLOSE is repeated.
    pub close_at: Nanos,
    /// QPs that use it.
    pub users: u32,
    /// Last packet from the peer.
    pub last_heard: Nanos,
    /// Last acknowledgement with news.
    pub last_progress: Nanos,
    /// Last data from the peer: it counts as an active sender.
    pub last_data: Nanos,
    /// Cursor of the path choice.
    pub turn: usize,
    /// Packets to send one by one, after a memory fault in a burst.
    pub singly: u32,
    /// It is in the endpoint's list of connections with something to send.
    pub active: bool,
    /// Plane of ours that data arrived on last.
    pub heard_plane: u8,
    /// Repairs that silence asked for and that no window holds back: they find out what became of what fills it.
    pub probes_due: u32,
    /// The tail of what was sent last goes twice at the moment.
    pub copying: bool,
    /// Frames received again that had been taken.
    pub repeats: u32,
    /// Counts signs that our acknowledgements do not arrive: each moves them to another path.
    pub ack_turn: u32,
    /// It waits in the queue of a busy link of ours.
    pub waits_for_link: bool,
    /// What the peer's rate hint allows.
    pub allowance: Allowance,
    /// When data that the hint holds back is to be tried again.
    pub allowance_at: Nanos,
    /// What the peer wants to send.
    pub demand: Demand,
    /// Round trips on all paths.
    pub rtt: Rtt,
    /// The peer understands PLANES frames.
    pub takes_status: bool,
    /// Which of the peer's planes are not to be used.
    pub peer_status: PlaneStatus,
    /// When the latest packet that was answered had been sent.
    pub answered_sent: Nanos,
    /// Smallest round trip to the peer on any path.
    pub min_rtt_ns: Nanos,
    /// Deadline armed in the timer heap.
    pub timer_at: Nanos,
}

impl Conn {
    /// A connection nobody has heard of yet.
    pub fn new(index: u32, cid: u64, peer_ip: IpAddr, peer_slot: u16, config: &Config) -> Self {
        let first = || Window::new(ORIGIN, limits::CPN_WINDOW);
        Conn {
            index,
            cid,
            peer_cid: 0,
            state: ConnState::Connecting,
            peer_ip,
            peer_ips: vec![peer_ip],
            announced_ips: Vec::new(),
            expires: Nanos::MAX,
            peer_slot,
            peer_incarnation: 0,
            self_accepting: false,
            hello: HelloState::default(),
            proposed_segment: handshake::segment_for(config, peer_ip),
            segment: 0,
            payload_max: 0,
            unit: 64,
            message_window: 1,
            budget: limits::BUDGET_MIN,
            paths: Vec::new(),
            rx_paths: Vec::new(),
            next_cpn: [ORIGIN + u64::from(config.first_cpn); 2],
            tx_windows: [
                Window::new(ORIGIN + u64::from(config.first_cpn), limits::CPN_WINDOW),
                Window::new(ORIGIN + u64::from(config.first_cpn), limits::CPN_WINDOW),
            ],
            rx_windows: [first(), first()],
            in_flight_bytes: 0,
            settled_bytes: 0,
            retransmits: VecDeque::new(),
            round: VecDeque::new(),
            requests_first: false,
            responders: VecDeque::new(),
            refusals: Vec::new(),
            credits: VecDeque::new(),
            ack: AckState::default(),
            ping_due: false,
            close_due: false,
            close_ack_due: false,
            close_at: Nanos::MAX,
            users: 0,
            last_heard: 0,
            last_progress: 0,
            last_data: 0,
            turn: 0,
            singly: 0,
            active: false,
            heard_plane: 0,
            ack_turn: 0,
            copying: false,
            probes_due: 0,
            repeats: 0,
            waits_for_link: false,
            allowance: Allowance::default(),
            allowance_at: Nanos::MAX,
            demand: Demand::default(),
            rtt: Rtt::default(),
            takes_status: false,
            peer_status: PlaneStatus::default(),
            answered_sent: 0,
            min_rtt_ns: Nanos::MAX,
            timer_at: Nanos::MAX,
        }
    }
    /// Round trips take half as long again as they could: a queue stands somewhere.
    pub fn is_delayed(&self, host_slack_ns: Nanos) -> bool {
        self.rtt.latest_ns > self.min_rtt_ns.saturating_add(self.min_rtt_ns / 2 + host_slack_ns)
    }
    /// The peer may be addressed with data.
    pub fn usable(&self) -> bool {
        matches!(self.state, ConnState::Established | ConnState::Closing)
    }
    /// Puts a QP into the round of requesters.
    pub fn enqueue(&mut self, qp: &mut crate::qp::Qp) {
        if !qp.tx.in_round && qp.tx.unsent() {
            qp.tx.in_round = true;
            self.round.push_back(qp.qpn.index() as u16);
        }
    }
    /// Puts a QP into the round of responders.
    pub fn enqueue_responder(&mut self, qp: &mut crate::qp::Qp) {
        if !qp.rx.in_round && !qp.rx.jobs.is_empty() {
            qp.rx.in_round = true;
            self.responders.push_back(qp.qpn.index() as u16);
        }
    }
    /// Notes that a CREDIT is to be told.
    pub fn enqueue_credit(&mut self, qp: &mut crate::qp::Qp) {
        if !qp.rx.credit_due {
            qp.rx.credit_due = true;
            self.credits.push_back(qp.qpn.index() as u16);
        }
    }
    /// Takes the front of the retransmit queue off; an emptied queue gives the room of a bad hour back.
    pub fn take_retransmit(&mut self) -> Option<Retransmit> {
        let front = self.retransmits.pop_front();
        if self.retransmits.is_empty() && self.retransmits.capacity() > limits::RETRANSMITS_KEPT {
            self.retransmits.shrink_to(limits::RETRANSMITS_KEPT);
        }
        front
    }
    /// An acknowledgement leaves at the latest after the ACK delay.
    pub fn owe_ack(&mut self, now: Nanos, delay: Nanos) {
        self.ack.deadline.get_or_insert(now + delay);
    }
    /// Acknowledgements written into a packet that did not leave are owed again; also used for the last word.
    pub fn untell_acks(&mut self) {
        self.rx_paths.iter_mut().for_each(|r| r.untold = limits::ACK_TOLD);
        self.ack.now = true;
    }
    /// The earliest time something of this connection is due.
    pub fn deadline(&self, tuning: &Tuning) -> Nanos {
        let mut at = self.hello.due.unwrap_or(Nanos::MAX).min(self.close_at).min(self.expires);
        if self.usable() {
            at = at.min(self.ack.deadline.unwrap_or(Nanos::MAX));
            if self.allowance.holds {
                at = at.min(self.allowance_at);
            }
            for path in &self.paths {
                at = at
                    .min(path.probe_at(tuning, &self.rtt, self.answered_sent).unwrap_or(Nanos::MAX))
                    .min(completer::gap_at(path));
                at = at.min(path.health.probe_at());
                if path.shunned {
                    at = at.min(path.struck_at + tuning.leave_after_ns);
                }
            }
        }
        at
    }
    /// Drops all transport state in flight; streams decide for themselves what that means to them.
    pub fn abandon(&mut self) {
        self.state = ConnState::Dead;
        self.paths.clear();
        self.retransmits.clear();
        self.refusals.clear();
        self.credits.clear();
        self.round.clear();
        self.responders.clear();
        self.in_flight_bytes = 0;
        self.ack = AckState::default();
        self.hello = HelloState::default();
        self.expires = Nanos::MAX;
        self.close_at = Nanos::MAX;
    }
    /// Bytes of transport state, without what QPs hold (their places in the rounds, two bytes each, included).
    pub fn bytes(&self) -> usize {
        size_of::<Conn>()
            + self.paths.iter().map(|p| size_of::<PathTx>() + p.heap_bytes()).sum::<usize>()
            + self.rx_paths.capacity() * size_of::<PathRx>()
            + self.tx_windows.iter().chain(&self.rx_windows).map(Window::heap_bytes).sum::<usize>()
            + self.retransmits.capacity() * size_of::<Retransmit>()
            + self.refusals.capacity() * size_of::<PendingRefusal>()
    }
}
