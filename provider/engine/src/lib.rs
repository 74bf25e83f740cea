//! The UDP driver of MetaRoCE: sockets, threads, rings and application memory around the sans-IO core.
//!
//! START HERE: `engine.rs`, one page, the step. Who runs it and when: `drive.rs` and `thread.rs`.
//! What the verbs edge uses: [`Device`], [`Cq`], [`Qp`], [`Srq`].
#![cfg_attr(test, expect(non_snake_case, reason = "tests are named subject__case"))]

mod doorbell;
mod impair;
mod limits;
mod memory;
mod ring;
mod sync;
mod udp;
