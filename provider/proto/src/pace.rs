//! Pacing of the host's own links: a plane whose rate is known takes packets only as fast as its link does, so that no
//! queue builds below the core, and connections take turns at it (MR-CC-9).

use crate::config::{PlaneConfig, limits};
use crate::types::Nanos;
use std::collections::VecDeque;

/// All planes' links.
#[derive(Debug, Default)]
pub struct Pace {
    links: Vec<Link>,
    /// How far ahead of a link packets are handed over.
    ahead_ns: Nanos,
}

#[derive(Debug, Default)]
struct Link {
    /// Picoseconds per byte; 0: unpaced.
    ps_per_byte: u64,
    /// When what was handed over has left, picoseconds.
    free_ps: u64,
    /// Connections that wait for the link, in turn.
    waiting: VecDeque<u32>,
}

impl Pace {
    /// Links of these planes.
    pub fn new(planes: &[PlaneConfig], ahead_ns: Nanos) -> Pace {
        let link = |p: &PlaneConfig| Link { ps_per_byte: ps_per_byte(p.rate_bps), ..Link::default() };
        Pace { links: planes.iter().map(link).collect(), ahead_ns }
    }
    /// The rate of a plane's link has changed (0: not known).
    pub fn set_rate(&mut self, plane: u8, bps: u64) {
        if let Some(link) = self.links.get_mut(usize::from(plane)) {
            link.ps_per_byte = ps_per_byte(bps);
        }
    }
    /// From when on the plane takes another burst. A little ahead of the link, so that it never runs dry.
    pub fn open_at(&self, plane: u8) -> Nanos {
        self.links.get(usize::from(plane)).map_or(0, |l| (l.free_ps / 1000).saturating_sub(self.ahead_ns))
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
        let ahead = self.ahead_ns;
        let open = |l: &&mut Link| !l.waiting.is_empty() && (l.free_ps / 1000).saturating_sub(ahead) <= now;
        self.links.iter_mut().find(open)?.waiting.pop_front()
    }
    /// When the next of those that wait can go on.
    pub fn next_at(&self) -> Option<Nanos> {
        let at = |l: &Link| (l.free_ps / 1000).saturating_sub(self.ahead_ns);
        self.links.iter().filter(|l| !l.waiting.is_empty()).map(at).min()
    }
}

fn ps_per_byte(bps: u64) -> u64 {
    8_000_000_000_000u64.checked_div(bps).unwrap_or(0)
}
