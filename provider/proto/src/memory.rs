//! The core's only way to application memory. Raw copies in the engine, byte arrays in the simulator.
//!
//! Addresses are virtual addresses the core has already checked against an MR; the implementation does not check
//! rights again.

/// The memory behind a checked address could not be accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault;

/// Access to application memory; statically dispatched.
pub trait Memory {
    /// Copies `bytes` to `va`. The order in which the bytes become visible is not specified.
    fn place(&mut self, va: u64, bytes: &[u8]) -> Result<(), Fault>;
    /// Copies `bytes` to `va` so that everything placed before is visible before the last byte of `bytes` is, and
    /// an 8-byte aligned last word appears at once (programs poll it).
    fn place_last(&mut self, va: u64, bytes: &[u8]) -> Result<(), Fault>;
    /// Copies from `va` to `out`.
    fn gather(&mut self, va: u64, out: &mut [u8]) -> Result<(), Fault>;
    /// Atomic compare-and-swap on the native-endian u64 at `va` (8-byte aligned); gives the old value.
    fn compare_swap(&mut self, va: u64, compare: u64, swap: u64) -> Result<u64, Fault>;
    /// Atomic add on the native-endian u64 at `va`; gives the old value.
    fn fetch_add(&mut self, va: u64, add: u64) -> Result<u64, Fault>;
}
