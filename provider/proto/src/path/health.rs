//! Health of one path (design D11). The transport issue completes it with planes, probing and flap damping; here a
//! silent path becomes SUSPECT, its packets go elsewhere, and the next acknowledgement makes it ACTIVE again.

/// State of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Health {
    /// In use.
    #[default]
    Active,
    /// Two probes unanswered while siblings made progress: used for probes only.
    Suspect,
}
