//! The exported functions, each with its symbol version. What they do is said in `metaroce/metaroce.h`.
//!
//! The SAFETY argument is the same for all: objects are NULL or live ones of libibverbs or of this library, structures are
//! NULL or the caller's, as the header asks.

use std::ffi::c_int;

use metaroce_ext_abi::*;
use rdma_core_sys::{ibv_context, ibv_qp};

use crate::find::{Errno, Held, give, of_context, of_qp, take_back};

/// Exports a function under its name in the header: rustc's own list of exports would give it no version, the
/// assembler's directive does.
macro_rules! export {
    ($($(#[$attribute:meta])* $symbol:ident as $inner:ident($($name:ident: $ty:ty),*) $(-> $out:ty)? $body:block)*) => { $(
        std::arch::global_asm!(concat!(
            ".symver ", stringify!($inner), ", ", stringify!($symbol), "@@METAROCE_1.0, remove"
        ));
        $(#[$attribute])*
        // SAFETY: the name is ours alone.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $inner($($name: $ty),*) $(-> $out)? $body
    )* };
}

/// What is known without a device.
const LIBRARY: Version = Version { api_major: API.0, api_minor: API.1, ..Version::ZERO };

/// Hands a call over, or gives why that cannot be.
fn call(ops: Result<&'static Ops, Errno>, function: impl FnOnce(&'static Ops) -> c_int) -> c_int {
    ops.map_or_else(|errno| errno, function)
}

/// The same for a snapshot or a listener.
///
/// # Safety
/// `held` is NULL or one that is not given up.
unsafe fn of_held(held: *mut Held, function: impl FnOnce(&Held) -> c_int) -> c_int {
    // SAFETY: upheld by the caller.
    unsafe { held.as_ref() }.map_or(libc::EINVAL, function)
}

export! {
    metaroce_query_version as query_version_1(context: *mut ibv_context, version: *mut Version) -> c_int {
        if context.is_null() {
            // SAFETY: module comment.
            return unsafe { fill(version, LIBRARY) }.err().unwrap_or(0);
        }
        // SAFETY: module comment.
        unsafe {
            call(of_context(context), |ops| match (ops.query_version)(context.cast(), version) {
                0 => {
                    ((*version).api_major, (*version).api_minor) = API;
                    0
                }
                errno => errno,
            })
        }
    }

    metaroce_owns as owns_1(context: *mut ibv_context) -> c_int {
        // SAFETY: module comment.
        unsafe { call(of_context(context), |_| 0) }
    }

    metaroce_query_device as query_device_1(context: *mut ibv_context, attr: *mut DeviceAttr) -> c_int {
        // SAFETY: module comment.
        unsafe { call(of_context(context), |ops| (ops.query_device)(context.cast(), attr)) }
    }

    metaroce_query_plane as query_plane_1(context: *mut ibv_context, plane: u32, attr: *mut Plane) -> c_int {
        // SAFETY: module comment.
        unsafe { call(of_context(context), |ops| (ops.query_plane)(context.cast(), plane, attr)) }
    }

    metaroce_set_plane_admin as set_plane_admin_1(context: *mut ibv_context, plane: u32, admin: u32, kept: *mut u32) -> c_int {
        // SAFETY: module comment.
        unsafe { call(of_context(context), |ops| (ops.set_plane_admin)(context.cast(), plane, admin, kept)) }
    }

    metaroce_deny_entropy as deny_entropy_1(context: *mut ibv_context, plane: u32, entropy: u32) -> c_int {
        // SAFETY: module comment.
        unsafe { call(of_context(context), |ops| (ops.deny_entropy)(context.cast(), plane, entropy, 1)) }
    }

    metaroce_allow_entropy as allow_entropy_1(context: *mut ibv_context, plane: u32, entropy: u32) -> c_int {
        // SAFETY: module comment.
        unsafe { call(of_context(context), |ops| (ops.deny_entropy)(context.cast(), plane, entropy, 0)) }
    }

    metaroce_rehash_path as rehash_path_1(context: *mut ibv_context, connection: u32, path: u32) -> c_int {
        // SAFETY: module comment.
        unsafe { call(of_context(context), |ops| (ops.rehash_path)(context.cast(), connection, path)) }
    }

    metaroce_query_qp as query_qp_1(qp: *mut ibv_qp, attr: *mut QueuePair) -> c_int {
        // SAFETY: module comment.
        unsafe { call(of_qp(qp), |ops| (ops.query_qp)(qp.cast(), attr)) }
    }

    metaroce_take_snapshot as take_snapshot_1(context: *mut ibv_context, snapshot: *mut *mut Held) -> c_int {
        // SAFETY: module comment.
        unsafe { give(snapshot, context, |ops, inner| (ops.take_snapshot)(context.cast(), inner)) }
    }

    metaroce_free_snapshot as free_snapshot_1(snapshot: *mut Held) {
        // SAFETY: module comment; the program gives it up, and the provider gets its own for the last time.
        unsafe { take_back(snapshot, |ops, inner| (ops.free_snapshot)(inner)) }
    }

    metaroce_open_events as open_events_1(context: *mut ibv_context, events: *mut *mut Held) -> c_int {
        // SAFETY: module comment.
        unsafe { give(events, context, |ops, inner| (ops.open_events)(context.cast(), inner)) }
    }

    metaroce_close_events as close_events_1(events: *mut Held) {
        // SAFETY: module comment; the program gives it up, and the provider gets its own for the last time.
        unsafe { take_back(events, |ops, inner| (ops.close_events)(inner)) }
    }

    metaroce_events_fd as events_fd_1(events: *mut Held, fd: *mut c_int) -> c_int {
        // SAFETY: module comment.
        unsafe { of_held(events, |events| (events.ops.events_fd)(events.inner, fd)) }
    }

    metaroce_next_event as next_event_1(events: *mut Held, event: *mut Event) -> c_int {
        // SAFETY: module comment.
        unsafe { of_held(events, |events| (events.ops.next_event)(events.inner, event)) }
    }

    metaroce_snapshot_info as snapshot_info_1(snapshot: *mut Held, info: *mut SnapshotInfo) -> c_int {
        // SAFETY: module comment.
        unsafe { of_held(snapshot, |snapshot| (snapshot.ops.snapshot_info)(snapshot.inner, info)) }
    }

    metaroce_snapshot_plane as snapshot_plane_1(snapshot: *mut Held, index: u32, to: *mut Plane) -> c_int {
        // SAFETY: module comment.
        unsafe { of_held(snapshot, |snapshot| (snapshot.ops.snapshot_plane)(snapshot.inner, index, to)) }
    }

    metaroce_snapshot_connection as snapshot_connection_1(snapshot: *mut Held, index: u32, to: *mut Connection) -> c_int {
        // SAFETY: module comment.
        unsafe { of_held(snapshot, |snapshot| (snapshot.ops.snapshot_connection)(snapshot.inner, index, to)) }
    }

    metaroce_snapshot_path as snapshot_path_1(snapshot: *mut Held, index: u32, to: *mut Path) -> c_int {
        // SAFETY: module comment.
        unsafe { of_held(snapshot, |snapshot| (snapshot.ops.snapshot_path)(snapshot.inner, index, to)) }
    }

    metaroce_snapshot_qp as snapshot_qp_1(snapshot: *mut Held, index: u32, to: *mut QueuePair) -> c_int {
        // SAFETY: module comment.
        unsafe { of_held(snapshot, |snapshot| (snapshot.ops.snapshot_qp)(snapshot.inner, index, to)) }
    }
}
