//! The MetaRoCE transport as a sans-IO library: no sockets, threads, clock, globals or randomness of its own.
//!
//! START HERE: [`Endpoint`] (`endpoint.rs`) and the contract written on it. The layout of the packets is in
//! `wire/`, what a sender does in `connection/requester.rs` and `connection/completer.rs`, what a receiver does in
//! `connection/responder.rs`.
#![forbid(unsafe_code)]
#![cfg_attr(test, expect(non_snake_case, reason = "tests are named subject__case"))]

pub mod burst;
pub mod config;
mod connection;
mod control;
mod datagrams;
pub mod endpoint;
pub mod groups;
mod intake;
pub mod journal;
pub mod memory;
mod mr;
mod pace;
mod parts;
mod path;
mod peers;
mod plane_status;
mod qp;
mod rate_hint;
mod raw;
mod seq;
pub mod snapshot;
pub mod stats;
pub mod steer;
pub mod steering;
mod tables;
pub mod types;
pub mod wire;

pub use burst::{Piece, TxBurst};
pub use config::Config;
pub use endpoint::Endpoint;
pub use memory::{Fault, Memory};
pub use types::*;

/// The next number of a SplitMix64 stream. Our own fifteen lines, so that seeds keep their meaning for ever.
pub fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
