//! Pacing of the host's own links: a plane whose rate is known takes packets only as fast as its link does, so that no
//! queue builds below the core, and connections take turns at it (MR-CC-9).

use crate::config::{PlaneConfig, Tuning, limits};
use crate::types::Nanos;
use std::collections::VecDeque;

/// All planes' links.
#[derive(Debug, Default)]
pub struct Pace {
    links: Vec<Link>,
    /// How far ahead of a link packets are handed over: time, bytes where that is longer, and their longest time.
    ahead: (Nanos, u32, Nanos),
}

#[derive(Debug, Default)]
struct Link {
    /// Picoseconds per byte; 0: unpaced.
    ps_per_byte: u64,
    ahead_ns: Nanos,
    /// When what was handed over has left, picoseconds.
    free_ps: u64,
    /// Connections that wait for the link, in turn.
    waiting: VecDeque<u32>,
}

impl Link {
    fn open_at(&self) -> Nanos {
        (self.free_ps / 1000).saturating_sub(self.ahead_ns)
    }
}

impl Pace {
    /// Links of these planes.
    pub fn new(planes: &[PlaneConfig], tuning: &Tuning) -> Pace {
        let mut pace = Pace {
            links: planes.iter().map(|_| Link::default()).collect(),
            ahead: (tuning.link_ahead_ns, tuning.link_ahead_bytes, tuning.host_slack_ns),
        };
        (0u8..).zip(planes).for_each(|(plane, config)| pace.set_rate(plane, config.rate_bps));
        pace
    }
    /// The rate of a plane's link has changed (0: not known).
    pub fn set_rate(&mut self, plane: u8, bps: u64) {
        let (least, bytes, longest) = self.ahead;
        if let Some(link) = self.links.get_mut(usize::from(plane)) {
            link.ps_per_byte = ps_per_byte(bps);
            link.ahead_ns = least.max((u64::from(bytes) * link.ps_per_byte / 1000).min(longest));
        }
    }
    /// From when on the plane takes another burst. A little ahead of the link, so that it never runs dry.
    pub fn open_at(&self, plane: u8) -> Nanos {
        self.links.get(usize::from(plane)).map_or(0, Link::open_at)
    }
    /// A packet of so many bytes of UDP payload was handed over.
    pub fn sent(&mut self, now: Nanos, plane: u8, bytes: u32) {
        if let Some(link) = self.links.get_mut(usize::from(plane)) {
            let wire = u64::from(bytes + limits::WIRE_OVERHEAD_BYTES);
            link.free_ps = link.free_ps.max(now * 1000) + wire * link.ps_per_byte;
        }
    }
    /// A connection waits for the link.
    pub fn wait(&mut self, plane: u8, conn: u32) {
        if let Some(link) = self.links.get_mut(usize::from(plane)) {
            link.waiting.push_back(conn);
        }
    }
    /// The next connection whose link has become free.
    pub fn next_waiting(&mut self, now: Nanos) -> Option<u32> {
        let open = |l: &&mut Link| !l.waiting.is_empty() && l.open_at() <= now;
        self.links.iter_mut().find(open)?.waiting.pop_front()
    }
    /// When the next of those that wait can go on.
    pub fn next_at(&self) -> Option<Nanos> {
        self.links.iter().filter(|l| !l.waiting.is_empty()).map(Link::open_at).min()
    }
}

fn ps_per_byte(bps: u64) -> u64 {
    8_000_000_000_000u64.checked_div(bps).unwrap_or(0)
}
