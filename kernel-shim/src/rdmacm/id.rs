//! An rdma_cm_id as this side of the device sees it.

use std::net::SocketAddr;

use super::abi::{Plain, QpAttr, RDMA_PS_UDP};
use super::machine::{Conn, Key, State};
use super::service::ah_attr;
use super::socket::Socket;

/// Room for private data in InfiniBand's messages, less what IP addressing takes of the requests.
pub(super) mod private_bytes {
    pub(crate) const REQ: usize = 56;
    pub(crate) const REP: usize = 196;
    pub(crate) const REJ: usize = 148;
    pub(crate) const SIDR_REQ: usize = 180;
    pub(crate) const SIDR_REP: usize = 136;
}

/// The queue key of datagram services that name none (RDMA_UDP_QKEY).
pub(super) const RDMA_UDP_QKEY: u32 = 0x0123_4567;

#[derive(Debug)]
pub(super) struct Id {
    /// Inode of the channel that its events go to.
    pub channel: u64,
    /// What the application calls it; 0 until it accepts a request.
    pub uid: u64,
    pub port_space: u16,
    pub qp_type: u8,
    pub src: Option<SocketAddr>,
    pub dst: Option<SocketAddr>,
    /// The device's GID it is bound to, once it is.
    pub gid_index: Option<usize>,
    pub gid_remote: [u8; 16],
    pub routed: bool,
    pub listening: bool,
    /// Keeps the port that the application asked for.
    pub socket: Option<Socket>,
    pub key: Option<Key>,
    pub events_reported: u32,
    pub reuse_address: bool,
    pub only_v6: bool,
    pub traffic_class: u8,
    pub ack_timeout: Option<u8>,
}

impl Id {
    pub(super) fn new(channel: u64, uid: u64, port_space: u16, qp_type: u8) -> Id {
        Id {
            channel,
            uid,
            port_space,
            qp_type,
            src: None,
            dst: None,
            gid_index: None,
            gid_remote: [0; 16],
            routed: false,
            listening: false,
            socket: None,
            key: None,
            events_reported: 0,
            reuse_address: false,
            only_v6: false,
            traffic_class: 0,
            ack_timeout: None,
        }
    }

    pub(super) fn is_datagram(&self) -> bool {
        self.port_space == RDMA_PS_UDP
    }
}

mod mask {
    //! enum ibv_qp_attr_mask.
    pub(super) const STATE: u32 = 1 << 0;
    pub(super) const ACCESS_FLAGS: u32 = 1 << 3;
    pub(super) const PKEY_INDEX: u32 = 1 << 4;
    pub(super) const PORT: u32 = 1 << 5;
    pub(super) const QKEY: u32 = 1 << 6;
    pub(super) const AV: u32 = 1 << 7;
    pub(super) const PATH_MTU: u32 = 1 << 8;
    pub(super) const TIMEOUT: u32 = 1 << 9;
    pub(super) const RETRY_CNT: u32 = 1 << 10;
    pub(super) const RNR_RETRY: u32 = 1 << 11;
    pub(super) const RQ_PSN: u32 = 1 << 12;
    pub(super) const MAX_QP_RD_ATOMIC: u32 = 1 << 13;
    pub(super) const MIN_RNR_TIMER: u32 = 1 << 15;
    pub(super) const SQ_PSN: u32 = 1 << 16;
    pub(super) const MAX_DEST_RD_ATOMIC: u32 = 1 << 17;
    pub(super) const DEST_QPN: u32 = 1 << 20;
}

const QPT_RC: u8 = 2;
const QPT_XRC_SEND: u8 = 9;
const QPT_XRC_RECV: u8 = 10;
const QPS_INIT: u32 = 1;
const QPS_RTR: u32 = 2;
const QPS_RTS: u32 = 3;
const ACCESS_REMOTE_WRITE: u32 = 1 << 1;
const ACCESS_REMOTE_READ: u32 = 1 << 2;
const ACCESS_REMOTE_ATOMIC: u32 = 1 << 3;

/// About a second, eight times: a peer on a loaded machine is not dead (4.096 us * 2^18).
const ACK_TIMEOUT: u8 = 18;
/// 0.64 ms. The kernel says 0, which is 655 ms: hardware's receivers are rarely late, ours wait for a processor.
const MIN_RNR_TIMER: u8 = 12;

/// The attributes that take an id's QP to `state`; `None` when the connection is not that far.
pub(super) fn qp_attr(id: &Id, conn: Option<&Conn>, state: u32) -> Option<QpAttr> {
    id.gid_index?;
    let attr = QpAttr { qp_state: state, port_num: 1, ..QpAttr::read(&[]) };
    if id.is_datagram() {
        let qp_attr_mask = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::QKEY;
        return (state <= QPS_RTS).then_some(QpAttr { qp_attr_mask, qkey: RDMA_UDP_QKEY, ..attr });
    }
    match (state, conn) {
        (QPS_INIT, conn) => {
            let qp_attr_mask = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS_FLAGS;
            let remote = |conn: &Conn| {
                let depth = if conn.state == State::ReqSent {
                    conn.ours.responder_resources
                } else {
                    conn.theirs.initiator_depth
                };
                if depth > 0 { ACCESS_REMOTE_READ | ACCESS_REMOTE_ATOMIC } else { 0 }
            };
            let qp_access_flags = conn.map_or(0, |conn| ACCESS_REMOTE_WRITE | remote(conn));
            Some(QpAttr { qp_attr_mask, qp_access_flags, ..attr })
        }
        (QPS_RTR, Some(conn)) if conn.has_terms() => {
            let mut qp_attr_mask = mask::STATE | mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN;
            if matches!(id.qp_type, QPT_RC | QPT_XRC_RECV) {
                qp_attr_mask |= mask::MAX_DEST_RD_ATOMIC | mask::MIN_RNR_TIMER;
            }
            let accepted = conn.passive && conn.state != State::ReqRcvd;
            Some(QpAttr {
                qp_attr_mask,
                ah_attr: ah_attr(id),
                path_mtu: conn.ours.mtu.into(),
                dest_qp_num: conn.theirs.qpn,
                rq_psn: conn.theirs.psn,
                max_dest_rd_atomic: if accepted {
                    conn.ours.responder_resources
                } else {
                    conn.theirs.initiator_depth
                },
                min_rnr_timer: MIN_RNR_TIMER,
                ..attr
            })
        }
        (QPS_RTS, Some(conn)) if conn.has_terms() => {
            let mut qp_attr_mask = mask::STATE | mask::SQ_PSN;
            if matches!(id.qp_type, QPT_RC | QPT_XRC_SEND) {
                qp_attr_mask |= mask::RETRY_CNT | mask::RNR_RETRY | mask::MAX_QP_RD_ATOMIC;
            }
            if matches!(id.qp_type, QPT_RC | QPT_XRC_SEND | QPT_XRC_RECV) {
                qp_attr_mask |= mask::TIMEOUT;
            }
            let accepted = conn.passive && conn.state != State::ReqRcvd;
            Some(QpAttr {
                qp_attr_mask,
                sq_psn: conn.ours.psn,
                timeout: id.ack_timeout.unwrap_or(ACK_TIMEOUT),
                retry_cnt: if conn.passive { conn.theirs.retry_count } else { conn.ours.retry_count },
                rnr_retry: conn.theirs.rnr_retry_count,
                max_rd_atomic: if accepted {
                    conn.ours.initiator_depth
                } else {
                    conn.theirs.responder_resources
                },
                ..attr
            })
        }
        _ => None,
    }
}
