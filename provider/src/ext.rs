//! What `libmetaroce.so.1` calls: the functions of `metaroce/metaroce.h` on this provider's objects, by a table that the
//! library finds with `dlsym`. Boundary, casts, one call of safe code.
//!
//! The SAFETY argument is the same for all: the library passes contexts and queue pairs that libibverbs gave the
//! program and that it keeps open during the call, snapshots made here, and structures the program declares valid.

use std::ffi::c_int;
use std::mem::size_of;
use std::sync::Arc;

use metaroce_engine::Watch;
use metaroce_ext_abi::{
    API, Connection, DeviceAttr, Event, Opaque, Ops, Path, Plain, Plane, QueuePair, SnapshotInfo, Version,
    admin, fill,
};
use metaroce_proto::steering::Admin;
use rdma_core_sys::{ibv_context, ibv_qp};

use crate::context::Context;
use crate::ffi::{Result, context, object, put, verb};
use crate::{entry, qp::Qp};

mod view;

use view::Snapshot;

static TABLE: Ops = Ops {
    size: size_of::<Ops>() as u32,
    reserved: 0,
    owns,
    query_version,
    query_device,
    query_plane,
    set_plane_admin,
    deny_entropy,
    rehash_path,
    query_qp,
    take_snapshot,
    snapshot_info,
    snapshot_plane,
    snapshot_connection,
    snapshot_path,
    snapshot_qp,
    free_snapshot,
    open_events,
    events_fd,
    next_event,
    close_events,
};

/// Gives the table; its name is [`metaroce_ext_abi::ENTRY`].
// SAFETY: the name is ours alone.
#[unsafe(no_mangle)]
extern "C" fn metaroce_private_ext_1() -> *const Ops {
    &raw const TABLE
}

/// The open context; ENODEV for one that another driver, or another copy of this one, has made.
///
/// # Safety
/// `raw` is NULL (gives EINVAL) or an open context of whatever driver.
unsafe fn ours<'a>(raw: Opaque) -> Result<&'a Arc<Context>> {
    let raw = raw.cast::<ibv_context>();
    // SAFETY: upheld by the caller; a context with our function in it was filled by `register.rs`.
    unsafe {
        let theirs = raw.as_ref().ok_or(libc::EINVAL)?.ops.poll_cq;
        if theirs.is_none_or(|f| f as usize != entry::poll_cq as *const () as usize) {
            return Err(libc::ENODEV);
        }
        context(raw)
    }
}

unsafe extern "C" fn owns(ctx: Opaque) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_owns", || unsafe { ours(ctx).map(drop) })
}

unsafe extern "C" fn query_version(ctx: Opaque, version: *mut Version) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_query_version", || unsafe {
        ours(ctx)?;
        let wire = metaroce_proto::wire::VERSION.into();
        fill(version, Version { device_api_major: API.0, device_api_minor: API.1, wire, ..Version::ZERO })
    })
}

unsafe extern "C" fn query_device(ctx: Opaque, attr: *mut DeviceAttr) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_query_device", || unsafe { fill(attr, view::device(&ours(ctx)?.device)) })
}

unsafe extern "C" fn query_plane(ctx: Opaque, index: u32, attr: *mut Plane) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_query_plane", || unsafe {
        let context = ours(ctx)?;
        let (index, config) = (index as usize, context.net.config());
        let plane = config.planes.get(index).ok_or(libc::EINVAL)?;
        let counters = context.device.view_planes().unwrap_or_default();
        let wanted = context.device.plane_states().unwrap_or_default();
        fill(attr, view::plane(plane, wanted.get(index), counters.get(index)))
    })
}

unsafe extern "C" fn set_plane_admin(ctx: Opaque, plane: u32, wish: u32, kept: *mut u32) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_set_plane_admin", || unsafe {
        let wish = match wish {
            admin::UP => Admin::Up,
            admin::DRAIN => Admin::Drain,
            admin::DOWN => Admin::Down,
            _ => return Err(libc::EINVAL),
        };
        let count = ours(ctx)?.device.set_plane_admin(small(plane)?, wish)?;
        if let Some(kept) = kept.as_mut() {
            *kept = count as u32;
        }
        Ok(())
    })
}

unsafe extern "C" fn deny_entropy(ctx: Opaque, plane: u32, entropy: u32, deny: c_int) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_deny_entropy", || unsafe {
        ours(ctx)?.device.deny_entropy(small(plane)?, small(entropy)?, deny != 0)
    })
}

unsafe extern "C" fn rehash_path(ctx: Opaque, connection: u32, path: u32) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_rehash_path", || unsafe { ours(ctx)?.device.rehash(connection, small(path)?) })
}

unsafe extern "C" fn query_qp(qp: Opaque, attr: *mut QueuePair) -> c_int {
    // SAFETY: module comment; the library has looked at the context, which says whose the queue pair is.
    verb("metaroce_query_qp", || unsafe {
        let raw = qp.cast::<ibv_qp>();
        let context = ours(raw.as_ref().ok_or(libc::EINVAL)?.context.cast())?;
        let qp: &Qp = object(raw)?;
        let seen = context.device.view_qp(qp.engine.qpn()).ok_or(libc::EINVAL)?;
        fill(attr, view::qp(&seen))
    })
}

unsafe extern "C" fn take_snapshot(ctx: Opaque, to: *mut Opaque) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_take_snapshot", || unsafe {
        let context = ours(ctx)?;
        let to = to.as_mut().ok_or(libc::EINVAL)?;
        let seen = context.device.view_all();
        let snapshot = Snapshot::of(seen, &context.net.config(), context.device.now_ns());
        *to = Box::into_raw(Box::new(snapshot)).cast();
        Ok(())
    })
}

unsafe extern "C" fn free_snapshot(snapshot: Opaque) {
    // SAFETY: take_snapshot made it of a box; nobody uses it any more.
    drop(unsafe { Box::from_raw(snapshot.cast::<Snapshot>()) });
}

unsafe extern "C" fn snapshot_info(snapshot: Opaque, to: *mut SnapshotInfo) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_snapshot_info", || unsafe { fill(to, of(snapshot)?.info) })
}

unsafe extern "C" fn snapshot_plane(snapshot: Opaque, index: u32, to: *mut Plane) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_snapshot_plane", || unsafe { item(&of(snapshot)?.planes, index, to) })
}

unsafe extern "C" fn snapshot_connection(snapshot: Opaque, index: u32, to: *mut Connection) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_snapshot_connection", || unsafe { item(&of(snapshot)?.connections, index, to) })
}

unsafe extern "C" fn snapshot_path(snapshot: Opaque, index: u32, to: *mut Path) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_snapshot_path", || unsafe { item(&of(snapshot)?.paths, index, to) })
}

unsafe extern "C" fn snapshot_qp(snapshot: Opaque, index: u32, to: *mut QueuePair) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_snapshot_qp", || unsafe { item(&of(snapshot)?.qps, index, to) })
}

unsafe extern "C" fn open_events(ctx: Opaque, to: *mut Opaque) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_open_events", || unsafe {
        let to = to.as_mut().ok_or(libc::EINVAL)?;
        *to = Box::into_raw(Box::new(ours(ctx)?.device.watch()?)).cast();
        Ok(())
    })
}

unsafe extern "C" fn close_events(events: Opaque) {
    // SAFETY: open_events made it of a box; nobody uses it any more.
    drop(unsafe { Box::from_raw(events.cast::<Watch>()) });
}

unsafe extern "C" fn events_fd(events: Opaque, fd: *mut c_int) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_events_fd", || unsafe { put(fd, listener(events)?.fd()) })
}

unsafe extern "C" fn next_event(events: Opaque, to: *mut Event) -> c_int {
    // SAFETY: module comment.
    verb("metaroce_next_event", || unsafe {
        // Before it is taken: one that does not fit must not be lost.
        fill(to, Event::ZERO)?;
        fill(to, view::event(&listener(events)?.next()?))
    })
}

/// # Safety
/// `raw` is NULL (gives EINVAL) or a listener that is not closed during `'a`.
unsafe fn listener<'a>(raw: Opaque) -> Result<&'a Watch> {
    // SAFETY: upheld by the caller.
    unsafe { raw.cast::<Watch>().as_ref() }.ok_or(libc::EINVAL)
}

/// # Safety
/// `raw` is NULL (gives EINVAL) or a snapshot that is not freed during `'a`.
unsafe fn of<'a>(raw: Opaque) -> Result<&'a Snapshot> {
    // SAFETY: upheld by the caller.
    unsafe { raw.cast::<Snapshot>().as_ref() }.ok_or(libc::EINVAL)
}

/// Gives one of a list; ENOENT at its end.
///
/// # Safety
/// As for [`fill`].
unsafe fn item<T: Plain>(all: &[T], index: u32, to: *mut T) -> Result<()> {
    let item = all.get(index as usize).ok_or(libc::ENOENT)?;
    // SAFETY: upheld by the caller.
    unsafe { fill(to, *item) }
}

/// A number of a plane, path or entropy value; none is above 255.
fn small(number: u32) -> Result<u8> {
    u8::try_from(number).map_err(|_| libc::EINVAL)
}
