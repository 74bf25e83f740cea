//! The `extern "C"` functions of multicast groups. As in `entry.rs`: no logic.

use std::ffi::c_int;

use rdma_core_sys::*;

use crate::ffi::{gid_bytes, object, verb};
use crate::qp::Qp;

// The LID of a group means something on InfiniBand only.

pub(super) unsafe extern "C" fn attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: module comment of `entry.rs`.
    verb("ibv_attach_mcast", || unsafe {
        object::<Qp>(qp)?.attach_group(gid_bytes(gid.as_ref().ok_or(libc::EINVAL)?))
    })
}

pub(super) unsafe extern "C" fn detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> c_int {
    // SAFETY: module comment of `entry.rs`.
    verb("ibv_detach_mcast", || unsafe {
        object::<Qp>(qp)?.detach_group(gid_bytes(gid.as_ref().ok_or(libc::EINVAL)?))
    })
}
