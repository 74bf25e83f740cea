//! UDP sockets of a slot: one that receives everything, and one per (plane, address family, entropy) that only sends.
//!
//! System calls are made without libc's cancellation points: a thread cancelled inside a step would leave the
//! engine's lock held for ever.

pub(crate) mod rx;
pub(crate) mod slot;
pub(crate) mod socket;
pub(crate) mod tx;

#[cfg(all(test, not(loom)))]
mod tests;
