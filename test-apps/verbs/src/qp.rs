//! Queue pairs and shared receive queues.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::context::PORT;
use crate::{Cq, Pd, check, last_error, sys};

/// `IBV_QPS_*` states.
pub mod state {
    pub use crate::sys::{
        IBV_QPS_ERR as ERR, IBV_QPS_INIT as INIT, IBV_QPS_RESET as RESET, IBV_QPS_RTR as RTR,
        IBV_QPS_RTS as RTS, IBV_QPS_SQD as SQD, IBV_QPS_SQE as SQE,
    };
}

/// `IBV_QP_*` attribute mask bits.
pub mod mask {
    pub use crate::sys::{
        IBV_QP_ACCESS_FLAGS as ACCESS_FLAGS, IBV_QP_AV as AV, IBV_QP_DEST_QPN as DEST_QPN,
        IBV_QP_MAX_DEST_RD_ATOMIC as MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC as MAX_QP_RD_ATOMIC,
        IBV_QP_MIN_RNR_TIMER as MIN_RNR_TIMER, IBV_QP_PATH_MTU as PATH_MTU, IBV_QP_PKEY_INDEX as PKEY_INDEX,
        IBV_QP_PORT as PORT, IBV_QP_QKEY as QKEY, IBV_QP_RETRY_CNT as RETRY_CNT,
        IBV_QP_RNR_RETRY as RNR_RETRY, IBV_QP_RQ_PSN as RQ_PSN, IBV_QP_SQ_PSN as SQ_PSN,
        IBV_QP_STATE as STATE, IBV_QP_TIMEOUT as TIMEOUT,
    };
    /// What RESET to INIT takes for RC and UC.
    pub const TO_INIT: u32 = STATE | PKEY_INDEX | PORT | ACCESS_FLAGS;
    /// What INIT to RTR takes for RC.
    pub const TO_RTR: u32 = STATE | AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER;
    /// What RTR to RTS takes for RC.
    pub const TO_RTS: u32 = STATE | SQ_PSN | TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_QP_RD_ATOMIC;
    /// The same for UC: nothing of what makes a connection reliable.
    pub const UC_TO_RTR: u32 = STATE | AV | PATH_MTU | DEST_QPN | RQ_PSN;
    /// The same for UD: a key instead of rights, no peer.
    pub const UD_TO_INIT: u32 = STATE | PKEY_INDEX | PORT | QKEY;
    /// RTR to RTS for UC and UD.
    pub const UNRELIABLE_TO_RTS: u32 = STATE | SQ_PSN;
}

/// The service of a QP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection: Sends and Writes that may get lost.
    Uc,
    /// Unreliable datagrams: Sends of one packet.
    Ud,
}

impl Transport {
    fn raw(self) -> u32 {
        match self {
            Transport::Rc => sys::IBV_QPT_RC,
            Transport::Uc => sys::IBV_QPT_UC,
            Transport::Ud => sys::IBV_QPT_UD,
        }
    }

    /// Every operation `ibv_wr_*` has for it, as far as this crate knows them.
    fn operations(self) -> u32 {
        let sends = sys::IBV_QP_EX_WITH_SEND | sys::IBV_QP_EX_WITH_SEND_WITH_IMM;
        let writes = sys::IBV_QP_EX_WITH_RDMA_WRITE | sys::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
        let reads = sys::IBV_QP_EX_WITH_RDMA_READ
            | sys::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
            | sys::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
        match self {
            Transport::Rc => sends | writes | reads,
            Transport::Uc => sends | writes,
            Transport::Ud => sends,
        }
    }
}

/// Name of a QP state.
pub fn state_name(value: u32) -> &'static str {
    ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"].get(value as usize).copied().unwrap_or("?")
}

/// Sizes asked of a QP, and given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpCaps {
    /// Send WRs outstanding.
    pub send_wr: u32,
    /// Receive WRs outstanding.
    pub recv_wr: u32,
    /// SGEs per send WR.
    pub send_sge: u32,
    /// SGEs per receive WR.
    pub recv_sge: u32,
    /// Inline bytes.
    pub inline: u32,
}

/// How to make a QP.
#[derive(Debug)]
pub struct QpOptions<'a> {
    /// Its service.
    pub transport: Transport,
    /// CQ of its send queue.
    pub send_cq: &'a Arc<Cq>,
    /// CQ of its receive queue.
    pub recv_cq: &'a Arc<Cq>,
    /// Receives come from here.
    pub srq: Option<&'a Arc<Srq>>,
    /// Sizes.
    pub caps: QpCaps,
    /// Every send is signaled.
    pub signal_all: bool,
    /// Make it by `ibv_create_qp_ex`, able to post by `ibv_wr_*`.
    pub extended: bool,
}

/// The peer of an RC QP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Remote {
    /// Its GID.
    pub gid: [u8; 16],
    /// Its QP number.
    pub qpn: u32,
}

/// Attributes of an RC QP that the tests vary; [`Attr::default`] is a usual choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attr {
    /// `IBV_QPS_*` to go to.
    pub state: u32,
    /// `qp_access_flags`.
    pub access: u32,
    /// Path MTU in bytes (256 to 4096).
    pub path_mtu: u32,
    /// Who to talk to.
    pub remote: Remote,
    /// Index of our GID.
    pub gid_index: u8,
    /// GRH given (RoCE demands it).
    pub is_global: bool,
    /// First PSN we expect.
    pub rq_psn: u32,
    /// First PSN we send.
    pub sq_psn: u32,
    /// Reads and atomics in flight as requester.
    pub max_rd_atomic: u8,
    /// Reads and atomics in flight as responder.
    pub max_dest_rd_atomic: u8,
    /// RNR NAK delay code.
    pub min_rnr_timer: u8,
    /// Local ACK timeout code: 4.096 us times two to this power; 0 is for ever.
    pub timeout: u8,
    /// Transport retries.
    pub retry_cnt: u8,
    /// RNR retries, 7 is for ever.
    pub rnr_retry: u8,
    /// Key that datagrams must carry.
    pub qkey: u32,
}

impl Default for Attr {
    fn default() -> Self {
        Self {
            state: state::RESET,
            access: sys::IBV_ACCESS_REMOTE_WRITE
                | sys::IBV_ACCESS_REMOTE_READ
                | sys::IBV_ACCESS_REMOTE_ATOMIC,
            path_mtu: 1024,
            remote: Remote { gid: [0; 16], qpn: 0 },
            gid_index: 0,
            is_global: true,
            rq_psn: 0x11_1111,
            sq_psn: 0x11_1111,
            max_rd_atomic: 8,
            max_dest_rd_atomic: 8,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            qkey: 0x1111_1111,
        }
    }
}

impl Attr {
    fn raw(&self) -> sys::ibv_qp_attr {
        let mut raw = sys::ibv_qp_attr {
            qp_state: self.state,
            qp_access_flags: self.access,
            path_mtu: (self.path_mtu / 128).checked_ilog2().unwrap_or(0),
            dest_qp_num: self.remote.qpn,
            rq_psn: self.rq_psn,
            sq_psn: self.sq_psn,
            max_rd_atomic: self.max_rd_atomic,
            max_dest_rd_atomic: self.max_dest_rd_atomic,
            min_rnr_timer: self.min_rnr_timer,
            timeout: self.timeout,
            retry_cnt: self.retry_cnt,
            rnr_retry: self.rnr_retry,
            qkey: self.qkey,
            port_num: PORT,
            ..Default::default()
        };
        raw.ah_attr.is_global = u8::from(self.is_global);
        raw.ah_attr.port_num = PORT;
        raw.ah_attr.grh.dgid.raw = self.remote.gid;
        raw.ah_attr.grh.sgid_index = self.gid_index;
        raw.ah_attr.grh.hop_limit = 64;
        raw
    }
}

/// A QP.
#[derive(Debug)]
pub struct Qp {
    raw: NonNull<sys::ibv_qp>,
    caps: QpCaps,
    transport: Transport,
    extended: bool,
    _held: (Arc<Pd>, Arc<Cq>, Arc<Cq>, Option<Arc<Srq>>),
}

// SAFETY: verbs objects may be used from any thread.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

impl Qp {
    /// Makes one in RESET.
    pub fn new(pd: &Arc<Pd>, options: &QpOptions<'_>) -> io::Result<Self> {
        let cap = sys::ibv_qp_cap {
            max_send_wr: options.caps.send_wr,
            max_recv_wr: options.caps.recv_wr,
            max_send_sge: options.caps.send_sge,
            max_recv_sge: options.caps.recv_sge,
            max_inline_data: options.caps.inline,
        };
        let srq = options.srq.map_or(std::ptr::null_mut(), |s| s.raw());
        // SAFETY: PD, CQs and SRQ are alive and kept so by the Arcs stored below; the calls read and update
        // the attr structs only.
        let (raw, cap) = unsafe {
            if options.extended {
                let mut init = sys::ibv_qp_init_attr_ex {
                    send_cq: options.send_cq.raw(),
                    recv_cq: options.recv_cq.raw(),
                    srq,
                    cap,
                    qp_type: options.transport.raw(),
                    sq_sig_all: i32::from(options.signal_all),
                    comp_mask: sys::IBV_QP_INIT_ATTR_PD | sys::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
                    pd: pd.raw(),
                    send_ops_flags: u64::from(options.transport.operations()),
                    ..Default::default()
                };
                (sys::ibv_create_qp_ex(pd.context().raw(), &mut init), init.cap)
            } else {
                let mut init = sys::ibv_qp_init_attr {
                    send_cq: options.send_cq.raw(),
                    recv_cq: options.recv_cq.raw(),
                    srq,
                    cap,
                    qp_type: options.transport.raw(),
                    sq_sig_all: i32::from(options.signal_all),
                    ..Default::default()
                };
                (sys::ibv_create_qp(pd.raw(), &mut init), init.cap)
            }
        };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("ibv_create_qp"))?;
        let caps = QpCaps {
            send_wr: cap.max_send_wr,
            recv_wr: cap.max_recv_wr,
            send_sge: cap.max_send_sge,
            recv_sge: cap.max_recv_sge,
            inline: cap.max_inline_data,
        };
        let held = (pd.clone(), options.send_cq.clone(), options.recv_cq.clone(), options.srq.cloned());
        Ok(Self { raw, caps, transport: options.transport, extended: options.extended, _held: held })
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_qp {
        self.raw.as_ptr()
    }

    pub(crate) fn is_extended(&self) -> bool {
        self.extended
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        // SAFETY: the QP is alive.
        unsafe { self.raw.as_ref() }.qp_num
    }

    /// What the device gave.
    pub fn caps(&self) -> QpCaps {
        self.caps
    }

    /// `ibv_modify_qp` with exactly the attributes of `mask`.
    pub fn modify(&self, attr: &Attr, mask: u32) -> io::Result<()> {
        let mut raw = attr.raw();
        // SAFETY: the QP is alive; the call reads one attr struct.
        check("ibv_modify_qp", unsafe { sys::ibv_modify_qp(self.raw(), &mut raw, mask as i32) })
    }

    /// RESET to INIT.
    pub fn to_init(&self, attr: &Attr) -> io::Result<()> {
        let mask = if self.transport == Transport::Ud { mask::UD_TO_INIT } else { mask::TO_INIT };
        self.modify(&Attr { state: state::INIT, ..*attr }, mask)
    }

    /// INIT to RTR.
    pub fn to_rtr(&self, attr: &Attr) -> io::Result<()> {
        let mask = match self.transport {
            Transport::Rc => mask::TO_RTR,
            Transport::Uc => mask::UC_TO_RTR,
            Transport::Ud => mask::STATE,
        };
        self.modify(&Attr { state: state::RTR, ..*attr }, mask)
    }

    /// RTR to RTS.
    pub fn to_rts(&self, attr: &Attr) -> io::Result<()> {
        let mask = if self.transport == Transport::Rc { mask::TO_RTS } else { mask::UNRELIABLE_TO_RTS };
        self.modify(&Attr { state: state::RTS, ..*attr }, mask)
    }

    /// Any state to one that needs STATE alone (RESET, ERR).
    pub fn to_state(&self, state: u32) -> io::Result<()> {
        self.modify(&Attr { state, ..Attr::default() }, mask::STATE)
    }

    /// What `ibv_query_qp` says now, as far as [`Attr`] holds it.
    pub fn query(&self) -> io::Result<Attr> {
        // SAFETY: the QP is alive; the call fills both structs; ibv_gid is bytes whichever field is read.
        unsafe {
            let mut raw = sys::ibv_qp_attr::default();
            let mut init = sys::ibv_qp_init_attr::default();
            let all = mask::TO_INIT | mask::TO_RTR | mask::TO_RTS;
            check("ibv_query_qp", sys::ibv_query_qp(self.raw(), &mut raw, all as i32, &mut init))?;
            Ok(Attr {
                state: raw.qp_state,
                access: raw.qp_access_flags,
                path_mtu: if raw.path_mtu == 0 { 0 } else { 128 << raw.path_mtu },
                remote: Remote { gid: raw.ah_attr.grh.dgid.raw, qpn: raw.dest_qp_num },
                gid_index: raw.ah_attr.grh.sgid_index,
                is_global: raw.ah_attr.is_global != 0,
                rq_psn: raw.rq_psn,
                sq_psn: raw.sq_psn,
                max_rd_atomic: raw.max_rd_atomic,
                max_dest_rd_atomic: raw.max_dest_rd_atomic,
                min_rnr_timer: raw.min_rnr_timer,
                timeout: raw.timeout,
                retry_cnt: raw.retry_cnt,
                rnr_retry: raw.rnr_retry,
                qkey: raw.qkey,
            })
        }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once; what it uses is still held.
        unsafe { sys::ibv_destroy_qp(self.raw()) };
    }
}

/// A basic shared receive queue.
#[derive(Debug)]
pub struct Srq {
    raw: NonNull<sys::ibv_srq>,
    _pd: Arc<Pd>,
}

// SAFETY: verbs objects may be used from any thread.
unsafe impl Send for Srq {}
// SAFETY: as above.
unsafe impl Sync for Srq {}

impl Srq {
    /// Makes one for `wrs` receives of `sges` elements.
    pub fn new(pd: &Arc<Pd>, wrs: u32, sges: u32) -> io::Result<Arc<Self>> {
        let mut init = sys::ibv_srq_init_attr::default();
        init.attr.max_wr = wrs;
        init.attr.max_sge = sges;
        // SAFETY: the PD is alive and kept so; the call reads and updates `init` only.
        let raw = unsafe { sys::ibv_create_srq(pd.raw(), &mut init) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("ibv_create_srq"))?;
        Ok(Arc::new(Self { raw, _pd: pd.clone() }))
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_srq {
        self.raw.as_ptr()
    }

    /// How an [`crate::AsyncEvent`] names it.
    pub fn element(&self) -> crate::Element {
        crate::Element::Srq(self.raw() as usize)
    }

    /// Arms the limit event: once when fewer than `limit` receives are left.
    pub fn arm_limit(&self, limit: u32) -> io::Result<()> {
        let mut attr = sys::ibv_srq_attr { srq_limit: limit, ..Default::default() };
        // SAFETY: the SRQ is alive; the call reads one attr struct.
        check("ibv_modify_srq", unsafe {
            sys::ibv_modify_srq(self.raw(), &mut attr, sys::IBV_SRQ_LIMIT as i32)
        })
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        // SAFETY: QPs hold an Arc of their SRQ, so none is left.
        unsafe { sys::ibv_destroy_srq(self.raw()) };
    }
}
