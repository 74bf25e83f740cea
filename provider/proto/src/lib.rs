//! The MetaRoCE transport as a sans-IO library: no sockets, threads, clock, globals or randomness of its own.
//!
//! START HERE: [`Endpoint`] (`endpoint.rs`) and the contract written on it. The layout of the packets is in
//! `wire/`, what a sender does in `connection/requester.rs` and `connection/completer.rs`, what a receiver does in
//! `connection/responder.rs`.
#![forbid(unsafe_code)]

pub mod burst;
pub mod config;
pub mod endpoint;
pub mod memory;
pub mod stats;
pub mod types;

pub use burst::{Piece, TxBurst};
pub use config::Config;
pub use endpoint::Endpoint;
pub use memory::{Fault, Memory};
pub use types::*;
