//! The commands and answers of rdma/rdma_user_cm.h, byte for byte.

use std::mem::zeroed;

/// Structures that are plain data: every bit pattern is valid and there is no padding.
///
/// # Safety
/// Implementors are repr(C), consist of integers and byte arrays only, and their size is the sum of their fields'.
pub(super) unsafe trait Plain: Copy {
    /// Reads one from the beginning of `bytes`; what is missing is zero, as for callers built with a shorter struct.
    fn read(bytes: &[u8]) -> Self {
        // SAFETY: all zero is valid for plain data.
        let mut value: Self = unsafe { zeroed() };
        let length = bytes.len().min(size_of::<Self>());
        // SAFETY: both are valid for `length` bytes and do not overlap; any bytes are valid for plain data.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), (&raw mut value).cast::<u8>(), length) };
        value
    }

    /// The value's bytes.
    fn bytes(&self) -> &[u8] {
        // SAFETY: plain data has no padding, so all of its bytes are initialised.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast::<u8>(), size_of::<Self>()) }
    }
}

/// Declares plain structures and checks their size.
macro_rules! plain {
    ($($(#[$meta:meta])* struct $name:ident[$size:literal] { $($(#[$field_meta:meta])* $field:ident: $ty:ty,)* })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy)]
        pub(super) struct $name { $($(#[$field_meta])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size && 0 $(+ size_of::<$ty>())* == $size);
        // SAFETY: repr(C), of plain data, and without padding by the assertion above.
        unsafe impl Plain for $name {}
    )*};
}

/// Bytes of a command's header.
pub(super) const HEADER_BYTES: usize = 8;
/// ABI version that librdmacm asks for.
pub(crate) const ABI_VERSION: u64 = 4;

pub(super) mod cmd {
    //! Command numbers.
    pub(crate) const CREATE_ID: u32 = 0;
    pub(crate) const DESTROY_ID: u32 = 1;
    pub(crate) const BIND_IP: u32 = 2;
    pub(crate) const RESOLVE_IP: u32 = 3;
    pub(crate) const RESOLVE_ROUTE: u32 = 4;
    pub(crate) const QUERY_ROUTE: u32 = 5;
    pub(crate) const CONNECT: u32 = 6;
    pub(crate) const LISTEN: u32 = 7;
    pub(crate) const ACCEPT: u32 = 8;
    pub(crate) const REJECT: u32 = 9;
    pub(crate) const DISCONNECT: u32 = 10;
    pub(crate) const INIT_QP_ATTR: u32 = 11;
    pub(crate) const GET_EVENT: u32 = 12;
    pub(crate) const SET_OPTION: u32 = 14;
    pub(crate) const NOTIFY: u32 = 15;
    pub(crate) const JOIN_IP_MCAST: u32 = 16;
    pub(crate) const LEAVE_MCAST: u32 = 17;
    pub(crate) const MIGRATE_ID: u32 = 18;
    pub(crate) const JOIN_MCAST: u32 = 22;
    /// The last number of any known version.
    pub(crate) const LAST: u32 = 24;
}

pub(super) mod event {
    //! RDMA_CM_EVENT_* numbers.
    pub(crate) const ADDR_RESOLVED: u32 = 0;
    pub(crate) const ADDR_ERROR: u32 = 1;
    pub(crate) const ROUTE_RESOLVED: u32 = 2;
    pub(crate) const CONNECT_REQUEST: u32 = 4;
    pub(crate) const CONNECT_RESPONSE: u32 = 5;
    pub(crate) const UNREACHABLE: u32 = 7;
    pub(crate) const REJECTED: u32 = 8;
    pub(crate) const ESTABLISHED: u32 = 9;
    pub(crate) const DISCONNECTED: u32 = 10;
    pub(crate) const DEVICE_REMOVAL: u32 = 11;
    pub(crate) const MULTICAST_JOIN: u32 = 12;
    pub(crate) const ADDR_CHANGE: u32 = 14;
    pub(crate) const TIMEWAIT_EXIT: u32 = 15;
}

/// Port spaces (enum rdma_ucm_port_space).
pub(super) const RDMA_PS_IB: u16 = 0x013f;
pub(super) const RDMA_PS_TCP: u16 = 0x0106;
pub(super) const RDMA_PS_UDP: u16 = 0x0111;

plain! {
    /// struct rdma_ucm_cmd_hdr.
    struct Header[8] { cmd: u32, bytes_in: u16, bytes_out: u16, }
    struct CreateId[24] { uid: u64, response: u64, ps: u16, qp_type: u8, reserved: [u8; 5], }
    /// DESTROY_ID and LEAVE_MCAST.
    struct DestroyId[16] { response: u64, id: u32, reserved: u32, }
    struct BindIp[40] { response: u64, addr: [u8; 28], id: u32, }
    struct ResolveIp[64] { src_addr: [u8; 28], dst_addr: [u8; 28], id: u32, timeout_ms: u32, }
    /// RESOLVE_ROUTE, LISTEN (backlog) and NOTIFY (event).
    struct IdAndNumber[8] { id: u32, number: u32, }
    /// QUERY_ROUTE and INIT_QP_ATTR (qp_state).
    struct Query[16] { response: u64, id: u32, option: u32, }
    /// struct ib_user_path_rec; big-endian fields as byte arrays.
    struct PathRec[64] {
        dgid: [u8; 16], sgid: [u8; 16], dlid: [u8; 2], slid: [u8; 2], raw_traffic: u32, flow_label: u32,
        reversible: u32, mtu: u32, pkey: [u8; 2], hop_limit: u8, traffic_class: u8, numb_path: u8, sl: u8,
        mtu_selector: u8, rate_selector: u8, rate: u8, packet_life_time_selector: u8, packet_life_time: u8,
        preference: u8,
    }
    struct QueryRouteResp[208] {
        node_guid: [u8; 8], ib_route: [PathRec; 2], src_addr: [u8; 28], dst_addr: [u8; 28], num_paths: u32,
        port_num: u8, reserved: [u8; 3], ibdev_index: u32, reserved1: u32,
    }
    struct ConnParam[272] {
        qp_num: u32, qkey: u32, private_data: [u8; 256], private_data_len: u8, srq: u8, responder_resources: u8,
        initiator_depth: u8, flow_control: u8, retry_count: u8, rnr_retry_count: u8, valid: u8,
    }
    /// struct ib_uverbs_ah_attr.
    struct AhAttr[32] {
        dgid: [u8; 16], flow_label: u32, sgid_index: u8, hop_limit: u8, traffic_class: u8, grh_reserved: u8,
        dlid: u16, sl: u8, src_path_bits: u8, static_rate: u8, is_global: u8, port_num: u8, reserved: u8,
    }
    struct UdParam[304] {
        qp_num: u32, qkey: u32, ah_attr: AhAttr, private_data: [u8; 256], private_data_len: u8, reserved: [u8; 7],
    }
    struct Connect[288] { conn_param: ConnParam, id: u32, reserved: u32, ece_vendor_id: u32, ece_attr_mod: u32, }
    struct Accept[296] {
        uid: u64, conn_param: ConnParam, id: u32, reserved: u32, ece_vendor_id: u32, ece_attr_mod: u32,
    }
    struct Reject[264] { id: u32, private_data_len: u8, reason: u8, reserved: [u8; 2], private_data: [u8; 256], }
    struct Disconnect[4] { id: u32, }
    struct GetEvent[8] { response: u64, }
    struct SetOption[24] { optval: u64, id: u32, level: u32, optname: u32, optlen: u32, }
    struct JoinIpMcast[48] { response: u64, uid: u64, addr: [u8; 28], id: u32, }
    struct JoinMcast[152] {
        response: u64, uid: u64, id: u32, addr_size: u16, join_flags: u16, addr: [u8; 128],
    }
    struct MigrateId[16] { response: u64, id: u32, fd: u32, }
    /// struct rdma_ucm_event_resp; `param` is a ConnParam or a UdParam.
    struct EventResp[336] {
        uid: u64, id: u32, event: u32, status: u32, param: [u8; 304], reserved: u32, ece_vendor_id: u32,
        ece_attr_mod: u32,
    }
    /// struct ib_uverbs_qp_attr.
    struct QpAttr[144] {
        qp_attr_mask: u32, qp_state: u32, cur_qp_state: u32, path_mtu: u32, path_mig_state: u32, qkey: u32,
        rq_psn: u32, sq_psn: u32, dest_qp_num: u32, qp_access_flags: u32, ah_attr: AhAttr, alt_ah_attr: AhAttr,
        max_send_wr: u32, max_recv_wr: u32, max_send_sge: u32, max_recv_sge: u32, max_inline_data: u32,
        pkey_index: u16, alt_pkey_index: u16, en_sqd_async_notify: u8, sq_draining: u8, max_rd_atomic: u8,
        max_dest_rd_atomic: u8, min_rnr_timer: u8, port_num: u8, timeout: u8, retry_cnt: u8, rnr_retry: u8,
        alt_port_num: u8, alt_timeout: u8, reserved: [u8; 5],
    }
}

impl EventResp {
    /// An event without parameters.
    pub(super) fn new(uid: u64, id: u32, event: u32, status: i32) -> EventResp {
        EventResp { uid, id, event, status: status as u32, ..EventResp::read(&[]) }
    }

    /// Stores a connection's or a datagram service's parameters.
    pub(super) fn with_param(mut self, param: &impl Plain) -> EventResp {
        let bytes = param.bytes();
        self.param[..bytes.len()].copy_from_slice(bytes);
        self
    }
}

/// The part of an event that every caller must have room for; what follows was added to the ABI later.
pub(super) const EVENT_BYTES_MIN: usize = 324;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain__reads_short_input_as_zero_padded() {
        let header = Header::read(&[12, 0, 0, 0, 8]);
        assert_eq!((header.cmd, header.bytes_in, header.bytes_out), (cmd::GET_EVENT, 8, 0));
        assert_eq!(Header { cmd: 1, bytes_in: 2, bytes_out: 3 }.bytes(), [1, 0, 0, 0, 2, 0, 3, 0]);
    }
}
