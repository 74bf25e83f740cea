//! QP attributes: the table of legal transitions and the ranges of values. Nothing here changes anything.

use rdma_core_sys::*;

use crate::ffi::Result;
use crate::limits::{MAX_RD_ATOMIC, PORT};

const PKEY: u32 = IBV_QP_PKEY_INDEX;
const PORT_BIT: u32 = IBV_QP_PORT;
const ACCESS: u32 = IBV_QP_ACCESS_FLAGS;
const QKEY: u32 = IBV_QP_QKEY;
const CUR: u32 = IBV_QP_CUR_STATE;
const ALT: u32 = IBV_QP_ALT_PATH;
const MIG: u32 = IBV_QP_PATH_MIG_STATE;
const RNR_TIMER: u32 = IBV_QP_MIN_RNR_TIMER;

/// Required and optional attributes of a transition for one transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Masks {
    pub(crate) required: u32,
    pub(crate) optional: u32,
}

impl Masks {
    fn without(self, lacks: u32) -> Self {
        Masks { required: self.required & !lacks, optional: self.optional & !lacks }
    }
}

const fn masks(required: u32, optional: u32) -> Masks {
    Masks { required, optional }
}

/// A legal transition (or change within a state) with the masks of RC, UC and UD.
struct Transition {
    from: ibv_qp_state,
    to: ibv_qp_state,
    rc: Masks,
    uc: Masks,
    ud: Masks,
}

/// The masks of XRC where they differ from RC's: requesters have no responder's attributes and the other way round.
const XRC_SEND_LACKS: u32 = IBV_QP_MAX_DEST_RD_ATOMIC | RNR_TIMER;
const XRC_RECV_LACKS: u32 = IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;

const UC_TO_RTR: u32 = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
const RC_TO_RTR: u32 = UC_TO_RTR | IBV_QP_MAX_DEST_RD_ATOMIC | RNR_TIMER;
const RC_TO_RTS: u32 =
    IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
/// Optional on the way to RTS and within it.
const UC_IN_RTS: u32 = CUR | ALT | ACCESS | MIG;
const RC_IN_RTS: u32 = UC_IN_RTS | RNR_TIMER;
const UC_IN_SQD: u32 = IBV_QP_AV | ALT | ACCESS | PKEY | MIG;
const RC_IN_SQD: u32 = UC_IN_SQD
    | PORT_BIT
    | IBV_QP_TIMEOUT
    | IBV_QP_RETRY_CNT
    | IBV_QP_RNR_RETRY
    | IBV_QP_MAX_QP_RD_ATOMIC
    | IBV_QP_MAX_DEST_RD_ATOMIC
    | RNR_TIMER;

/// Every legal pair of states except the ways to RESET and ERR, which are open from everywhere with STATE alone.
const TRANSITIONS: &[Transition] = &[
    Transition {
        from: IBV_QPS_RESET,
        to: IBV_QPS_INIT,
        rc: masks(PKEY | PORT_BIT | ACCESS, 0),
        uc: masks(PKEY | PORT_BIT | ACCESS, 0),
        ud: masks(PKEY | PORT_BIT | QKEY, 0),
    },
    Transition {
        from: IBV_QPS_INIT,
        to: IBV_QPS_INIT,
        rc: masks(0, PKEY | PORT_BIT | ACCESS),
        uc: masks(0, PKEY | PORT_BIT | ACCESS),
        ud: masks(0, PKEY | PORT_BIT | QKEY),
    },
    Transition {
        from: IBV_QPS_INIT,
        to: IBV_QPS_RTR,
        rc: masks(RC_TO_RTR, ALT | ACCESS | PKEY),
        uc: masks(UC_TO_RTR, ALT | ACCESS | PKEY),
        ud: masks(0, PKEY | QKEY),
    },
    Transition {
        from: IBV_QPS_RTR,
        to: IBV_QPS_RTS,
        rc: masks(RC_TO_RTS, RC_IN_RTS),
        uc: masks(IBV_QP_SQ_PSN, UC_IN_RTS),
        ud: masks(IBV_QP_SQ_PSN, CUR | QKEY),
    },
    Transition {
        from: IBV_QPS_RTS,
        to: IBV_QPS_RTS,
        rc: masks(0, RC_IN_RTS),
        uc: masks(0, UC_IN_RTS),
        ud: masks(0, CUR | QKEY),
    },
    Transition {
        from: IBV_QPS_RTS,
        to: IBV_QPS_SQD,
        rc: masks(0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
        uc: masks(0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
        ud: masks(0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
    },
    Transition {
        from: IBV_QPS_SQD,
        to: IBV_QPS_SQD,
        rc: masks(0, RC_IN_SQD),
        uc: masks(0, UC_IN_SQD),
        ud: masks(0, PKEY | QKEY),
    },
    Transition {
        from: IBV_QPS_SQD,
        to: IBV_QPS_RTS,
        rc: masks(0, RC_IN_RTS),
        uc: masks(0, UC_IN_RTS),
        ud: masks(0, CUR | QKEY),
    },
    Transition {
        from: IBV_QPS_SQE,
        to: IBV_QPS_RTS,
        rc: masks(0, 0),
        uc: masks(0, CUR | ACCESS),
        ud: masks(0, CUR | QKEY),
    },
];

/// The masks of a transition; `None` when it is illegal.
pub(crate) fn transition(qp_type: ibv_qp_type, from: ibv_qp_state, to: ibv_qp_state) -> Option<Masks> {
    if from > IBV_QPS_ERR {
        return None;
    }
    if to == IBV_QPS_RESET || to == IBV_QPS_ERR {
        return Some(masks(0, 0));
    }
    let row = TRANSITIONS.iter().find(|t| t.from == from && t.to == to)?;
    match qp_type {
        IBV_QPT_RAW_PACKET => Some(raw(from, to)),
        // An RC send queue never is in SQE: its errors end the QP.
        IBV_QPT_RC if from != IBV_QPS_SQE => Some(row.rc),
        IBV_QPT_XRC_SEND if from != IBV_QPS_SQE => Some(row.rc.without(XRC_SEND_LACKS)),
        IBV_QPT_XRC_RECV if from != IBV_QPS_SQE => Some(row.rc.without(XRC_RECV_LACKS)),
        IBV_QPT_UC => Some(row.uc),
        IBV_QPT_UD => Some(row.ud),
        _ => None,
    }
}

/// The masks of raw packets, which have little to set.
fn raw(from: ibv_qp_state, to: ibv_qp_state) -> Masks {
    match (from, to) {
        (IBV_QPS_RESET, IBV_QPS_INIT) => masks(PORT_BIT, 0),
        (IBV_QPS_INIT, IBV_QPS_INIT) => masks(0, PORT_BIT),
        (IBV_QPS_RTS, IBV_QPS_SQD) => masks(0, IBV_QP_EN_SQD_ASYNC_NOTIFY),
        (_, IBV_QPS_RTS) => masks(0, CUR),
        _ => masks(0, 0),
    }
}

/// The mask without what the other side of an XRC connection has: it may be given and means nothing, as in the kernel.
pub(crate) fn relevant(qp_type: ibv_qp_type, mask: u32) -> u32 {
    match qp_type {
        IBV_QPT_XRC_SEND => mask & !XRC_SEND_LACKS,
        IBV_QPT_XRC_RECV => mask & !XRC_RECV_LACKS,
        _ => mask,
    }
}

/// The state a modify leads to; EINVAL when the mask or the transition is illegal.
pub(crate) fn check_mask(
    qp_type: ibv_qp_type,
    from: ibv_qp_state,
    attr: &ibv_qp_attr,
    mask: u32,
) -> Result<ibv_qp_state> {
    let to = if mask & IBV_QP_STATE != 0 { attr.qp_state } else { from };
    let masks = transition(qp_type, from, to).ok_or(libc::EINVAL)?;
    let attributes = mask & !IBV_QP_STATE;
    let complete = attributes & masks.required == masks.required;
    let only_known = attributes & !(masks.required | masks.optional) == 0;
    let assumed = mask & CUR == 0 || attr.cur_qp_state == from;
    if complete && only_known && assumed { Ok(to) } else { Err(libc::EINVAL) }
}

/// EINVAL for a value out of range, EOPNOTSUPP for what the device does not have (alternate paths).
pub(crate) fn check_values(attr: &ibv_qp_attr, mask: u32) -> Result<()> {
    const ACCESS_KNOWN: u32 = 0x3ff0_00ff;
    let has = |bit: u32| mask & bit != 0;
    let out_of_range = has(PKEY) && attr.pkey_index != 0
        || has(PORT_BIT) && attr.port_num != PORT
        || has(ACCESS) && attr.qp_access_flags & !ACCESS_KNOWN != 0
        || has(IBV_QP_PATH_MTU) && !(IBV_MTU_256..=IBV_MTU_4096).contains(&attr.path_mtu)
        || has(IBV_QP_DEST_QPN) && attr.dest_qp_num > 0xff_ffff
        || has(IBV_QP_TIMEOUT) && attr.timeout > 31
        || has(IBV_QP_RETRY_CNT) && attr.retry_cnt > 7
        || has(IBV_QP_RNR_RETRY) && attr.rnr_retry > 7
        || has(RNR_TIMER) && attr.min_rnr_timer > 31
        || has(IBV_QP_MAX_QP_RD_ATOMIC) && u32::from(attr.max_rd_atomic) > MAX_RD_ATOMIC
        || has(IBV_QP_MAX_DEST_RD_ATOMIC) && u32::from(attr.max_dest_rd_atomic) > MAX_RD_ATOMIC;
    if out_of_range {
        return Err(libc::EINVAL);
    }
    if has(ALT) || has(MIG) && attr.path_mig_state != IBV_MIG_MIGRATED {
        return Err(libc::EOPNOTSUPP);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
