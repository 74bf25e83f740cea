//! The UDP driver of MetaRoCE: sockets, threads, rings and application memory around the sans-IO core.
//!
//! START HERE: `engine.rs`, one page, the step. Who runs it and when: `drive.rs` and `thread.rs`.
//! What the verbs edge uses: [`Device`], [`Cq`], [`Qp`], [`Srq`].
#![cfg_attr(test, expect(non_snake_case, reason = "tests are named subject__case"))]

mod arm;
mod cq;
mod depth;
mod device;
mod doorbell;
mod drive;
mod engine;
mod fork;
mod guard;
mod impair;
mod limits;
mod memory;
#[cfg(all(test, loom))]
mod models;
mod outbox;
mod qp;
mod rates;
mod ring;
mod snapshot;
mod srq;
mod sync;
mod thread;
mod udp;
mod watch;

pub use cq::{Cq, CqNotify};
pub use device::{Device, Everything, OpenError};
pub use qp::{Qp, QpCreate, QpNotify, RecvPost, SendPost};
pub use rates::of_plane as plane_rate_bps;
pub use srq::{Srq, SrqPost};
pub use watch::{Heard, Watch};

/// An errno of the C library, positive.
pub type Errno = i32;

/// The errno of a refusal of the core.
fn errno_of(refused: metaroce_proto::Refused) -> Errno {
    use metaroce_proto::Refused;
    match refused {
        Refused::NotFound | Refused::Invalid => libc::EINVAL,
        Refused::Full => libc::ENOMEM,
        Refused::Busy => libc::EBUSY,
        Refused::Unsupported => libc::EOPNOTSUPP,
    }
}
