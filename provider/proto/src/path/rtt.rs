//! Round trip time of one path (RFC 6298 smoothing; samples are unambiguous because PSNs are never reused).

use crate::config::limits;
use crate::types::Nanos;

/// Smoothed round trip time.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rtt {
    /// Smoothed value; 0 before the first sample.
    pub srtt_ns: Nanos,
    /// Mean deviation.
    pub var_ns: Nanos,
    /// Smallest sample of this generation.
    pub min_ns: Nanos,
}

impl Rtt {
    /// A sample with the peer's own delay already taken off.
    pub fn sample(&mut self, rtt_ns: Nanos) {
        let rtt_ns = rtt_ns.max(1);
        if self.srtt_ns == 0 {
            *self = Rtt { srtt_ns: rtt_ns, var_ns: rtt_ns / 2, min_ns: rtt_ns };
            return;
        }
        self.min_ns = self.min_ns.min(rtt_ns);
        self.var_ns = (3 * self.var_ns + self.srtt_ns.abs_diff(rtt_ns)) / 4;
        self.srtt_ns = (7 * self.srtt_ns + rtt_ns) / 8;
    }
    /// How long without news before the path is probed.
    pub fn probe_timeout(&self) -> Nanos {
        if self.srtt_ns == 0 {
            return limits::PTO_INITIAL_NS;
        }
        (self.srtt_ns + 4 * self.var_ns + limits::ACK_DELAY_NS).clamp(limits::PTO_MIN_NS, limits::PTO_MAX_NS)
    }
}
