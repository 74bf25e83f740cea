//! A deterministic fabric in virtual time: hosts run the real protocol core (`metaroce_proto::Endpoint`), links have rate
//! and delay, queues have a depth and an ECN threshold, faults come from a seed. Two runs of a scenario are bit-identical.
//!
//! START HERE: `world.rs` (one event after the other), then `topology.rs` (which ports a packet passes), `port.rs` (what a
//! port does to it), `traffic.rs` (what hosts are asked to do) and `checks.rs` (what must be true afterwards). Scenarios
//! are data: `scenario.rs` has the schema, `scenarios/*.toml` the files.
#![forbid(unsafe_code)]

pub mod checks;
pub mod claims;
pub mod faults;
pub mod host;
pub mod memory;
pub mod packet;
pub mod port;
pub mod report;
pub mod rocev2;
pub mod run;
pub mod scenario;
pub mod topology;
pub mod traffic;
pub mod world;
