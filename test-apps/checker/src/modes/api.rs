//! `api`: limits and errnos of posting, object lifetimes, state transitions, memory registration, completion events.

mod events;
mod objects;
mod posting;

use crate::modes::Case;
use crate::options::Options;

/// The cases.
pub fn cases(options: &Options) -> Vec<Case> {
    let mut cases = posting::cases();
    cases.extend(objects::cases());
    cases.extend(events::cases(options));
    cases
}
