//! Receiver-driven rates (design D10): the receiver shares the rate of its links out among those who want to send, tells
//! each an absolute rate in every acknowledgement, and the sender takes it as ceiling and as the rate to jump to.

use crate::config::{PlaneConfig, limits};
use crate::types::Nanos;
use crate::wire::HUNGRY;

/// Rate on the wire: 5 bits of exponent, 11 of mantissa, in kb/s, rounded down.
pub const NO_OPINION: u16 = 0xffff;

/// A rate as it travels.
pub fn encode(bps: u64) -> u16 {
    let kbps = (bps / 1000).max(1);
    let exponent = (64 - kbps.leading_zeros()).saturating_sub(11);
    if exponent > 30 {
        return NO_OPINION - 1;
    }
    (exponent << 11) as u16 | (kbps >> exponent) as u16
}

/// The rate a field means, in bit/s; `None`: the receiver has no opinion.
pub fn decode(rate: u16) -> Option<u64> {
    (rate != NO_OPINION).then(|| (u64::from(rate & 0x7ff) << (rate >> 11)) * 1000)
}

/// What a connection of ours knows of the rate it may send at (sender's side).
#[derive(Debug, Clone, Copy, Default)]
pub struct Allowance {
    /// The peer gives hints: without a fresh one, only the first window is sent.
    pub expected: bool,
    /// Last hint, bit/s; 0: none yet.
    pub rate_bps: u64,
    epoch: u8,
    /// When it came.
    at: Nanos,
    /// Next time something may leave at that rate, picoseconds.
    next_ps: u64,
    /// Data waited because of the hint, not because of a window or a link, when it was last tried.
    pub holds: bool,
}

impl Allowance {
    /// A HINT arrived. An epoch older than the last one says nothing (MR-HINT-3).
    /// `phase` is the connection's own, in 1/65536: senders slowed down at the same moment do not go on at the same moment.
    pub fn take(&mut self, now: Nanos, epoch: u8, rate: u16, phase: u16) {
        let Some(bps) = decode(rate) else {
            *self = Allowance { holds: false, ..Allowance::default() };
            return;
        };
        let older = (epoch.wrapping_sub(self.epoch) as i8) < 0;
        if older && self.rate_bps > 0 {
            return;
        }
        if bps < self.rate_bps / 2 || self.rate_bps == 0 {
            let packet_ps = 4096 * 8_000_000_000_000 / bps.max(1000);
            self.next_ps = self.next_ps.max(now * 1000 + packet_ps / 65536 * u64::from(phase));
        }
        *self = Allowance { expected: true, rate_bps: bps, epoch, at: now, ..*self };
    }
    /// The hint counts: it is recent, measured in round trips and in packets at its own rate.
    pub fn is_fresh(&self, now: Nanos, rtt_ns: Nanos, segment: u32) -> bool {
        let packet_ns = u64::from(segment) * 8_000_000_000 / self.rate_bps.max(1);
        let life = rtt_ns
            .saturating_mul(limits::HINT_LIFE_RTTS)
            .max(packet_ns.saturating_mul(limits::HINT_LIFE_PACKETS));
        self.rate_bps > 0 && now.saturating_sub(self.at) < life.max(limits::HINT_LIFE_MIN_NS)
    }
    /// Bytes that may be in flight by the hint.
    pub fn window(&self, now: Nanos, rtt_ns: Nanos, risen: bool, segment: u32) -> u32 {
        if !self.expected {
            return u32::MAX;
        }
        let bdp = |ns: Nanos| (u128::from(self.rate_bps) * u128::from(ns) / 8_000_000_000) as u64;
        let first = u64::from(limits::FIRST_WINDOW_PACKETS * segment);
        let bytes = if self.is_fresh(now, rtt_ns, segment) {
            // The rate alone keeps queues short; while one stands, the window drains it.
            if risen { bdp(rtt_ns).max(u64::from(segment)) } else { 2 * (bdp(rtt_ns) + u64::from(segment)) }
        } else if self.rate_bps > 0 {
            // After a pause: what was allowed last, but not more than a newcomer's first window.
            bdp(rtt_ns.min(limits::FIRST_WINDOW_SPAN_NS)).clamp(u64::from(segment), first)
        } else {
            first
        };
        u32::try_from(bytes).unwrap_or(u32::MAX)
    }
    /// When the next packet may leave at the hinted rate.
    pub fn open_at(&self) -> Nanos {
        self.next_ps / 1000
    }
    /// A packet left. What was not sent for the host being late may be caught up.
    pub fn sent(&mut self, now: Nanos, bytes: u32, host_slack_ns: Nanos) {
        if self.rate_bps == 0 {
            return;
        }
        let wire = u64::from(bytes + limits::WIRE_OVERHEAD_BYTES);
        let took = (u128::from(wire) * 8_000_000_000_000 / u128::from(self.rate_bps)) as u64;
        // Leaving a little late, because of a wake-up or of others at the link, does not cost rate.
        let credit = host_slack_ns.max(limits::PACE_CREDIT_NS);
        let late = (now.saturating_sub(credit) * 1000).saturating_sub(took);
        self.next_ps = self.next_ps.max(late) + took;
    }
}

/// What a connection's peer wants to send (receiver's side).
#[derive(Debug, Clone, Copy, Default)]
pub struct Demand {
    kind: Kind,
    /// Rate counted for it while it is `Measured`, bit/s.
    rate_bps: u64,
    /// Bytes since `since`.
    bytes: u64,
    /// Beginning of the span it is judged by.
    since: Nanos,
    last: Nanos,
    /// Hint told last, and its epoch.
    told: (u16, u8),
}

impl Demand {
    /// The rate told to the peer last, bit/s; `None`: no opinion, or never told.
    pub fn told_bps(&self) -> Option<u64> {
        decode(self.told.0).filter(|bps| *bps > 0)
    }
}

/// What limits a sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Kind {
    /// It sends nothing.
    #[default]
    Idle,
    /// Something else than us: it is counted with what it sends and a little more.
    Measured,
    /// Our hint: it would take whatever it is given.
    Hungry,
}

/// The receiver's links and who shares them.
#[derive(Debug, Default)]
pub struct Inbound {
    /// Rate of the links in use, bit/s; 0: not known, no hints are given.
    capacity_bps: u64,
    /// How late hosts may be.
    host_slack_ns: Nanos,
    /// Part of it that is shared out, in 1/1024: lowered by marks.
    factor: u64,
    /// Senders limited by our hint.
    hungry: u64,
    /// What the others send.
    measured_bps: u64,
    /// Senders of both kinds.
    active: u64,
    /// Connections, idle ones included.
    peers: u64,
    /// Since `shared_at`: packets, marked ones, bytes.
    packets: u32,
    marks: u32,
    bytes: u64,
    counted_at: Nanos,
    shared_at: Nanos,
}

impl Inbound {
    /// All planes' links.
    pub fn new(planes: &[PlaneConfig], host_slack_ns: Nanos) -> Inbound {
        let known = planes.iter().all(|p| p.rate_bps > 0);
        let sum = planes.iter().map(|p| p.rate_bps).sum();
        Inbound {
            capacity_bps: if known { sum } else { 0 },
            host_slack_ns,
            factor: limits::HINT_FACTOR_MAX,
            ..Inbound::default()
        }
    }
    /// Hints are given.
    pub fn is_known(&self) -> bool {
        self.capacity_bps > 0
    }
    /// Connections there are, idle ones included.
    pub fn set_peers(&mut self, peers: usize) {
        self.peers = peers as u64;
    }
    /// Our part of the host's inbound rate has changed.
    pub fn set_capacity(&mut self, bps: u64) {
        self.capacity_bps = bps;
    }
    fn shared_bps(&self) -> u64 {
        self.capacity_bps / 1024 * self.factor
    }
    /// Data of a peer arrived; `backlog` is what its header says (MR-HINT-4).
    pub fn on_data(&mut self, now: Nanos, d: &mut Demand, bytes: usize, backlog: u16, ce: bool) {
        if !self.is_known() {
            return;
        }
        self.packets += 1;
        self.marks += u32::from(ce);
        self.bytes += bytes as u64 + u64::from(limits::WIRE_OVERHEAD_BYTES);
        if d.kind == Kind::Idle {
            self.active += 1;
            (d.kind, d.rate_bps, d.bytes, d.since) = (Kind::Measured, 0, 0, now);
            // A newcomer with more to send is taken to want its part.
            if backlog != 0 {
                self.hungry += 1;
                d.kind = Kind::Hungry;
            }
        }
        d.bytes += bytes as u64 + u64::from(limits::WIRE_OVERHEAD_BYTES);
        d.last = now;
        match d.kind {
            Kind::Measured if backlog == HUNGRY => {
                self.measured_bps -= d.rate_bps;
                self.hungry += 1;
                (d.kind, d.rate_bps, d.bytes, d.since) = (Kind::Hungry, 0, 0, now);
            }
            Kind::Hungry if backlog == HUNGRY => (d.bytes, d.since) = (0, now),
            // For a whole span it was not our hint that held it, or nothing more waits.
            Kind::Hungry if backlog == 0 || now >= d.since + self.span_ns() => {
                self.hungry -= 1;
                d.kind = Kind::Measured;
                d.rate_bps = self.level(1);
                self.measured_bps += d.rate_bps;
            }
            _ => {}
        }
        if d.kind == Kind::Measured && now >= d.since + self.span_ns() {
            let rate = d.bytes * 8_000_000_000 / (now - d.since);
            self.measured_bps -= d.rate_bps;
            // Room to grow by a quarter per span. What it wants beyond an equal part it has to ask for by being hungry.
            d.rate_bps = (rate + rate / 4).min(self.shared_bps() / self.active);
            self.measured_bps += d.rate_bps;
            (d.bytes, d.since) = (0, now);
        }
    }
    /// Span by which a sender is judged: bursts and hosts that are late must not look like its rate.
    fn span_ns(&self) -> Nanos {
        limits::DEMAND_SPAN_NS.max(self.host_slack_ns)
    }
    /// Rate per hungry sender if there were `more` of them.
    fn level(&self, more: u64) -> u64 {
        let shared = self.shared_bps();
        // Those limited elsewhere cannot take more than an equal part: what they seem to want beyond it is not theirs.
        let fair = shared / self.active.max(1);
        let others = self.active.saturating_sub(self.hungry) * fair;
        shared.saturating_sub(self.measured_bps.min(others)) / (self.hungry + more).max(1)
    }
    /// The hint for a peer: rate field and epoch (MR-HINT-2).
    pub fn hint(&self, d: &mut Demand) -> (u16, u8) {
        if !self.is_known() {
            return (NO_OPINION, 0);
        }
        let rate = match d.kind {
            Kind::Hungry => self.level(0),
            // What it would get if it asked for more.
            Kind::Measured => {
                let fair = self.shared_bps() / self.active.max(1);
                self.level(1).max(fair).max(d.rate_bps.min(self.shared_bps()))
            }
            // So many might begin at once.
            Kind::Idle => self.shared_bps() / (self.active + 1).max(self.peers / limits::PEERS_PER_NEWCOMER),
        };
        let field = encode(rate);
        if field != d.told.0 {
            d.told = (field, d.told.1.wrapping_add(1));
        }
        d.told
    }
    /// Time to look for senders that have fallen silent: true at most every so often, the rarer the more there are.
    pub fn is_due(&mut self, now: Nanos) -> bool {
        let every = limits::DEMAND_SPAN_NS + self.active * limits::DEMAND_PER_SENDER_NS;
        if !self.is_known() || now < self.counted_at + every {
            return false;
        }
        self.counted_at = now;
        self.adapt(now);
        true
    }
    /// Marks say that a queue stands before our links: share out a little less until it is gone (MR-HINT-5).
    fn adapt(&mut self, now: Nanos) {
        if now < self.shared_at + limits::HINT_ADAPT_NS || self.packets < limits::HINT_ADAPT_PACKETS {
            return;
        }
        let since = std::mem::replace(&mut self.shared_at, now);
        let marked = u64::from(self.marks) * 1024 / u64::from(self.packets);
        let rate = self.bytes * 8_000_000_000 / (now - since);
        (self.packets, self.marks, self.bytes) = (0, 0, 0);
        // Marks while the links are not full come from bursts that met, or from elsewhere.
        let full = rate > self.capacity_bps / 1024 * limits::HINT_FULL;
        self.factor = if full && marked > limits::HINT_MARKS_BEARABLE {
            (self.factor - marked / 16).max(limits::HINT_FACTOR_MIN)
        } else {
            (self.factor + limits::HINT_RECOVERY).min(limits::HINT_FACTOR_MAX)
        };
    }
    /// A peer that has been silent for longer than its rate explains wants nothing any more.
    pub fn expire(&mut self, now: Nanos, d: &mut Demand) {
        if d.kind == Kind::Idle {
            return;
        }
        let rate = decode(d.told.0).unwrap_or(0).max(1);
        let packet_ns = 4096 * 8_000_000_000 / rate;
        let patience =
            limits::DEMAND_IDLE_NS.max(limits::HINT_LIFE_PACKETS * packet_ns).max(2 * self.host_slack_ns);
        if d.last + patience > now {
            return;
        }
        self.forget(d);
    }
    /// The peer is gone.
    pub fn forget(&mut self, d: &mut Demand) {
        match d.kind {
            Kind::Idle => return,
            Kind::Measured => self.measured_bps -= d.rate_bps,
            Kind::Hungry => self.hungry -= 1,
        }
        self.active -= 1;
        (d.kind, d.rate_bps) = (Kind::Idle, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encode__loses_less_than_a_thousandth() {
        for bps in [1_000, 64_000, 1_000_000, 98_765_432, 100_000_000_000, 3_200_000_000_000] {
            let back = decode(encode(bps)).unwrap();
            assert!(back <= bps && bps - back <= bps / 1000, "{bps} became {back}");
        }
    }

    /// Proves MR-HINT-3.
    #[test]
    fn take__ignores_older_epochs() {
        let mut a = Allowance::default();
        a.take(1, 250, encode(5_000_000), 0);
        a.take(2, 2, encode(7_000_000), 0);
        a.take(3, 255, encode(9_000_000), 0);
        assert_eq!(a.rate_bps, 7_000_000 / 1000 * 1000);
    }
}
