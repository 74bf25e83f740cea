//! Congestion window of one path: ECN AIMD in the manner of DCTCP (design D10). Loss alone does not cut it (D9).

use crate::config::limits;

/// Window in packets, with the fraction of additive growth kept apart.
#[derive(Debug, Clone, Copy)]
pub struct Congestion {
    window: u32,
    threshold: u32,
    credit: u32,
    ce_seen: u32,
}

impl Congestion {
    /// A fresh window.
    pub fn new() -> Self {
        Congestion { window: limits::CWND_INITIAL, threshold: u32::MAX, credit: 0, ce_seen: 0 }
    }
    /// Packets that may be in flight.
    pub fn window(&self) -> u32 {
        self.window
    }
    /// An acknowledgement for `acked` packets; `ce` is the peer's cumulative count of CE marks; `limited`: the window
    /// was full, so growth is earned.
    pub fn on_ack(&mut self, acked: u32, ce: u32, limited: bool) {
        let marked = ce.wrapping_sub(self.ce_seen);
        // An old acknowledgement may arrive late: counts never run backwards.
        if (marked as i32) > 0 {
            self.ce_seen = ce;
            self.window = self.window.saturating_sub(marked.div_ceil(3)).max(limits::CWND_MIN);
            self.threshold = self.window;
            self.credit = 0;
        } else if limited {
            if self.window < self.threshold {
                self.window += acked;
            } else {
                self.credit += acked;
                if self.credit >= self.window {
                    self.credit -= self.window;
                    self.window += 1;
                }
            }
            self.window = self.window.min(limits::PATH_SPAN);
        }
    }
    /// The window of a path that begins again: small, and counting CE marks from zero.
    pub fn restarted() -> Self {
        Congestion { window: limits::CWND_MIN, ..Congestion::new() }
    }
}

impl Default for Congestion {
    fn default() -> Self {
        Self::new()
    }
}
