//! An open device: attributes, GIDs, asynchronous events.

use std::ffi::CStr;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use crate::{check, last_error, sys};

/// The only port of the devices tested here.
pub const PORT: u8 = 1;

/// An open device (`ibv_context`).
#[derive(Debug)]
pub struct Context {
    raw: NonNull<sys::ibv_context>,
}

// SAFETY: libibverbs contexts may be used from any thread (verbs are thread safe by specification).
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// What `ibv_query_port` and `ibv_query_device` say, as far as the tests ask.
#[derive(Debug, Clone, Copy)]
pub struct PortInfo {
    /// `active_mtu` in bytes.
    pub active_mtu: u32,
    /// `max_mtu` in bytes.
    pub max_mtu: u32,
    /// Device limit: QPs.
    pub max_qp: i32,
    /// Device limit: WRs per queue.
    pub max_qp_wr: i32,
    /// Device limit: SGEs per WR.
    pub max_sge: i32,
    /// Device limit: CQEs per CQ.
    pub max_cqe: i32,
    /// Device limit: Reads and atomics in flight at a responder.
    pub max_qp_rd_atom: i32,
}

/// What an asynchronous event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// QP with this number.
    Qp(u32),
    /// CQ, by the address libibverbs knows it by.
    Cq(usize),
    /// SRQ, by address.
    Srq(usize),
    /// Anything else (port, device).
    Other,
}

/// An asynchronous event, already acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncEvent {
    /// `IBV_EVENT_*`.
    pub kind: u32,
    /// The object concerned.
    pub element: Element,
}

/// Name of an `IBV_EVENT_*` value.
pub fn event_name(kind: u32) -> String {
    // SAFETY: ibv_event_type_str returns a static C string for every value ("unknown" for strange ones).
    unsafe { CStr::from_ptr(sys::ibv_event_type_str(kind)) }.to_string_lossy().into_owned()
}

impl Context {
    /// Opens the device called `name`, or the first one there is.
    pub fn open(name: Option<&str>) -> io::Result<Arc<Self>> {
        let mut count = 0;
        // SAFETY: the list is a null-terminated array owned by us until ibv_free_device_list; its devices
        // stay valid for ibv_open_device before that.
        unsafe {
            let list = sys::ibv_get_device_list(&mut count);
            if list.is_null() {
                return Err(last_error("ibv_get_device_list"));
            }
            let devices = std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0));
            let wanted = |device: &&*mut sys::ibv_device| {
                name.is_none_or(|n| {
                    CStr::from_ptr(sys::ibv_get_device_name(**device)).to_bytes() == n.as_bytes()
                })
            };
            let raw = devices.iter().find(wanted).map_or(ptr::null_mut(), |d| sys::ibv_open_device(*d));
            let error = last_error("ibv_open_device");
            let found = devices.iter().any(|d| wanted(&d));
            sys::ibv_free_device_list(list);
            match NonNull::new(raw) {
                Some(raw) => Ok(Arc::new(Self { raw })),
                None if found => Err(error),
                None => Err(io::Error::new(
                    io::ErrorKind::NotFound,
                    format!(
                        "no RDMA device{} ({count} listed)",
                        name.map_or(String::new(), |n| format!(" {n}"))
                    ),
                )),
            }
        }
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_context {
        self.raw.as_ptr()
    }

    /// Device and port attributes.
    pub fn info(&self) -> io::Result<PortInfo> {
        // SAFETY: all-zero is a valid value of both plain C structs; both calls only fill them.
        unsafe {
            let mut device: sys::ibv_device_attr = std::mem::zeroed();
            let mut port: sys::ibv_port_attr = std::mem::zeroed();
            check("ibv_query_device", sys::ibv_query_device(self.raw(), &mut device))?;
            check("ibv_query_port", sys::___ibv_query_port(self.raw(), PORT, &mut port))?;
            Ok(PortInfo {
                active_mtu: 128 << port.active_mtu,
                max_mtu: 128 << port.max_mtu,
                max_qp: device.max_qp,
                max_qp_wr: device.max_qp_wr,
                max_sge: device.max_sge,
                max_cqe: device.max_cqe,
                max_qp_rd_atom: device.max_qp_rd_atom,
            })
        }
    }

    /// GID at `index` of the port's table.
    pub fn gid(&self, index: i32) -> io::Result<[u8; 16]> {
        let mut gid = sys::ibv_gid { raw: [0; 16] };
        // SAFETY: the call fills one ibv_gid; every bit pattern is a valid byte array.
        unsafe {
            check("ibv_query_gid", sys::ibv_query_gid(self.raw(), PORT, index, &mut gid))?;
            Ok(gid.raw)
        }
    }

    /// Waits at most `limit` for an asynchronous event, takes and acknowledges it.
    pub fn async_event(&self, limit: Duration) -> io::Result<Option<AsyncEvent>> {
        // SAFETY: the context is open, so its async_fd is valid; get/ack pair on one event struct as
        // documented.
        unsafe {
            if !readable((*self.raw()).async_fd, limit)? {
                return Ok(None);
            }
            let mut event: sys::ibv_async_event = std::mem::zeroed();
            check("ibv_get_async_event", sys::ibv_get_async_event(self.raw(), &mut event))?;
            let kind = event.event_type;
            let element = match kind {
                sys::IBV_EVENT_CQ_ERR => Element::Cq(event.element.cq as usize),
                sys::IBV_EVENT_QP_FATAL
                | sys::IBV_EVENT_QP_REQ_ERR
                | sys::IBV_EVENT_QP_ACCESS_ERR
                | sys::IBV_EVENT_COMM_EST
                | sys::IBV_EVENT_SQ_DRAINED
                | sys::IBV_EVENT_PATH_MIG
                | sys::IBV_EVENT_PATH_MIG_ERR
                | sys::IBV_EVENT_QP_LAST_WQE_REACHED => Element::Qp((*event.element.qp).qp_num),
                sys::IBV_EVENT_SRQ_ERR | sys::IBV_EVENT_SRQ_LIMIT_REACHED => {
                    Element::Srq(event.element.srq as usize)
                }
                _ => Element::Other,
            };
            sys::ibv_ack_async_event(&mut event);
            Ok(Some(AsyncEvent { kind, element }))
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: objects of the context hold an Arc of it, so none is left.
        unsafe { sys::ibv_close_device(self.raw()) };
    }
}

/// Waits until `fd` is readable, at most `limit`.
pub(crate) fn readable(fd: i32, limit: Duration) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let millis = i32::try_from(limit.as_millis()).unwrap_or(i32::MAX);
    loop {
        // SAFETY: one valid pollfd, count one.
        match unsafe { libc::poll(&mut poll, 1, millis) } {
            -1 if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            -1 => return Err(last_error("poll")),
            n => return Ok(n > 0),
        }
    }
}
