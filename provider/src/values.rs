//! Tests that the core's numbers are those of the installed header, since the edge only casts.

use metaroce_proto::types::*;
use rdma_core_sys::private::OP_NAMES;
use rdma_core_sys::*;

use crate::entry::OPS;

#[test]
fn completion_values_are_those_of_the_header() {
    for (core, header) in [
        (WcStatus::Success, IBV_WC_SUCCESS),
        (WcStatus::LocLenErr, IBV_WC_LOC_LEN_ERR),
        (WcStatus::LocQpOpErr, IBV_WC_LOC_QP_OP_ERR),
        (WcStatus::LocProtErr, IBV_WC_LOC_PROT_ERR),
        (WcStatus::WrFlushErr, IBV_WC_WR_FLUSH_ERR),
        (WcStatus::MwBindErr, IBV_WC_MW_BIND_ERR),
        (WcStatus::BadRespErr, IBV_WC_BAD_RESP_ERR),
        (WcStatus::LocAccessErr, IBV_WC_LOC_ACCESS_ERR),
        (WcStatus::RemInvReqErr, IBV_WC_REM_INV_REQ_ERR),
        (WcStatus::RemAccessErr, IBV_WC_REM_ACCESS_ERR),
        (WcStatus::RemOpErr, IBV_WC_REM_OP_ERR),
        (WcStatus::RetryExcErr, IBV_WC_RETRY_EXC_ERR),
        (WcStatus::RnrRetryExcErr, IBV_WC_RNR_RETRY_EXC_ERR),
        (WcStatus::GeneralErr, IBV_WC_GENERAL_ERR),
        (WcStatus::TmErr, IBV_WC_TM_ERR),
    ] {
        assert_eq!(core as u32, header, "{core:?}");
    }
    for (core, header) in [
        (WcOpcode::Send, IBV_WC_SEND),
        (WcOpcode::RdmaWrite, IBV_WC_RDMA_WRITE),
        (WcOpcode::RdmaRead, IBV_WC_RDMA_READ),
        (WcOpcode::CompSwap, IBV_WC_COMP_SWAP),
        (WcOpcode::FetchAdd, IBV_WC_FETCH_ADD),
        (WcOpcode::BindWindow, IBV_WC_BIND_MW),
        (WcOpcode::LocalInv, IBV_WC_LOCAL_INV),
        (WcOpcode::AtomicWrite, IBV_WC_ATOMIC_WRITE),
        (WcOpcode::Recv, IBV_WC_RECV),
        (WcOpcode::RecvRdmaWithImm, IBV_WC_RECV_RDMA_WITH_IMM),
        (WcOpcode::TmAdd, IBV_WC_TM_ADD),
        (WcOpcode::TmDel, IBV_WC_TM_DEL),
        (WcOpcode::TmSync, IBV_WC_TM_SYNC),
        (WcOpcode::TmRecv, IBV_WC_TM_RECV),
        (WcOpcode::TmNoTag, IBV_WC_TM_NO_TAG),
    ] {
        assert_eq!(core as u32, header, "{core:?}");
    }
    assert_eq!(u32::from(WC_WITH_IMM), IBV_WC_WITH_IMM);
    assert_eq!(u32::from(WC_WITH_INV), IBV_WC_WITH_INV);
    assert_eq!(u32::from(WC_TM_SYNC_REQ), IBV_WC_TM_SYNC_REQ);
    assert_eq!(u32::from(WC_TM_MATCH), IBV_WC_TM_MATCH);
    assert_eq!(u32::from(WC_TM_DATA_VALID), IBV_WC_TM_DATA_VALID);
}

#[test]
fn request_values_are_those_of_the_header() {
    for (core, header) in [
        (send_flags::FENCE, IBV_SEND_FENCE),
        (send_flags::SIGNALED, IBV_SEND_SIGNALED),
        (send_flags::SOLICITED, IBV_SEND_SOLICITED),
        (send_flags::INLINE, IBV_SEND_INLINE),
    ] {
        assert_eq!(u32::from(core), header);
    }
    for (core, header) in [
        (access::LOCAL_WRITE, IBV_ACCESS_LOCAL_WRITE),
        (access::REMOTE_WRITE, IBV_ACCESS_REMOTE_WRITE),
        (access::REMOTE_READ, IBV_ACCESS_REMOTE_READ),
        (access::REMOTE_ATOMIC, IBV_ACCESS_REMOTE_ATOMIC),
        (access::MW_BIND, IBV_ACCESS_MW_BIND),
        (access::ZERO_BASED, IBV_ACCESS_ZERO_BASED),
        (access::ON_DEMAND, IBV_ACCESS_ON_DEMAND),
        (access::HUGETLB, IBV_ACCESS_HUGETLB),
        (access::RELAXED_ORDERING, IBV_ACCESS_RELAXED_ORDERING),
    ] {
        assert_eq!(core, header);
    }
}

#[test]
fn state_and_transport_values_are_those_of_the_header() {
    for (core, header) in [
        (QpState::Reset, IBV_QPS_RESET),
        (QpState::Init, IBV_QPS_INIT),
        (QpState::Rtr, IBV_QPS_RTR),
        (QpState::Rts, IBV_QPS_RTS),
        (QpState::Sqd, IBV_QPS_SQD),
        (QpState::Sqe, IBV_QPS_SQE),
        (QpState::Err, IBV_QPS_ERR),
    ] {
        assert_eq!(core as u32, header, "{core:?}");
    }
    for (core, header) in [
        (QpType::Rc, IBV_QPT_RC),
        (QpType::Uc, IBV_QPT_UC),
        (QpType::Ud, IBV_QPT_UD),
        (QpType::Raw, IBV_QPT_RAW_PACKET),
        (QpType::XrcSend, IBV_QPT_XRC_SEND),
        (QpType::XrcRecv, IBV_QPT_XRC_RECV),
    ] {
        assert_eq!(core as u32, header, "{core:?}");
    }
}

#[test]
fn table_of_verbs_leaves_out_what_is_not_built() {
    // An op in the table is a promise; what is left out libibverbs answers with EOPNOTSUPP.
    let unset: Vec<_> =
        OP_NAMES.iter().enumerate().filter(|(i, _)| !OPS.is_set(*i)).map(|(_, name)| *name).collect();
    assert_eq!(
        unset,
        [
            "attach_counters_point_flow",
            "create_counters",
            "create_flow_action_esp",
            "destroy_counters",
            "destroy_flow_action",
            "modify_flow_action_esp",
            "modify_qp_rate_limit",
            "read_counters",
            "reg_dmabuf_mr",
        ]
    );
}
