//! UDP sockets of a slot: one that receives everything, one per (plane, address family, entropy) that only sends, and
//! one that receives for multicast groups, if there are any.
//!
//! System calls are made without libc's cancellation points: a thread cancelled inside a step would leave the
//! engine's lock held for ever.

pub(crate) mod groups;
pub(crate) mod rx;
pub(crate) mod slot;
pub(crate) mod socket;
pub(crate) mod tx;

#[cfg(all(test, not(loom)))]
mod tests;
