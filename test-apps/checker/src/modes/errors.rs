//! `errors`: what fails must fail with the right status at both ends, flush in order, raise the right events
//! and no others, leave the right QP states, and take the time the retry attributes say.

mod peer;
mod requests;
mod retry;

use crate::modes::Case;
use crate::options::Options;

/// The cases.
pub fn cases(_: &Options) -> Vec<Case> {
    let mut cases = requests::cases();
    cases.extend(retry::cases());
    cases.extend(peer::cases());
    cases
}
