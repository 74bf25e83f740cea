//! `api`: limits and errnos of posting, object lifetimes, state transitions, memory registration, threads,
//! completion events.

mod events;
mod lifetimes;
mod objects;
mod posting;
mod threads;

use crate::modes::Case;
use crate::options::Options;

/// The cases.
pub fn cases(options: &Options) -> Vec<Case> {
    let mut cases = posting::cases();
    cases.extend(objects::cases());
    cases.extend(lifetimes::cases());
    cases.extend(threads::cases());
    cases.extend(events::cases(options));
    cases
}
