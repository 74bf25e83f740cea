//! Counters that every process publishes in one shared file per user, and that `metaroce stat` reads.
//!
//! One file of fixed size holds [`RECORDS_MAX`] records. A process claims a record by compare-and-swap of its identity
//! (pid and start time) and stores plain relaxed 64-bit words from then on. Nothing has to be cleaned up: whether a
//! process has ended is derived from its identity, its last values stay readable, and the next start takes over the
//! record that ended longest ago. So a killed process leaves nothing behind that grows.

#![cfg_attr(test, expect(non_snake_case, reason = "tests are named subject__case"))]

mod counters;
mod file;
mod process;
mod record;
mod sys;

pub use counters::{DeviceCounter, PathCounter};
pub use file::StatFile;
pub use record::{PATHS_MAX, PathRecord, RECORDS_MAX, Record, StatWriter};
