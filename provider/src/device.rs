//! `query_device_ex` and `query_port`: what the device and its only port can do.

use libc::timespec;
use rdma_core_sys::*;

use crate::context::Context;
use crate::ffi::{Result, zeroed};
use crate::limits::*;
use crate::wq::HASHED;

/// 4 lanes, in the encoding of the InfiniBand PortInfo.
const WIDTH_4X: u8 = 2;
/// EDR, 25 Gb/s per lane: above what UDP on one machine reaches, so nobody throttles to it.
const SPEED_EDR: u8 = 32;
/// "LinkUp" and "Disabled" of the InfiniBand PortInfo.
const PHYS_LINK_UP: u8 = 5;
const PHYS_DISABLED: u8 = 3;
/// RoCE: address vectors need a GRH (`IBV_QPF_GRH_REQUIRED`, which the headers only have as a macro).
const GRH_REQUIRED: u8 = 1;

/// `IB_UVERBS_DEVICE_ATOMIC_WRITE`, which no public header of this version has.
const DEVICE_ATOMIC_WRITE: u64 = 1 << 40;
/// What may touch memory that is paged in on demand.
const ODP_UD: u32 = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
const ODP_RC: u32 = ODP_UD | IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_ATOMIC;

/// Completion times count nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

/// The clock that stamps completions, as `query_rt_values` reports it. EINVAL for values we do not have.
pub(crate) fn raw_clock(context: &Context, comp_mask: u32) -> Result<timespec> {
    if comp_mask & !IBV_VALUES_MASK_RAW_CLOCK != 0 {
        return Err(libc::EINVAL);
    }
    // All of it is in tv_nsec, as programs that know hardware expect.
    Ok(timespec { tv_sec: 0, tv_nsec: context.device.clock_ns() as libc::c_long })
}

/// Fills the device's attributes; features that are not built stay 0.
pub(crate) fn query(context: &Context) -> ibv_device_attr_ex {
    let mut attr: ibv_device_attr_ex = zeroed();
    let o = &mut attr.orig_attr;
    for (to, from) in o.fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()) {
        *to = from as _;
    }
    o.node_guid = context.node_guid;
    o.sys_image_guid = context.node_guid;
    o.max_mr_size = u64::MAX;
    o.page_size_cap = 0xffff_f000;
    o.vendor_id = VENDOR_ID;
    o.vendor_part_id = VENDOR_PART_ID;
    o.hw_ver = HW_VER;
    o.max_qp = MAX_QP as i32;
    o.max_qp_wr = MAX_QP_WR as i32;
    o.device_cap_flags = IBV_DEVICE_CURR_QP_STATE_MOD
        | IBV_DEVICE_SYS_IMAGE_GUID
        | IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_PORT_ACTIVE_EVENT
        | IBV_DEVICE_XRC
        | IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B
        | IBV_DEVICE_MEM_MGT_EXTENSIONS
        | IBV_DEVICE_SRQ_RESIZE;
    o.max_sge = MAX_SGE as i32;
    o.max_sge_rd = MAX_SGE as i32;
    o.max_cq = MAX_CQ as i32;
    o.max_cqe = MAX_CQE as i32;
    o.max_mr = MAX_MR as i32;
    o.max_mw = MAX_MW as i32;
    o.max_pd = MAX_PD as i32;
    o.max_qp_rd_atom = MAX_RD_ATOMIC as i32;
    o.max_res_rd_atom = (MAX_RD_ATOMIC * MAX_QP) as i32;
    o.max_qp_init_rd_atom = MAX_RD_ATOMIC as i32;
    o.atomic_cap = IBV_ATOMIC_HCA;
    o.max_raw_ethy_qp = MAX_QP as i32;
    o.max_mcast_grp = MAX_GROUPS as i32;
    o.max_mcast_qp_attach = MAX_GROUP_QPS as i32;
    o.max_total_mcast_qp_attach = (MAX_GROUPS * MAX_GROUP_QPS) as i32;
    o.max_ah = MAX_AH as i32;
    o.max_srq = MAX_SRQ as i32;
    o.max_srq_wr = MAX_SRQ_WR as i32;
    o.max_srq_sge = MAX_SRQ_SGE as i32;
    o.max_pkeys = 1;
    o.phys_port_cnt = PORT;
    attr.device_cap_flags_ex = u64::from(attr.orig_attr.device_cap_flags) | DEVICE_ATOMIC_WRITE;
    // The processor copies: pages need not be there before, and never need pinning.
    attr.odp_caps.general_caps = u64::from(IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT);
    attr.odp_caps.per_transport_caps = ibv_odp_caps__bindgen_ty_1 {
        rc_odp_caps: ODP_RC,
        uc_odp_caps: ODP_UD | IBV_ODP_SUPPORT_WRITE,
        ud_odp_caps: ODP_UD,
    };
    attr.xrc_odp_caps = ODP_RC;
    attr.rss_caps = ibv_rss_caps {
        supported_qpts: 1 << IBV_QPT_RAW_PACKET,
        max_rwq_indirection_tables: MAX_QP,
        max_rwq_indirection_table_size: MAX_RWQ_TABLE,
        rx_hash_fields_mask: HASHED,
        rx_hash_function: IBV_RX_HASH_FUNC_TOEPLITZ as u8,
    };
    attr.max_wq_type_rq = MAX_SRQ;
    attr.tm_caps = ibv_tm_caps {
        max_rndv_hdr_size: MAX_RENDEZVOUS_HEADER,
        max_num_tags: MAX_TAGS,
        flags: IBV_TM_CAP_RC,
        max_ops: MAX_TAG_OPS,
        max_sge: 1,
    };
    attr.max_dm_size = MAX_DM_SIZE;
    attr.completion_timestamp_mask = u64::MAX;
    attr.hca_core_clock = CLOCK_KHZ;
    attr.cq_mod_caps = ibv_cq_moderation_caps { max_cq_count: u16::MAX, max_cq_period: u16::MAX };
    attr.phys_port_cnt_ex = u32::from(PORT);
    attr
}

/// The port's attributes; EINVAL for any port but 1.
pub(crate) fn query_port(context: &Context, port: u8) -> Result<ibv_port_attr> {
    if port != PORT {
        return Err(libc::EINVAL);
    }
    let port = context.net.port();
    let up = port.up;
    let mut attr: ibv_port_attr = zeroed();
    attr.state = if up { IBV_PORT_ACTIVE } else { IBV_PORT_DOWN };
    attr.phys_state = if up { PHYS_LINK_UP } else { PHYS_DISABLED };
    attr.max_mtu = IBV_MTU_4096;
    attr.active_mtu = active_mtu(port.mtu);
    attr.gid_tbl_len = port.gid_table_len as i32;
    attr.port_cap_flags = IBV_PORT_CM_SUP | IBV_PORT_IP_BASED_GIDS;
    attr.max_msg_sz = MAX_MSG_SZ;
    attr.pkey_tbl_len = 1;
    attr.max_vl_num = 1;
    attr.active_width = WIDTH_4X;
    attr.active_speed = SPEED_EDR;
    attr.link_layer = IBV_LINK_LAYER_ETHERNET as u8;
    attr.flags = GRH_REQUIRED;
    Ok(attr)
}

/// The active MTU as `enum ibv_mtu`.
fn active_mtu(bytes: u32) -> ibv_mtu {
    match bytes {
        4096.. => IBV_MTU_4096,
        2048.. => IBV_MTU_2048,
        1024.. => IBV_MTU_1024,
        512.. => IBV_MTU_512,
        _ => IBV_MTU_256,
    }
}
