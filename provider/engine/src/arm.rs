//! Arming of a CQ: one request to be told of the next completion, without a gap between arming and polling.
//!
//! The poller arms, then polls. The step publishes entries, then fires. A fence on each side orders "mine, then look
//! at yours", so either the poll sees the entries or the step sees the arming.

use crate::sync::{AtomicU32, Ordering, fence};

const NOT_ARMED: u32 = 0;
const SOLICITED: u32 = 1;
const ANY: u32 = 2;

/// What a CQ is armed for.
#[derive(Debug)]
pub(crate) struct Armed(AtomicU32);

impl Armed {
    pub(crate) fn new() -> Self {
        Armed(AtomicU32::new(NOT_ARMED))
    }

    /// Arms; a request for any completion is not weakened by one for solicited ones. `true` if it was not armed.
    pub(crate) fn arm(&self, solicited_only: bool) -> bool {
        let wanted = if solicited_only { SOLICITED } else { ANY };
        let newly = self.0.fetch_max(wanted, Ordering::SeqCst) == NOT_ARMED;
        fence(Ordering::SeqCst);
        newly
    }

    /// To be called between publishing entries (of any number of CQs) and [`Armed::fire`].
    pub(crate) fn published() {
        fence(Ordering::SeqCst);
    }

    /// Entries have been published, `solicited` ones among them or not: `true` if it is to be told, once.
    pub(crate) fn fire(&self, solicited: bool) -> bool {
        self.would_fire(solicited) && self.disarm()
    }

    /// Whether [`Armed::fire`] would tell.
    pub(crate) fn would_fire(&self, solicited: bool) -> bool {
        let armed = self.0.load(Ordering::Relaxed);
        armed == ANY || armed == SOLICITED && solicited
    }

    /// Takes the request back; `true` if there was one.
    pub(crate) fn disarm(&self) -> bool {
        self.0.swap(NOT_ARMED, Ordering::SeqCst) != NOT_ARMED
    }
}
