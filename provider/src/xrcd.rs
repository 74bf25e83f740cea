//! XRC domains: what requesters' messages find SRQs in. A domain belongs to one process; the contexts of that process
//! share it by the file it was opened with.

use std::collections::HashMap;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Weak};

use metaroce_engine as engine;
use parking_lot::Mutex;
use rdma_core_sys::private::verbs_xrcd;
use rdma_core_sys::{ibv_context, ibv_xrcd};

use crate::ffi::{CPart, Object, Result, next_handle};

/// A domain as C sees it.
#[repr(C)]
pub(crate) struct Xrcd {
    _c: CPart<verbs_xrcd>,
    pub(crate) domain: Arc<Domain>,
}

/// The domain itself; SRQs and QPs in it keep it.
pub(crate) struct Domain {
    /// Its number in the core.
    pub(crate) number: u32,
    /// Responders in it, which other holders of the domain may open.
    responders: Mutex<HashMap<u32, Weak<engine::Qp>>>,
}

/// Device and inode of a file.
type FileId = (u64, u64);

/// Domains that have a file.
static SHARED: LazyLock<Mutex<HashMap<FileId, Weak<Domain>>>> = LazyLock::new(Mutex::default);

// SAFETY: repr(C), the C part is first and begins with an ibv_xrcd.
unsafe impl Object for Xrcd {
    type C = ibv_xrcd;
}

impl Xrcd {
    /// The domain of the file behind `fd`, or one of its own for -1. EBADF for a descriptor that is not open; as a
    /// kernel says it, EAGAIN where there is none and `O_CREAT` is not set, EINVAL where there is one and `O_EXCL` is.
    pub(crate) fn open(context: *mut ibv_context, fd: RawFd, flags: i32) -> Result<Box<Self>> {
        let create = flags & libc::O_CREAT != 0;
        if flags & !(libc::O_CREAT | libc::O_EXCL) != 0 {
            return Err(libc::EINVAL);
        }
        let domain = match fd {
            -1 if create => Domain::new(),
            -1 => return Err(libc::EINVAL),
            _ => {
                let file = file_of(fd)?;
                let mut shared = SHARED.lock();
                shared.retain(|_, domain| domain.strong_count() > 0);
                match shared.get(&file).and_then(Weak::upgrade) {
                    Some(_) if flags & libc::O_EXCL != 0 => return Err(libc::EINVAL),
                    Some(domain) => domain,
                    None if !create => return Err(libc::EAGAIN),
                    None => {
                        let domain = Domain::new();
                        shared.insert(file, Arc::downgrade(&domain));
                        domain
                    }
                }
            }
        };
        let _c = CPart::new(|xrcd: &mut verbs_xrcd| {
            xrcd.xrcd.context = context;
            xrcd.handle = next_handle();
        });
        Ok(Box::new(Self { _c, domain }))
    }

    /// EBUSY while an SRQ or QP is in it and nobody else holds it.
    pub(crate) fn check_unused(&self) -> Result<()> {
        if Arc::strong_count(&self.domain) > 1 && self.domain.is_used() { Err(libc::EBUSY) } else { Ok(()) }
    }
}

impl Domain {
    fn new() -> Arc<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { number, responders: Mutex::default() })
    }
    /// A responder was made in it.
    pub(crate) fn add(&self, qp: &Arc<engine::Qp>) {
        let mut responders = self.responders.lock();
        responders.retain(|_, qp| qp.strong_count() > 0);
        responders.insert(qp.qpn().0, Arc::downgrade(qp));
    }
    /// A responder of the domain; EINVAL when there is none of that number.
    pub(crate) fn responder(&self, number: u32) -> Result<Arc<engine::Qp>> {
        self.responders.lock().get(&number).and_then(Weak::upgrade).ok_or(libc::EINVAL)
    }
    fn is_used(&self) -> bool {
        self.responders.lock().values().any(|qp| qp.strong_count() > 0)
    }
}

/// Device and inode behind a descriptor of the application's.
fn file_of(fd: RawFd) -> Result<FileId> {
    if fd < 0 {
        return Err(libc::EBADF);
    }
    // SAFETY: only looked at, and left open; a descriptor that is not open gives an error.
    let file = ManuallyDrop::new(unsafe { File::from_raw_fd(fd) });
    let meta = file.metadata().map_err(|e| e.raw_os_error().unwrap_or(libc::EBADF))?;
    Ok((meta.dev(), meta.ino()))
}
