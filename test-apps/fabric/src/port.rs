//! A port of a host or switch: a queue in front of a link, with faults.
//!
//! The queue is first in, first out, so its length follows from when the link will be free: no event is needed for a
//! departure. Times of the link are in picoseconds, because a packet at 400 Gb/s takes 85 ns.

use crate::packet::WIRE_OVERHEAD;
use metaroce_proto::{Nanos, random};

/// Faults of a port, changed by the scenario while it runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Damage {
    /// Probability that a packet vanishes.
    pub loss: f64,
    /// Probability that it is damaged.
    pub corrupt: f64,
    /// Probability that it arrives twice.
    pub duplicate: f64,
    /// Probability that it is held back.
    pub reorder: f64,
    /// For how long at most.
    pub reorder_ns: Nanos,
    /// Everything vanishes.
    pub hole: bool,
}

/// What became of a packet at a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It arrives at the other end then.
    Pass {
        /// When.
        at: Nanos,
        /// The queue was long: mark it.
        mark: bool,
        /// It is damaged on the way.
        corrupt: bool,
        /// A second copy arrives then.
        again: Option<Nanos>,
    },
    /// The queue was full.
    Full,
    /// A fault took it.
    Lost,
}

/// Counters of a port.
#[derive(Debug, Clone, Copy, Default)]
pub struct PortStats {
    /// Bytes that occupied the link.
    pub wire_bytes: u64,
    /// Packets dropped because the queue was full.
    pub full: u64,
    /// Packets taken by faults.
    pub lost: u64,
    /// Packets marked.
    pub marked: u64,
    /// Packets that passed.
    pub passed: u64,
    /// Longest queue, bytes, since it was last looked at.
    pub peak: u64,
}

/// A port.
#[derive(Debug, Clone)]
pub struct Port {
    /// Link rate.
    pub bps: u64,
    /// Propagation delay.
    pub delay_ns: Nanos,
    /// Bytes the queue holds.
    pub buffer: u64,
    /// Bytes in the queue from which on packets are marked.
    pub ecn: u64,
    /// Faults.
    pub damage: Damage,
    /// Counters.
    pub stats: PortStats,
    free_ps: u64,
}

impl Port {
    /// A port with an idle link.
    pub fn new(bps: u64, delay_ns: Nanos, buffer: u64, ecn: u64) -> Self {
        Port {
            bps,
            delay_ns,
            buffer,
            ecn,
            damage: Damage::default(),
            stats: PortStats::default(),
            free_ps: 0,
        }
    }
    /// Bytes that have left.
    pub fn departed(&self, now: Nanos) -> u64 {
        self.stats.wire_bytes - self.backlog(now).min(self.stats.wire_bytes)
    }
    /// Bytes waiting.
    pub fn backlog(&self, now: Nanos) -> u64 {
        let wait_ps = self.free_ps.saturating_sub(now * 1000);
        (u128::from(wait_ps) * u128::from(self.bps) / 8_000_000_000_000) as u64
    }
    /// Offers a packet with so many bytes of UDP payload.
    pub fn offer(&mut self, now: Nanos, len: u32, rng: &mut u64) -> Verdict {
        let bytes = u64::from(len) + WIRE_OVERHEAD;
        let backlog = self.backlog(now);
        if backlog + bytes > self.buffer {
            self.stats.full += 1;
            return Verdict::Full;
        }
        self.stats.peak = self.stats.peak.max(backlog + bytes);
        let mark = backlog >= self.ecn;
        let took_ps = (u128::from(bytes) * 8_000_000_000_000 / u128::from(self.bps)) as u64;
        self.free_ps = self.free_ps.max(now * 1000) + took_ps;
        self.stats.wire_bytes += bytes;
        // A fault is one of the link: the packet took its time on it.
        let d = self.damage;
        if d.hole || chance(rng, d.loss) {
            self.stats.lost += 1;
            return Verdict::Lost;
        }
        self.stats.marked += u64::from(mark);
        self.stats.passed += 1;
        let mut at = self.free_ps.div_ceil(1000) + self.delay_ns;
        if chance(rng, d.reorder) {
            at += 1 + random(rng) % d.reorder_ns.max(1);
        }
        let again = chance(rng, d.duplicate).then_some(at + self.delay_ns);
        Verdict::Pass { at, mark, corrupt: chance(rng, d.corrupt), again }
    }
}

/// True with probability `p`; draws nothing when it cannot be.
pub fn chance(rng: &mut u64, p: f64) -> bool {
    p > 0.0 && (random(rng) >> 11) as f64 / (1u64 << 53) as f64 <= p
}
