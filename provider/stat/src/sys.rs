//! The system calls behind the statistics file: the one place of this crate with `unsafe`.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// A shared, writable mapping of a file, seen as 64-bit words.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<AtomicU64>,
    words: usize,
}

// SAFETY: the mapping is plain memory that lives until Drop, and it is only reached through AtomicU64 references.
unsafe impl Send for Mapping {}
// SAFETY: as above: every access is atomic, so shared references may be used from any thread.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `words` words of `file`, growing it (zero filled) with real blocks where it is shorter, so that
    /// a full file system is an error here and not a SIGBUS at the first store.
    pub(crate) fn new(file: &File, words: usize) -> io::Result<Mapping> {
        let bytes = words * size_of::<u64>();
        // SAFETY: plain system call on a descriptor that `file` keeps open; it touches no memory of ours.
        let error = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, bytes as libc::off_t) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: a fresh mapping at an address the kernel chooses; nothing of ours is replaced.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { base, words })
    }

    /// The word at `index`. Panics beyond the end.
    pub(crate) fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < self.words, "word index outside the statistics file");
        // SAFETY: index is inside the mapping, which is page aligned, zero-initialised by the kernel and lives as
        // long as self; all users of this memory, in this process and others, access it atomically.
        unsafe { self.base.add(index).as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those mmap returned; no reference outlives self (word() borrows it).
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.words * size_of::<u64>()) };
    }
}

/// Effective user id of this process.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: takes no argument, cannot fail.
    unsafe { libc::geteuid() }
}

/// Whether a process with this id exists (one we may not signal exists too).
pub(crate) fn process_exists(pid: u32) -> bool {
    let Ok(pid) = libc::pid_t::try_from(pid) else { return false };
    // SAFETY: signal 0 only checks; no memory is involved.
    pid > 0
        && (unsafe { libc::kill(pid, 0) } == 0
            || io::Error::last_os_error().raw_os_error() == Some(libc::EPERM))
}
