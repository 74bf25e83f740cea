//! What was sent on one path and not yet resolved: a ring of packets by path PSN, and the frames they carried.

use crate::config::{Algorithm, Tuning, limits};
use crate::path::{Congestion, Health, Rtt};
use crate::seq::ORIGIN;
use crate::stats::{Cause, PathTally};
use crate::types::Nanos;
use std::collections::VecDeque;
use std::net::SocketAddr;

/// What a frame in flight was, enough to build it again from the work request: with the same numbers and the same bytes
/// (MR-CPN-2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TxFrame {
    /// Which of the connection's number spaces and what to do with it.
    pub kind: FrameKind,
    /// Local QP index (Request, Response) and its life: a later life's frames never match.
    pub qp: u16,
    /// `tx.life` for requests, the QP's own `rx` counter for responses.
    pub life: u32,
    /// Message number (Request) or number of the response job (Response).
    pub msn: u64,
    /// Offset of the payload.
    pub offset: u32,
    /// Payload bytes.
    pub len: u32,
    /// First connection packet number.
    pub cpn: u64,
    /// Numbers covered.
    pub units: u16,
    /// Attempt the message was in.
    pub attempt: u16,
    /// It has been lost before: should it be lost again, it goes another way (MR-LOSS-3).
    pub repair: bool,
}

impl TxFrame {
    /// Its data will never come: from now on it only fills its numbers, so that windows advance (MR-CPN-5), and confirms
    /// nothing.
    pub fn become_void(&mut self, kind: FrameKind) {
        (self.kind, self.offset, self.len) = (kind, 0, 0);
    }
}

/// Kind of a frame in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameKind {
    /// Part of a request.
    Request,
    /// Part of a response.
    Response,
    /// Filler in the request space.
    VoidRequest,
    /// Filler in the response space.
    VoidResponse,
    /// Probe; carries no number.
    Ping,
}

/// State of a packet in the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PktState {
    /// No ACK has covered it.
    InFlight,
    /// Received by the peer.
    Acked,
    /// Declared lost because of a gap; its frames went to the retransmit queue. Kept to recognise a late arrival.
    Lost,
    /// The same because of silence.
    Presumed,
}

/// Packets and frames an idle path keeps room for: a message of 64 KiB on one path.
const ROOM_KEPT: usize = 32;

/// One packet in the ring.
#[derive(Debug, Clone, Copy)]
pub struct Pkt {
    /// When it was sent.
    pub sent: Nanos,
    /// First of its frames (absolute index).
    pub frame0: u64,
    /// Its size on the wire.
    pub bytes: u16,
    /// Number of frames.
    pub frames: u8,
    /// Where it stands.
    pub state: PktState,
}

/// Transmit side of a path slot.
#[derive(Debug)]
pub struct PathTx {
    /// Plane index of ours.
    pub plane: u8,
    /// Source port index.
    pub entropy: u8,
    /// Generation: counts source port changes.
    pub generation: u8,
    /// Peer address.
    pub dst: SocketAddr,
    /// Health.
    pub health: Health,
    /// Congestion window.
    pub congestion: Congestion,
    /// Round trip time.
    pub rtt: Rtt,
    /// When its first probe since it last answered was due; 0: it answers.
    pub struck_at: Nanos,
    /// It carries probes only until it answers, but keeps its port and window: it may merely be slow.
    pub shunned: bool,
    /// Probe timeouts in a row.
    pub pto_count: u32,
    /// Probe timeouts in a row during which packets sent later on siblings were answered.
    pub strikes: u32,
    /// When the last packet left on it.
    pub last_sent: Nanos,
    /// Last probe sent for silence.
    pub last_probe: Nanos,
    /// Last time an ACK brought news.
    pub last_progress: Nanos,
    /// Loss is declared only when a gap is older than this (0: at once); grows on spurious repairs.
    pub reorder_tolerance_ns: Nanos,
    /// Packets acknowledged since the last spurious repair.
    pub clean_acks: u32,
    /// Most packets in flight in this round trip and in the last, and where this round trip ends.
    peaks: [u32; 2],
    round_end: u64,
    /// Packets before this one have gone twice, or are the second.
    pub copied_to: u64,
    /// Highest PSN the peer reported.
    pub largest_acked: u64,
    /// What it has carried.
    pub tally: PathTally,
    /// The peer's plane it leads to, by its place in the peer's HELLO.
    pub peer_plane: u8,
    /// The peer says that this is not to be used.
    pub peer_down: bool,
    /// It is not to be used: an operator wants its plane left or drained.
    pub barred: bool,
    /// It takes nothing new; what is in flight on it may be acknowledged.
    pub draining: bool,
    /// When its health changed last, and why.
    pub changed: (Nanos, Cause),
    pkts: VecDeque<Pkt>,
    frames: VecDeque<TxFrame>,
    base_psn: u64,
    base_frame: u64,
    in_flight: u32,
}

impl PathTx {
    /// A fresh path whose first PSN is `first_psn`.
    pub fn new(plane: u8, entropy: u8, dst: SocketAddr, first_psn: u32, algorithm: Algorithm) -> Self {
        PathTx {
            plane,
            entropy,
            generation: 0,
            dst,
            health: Health::Active,
            congestion: Congestion::new(algorithm),
            rtt: Rtt::default(),
            struck_at: 0,
            shunned: false,
            pto_count: 0,
            strikes: 0,
            last_sent: 0,
            last_probe: 0,
            last_progress: 0,
            reorder_tolerance_ns: 0,
            clean_acks: 0,
            peaks: [0; 2],
            round_end: 0,
            copied_to: 0,
            largest_acked: 0,
            tally: PathTally::default(),
            peer_plane: u8::MAX,
            peer_down: false,
            barred: false,
            draining: false,
            changed: (0, Cause::Fresh),
            pkts: VecDeque::new(),
            frames: VecDeque::new(),
            base_psn: ORIGIN + u64::from(first_psn),
            base_frame: 0,
            in_flight: 0,
        }
    }
    /// PSN of the next packet.
    pub fn next_psn(&self) -> u64 {
        self.base_psn + self.pkts.len() as u64
    }
    /// Packets no ACK has covered.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }
    /// May carry data.
    pub fn in_use(&self) -> bool {
        self.health.is_active() && !self.draining
    }
    /// Packets that may be sent now.
    pub fn room(&self) -> u32 {
        if !self.in_use() {
            return 0;
        }
        let oldest = self.oldest_in_flight().map_or(self.next_psn(), |(psn, _)| psn);
        // Beyond this span not every number would be told of by some acknowledgement (MR-PSN-3).
        let span = limits::PATH_SPAN.saturating_sub((self.next_psn() - oldest) as u32);
        span.min(self.congestion.window().saturating_sub(self.in_flight))
    }
    /// The oldest packet no ACK has covered.
    pub fn oldest_in_flight(&self) -> Option<(u64, &Pkt)> {
        let at = self.pkts.iter().position(|p| p.state == PktState::InFlight)?;
        Some((self.base_psn + at as u64, &self.pkts[at]))
    }
    /// Records a packet just built, whose number is used up by it (MR-PSN-1); its frames were pushed with `push_frame`
    /// before.
    pub fn push_packet(&mut self, now: Nanos, frames: u8, bytes: u16) {
        let frame0 = self.base_frame + self.frames.len() as u64 - u64::from(frames);
        self.pkts.push_back(Pkt { sent: now, frame0, bytes, frames, state: PktState::InFlight });
        self.in_flight += 1;
        self.tally.sent += 1;
        self.tally.sent_bytes += u64::from(bytes);
        self.last_sent = now;
        self.peaks[0] = self.peaks[0].max(self.in_flight);
    }
    /// Most packets in flight lately; `acked` is the highest PSN just reported.
    pub fn peak(&mut self, acked: u64) -> u32 {
        let peak = self.peaks[0].max(self.peaks[1]);
        if acked >= self.round_end {
            self.peaks = [self.in_flight, self.peaks[0]];
            self.round_end = self.next_psn();
        }
        peak
    }
    /// Records a frame of the packet under construction.
    pub fn push_frame(&mut self, frame: TxFrame) {
        self.frames.push_back(frame);
    }
    /// Takes the newest packet back: it was never sent, so its number is free again (MR-PSN-1). Its frames go to `out`
    /// in order; gives its size.
    pub fn pop_packet(&mut self, out: &mut Vec<TxFrame>) -> u16 {
        let Some(pkt) = self.pkts.pop_back() else { return 0 };
        debug_assert_eq!(pkt.state, PktState::InFlight);
        let keep = (pkt.frame0 - self.base_frame) as usize;
        out.extend(self.frames.drain(keep..));
        self.in_flight -= 1;
        self.tally.sent -= 1;
        self.tally.sent_bytes -= u64::from(pkt.bytes);
        pkt.bytes
    }
    /// The packet with this PSN, if it is still remembered.
    pub fn packet(&self, psn: u64) -> Option<&Pkt> {
        self.pkts.get(psn.checked_sub(self.base_psn)? as usize)
    }
    /// Frames of a remembered packet.
    pub fn frame(&self, pkt: &Pkt, i: u8) -> TxFrame {
        self.frames[(pkt.frame0 - self.base_frame) as usize + usize::from(i)]
    }
    /// Moves a packet out of flight.
    pub fn resolve(&mut self, psn: u64, state: PktState) {
        let Some(at) = psn.checked_sub(self.base_psn) else { return };
        let Some(pkt) = self.pkts.get_mut(at as usize) else { return };
        if pkt.state == PktState::InFlight {
            self.in_flight -= 1;
        }
        pkt.state = state;
    }
    /// Oldest remembered PSN.
    pub fn base_psn(&self) -> u64 {
        self.base_psn
    }
    /// Forgets what is resolved and too old to be heard of again, given the highest PSN the peer reported.
    pub fn forget(&mut self, highest: u64) {
        self.drop_done(highest);
    }
    /// Nothing of the connection is in flight: gives back the room of what once was, so that it leaves no lasting trace.
    /// What was declared lost is no longer recognised if it should still arrive.
    pub fn rest(&mut self) {
        if self.in_flight == 0 && self.frames.capacity() > ROOM_KEPT {
            self.give_up(&mut |_| {});
            self.frames.shrink_to(ROOM_KEPT);
            self.pkts.shrink_to(ROOM_KEPT);
        }
    }
    fn drop_done(&mut self, highest: u64) {
        while let Some(front) = self.pkts.front() {
            let old = self.base_psn + 256 <= highest;
            let done = match front.state {
                PktState::InFlight => false,
                PktState::Acked => true,
                PktState::Lost | PktState::Presumed => old,
            };
            if !done {
                return;
            }
            let frames = usize::from(front.frames);
            self.frames.drain(..frames);
            self.base_frame += frames as u64;
            self.pkts.pop_front();
            self.base_psn += 1;
        }
    }
    /// Everything in flight is given up here: out of flight, bytes returned, frames to `lost` in order.
    pub fn give_up(&mut self, lost: &mut impl FnMut(TxFrame)) -> u32 {
        let mut bytes = 0;
        for i in 0..self.pkts.len() {
            let pkt = self.pkts[i];
            if pkt.state == PktState::InFlight {
                bytes += u32::from(pkt.bytes);
                (0..pkt.frames).for_each(|k| lost(self.frame(&pkt, k)));
            }
        }
        self.base_psn = self.next_psn();
        self.base_frame += self.frames.len() as u64;
        self.pkts.clear();
        self.frames.clear();
        self.in_flight = 0;
        bytes
    }
    /// Changes to another source port, none of those `denied` (a bit each): what was sent before can no longer be told
    /// apart from what is lost, so numbers begin anew in a new generation (MR-PSN-4). Between two changes lies an
    /// acknowledgement: only a path in use is left, one that was left is in use again only when it has answered, and who
    /// rehashes a path looks whether it `has_answered`.
    pub fn change_port(&mut self, entropies: u8, denied: u64) {
        self.change_entropy(entropies, denied);
        self.generation = self.generation.wrapping_add(1);
        self.largest_acked = 0;
        self.tally.marks_told = 0;
        self.reorder_tolerance_ns = 0;
        self.rtt = Rtt::default();
        self.congestion.restart();
    }
    /// Another source port that is not `denied`, with numbers that go on.
    pub fn change_entropy(&mut self, entropies: u8, denied: u64) {
        let count = entropies.max(1);
        let next = |step: u8| (u16::from(self.entropy) + u16::from(step)) % u16::from(count);
        let allowed = (1..=count).map(next).find(|e| denied.checked_shr(u32::from(*e)).unwrap_or(0) & 1 == 0);
        self.entropy = allowed.unwrap_or(next(1)) as u8;
    }
    /// Something of this generation was acknowledged.
    pub fn has_answered(&self) -> bool {
        self.rtt.min_ns > 0
    }
    /// It has answered: whatever was held against it is forgotten.
    pub fn absolve(&mut self, now: Nanos) {
        if !self.health.is_active() {
            self.changed = (now, Cause::Answered);
        }
        self.health = Health::Active;
        (self.pto_count, self.strikes, self.struck_at, self.shunned) = (0, 0, 0, false);
        self.last_progress = now;
    }
    /// When this path wants to be probed for silence, if anything is in flight (MR-LOSS-4).
    pub fn probe_at(&self, tuning: &Tuning, of_peer: &Rtt, answered_sent: Nanos) -> Option<Nanos> {
        if !self.health.is_active() {
            return None;
        }
        let (_, oldest) = self.oldest_in_flight()?;
        let since = oldest.sent.max(self.last_progress).max(self.last_probe);
        if answered_sent >= oldest.sent.max(self.last_probe) && self.pto_count < limits::STRIKES_TO_SHUN {
            // The peer is awake and has answered what was sent later elsewhere.
            let patience = self.rtt.overtaken_timeout(tuning).max(of_peer.overtaken_timeout(tuning));
            return Some(since + patience);
        }
        // What siblings meet, a queue at the peer's port for example, this path may meet as well.
        let timeout = self.rtt.probe_timeout(tuning).max(of_peer.probe_timeout(tuning));
        let doubled = timeout << self.pto_count.min(limits::PTO_BACKOFF_MAX);
        let most = limits::PTO_BACKED_OFF_MAX_NS.max(timeout << self.pto_count.min(2));
        Some(since + doubled.min(most))
    }
    /// Bytes of heap.
    pub fn heap_bytes(&self) -> usize {
        self.pkts.capacity() * size_of::<Pkt>() + self.frames.capacity() * size_of::<TxFrame>()
    }
}
