//! Health of one path (design D11): judged against its siblings, left at once when in trouble, probed with backoff.

use crate::config::limits;
use crate::types::Nanos;

/// State of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Health {
    /// In use.
    #[default]
    Active,
    /// Not answering while siblings were, or its plane is down: probed only.
    Suspect {
        /// When the next probe leaves.
        probe_at: Nanos,
        /// Pause after that one.
        pause: Nanos,
    },
}

impl Health {
    /// Left, and not probed: somebody says when it may be used again.
    pub const PARKED: Health = Health::Suspect { probe_at: Nanos::MAX, pause: Nanos::MAX };
    /// Just left: the first probe follows soon.
    pub fn suspect(now: Nanos) -> Self {
        Health::Suspect { probe_at: now + limits::PROBE_FIRST_NS, pause: 2 * limits::PROBE_FIRST_NS }
    }
    /// May carry data.
    pub fn is_active(self) -> bool {
        self == Health::Active
    }
    /// A probe is due; the next one is later, each pause twice the last (MR-PATH-3).
    pub fn take_probe(&mut self, now: Nanos) -> bool {
        match self {
            Health::Suspect { probe_at, pause } if *probe_at <= now => {
                *probe_at = now + *pause;
                *pause = (*pause * 2).min(limits::PROBE_MAX_NS);
                true
            }
            _ => false,
        }
    }
    /// When the next probe is due.
    pub fn probe_at(self) -> Nanos {
        match self {
            Health::Active => Nanos::MAX,
            Health::Suspect { probe_at, .. } => probe_at,
        }
    }
}
