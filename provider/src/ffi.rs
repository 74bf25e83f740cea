//! THE unsafe fence: everything that turns C pointers into Rust references and back, and the boundary that keeps
//! panics out of C. The files around it are safe code; `entry.rs` holds the `extern "C"` functions themselves.
//!
//! The invariant all casts rest on is the verbs contract, upheld by libibverbs and the application: an object passed
//! in was returned by our create function, has not been destroyed, and is not destroyed while a call uses it.

use std::cell::UnsafeCell;
use std::ffi::c_int;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};

use rdma_core_sys::private::*;
use rdma_core_sys::*;

use crate::context::{Context, ContextMemory};

/// A positive `errno` value.
pub(crate) type Errno = i32;
/// Outcome of the safe inner functions.
pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// Sets `errno`, which verbs that return pointers report by.
pub(crate) fn set_errno(errno: Errno) {
    // SAFETY: errno is thread-local and always writable.
    unsafe { *libc::__errno_location() = errno };
}

/// Boundary of a control verb that returns an errno value: 0, the error, or EIO for a panic (a bug of ours, logged).
pub(crate) fn verb(name: &str, inner: impl FnOnce() -> Result<()>) -> c_int {
    match guarded(name, inner) {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            errno
        }
    }
}

/// Boundary of a control verb that returns an object: NULL with `errno` set on failure.
pub(crate) fn verb_ptr<T>(name: &str, inner: impl FnOnce() -> Result<*mut T>) -> *mut T {
    guarded(name, inner).unwrap_or_else(|errno| {
        set_errno(errno);
        ptr::null_mut()
    })
}

/// Keeps `pthread_cancel` away from the calling thread while it lives: a thread that ended inside a verb would leave
/// locks held, and unwinding must not pass through these frames.
pub(crate) struct Uncancelled(c_int);

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

impl Uncancelled {
    pub(crate) fn begin() -> Self {
        const PTHREAD_CANCEL_DISABLE: c_int = 1;
        let mut before = 0;
        // SAFETY: the place for the old state is valid.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &mut before) };
        Self(before)
    }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: a state that pthread_setcancelstate gave; NULL is allowed.
        unsafe { pthread_setcancelstate(self.0, ptr::null_mut()) };
    }
}

/// Runs `inner`, which cannot be cancelled; a panic becomes EIO.
pub(crate) fn guarded<T>(name: &str, inner: impl FnOnce() -> Result<T>) -> Result<T> {
    let _uncancelled = Uncancelled::begin();
    catch_unwind(AssertUnwindSafe(inner)).unwrap_or_else(|_| {
        log::error!("{name}: internal error, the device is in an undefined state");
        Err(libc::EIO)
    })
}

/// The part of an object that C code reads and writes behind Rust's back.
#[repr(transparent)]
pub(crate) struct CPart<T>(UnsafeCell<T>);

// SAFETY: handed to C, which accesses it by the rules of the verbs API (its mutexes); Rust accesses go through raw
// pointers inside this file and `entry.rs`.
unsafe impl<T> Sync for CPart<T> {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl<T> Send for CPart<T> {}

/// C structures for which all-zero bytes are a valid value.
///
/// # Safety
/// Implement it only for structures of integers, raw pointers, `Option<fn>` and pthread objects.
pub(crate) unsafe trait Zeroable {}

macro_rules! zeroable {
    ($($ty:ty),*) => { $(
        // SAFETY: a bindgen (or hand-written) structure of integers, pointers, Option<fn> and pthread objects.
        unsafe impl Zeroable for $ty {}
    )* };
}
zeroable!(
    ibv_pd,
    ibv_td,
    verbs_mr,
    verbs_cq,
    verbs_qp,
    verbs_srq,
    ibv_ah,
    verbs_device,
    verbs_dm,
    ibv_flow,
    ibv_wq,
    ibv_rwq_ind_table,
    verbs_xrcd,
    ibv_mw,
    ibv_device_attr_ex,
    ibv_port_attr,
    ibv_qp_init_attr_ex
);

/// An all-zero C structure.
pub(crate) fn zeroed<T: Zeroable>() -> T {
    // SAFETY: Zeroable says so.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

impl<T: Zeroable> CPart<T> {
    /// A structure whose pointers are NULL and numbers 0, ready to be filled by `init`.
    pub(crate) fn new(init: impl FnOnce(&mut T)) -> Self {
        let mut value = zeroed();
        init(&mut value);
        Self(UnsafeCell::new(value))
    }
}

impl<T> CPart<T> {
    /// Changes an object that is not published yet, or what of it C only reads, under the object's own lock.
    pub(crate) fn fill(&self, fill: impl FnOnce(&mut T)) {
        // SAFETY: upheld by the callers, see above; plain integers and pointers.
        fill(unsafe { &mut *self.0.get() });
    }
    /// Its address, as C sees it.
    pub(crate) fn as_ptr(&self) -> *mut T {
        self.0.get()
    }
}

/// A verbs object: what C points at is its first member.
///
/// # Safety
/// The implementor is `#[repr(C)]` and its first member is a `CPart` whose content begins with a `C`.
pub(crate) unsafe trait Object: Send + Sync + Sized {
    /// The public C structure.
    type C;
}

/// Hands an object over to C; [`reclaim`] takes it back.
pub(crate) fn publish<T: Object>(object: Box<T>) -> *mut T::C {
    Box::into_raw(object).cast()
}

/// The object behind a pointer from C.
///
/// # Safety
/// `raw` is NULL (gives EINVAL) or came from [`publish`] of the same type and is not reclaimed during `'a`.
pub(crate) unsafe fn object<'a, T: Object>(raw: *mut T::C) -> Result<&'a T> {
    // SAFETY: upheld by the caller; the C part is the first member (Object), all other access is shared.
    unsafe { raw.cast::<T>().as_ref() }.ok_or(libc::EINVAL)
}

/// Takes an object back from C to drop it.
///
/// # Safety
/// `raw` came from [`publish`] of the same type and nobody uses it any more.
pub(crate) unsafe fn reclaim<T: Object>(raw: *mut T::C) -> Box<T> {
    // SAFETY: upheld by the caller.
    unsafe { Box::from_raw(raw.cast()) }
}

/// Reads or changes a structure of the caller (attributes).
///
/// # Safety
/// `raw` is NULL (gives EINVAL) or points at a valid structure that nobody else changes during the call.
pub(crate) unsafe fn attributes<'a, T>(raw: *mut T) -> Result<&'a mut T> {
    // SAFETY: upheld by the caller.
    unsafe { raw.as_mut() }.ok_or(libc::EINVAL)
}

/// Writes an answer into a structure of the caller, which may be uninitialised.
///
/// # Safety
/// `to` is NULL (gives EINVAL) or writable.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result<()> {
    if to.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: upheld by the caller.
    unsafe { to.write(value) };
    Ok(())
}

/// The context behind a pointer from C. EIO in the child of a fork.
///
/// # Safety
/// `raw` is NULL (gives EINVAL) or lies in the memory of an open context of ours.
pub(crate) unsafe fn context<'a>(raw: *mut ibv_context) -> Result<&'a Arc<Context>> {
    // SAFETY: upheld by the caller.
    unsafe {
        let state = inherited_context(raw)?;
        state.alive()?;
        state.adopt_events((*raw).async_fd);
        Ok(state)
    }
}

/// The context behind a pointer from C, in the child of a fork as well: for what needs no device but memory of the
/// process.
///
/// # Safety
/// As for [`context`].
pub(crate) unsafe fn inherited_context<'a>(raw: *mut ibv_context) -> Result<&'a Arc<Context>> {
    if raw.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: upheld by the caller: our alloc_context put a ContextMemory around it.
    unsafe { (*dl::verbs_context_of(raw).cast::<ContextMemory>()).state.as_ref().ok_or(libc::EINVAL) }
}

/// A number for `handle` members, unique in the process whatever the kind of object. They begin at random, so that a
/// handle of another process, which came with a descriptor, means nothing here.
pub(crate) fn next_handle() -> u32 {
    static NEXT: LazyLock<AtomicU32> = LazyLock::new(|| {
        let mut bytes = [0u8; 4];
        // SAFETY: a buffer of its length. Without entropy the handles begin at 0, which does no harm.
        unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
        AtomicU32::new(u32::from_ne_bytes(bytes))
    });
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// `gid` as 16 bytes.
pub(crate) fn gid_bytes(gid: &ibv_gid) -> [u8; 16] {
    // SAFETY: every member of the union is 16 bytes of plain data.
    unsafe { gid.raw }
}

/// Waits until the application has acknowledged at least `expected` events, counted modulo 2^32 by `completed`.
///
/// # Safety
/// The pointers are the mutex, condition and counter of one live verbs object.
unsafe fn wait_acks(
    mutex: *mut libc::pthread_mutex_t,
    cond: *mut libc::pthread_cond_t,
    completed: *const u32,
    expected: u32,
) {
    // SAFETY: upheld by the caller; libibverbs initialised mutex and condition and changes the counter under it.
    unsafe {
        libc::pthread_mutex_lock(mutex);
        // "At least": an application that acknowledges too much must not hang here.
        while (completed.read_volatile().wrapping_sub(expected) as i32) < 0 {
            libc::pthread_cond_wait(cond, mutex);
        }
        libc::pthread_mutex_unlock(mutex);
    }
}

impl CPart<verbs_cq> {
    fn cq(&self) -> *mut ibv_cq {
        self.as_ptr().cast()
    }

    /// Sets the public handle.
    pub(crate) fn set_cq_handle(&self, handle: u32) {
        // SAFETY: our own live object; libibverbs only reads it.
        unsafe { (*self.cq()).handle = handle };
    }

    /// Sets the public depth.
    pub(crate) fn set_cqe(&self, cqe: u32) {
        // SAFETY: our own live object; libibverbs only reads it.
        unsafe { (*self.cq()).cqe = cqe as c_int };
    }

    /// Waits for the acknowledgement of `comp` completion and `async_` asynchronous events.
    pub(crate) fn wait_acks(&self, comp: u32, async_: u32) {
        let cq = self.cq();
        // SAFETY: our own live object, initialised by verbs_init_cq.
        unsafe {
            let (mutex, cond) = (&raw mut (*cq).mutex, &raw mut (*cq).cond);
            wait_acks(mutex, cond, &raw const (*cq).comp_events_completed, comp);
            wait_acks(mutex, cond, &raw const (*cq).async_events_completed, async_);
        }
    }

    /// Publishes wr_id and status of the current completion of an extended poll.
    pub(crate) fn set_current(&self, wr_id: u64, status: ibv_wc_status) {
        let cq = self.as_ptr().cast::<ibv_cq_ex>();
        // SAFETY: our own live object; only the polling thread (holder of the poll lock) reads these members.
        unsafe {
            (*cq).wr_id = wr_id;
            (*cq).status = status;
        }
    }
}

impl CPart<ibv_mw> {
    /// The window's key as the application knows it.
    pub(crate) fn window_key(&self) -> u32 {
        // SAFETY: our own live object; the application only reads it.
        unsafe { (*self.as_ptr()).rkey }
    }
    /// Gives it a new key.
    pub(crate) fn set_window_key(&self, key: u32) {
        // SAFETY: as above; callers hold the send lock of the QP they bind with.
        unsafe { (*self.as_ptr()).rkey = key };
    }
}

impl CPart<verbs_mr> {
    /// Sets the access flags libibverbs looks at.
    pub(crate) fn set_access(&self, access: u32) {
        // SAFETY: our own live object; the application deregisters it on no other thread meanwhile.
        unsafe { (*self.as_ptr()).access = access as c_int };
    }
}

impl CPart<verbs_qp> {
    fn qp(&self) -> *mut ibv_qp {
        self.as_ptr().cast()
    }

    /// Initialises mutex and condition, as create_qp must.
    pub(crate) fn init_sync(&self) {
        // SAFETY: our own object, not yet published.
        unsafe {
            libc::pthread_mutex_init(&raw mut (*self.qp()).mutex, ptr::null());
            libc::pthread_cond_init(&raw mut (*self.qp()).cond, ptr::null());
        }
    }

    /// Waits for the acknowledgement of `expected` asynchronous events.
    pub(crate) fn wait_acks(&self, expected: u32) {
        let qp = self.qp();
        // SAFETY: our own live object, initialised by init_sync.
        unsafe {
            wait_acks(&raw mut (*qp).mutex, &raw mut (*qp).cond, &raw const (*qp).events_completed, expected);
        }
    }

    /// `wr_id` and `wr_flags` as the application set them before an `ibv_wr_*` call.
    pub(crate) fn wr_id_flags(&self) -> (u64, u32) {
        let qp = self.as_ptr().cast::<ibv_qp_ex>();
        // SAFETY: our own live object; the application sets these from the thread that calls us.
        unsafe { ((*qp).wr_id, (*qp).wr_flags) }
    }
}

impl CPart<verbs_srq> {
    /// Initialises mutex and condition, as create_srq_ex must.
    pub(crate) fn init_sync(&self) {
        let srq = self.as_ptr().cast::<ibv_srq>();
        // SAFETY: our own object, not yet published.
        unsafe {
            libc::pthread_mutex_init(&raw mut (*srq).mutex, ptr::null());
            libc::pthread_cond_init(&raw mut (*srq).cond, ptr::null());
        }
    }
    /// Waits for the acknowledgement of `expected` asynchronous events.
    pub(crate) fn wait_acks(&self, expected: u32) {
        let srq = self.as_ptr().cast::<ibv_srq>();
        // SAFETY: our own live object, initialised by ibv_create_srq.
        unsafe {
            wait_acks(
                &raw mut (*srq).mutex,
                &raw mut (*srq).cond,
                &raw const (*srq).events_completed,
                expected,
            );
        }
    }
}

/// State that only the holder of some lock touches; the lock is named where the cell is used.
pub(crate) struct LockedCell<T>(UnsafeCell<T>);

// SAFETY: accessed by one thread at a time, see `with`.
unsafe impl<T> Sync for LockedCell<T> {}
// SAFETY: verbs permits creating and destroying on different threads; nothing is borrowed then.
unsafe impl<T> Send for LockedCell<T> {}

impl<T> LockedCell<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Access for the holder of the lock.
    ///
    /// # Safety
    /// The calling thread holds the lock that guards this cell, and `f` does not come back here.
    pub(crate) unsafe fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        // SAFETY: upheld by the caller.
        f(unsafe { &mut *self.0.get() })
    }
}

/// `write` without being a cancellation point: a thread cancelled inside it would leave the engine's lock held.
pub(crate) fn write_uncancelled(fd: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<usize> {
    // SAFETY: the buffer is valid for its length; the kernel only reads it.
    let n = unsafe { libc::syscall(libc::SYS_write, fd.as_raw_fd(), bytes.as_ptr(), bytes.len()) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// `read` without being a cancellation point.
pub(crate) fn read_uncancelled(fd: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<usize> {
    // SAFETY: the buffer is valid and writable for its length.
    let n = unsafe { libc::syscall(libc::SYS_read, fd.as_raw_fd(), bytes.as_mut_ptr(), bytes.len()) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Makes the descriptor `to` name what `from` names.
pub(crate) fn replace_descriptor(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: both are open; `to` goes on to be owned by who has it.
    let n = unsafe { libc::dup3(from.as_raw_fd(), to.as_raw_fd(), libc::O_CLOEXEC) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
