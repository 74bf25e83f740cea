//! Round trip time of one path (RFC 6298 smoothing; samples are unambiguous because PSNs are never reused).

use crate::config::{Tuning, limits};
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
    /// Latest sample.
    pub latest_ns: Nanos,
}

impl Rtt {
    /// A sample with the peer's own delay already taken off.
    pub fn sample(&mut self, rtt_ns: Nanos) {
        let rtt_ns = rtt_ns.max(1);
        if self.min_ns == 0 {
            *self = Rtt { srtt_ns: rtt_ns, var_ns: rtt_ns / 2, min_ns: rtt_ns, latest_ns: rtt_ns };
            return;
        }
        self.latest_ns = rtt_ns;
        self.min_ns = self.min_ns.min(rtt_ns);
        self.var_ns = (3 * self.var_ns + self.srtt_ns.abs_diff(rtt_ns)) / 4;
        self.srtt_ns = (7 * self.srtt_ns + rtt_ns) / 8;
    }
    /// What is assumed before the first sample.
    pub fn seed(&mut self, rtt_ns: Nanos) {
        if self.min_ns == 0 {
            (self.srtt_ns, self.var_ns) = (rtt_ns, rtt_ns / 4);
        }
    }
    /// How long without news before the path is probed.
    pub fn probe_timeout(&self, tuning: &Tuning) -> Nanos {
        if self.srtt_ns == 0 {
            return limits::PTO_INITIAL_NS;
        }
        let timeout = self.srtt_ns + 4 * self.var_ns + tuning.ack_delay_ns;
        timeout.clamp(tuning.pto_min_ns, limits::PTO_MAX_NS)
    }
    /// The same when packets sent later on other paths were answered: no allowance for a peer that does not run.
    pub fn overtaken_timeout(&self, tuning: &Tuning) -> Nanos {
        let slack = (self.srtt_ns / 4).max(2 * self.var_ns);
        let timeout = self.srtt_ns + slack + tuning.ack_delay_ns;
        timeout.clamp(tuning.pto_min_ns / 4, limits::PTO_MAX_NS)
    }
    /// The delay is far above the path's least: a queue stands somewhere on it.
    pub fn is_risen(&self, tuning: &Tuning) -> bool {
        self.min_ns > 0 && self.srtt_ns > 2 * self.min_ns + tuning.delay_slack_ns
    }
}
