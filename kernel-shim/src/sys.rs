//! System calls that std does not have, as safe functions, and a slot for values that are published without a lock.

use std::ffi::c_int;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A value that any thread may look at while another replaces it.
///
/// No lock, because a child forked while another thread holds one would wait for ever. What is replaced is never freed,
/// because others may still look at it: only for what changes a few times in a process's life.
#[derive(Debug)]
pub(crate) struct Published<T: Sync + 'static>(AtomicPtr<T>);

impl<T: Sync + 'static> Published<T> {
    pub(crate) const fn nothing() -> Published<T> {
        Published(AtomicPtr::new(ptr::null_mut()))
    }

    pub(crate) fn get(&self) -> Option<&'static T> {
        // SAFETY: the pointer is null or came from Box::leak in `publish`, so it is valid for ever; Acquire pairs with
        // the Release there.
        unsafe { self.0.load(Ordering::Acquire).as_ref() }
    }

    pub(crate) fn publish(&self, value: T) -> &'static T {
        let value: &'static T = Box::leak(Box::new(value));
        self.0.store(ptr::from_ref(value).cast_mut(), Ordering::Release);
        value
    }
}

/// The effective user.
pub(crate) fn euid() -> u32 {
    // SAFETY: a system call without pointers that cannot fail.
    unsafe { libc::geteuid() }
}

/// Tries to lock a file or directory; false when someone else's lock is in the way.
pub(crate) fn try_flock(file: &File, operation: c_int) -> bool {
    // SAFETY: a system call on a descriptor that `file` keeps open.
    unsafe { libc::flock(file.as_raw_fd(), operation | libc::LOCK_NB) == 0 }
}

/// Keeps a file open until the process ends, on a descriptor out of the way of programs that count on low numbers.
pub(crate) fn keep_open(file: File) {
    const HIGH: c_int = 500;
    // SAFETY: a system call on a descriptor that `file` keeps open; the result is a new descriptor or -1.
    let high = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH) };
    if high < 0 {
        // The limit is lower than that: stay on the descriptor we have.
        let _ = file.into_raw_fd();
    }
}

/// Writes one line to stderr, in one piece. A failed write loses a message and nothing else.
pub(crate) fn say(line: &str) {
    // SAFETY: `line` is valid for its length.
    unsafe { libc::write(libc::STDERR_FILENO, line.as_ptr().cast(), line.len()) };
}

/// A pipe's reading and writing end.
pub(crate) fn pipe() -> io::Result<[OwnedFd; 2]> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptors are new and nobody else's.
    Ok(ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) }))
}
