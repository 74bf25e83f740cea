//! The nouns of the verbs world as the core uses them. Numeric values equal those of `<infiniband/verbs.h>` 44, so
//! that the verbs edge only casts.

pub use crate::qp::tags::Expected;
use std::net::{IpAddr, SocketAddr};

/// Time in nanoseconds since an arbitrary origin; comes in as an argument, never decreases.
pub type Nanos = u64;

/// 24-bit queue pair number: slot (high 10 bits) | index (low 14 bits).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Qpn(pub u32);

impl Qpn {
    /// Bits of the index part.
    pub const INDEX_BITS: u32 = 14;
    /// The slot part, 0..1024: which process on the host.
    pub fn slot(self) -> u16 {
        (self.0 >> Self::INDEX_BITS) as u16 & 0x3ff
    }
    /// The index part, 0..16384: which QP of the process.
    pub fn index(self) -> usize {
        (self.0 & ((1 << Self::INDEX_BITS) - 1)) as usize
    }
    /// Puts a QPN together; both parts are masked.
    pub fn new(slot: u16, index: u32) -> Self {
        Qpn((u32::from(slot) & 0x3ff) << Self::INDEX_BITS | index & ((1 << Self::INDEX_BITS) - 1))
    }
}

/// `IBV_ACCESS_*` bits.
pub mod access {
    #![expect(missing_docs, reason = "names are those of ibv_access_flags")]
    pub const LOCAL_WRITE: u32 = 1;
    pub const REMOTE_WRITE: u32 = 2;
    pub const REMOTE_READ: u32 = 4;
    pub const REMOTE_ATOMIC: u32 = 8;
    pub const MW_BIND: u32 = 16;
    pub const ZERO_BASED: u32 = 32;
    pub const ON_DEMAND: u32 = 64;
    pub const HUGETLB: u32 = 128;
    pub const RELAXED_ORDERING: u32 = 1 << 20;
}

/// A local scatter/gather element (`ibv_sge`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// Address as the application gave it (in the MR's iova space).
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Key of the MR it lies in.
    pub lkey: u32,
}

/// Work request opcodes; values of `ibv_wr_opcode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// RDMA Write.
    Write = 0,
    /// RDMA Write that also consumes a receive and delivers an immediate.
    WriteImm = 1,
    /// Send.
    Send = 2,
    /// Send with immediate.
    SendImm = 3,
    /// RDMA Read.
    Read = 4,
    /// Compare and swap.
    CompareSwap = 5,
    /// Fetch and add.
    FetchAdd = 6,
    /// Takes its memory from a window of ours; nothing of it travels but its place in the order.
    LocalInv = 7,
    /// Binds a window of ours; nothing of it travels but its place in the order.
    BindWindow = 8,
    /// Send that also invalidates a window of the responder's.
    SendInv = 9,
    /// Write of 8 aligned bytes that appear at once.
    AtomicWrite = 15,
    /// On the wire: the place of an operation that is the requester's alone.
    Nop = 127,
}

impl Opcode {
    /// Consumes a receive at the responder.
    pub fn consumes_recv(self) -> bool {
        self.is_send() || self == Opcode::WriteImm
    }
    /// Its payload goes where a receive says.
    pub fn is_send(self) -> bool {
        matches!(self, Opcode::Send | Opcode::SendImm | Opcode::SendInv)
    }
    /// Executed by the requester alone.
    pub fn is_local(self) -> bool {
        matches!(self, Opcode::LocalInv | Opcode::BindWindow)
    }
    /// Completed by a response, not by an acknowledgement.
    pub fn has_response(self) -> bool {
        matches!(self, Opcode::Read | Opcode::CompareSwap | Opcode::FetchAdd)
    }
}

/// `ibv_send_flags`.
pub mod send_flags {
    #![expect(missing_docs, reason = "names are those of ibv_send_flags")]
    pub const FENCE: u8 = 1;
    pub const SIGNALED: u8 = 2;
    pub const SOLICITED: u8 = 4;
    pub const INLINE: u8 = 8;
    /// Nobody's work request: the core's own.
    pub const INTERNAL: u8 = 0x80;
}

/// One work request of a send queue. Its SGEs or inline bytes lie in the [`SendBatch`] beside it.
#[derive(Debug, Clone, Copy)]
pub struct SendWqe {
    /// The application's cookie.
    pub wr_id: u64,
    /// What to do.
    pub opcode: Opcode,
    /// `send_flags` bits (SIGNALED already includes `sq_sig_all`).
    pub flags: u8,
    /// Number of SGEs in the batch (0 with INLINE).
    pub num_sge: u8,
    /// Inline bytes in the batch (with INLINE).
    pub inline_len: u16,
    /// Message length in bytes: the sum of the SGEs or `inline_len`; 8 for atomics.
    pub length: u32,
    /// Immediate data, as it goes on the wire (`__be32` read natively); SendInv, LocalInv: the key to invalidate.
    pub imm: u32,
    /// Remote address (Write, Read, atomics).
    pub remote_addr: u64,
    /// Remote key.
    pub rkey: u32,
    /// FetchAdd: addend; CompareSwap: compare value.
    pub compare_add: u64,
    /// CompareSwap: new value.
    pub swap: u64,
    /// Where it goes (UD); `None` on connected QPs.
    pub dest: Option<Destination>,
    /// The SRQ it is for (XRC).
    pub remote_srq: SrqId,
}

/// What BindWindow does. It lies in the members of a [`SendWqe`] that name the memory of other operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind {
    /// The window's key from now on; its high 24 bits say which window.
    pub new_key: u32,
    /// lkey of the region.
    pub region: u32,
    /// First byte, in the region's iova space.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// What peers may do: `IBV_ACCESS_REMOTE_*` and ZERO_BASED.
    pub access: u32,
}

impl SendWqe {
    /// A request without data, memory or destination.
    pub fn new(wr_id: u64, opcode: Opcode, flags: u8) -> Self {
        SendWqe {
            wr_id,
            opcode,
            flags,
            num_sge: 0,
            inline_len: 0,
            length: 0,
            imm: 0,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            dest: None,
            remote_srq: 0,
        }
    }
    /// Makes the request bind a window.
    pub fn set_bind(&mut self, bind: &Bind) {
        (self.rkey, self.remote_addr, self.compare_add) = (bind.new_key, bind.addr, bind.len);
        self.swap = u64::from(bind.region) << 32 | u64::from(bind.access);
    }
    /// What [`SendWqe::set_bind`] put in.
    pub fn bind(&self) -> Bind {
        Bind {
            new_key: self.rkey,
            region: (self.swap >> 32) as u32,
            addr: self.remote_addr,
            len: self.compare_add,
            access: self.swap as u32,
        }
    }
}

/// Where a datagram goes: the address handle resolved, and what the work request says beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// Peer address.
    pub ip: IpAddr,
    /// Remote QP.
    pub qpn: Qpn,
    /// Q_Key; with the top bit set the QP's own is sent instead.
    pub qkey: u32,
}

/// Work requests on their way from `ibv_post_send` into the core: WQEs in order, their SGEs and inline bytes
/// concatenated in the same order. Drained (and kept allocated) by [`crate::Endpoint::post_sends`].
#[derive(Debug, Default)]
pub struct SendBatch {
    /// The requests.
    pub wqes: Vec<SendWqe>,
    /// SGEs of all requests, in order.
    pub sges: Vec<Sge>,
    /// Inline bytes of all requests, in order.
    pub inline: Vec<u8>,
}

/// One posted receive; its SGEs lie in the [`RecvBatch`] beside it.
#[derive(Debug, Clone, Copy)]
pub struct RecvWqe {
    /// The application's cookie.
    pub wr_id: u64,
    /// Number of SGEs in the batch.
    pub num_sge: u8,
}

/// Receives on their way from `ibv_post_recv` / `ibv_post_srq_recv` into the core.
#[derive(Debug, Default)]
pub struct RecvBatch {
    /// The receives.
    pub wqes: Vec<RecvWqe>,
    /// SGEs of all receives, in order.
    pub sges: Vec<Sge>,
}

/// Completion status; values of `ibv_wc_status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "names are those of ibv_wc_status")]
pub enum WcStatus {
    Success = 0,
    LocLenErr = 1,
    LocQpOpErr = 2,
    LocProtErr = 4,
    WrFlushErr = 5,
    MwBindErr = 6,
    BadRespErr = 7,
    LocAccessErr = 8,
    RemInvReqErr = 9,
    RemAccessErr = 10,
    RemOpErr = 11,
    RetryExcErr = 12,
    RnrRetryExcErr = 13,
    GeneralErr = 21,
    TmErr = 22,
}

/// Completion opcode; values of `ibv_wc_opcode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "names are those of ibv_wc_opcode")]
pub enum WcOpcode {
    Send = 0,
    RdmaWrite = 1,
    RdmaRead = 2,
    CompSwap = 3,
    FetchAdd = 4,
    BindWindow = 5,
    LocalInv = 6,
    AtomicWrite = 9,
    Recv = 128,
    RecvRdmaWithImm = 129,
    TmAdd = 130,
    TmDel = 131,
    TmSync = 132,
    TmRecv = 133,
    TmNoTag = 134,
}

/// `IBV_WC_GRH`.
pub const WC_GRH: u8 = 1;
/// Not a flag of verbs: the header before a datagram is an IPv4 one, in the second half of the 40 bytes.
pub const WC_IPV4: u8 = 0x80;
/// `IBV_WC_WITH_IMM`.
pub const WC_WITH_IMM: u8 = 2;
/// `IBV_WC_WITH_INV`.
pub const WC_WITH_INV: u8 = 8;

/// `IBV_WC_TM_SYNC_REQ`.
pub const WC_TM_SYNC_REQ: u8 = 16;
/// `IBV_WC_TM_MATCH`.
pub const WC_TM_MATCH: u8 = 32;
/// `IBV_WC_TM_DATA_VALID`.
pub const WC_TM_DATA_VALID: u8 = 64;

/// What a tagged message says of itself (`ibv_wc_tm_info`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TagInfo {
    /// The tag.
    pub tag: u64,
    /// The sender's word beside it.
    pub app_ctx: u32,
}

/// One completion, handed to [`Sink::complete`]; maps to `ibv_wc`.
#[derive(Debug, Clone, Copy)]
pub struct Completion {
    /// The work request's cookie.
    pub wr_id: u64,
    /// Outcome.
    pub status: WcStatus,
    /// What completed.
    pub opcode: WcOpcode,
    /// `IBV_WC_*` flags.
    pub wc_flags: u8,
    /// Bytes received (receives, Read, atomics) or sent.
    pub byte_len: u32,
    /// Immediate data if WITH_IMM; the key that was invalidated if WITH_INV.
    pub imm: u32,
    /// The local QP.
    pub qpn: Qpn,
    /// The sender's QP (receives).
    pub src_qp: Qpn,
    /// Slots of the send queue that polling this completion gives back (it and the unsignaled ones before it).
    pub sq_release: u32,
    /// Slots of the receive queue (or SRQ) that polling this completion gives back: 0 or 1.
    pub rq_release: u32,
    /// The SRQ they are of, if that is not the QP's own one (XRC).
    pub srq: Option<SrqId>,
    /// The message was sent with IBV_SEND_SOLICITED, or the completion is an error: counts for solicited-only arming.
    pub solicited: bool,
    /// Of a tagged message that was matched.
    pub tags: TagInfo,
}

impl Completion {
    /// A success that gives back no slots.
    pub fn new(wr_id: u64, opcode: WcOpcode, qpn: Qpn) -> Self {
        Completion {
            wr_id,
            status: WcStatus::Success,
            opcode,
            wc_flags: 0,
            byte_len: 0,
            imm: 0,
            qpn,
            src_qp: Qpn(0),
            sq_release: 0,
            rq_release: 0,
            srq: None,
            solicited: false,
            tags: TagInfo::default(),
        }
    }
}

/// Asynchronous events; map to `ibv_event_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// IBV_EVENT_QP_FATAL.
    QpFatal(Qpn),
    /// IBV_EVENT_QP_REQ_ERR.
    QpReqErr(Qpn),
    /// IBV_EVENT_QP_ACCESS_ERR.
    QpAccessErr(Qpn),
    /// IBV_EVENT_COMM_EST: data arrived on a QP still in RTR.
    CommEst(Qpn),
    /// IBV_EVENT_SQ_DRAINED.
    SqDrained(Qpn),
    /// IBV_EVENT_QP_LAST_WQE_REACHED (QPs on an SRQ).
    LastWqeReached(Qpn),
    /// Not a verbs event: the core itself moved the QP to this state; comes before the completions that tell why.
    State(Qpn, QpState),
    /// IBV_EVENT_SRQ_LIMIT_REACHED.
    SrqLimit(SrqId),
}

/// Where completions and events go; implemented by the engine, statically dispatched.
pub trait Sink {
    /// A completion for completion queue `cq`, in order per queue pair and queue.
    fn complete(&mut self, cq: CqId, completion: &Completion);
    /// An asynchronous event.
    fn event(&mut self, event: Event);
}

/// Completion queue number, chosen by the engine; opaque to the core.
pub type CqId = u32;
/// Shared receive queue number, given by [`crate::Endpoint::create_srq`].
pub type SrqId = u32;

/// QP states; values of `ibv_qp_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(u8)]
#[expect(missing_docs, reason = "names are those of ibv_qp_state")]
pub enum QpState {
    #[default]
    Reset = 0,
    Init = 1,
    Rtr = 2,
    Rts = 3,
    Sqd = 4,
    Sqe = 5,
    Err = 6,
}

/// Transport of a QP; values of `ibv_qp_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum QpType {
    /// Reliable connection.
    Rc = 2,
    /// Unreliable connection.
    Uc = 3,
    /// Unreliable datagram.
    Ud = 4,
    /// Ethernet frames, within the endpoint.
    Raw = 8,
    /// Requester of an extended reliable connection: each message names the SRQ it is for.
    XrcSend = 9,
    /// Responder of an extended reliable connection.
    XrcRecv = 10,
}

impl QpType {
    /// Acknowledged and repaired.
    pub fn is_reliable(self) -> bool {
        matches!(self, QpType::Rc | QpType::XrcSend | QpType::XrcRecv)
    }
    /// It has one peer.
    pub fn is_connected(self) -> bool {
        !matches!(self, QpType::Ud | QpType::Raw)
    }
}

/// What a QP is made of.
#[derive(Debug, Clone, Copy)]
pub struct QpInit {
    /// Transport.
    pub qp_type: QpType,
    /// Protection domain number.
    pub pd: u32,
    /// Where send completions go.
    pub send_cq: CqId,
    /// Where receive completions go.
    pub recv_cq: CqId,
    /// Shared receive queue, if any.
    pub srq: Option<SrqId>,
    /// XRC domain (XrcRecv): its messages go to SRQs of it.
    pub xrcd: Option<u32>,
    /// Send queue depth.
    pub max_send_wr: u32,
    /// Receive queue depth.
    pub max_recv_wr: u32,
    /// SGEs per send.
    pub max_send_sge: u32,
    /// SGEs per receive.
    pub max_recv_sge: u32,
    /// Inline bytes per send.
    pub max_inline: u32,
}

/// Attributes to change; `None` leaves as is. The verbs edge has checked masks and transitions before.
#[derive(Debug, Clone, Copy, Default)]
#[expect(missing_docs, reason = "names are those of ibv_qp_attr")]
pub struct QpModify {
    pub state: Option<QpState>,
    /// `IBV_ACCESS_REMOTE_*` bits allowed to the peer.
    pub access: Option<u32>,
    pub dest_qpn: Option<Qpn>,
    /// Peer address from the address vector's GID, and our own address from `sgid_index`.
    pub remote: Option<IpAddr>,
    pub local: Option<IpAddr>,
    /// Q_Key (UD).
    pub qkey: Option<u32>,
    /// Path MTU in bytes.
    pub path_mtu: Option<u32>,
    pub timeout: Option<u8>,
    pub retry_cnt: Option<u8>,
    pub rnr_retry: Option<u8>,
    pub min_rnr_timer: Option<u8>,
    pub max_rd_atomic: Option<u8>,
    pub max_dest_rd_atomic: Option<u8>,
}

/// A change of the expected messages of a tag matching SRQ.
#[derive(Debug, Clone, Copy)]
pub struct TagOp {
    /// The application's cookie.
    pub wr_id: u64,
    /// What to do.
    pub change: TagChange,
    /// How many messages that matched nothing the application has heard of.
    pub heard: u32,
    /// That number settles what takes part in matching.
    pub sync: bool,
    /// It completes.
    pub signaled: bool,
}

/// What a [`TagOp`] does.
#[derive(Debug, Clone, Copy)]
pub enum TagChange {
    /// Adds an expected message.
    Add(Expected),
    /// Takes one out, by its number.
    Delete(u32),
    /// Nothing else.
    Sync,
}

/// Why a call on the core was refused; each maps to an errno.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// No such object (EINVAL).
    NotFound,
    /// A table is full (ENOMEM).
    Full,
    /// The object is still used by another (EBUSY).
    Busy,
    /// Not valid in this state or out of range (EINVAL).
    Invalid,
    /// The feature is not there (EOPNOTSUPP).
    Unsupported,
}

/// Facts about a received datagram (or GRO run of datagrams).
#[derive(Debug, Clone, Copy)]
pub struct RxMeta {
    /// UDP source.
    pub src: SocketAddr,
    /// Local address it was sent to.
    pub dst_ip: IpAddr,
    /// ECN field of the IP header (0..=3; 3 is CE).
    pub ecn: u8,
}
