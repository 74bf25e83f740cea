//! Congestion window of one path. Loss alone does not cut it (design D9); marks do, and loss beside rising delay.

use crate::config::{Algorithm, EcnAimd, limits};
use crate::types::Nanos;

/// Window in packets, with the fraction of additive growth kept apart.
#[derive(Debug, Clone, Copy)]
pub struct Congestion {
    algorithm: Algorithm,
    window: u32,
    threshold: u32,
    credit: u32,
    ce_seen: u32,
    /// Marks that have not cost a packet yet.
    marks: u32,
    cut_at: Nanos,
}

/// What an acknowledgement tells the controller.
#[derive(Debug, Clone, Copy)]
pub struct AckNews {
    /// Packets newly acknowledged.
    pub acked: u32,
    /// The peer's cumulative count of CE marks on this path.
    pub ce: u32,
    /// Most packets that were in flight in this round trip and the last: growth is earned by a window that was used.
    pub peak: u32,
    /// Windows of all paths of the plane together: they share its link and grow as one (MR-CC-6).
    pub plane_window: u32,
    /// Window the peer's rate hint grants on this plane, packets; 0: no hint.
    pub plane_target: u32,
}

impl Congestion {
    /// A fresh window.
    pub fn new(algorithm: Algorithm) -> Self {
        let window = match algorithm {
            Algorithm::EcnAimd(a) => a.initial,
            Algorithm::Fixed { packets } => packets,
        };
        Congestion { algorithm, window, threshold: u32::MAX, credit: 0, ce_seen: 0, marks: 0, cut_at: 0 }
    }
    /// Packets that may be in flight.
    pub fn window(&self) -> u32 {
        self.window
    }
    /// Takes an acknowledgement in (MR-CC-1, MR-CC-2).
    pub fn on_ack(&mut self, news: AckNews) {
        let Algorithm::EcnAimd(a) = self.algorithm else { return };
        let marked = news.ce.wrapping_sub(self.ce_seen);
        // An old acknowledgement may arrive late: counts never run backwards.
        if (marked as i32) > 0 {
            self.ce_seen = news.ce;
            self.marks += marked;
            self.window = self.window.saturating_sub(self.marks / a.mark_divisor).max(a.least);
            self.marks %= a.mark_divisor;
            self.threshold = self.window;
            self.credit = 0;
        } else {
            self.grow(news);
        }
    }
    /// Above the threshold all paths of a plane together grow by one packet per round trip, or by a part of what is
    /// missing to what the receiver grants: flows with equal grants and equal marks end up equal.
    fn grow(&mut self, news: AckNews) {
        let plane_window = news.plane_window.max(self.window);
        if self.window < self.threshold {
            // At most twice what was used.
            if self.window < 2 * news.peak {
                self.window += news.acked;
            }
        } else if self.window <= news.peak + news.peak / 8 + limits::BURST_ADAPTIVE {
            let missing = news.plane_target.saturating_sub(plane_window);
            self.credit += news.acked * (missing / limits::HINT_APPROACH).max(1);
            self.window += self.credit / plane_window;
            self.credit %= plane_window;
        }
        self.window = self.window.min(limits::PATH_SPAN);
    }
    /// A packet was lost while the path's delay is far above its least: a fabric that drops instead of marking. One cut
    /// per round trip (MR-CC-7).
    pub fn on_congestive_loss(&mut self, now: Nanos, srtt_ns: Nanos) {
        let Algorithm::EcnAimd(a) = self.algorithm else { return };
        if self.cut_at + srtt_ns > now {
            return;
        }
        self.cut_at = now;
        self.window = (self.window - self.window * a.loss_cut_percent / 100).max(a.least);
        self.threshold = self.window;
        self.credit = 0;
    }
    /// The window of a path that begins again: small, and counting CE marks from zero (MR-CC-3).
    pub fn restart(&mut self) {
        *self = Congestion::new(self.algorithm);
        if let Algorithm::EcnAimd(EcnAimd { least, .. }) = self.algorithm {
            self.window = least;
        }
    }
}
