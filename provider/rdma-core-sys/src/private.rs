//! What a provider and libibverbs say to each other: private ABI 34 (rdma-core 36 to 56), written by hand because
//! `driver.h` is in no distribution package. Sizes and offsets are asserted at compile time against the values
//! measured with the real header on x86-64; every 64-bit Linux has the same.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

use crate::*;

/// One way a driver recognises a device.
#[repr(C)]
pub struct verbs_match_ent {
    /// Free for the driver.
    pub driver_data: *mut c_void,
    /// Modalias pattern or driver id, by `kind`.
    pub u: verbs_match_ent_u,
    /// PCI vendor.
    pub vendor: u16,
    /// PCI device.
    pub device: u16,
    /// `VERBS_MATCH_*`.
    pub kind: u8,
}

/// The variant part of [`verbs_match_ent`].
#[repr(C)]
pub union verbs_match_ent_u {
    /// For [`VERBS_MATCH_MODALIAS`].
    pub modalias: *const c_char,
    /// For [`VERBS_MATCH_DRIVER_ID`].
    pub driver_id: u64,
}

/// End of a match table.
pub const VERBS_MATCH_SENTINEL: u8 = 0;
/// Match by modalias pattern.
pub const VERBS_MATCH_MODALIAS: u8 = 2;
/// Match by the kernel's driver id.
pub const VERBS_MATCH_DRIVER_ID: u8 = 3;

/// What a driver registers.
#[repr(C)]
pub struct verbs_device_ops {
    /// Driver name.
    pub name: *const c_char,
    /// Smallest uverbs ABI version of the device it serves.
    pub match_min_abi_version: u32,
    /// Largest one.
    pub match_max_abi_version: u32,
    /// Ends with a sentinel.
    pub match_table: *const verbs_match_ent,
    /// For static linking only.
    pub static_providers: *const *const verbs_device_ops,
    /// Further check.
    pub match_device: Option<unsafe extern "C" fn(*mut verbs_sysfs_dev) -> bool>,
    /// Opens the device; owns `cmd_fd`, also on failure.
    pub alloc_context:
        Option<unsafe extern "C" fn(*mut ibv_device, c_int, *mut c_void) -> *mut verbs_context>,
    /// Opens it from a shared fd.
    pub import_context: Option<unsafe extern "C" fn(*mut ibv_device, c_int) -> *mut verbs_context>,
    /// Makes the device object.
    pub alloc_device: Option<unsafe extern "C" fn(*mut verbs_sysfs_dev) -> *mut verbs_device>,
    /// Frees it.
    pub uninit_device: Option<unsafe extern "C" fn(*mut verbs_device)>,
}

/// A device found in sysfs or by netlink; only its address is passed on.
#[repr(C)]
#[derive(Debug)]
pub struct verbs_sysfs_dev {
    _opaque: [u8; 0],
}

/// A device object; libibverbs fills everything but `core_support`. The first two pointers must be NULL.
#[repr(C)]
pub struct verbs_device {
    /// The public part.
    pub device: ibv_device,
    /// The driver's ops.
    pub ops: *const verbs_device_ops,
    /// Users (atomic_int).
    pub refcount: c_int,
    /// Link in libibverbs' list.
    pub entry: [*mut c_void; 2],
    /// Where it was found.
    pub sysfs: *mut verbs_sysfs_dev,
    /// `IB_UVERBS_CORE_SUPPORT_*`.
    pub core_support: u64,
}

/// A memory region.
#[repr(C)]
pub struct verbs_mr {
    /// The public part.
    pub ibv_mr: ibv_mr,
    /// `IBV_MR_TYPE_*`; read by `ibv_dereg_mr` and `ibv_rereg_mr`.
    pub mr_type: c_uint,
    /// Access flags; read by `ibv_dereg_mr`.
    pub access: c_int,
}

/// An ordinary memory region.
pub const IBV_MR_TYPE_MR: c_uint = 0;
/// A null memory region.
pub const IBV_MR_TYPE_NULL_MR: c_uint = 1;
/// An imported memory region.
pub const IBV_MR_TYPE_IMPORTED_MR: c_uint = 2;

/// A queue pair.
#[repr(C)]
pub struct verbs_qp {
    /// The public part.
    pub u: verbs_qp_u,
    /// `VERBS_QP_*`.
    pub comp_mask: u32,
    /// XRC domain with [`VERBS_QP_XRCD`].
    pub xrcd: *mut verbs_xrcd,
}

/// The public part of [`verbs_qp`].
#[repr(C)]
pub union verbs_qp_u {
    /// Plain.
    pub qp: std::mem::ManuallyDrop<ibv_qp>,
    /// With the `ibv_wr_*` functions.
    pub qp_ex: std::mem::ManuallyDrop<ibv_qp_ex>,
}

/// `verbs_qp.xrcd` is valid.
pub const VERBS_QP_XRCD: u32 = 1;
/// `ibv_qp_to_qp_ex` may hand out `qp_ex`.
pub const VERBS_QP_EX: u32 = 2;

/// A completion queue.
#[repr(C)]
pub union verbs_cq {
    /// Plain.
    pub cq: std::mem::ManuallyDrop<ibv_cq>,
    /// Extended; begins with the members of `ibv_cq`.
    pub cq_ex: std::mem::ManuallyDrop<ibv_cq_ex>,
}

/// A shared receive queue.
#[repr(C)]
pub struct verbs_srq {
    /// The public part.
    pub srq: ibv_srq,
    /// `IBV_SRQT_*`.
    pub srq_type: c_uint,
    /// XRC domain.
    pub xrcd: *mut verbs_xrcd,
    /// Completion queue (XRC, tag matching).
    pub cq: *mut ibv_cq,
    /// Number on the wire (XRC).
    pub srq_num: u32,
}

/// An XRC domain.
#[repr(C)]
pub struct verbs_xrcd {
    /// The public part.
    pub xrcd: ibv_xrcd,
    /// `VERBS_XRCD_*`.
    pub comp_mask: u32,
    /// Kernel handle.
    pub handle: u32,
}

/// Device memory.
#[repr(C)]
pub struct verbs_dm {
    /// The public part.
    pub dm: ibv_dm,
    /// Kernel handle.
    pub handle: u32,
}

/// Counters.
#[repr(C)]
pub struct verbs_counters {
    /// The public part.
    pub counters: ibv_counters,
    /// Kernel handle.
    pub handle: u32,
}

/// Number of ops of private ABI 34 since rdma-core 36.
pub const OPS: usize = 76;

/// The table of verbs a driver implements: one pointer per op, in the order of [`OP_NAMES`]; NULL leaves libibverbs'
/// default, which answers EOPNOTSUPP.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct verbs_context_ops {
    ops: [Option<unsafe extern "C" fn()>; OPS],
}

/// The names of the ops in the order of the table (sorted, as in `driver.h`).
pub const OP_NAMES: [&str; OPS] = [
    "advise_mr",
    "alloc_dm",
    "alloc_mw",
    "alloc_null_mr",
    "alloc_parent_domain",
    "alloc_pd",
    "alloc_td",
    "async_event",
    "attach_counters_point_flow",
    "attach_mcast",
    "bind_mw",
    "close_xrcd",
    "cq_event",
    "create_ah",
    "create_counters",
    "create_cq",
    "create_cq_ex",
    "create_flow",
    "create_flow_action_esp",
    "create_qp",
    "create_qp_ex",
    "create_rwq_ind_table",
    "create_srq",
    "create_srq_ex",
    "create_wq",
    "dealloc_mw",
    "dealloc_pd",
    "dealloc_td",
    "dereg_mr",
    "destroy_ah",
    "destroy_counters",
    "destroy_cq",
    "destroy_flow",
    "destroy_flow_action",
    "destroy_qp",
    "destroy_rwq_ind_table",
    "destroy_srq",
    "destroy_wq",
    "detach_mcast",
    "free_context",
    "free_dm",
    "get_srq_num",
    "import_dm",
    "import_mr",
    "import_pd",
    "modify_cq",
    "modify_flow_action_esp",
    "modify_qp",
    "modify_qp_rate_limit",
    "modify_srq",
    "modify_wq",
    "open_qp",
    "open_xrcd",
    "poll_cq",
    "post_recv",
    "post_send",
    "post_srq_ops",
    "post_srq_recv",
    "query_device_ex",
    "query_ece",
    "query_port",
    "query_qp",
    "query_qp_data_in_order",
    "query_rt_values",
    "query_srq",
    "read_counters",
    "reg_dm_mr",
    "reg_dmabuf_mr",
    "reg_mr",
    "req_notify_cq",
    "rereg_mr",
    "resize_cq",
    "set_ece",
    "unimport_dm",
    "unimport_mr",
    "unimport_pd",
];

/// Place of an op in the table. Evaluated at compile time by the setters; panics for an unknown name.
pub const fn op_index(name: &str) -> usize {
    let mut i = 0;
    while i < OPS {
        if same(OP_NAMES[i].as_bytes(), name.as_bytes()) {
            return i;
        }
        i += 1;
    }
    panic!("no such op in private ABI 34");
}

const fn same(a: &[u8], b: &[u8]) -> bool {
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

impl verbs_context_ops {
    /// No op implemented.
    pub const EMPTY: Self = Self { ops: [None; OPS] };
    /// The pointer at `index`, for tests.
    pub fn is_set(&self, index: usize) -> bool {
        self.ops[index].is_some()
    }
}

/// Setters that pair each op's name with its type from `driver.h`, so that a mismatch does not compile.
macro_rules! typed_ops {
    ($($name:ident($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        impl verbs_context_ops {
            $(
                #[doc = concat!("Implements `", stringify!($name), "`.")]
                pub const fn $name(mut self, f: unsafe extern "C" fn($($arg),*) $(-> $ret)?) -> Self {
                    const INDEX: usize = op_index(stringify!($name));
                    // SAFETY: function pointers of one size; libibverbs calls the entry with the type above.
                    self.ops[INDEX] = Some(unsafe {
                        std::mem::transmute::<
                            unsafe extern "C" fn($($arg),*) $(-> $ret)?,
                            unsafe extern "C" fn(),
                        >(f)
                    });
                    self
                }
            )*
        }
    };
}

typed_ops! {
    advise_mr(*mut ibv_pd, ib_uverbs_advise_mr_advice, u32, *mut ibv_sge, u32) -> c_int;
    alloc_dm(*mut ibv_context, *mut ibv_alloc_dm_attr) -> *mut ibv_dm;
    alloc_mw(*mut ibv_pd, ibv_mw_type) -> *mut ibv_mw;
    alloc_null_mr(*mut ibv_pd) -> *mut ibv_mr;
    attach_mcast(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    bind_mw(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int;
    close_xrcd(*mut ibv_xrcd) -> c_int;
    detach_mcast(*mut ibv_qp, *const ibv_gid, u16) -> c_int;
    get_srq_num(*mut ibv_srq, *mut u32) -> c_int;
    open_qp(*mut ibv_context, *mut ibv_qp_open_attr) -> *mut ibv_qp;
    open_xrcd(*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd;
    create_flow(*mut ibv_qp, *mut ibv_flow_attr) -> *mut ibv_flow;
    create_rwq_ind_table(*mut ibv_context, *mut ibv_rwq_ind_table_init_attr) -> *mut ibv_rwq_ind_table;
    create_wq(*mut ibv_context, *mut ibv_wq_init_attr) -> *mut ibv_wq;
    destroy_flow(*mut ibv_flow) -> c_int;
    destroy_rwq_ind_table(*mut ibv_rwq_ind_table) -> c_int;
    destroy_wq(*mut ibv_wq) -> c_int;
    modify_wq(*mut ibv_wq, *mut ibv_wq_attr) -> c_int;
    post_srq_ops(*mut ibv_srq, *mut ibv_ops_wr, *mut *mut ibv_ops_wr) -> c_int;
    query_ece(*mut ibv_qp, *mut ibv_ece) -> c_int;
    set_ece(*mut ibv_qp, *mut ibv_ece) -> c_int;
    dealloc_mw(*mut ibv_mw) -> c_int;
    free_dm(*mut ibv_dm) -> c_int;
    import_dm(*mut ibv_context, u32) -> *mut ibv_dm;
    import_mr(*mut ibv_pd, u32) -> *mut ibv_mr;
    import_pd(*mut ibv_context, u32) -> *mut ibv_pd;
    reg_dm_mr(*mut ibv_pd, *mut ibv_dm, u64, usize, c_uint) -> *mut ibv_mr;
    unimport_dm(*mut ibv_dm);
    unimport_mr(*mut ibv_mr);
    unimport_pd(*mut ibv_pd);
    alloc_parent_domain(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd;
    alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    alloc_td(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td;
    async_event(*mut ibv_context, *mut ibv_async_event);
    cq_event(*mut ibv_cq);
    create_ah(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    create_cq(*mut ibv_context, c_int, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
    create_cq_ex(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex;
    create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    create_qp_ex(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp;
    create_srq(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq;
    create_srq_ex(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq;
    dealloc_pd(*mut ibv_pd) -> c_int;
    dealloc_td(*mut ibv_td) -> c_int;
    dereg_mr(*mut verbs_mr) -> c_int;
    destroy_ah(*mut ibv_ah) -> c_int;
    destroy_cq(*mut ibv_cq) -> c_int;
    destroy_qp(*mut ibv_qp) -> c_int;
    destroy_srq(*mut ibv_srq) -> c_int;
    free_context(*mut ibv_context);
    modify_cq(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int;
    modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    modify_srq(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int;
    poll_cq(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
    post_recv(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
    post_send(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
    post_srq_recv(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
    query_device_ex(*mut ibv_context, *const ibv_query_device_ex_input, *mut ibv_device_attr_ex, usize) -> c_int;
    query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    query_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
    query_qp_data_in_order(*mut ibv_qp, ibv_wr_opcode, u32) -> c_int;
    query_rt_values(*mut ibv_context, *mut ibv_values_ex) -> c_int;
    query_srq(*mut ibv_srq, *mut ibv_srq_attr) -> c_int;
    reg_mr(*mut ibv_pd, *mut c_void, usize, u64, c_int) -> *mut ibv_mr;
    req_notify_cq(*mut ibv_cq, c_int) -> c_int;
    rereg_mr(*mut verbs_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int) -> c_int;
    resize_cq(*mut ibv_cq, c_int) -> c_int;
}

macro_rules! layout {
    ($($ty:ident: $size:expr $(, $field:ident @ $offset:expr)*;)*) => {
        const _: () = {
            $(
                assert!(size_of::<$ty>() == $size, concat!("size of ", stringify!($ty)));
                $(assert!(
                    offset_of!($ty, $field) == $offset,
                    concat!("offset of ", stringify!($ty), ".", stringify!($field))
                );)*
            )*
        };
    };
}

layout! {
    verbs_match_ent: 24, u @ 8, vendor @ 16, device @ 18, kind @ 20;
    verbs_device_ops: 72, name @ 0, match_min_abi_version @ 8, match_max_abi_version @ 12, match_table @ 16,
        static_providers @ 24, match_device @ 32, alloc_context @ 40, import_context @ 48, alloc_device @ 56,
        uninit_device @ 64;
    ibv_device: 664;
    verbs_device: 712, ops @ 664, refcount @ 672, entry @ 680, sysfs @ 696, core_support @ 704;
    verbs_context: 648, priv_ @ 208, sz @ 312, context @ 320;
    ibv_context: 328, cmd_fd @ 264, async_fd @ 268, num_comp_vectors @ 272;
    verbs_mr: 56, mr_type @ 48, access @ 52;
    ibv_qp_ex: 352;
    verbs_qp: 368, comp_mask @ 352, xrcd @ 360;
    verbs_cq: 288;
    verbs_srq: 160;
    verbs_xrcd: 16, comp_mask @ 8, handle @ 12;
    verbs_dm: 40, handle @ 32;
    verbs_counters: 16, handle @ 8;
    verbs_context_ops: 608;
    ibv_port_attr: 52;
    ibv_device_attr: 232;
    ibv_device_attr_ex: 400;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn op_names_are_sorted_and_unique() {
        // The table in driver.h is kept sorted; a slip in ours would shift every later op.
        assert!(OP_NAMES.windows(2).all(|w| w[0] < w[1]));
    }

    #[test]
    fn op_index_agrees_with_measured_places() {
        // Measured with the header of rdma-core 44.
        for (name, index) in [
            ("alloc_pd", 5),
            ("async_event", 7),
            ("cq_event", 12),
            ("create_qp_ex", 20),
            ("free_context", 39),
            ("poll_cq", 53),
            ("query_qp_data_in_order", 62),
            ("reg_mr", 68),
            ("unimport_pd", 75),
        ] {
            assert_eq!(op_index(name), index, "{name}");
        }
    }

    #[test]
    fn setter_touches_its_own_slot_only() {
        unsafe extern "C" fn poll(_: *mut ibv_cq, _: c_int, _: *mut ibv_wc) -> c_int {
            0
        }
        let ops = verbs_context_ops::EMPTY.poll_cq(poll);
        for (i, name) in OP_NAMES.iter().enumerate() {
            assert_eq!(ops.is_set(i), *name == "poll_cq", "{name}");
        }
    }
}
