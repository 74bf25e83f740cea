//! Verbs objects with owners, for client programs that test a device: what any C program does with the stock
//! libibverbs, in types that destroy themselves in the right order. Nothing here knows which device serves
//! it.
//!
//! All unsafe code of the test programs' verbs side is in this crate. The rule it rests on: a device reaches
//! memory only through an [`Mr`], an `Mr` keeps its [`Buffer`] mapped, and inline data is borrowed during the
//! post.

mod ah;
mod context;
mod cq;
mod memory;
mod post;
mod qp;

/// The C API as the installed header declares it; its inline functions are compiled from the header itself.
#[expect(
    missing_docs,
    nonstandard_style,
    dead_code,
    clippy::undocumented_unsafe_blocks,
    reason = "generated from the C header"
)]
mod sys {
    include!(concat!(env!("OUT_DIR"), "/verbs.rs"));
}

pub use ah::{Ah, Destination};
pub use context::{AsyncEvent, Context, Element, PortInfo, event_name};
pub use cq::{Channel, Cq, Wc, opcode_name, status_name};
pub use memory::{Buffer, Mr, Pd, PdNumber};
pub use post::{BadWr, Opcode, RecvWr, SendWr, Sge, flags};
pub use qp::{Attr, Qp, QpCaps, QpOptions, Remote, Srq, Transport, mask, state, state_name};

/// Constants of `<infiniband/verbs.h>` a client names.
pub mod constants {
    pub use crate::sys::{
        IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_ATOMIC,
        IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_EVENT_CQ_ERR, IBV_EVENT_QP_ACCESS_ERR,
        IBV_EVENT_QP_FATAL, IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_QP_REQ_ERR, IBV_EVENT_SQ_DRAINED,
        IBV_EVENT_SRQ_LIMIT_REACHED, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD, IBV_WC_LOC_LEN_ERR,
        IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WC_RECV,
        IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR,
        IBV_WC_RETRY_EXC_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_SEND, IBV_WC_SUCCESS, IBV_WC_WITH_IMM,
        IBV_WC_WR_FLUSH_ERR,
    };
}

/// Last OS error as `io::Error` naming the call that failed.
fn last_error(call: &str) -> std::io::Error {
    named(call, std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
}

/// An errno as `io::Error` naming the call; `Errno::of` gets the number back.
fn named(call: &str, errno: i32) -> std::io::Error {
    let kind = std::io::Error::from_raw_os_error(errno).kind();
    std::io::Error::new(kind, Errno { call: call.to_owned(), errno })
}

/// A failed verbs call: which, and the errno it returned or set.
#[derive(Debug, Clone)]
pub struct Errno {
    /// The C function.
    pub call: String,
    /// The errno value; 0 when the call failed without setting one (a bug of the callee).
    pub errno: i32,
}

impl Errno {
    /// The errno inside an error of this crate.
    pub fn of(error: &std::io::Error) -> Option<i32> {
        error.get_ref()?.downcast_ref::<Errno>().map(|e| e.errno)
    }
}

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.call, std::io::Error::from_raw_os_error(self.errno))
    }
}

impl std::error::Error for Errno {}

/// `Ok` when a call that returns an errno returned 0.
fn check(call: &str, code: i32) -> std::io::Result<()> {
    // Some verbs return -1 and set errno, most return the errno itself.
    match code {
        0 => Ok(()),
        -1 => Err(last_error(call)),
        errno => Err(named(call, errno.abs())),
    }
}
