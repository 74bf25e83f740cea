//! Memory by the page: what is mapped for device memory, and what is brought in ahead of its use. Part of the unsafe
//! fence.

use std::io;

use crate::ffi::Result;

/// Advice of Linux 5.14: fault pages in, for reading or writing.
const MADV_POPULATE_READ: i32 = 22;
const MADV_POPULATE_WRITE: i32 = 23;

/// Zeroed pages of our own; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Room {
    start: *mut u8,
    len: usize,
}

// SAFETY: an address; what lies there is shared memory without type.
unsafe impl Send for Room {}
// SAFETY: as above.
unsafe impl Sync for Room {}

impl Room {
    /// At least `len` bytes, which are not 0.
    pub(crate) fn new(len: usize) -> Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe {
            let (rights, kind) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            libc::mmap(std::ptr::null_mut(), len, rights, kind, -1, 0)
        };
        if start == libc::MAP_FAILED { Err(libc::ENOMEM) } else { Ok(Self { start: start.cast(), len }) }
    }
    /// Address of a byte; `offset` is at most the length.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        self.start.wrapping_add(offset.min(self.len))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`; whoever handed the address on has ended its use (regions keep the Room).
        unsafe { libc::munmap(self.start.cast(), self.len) };
    }
}

/// The whole pages around a range.
fn pages(va: u64, len: u64) -> (u64, u64) {
    let page = 4096;
    let start = va & !(page - 1);
    // Beyond the last page there is no memory: whoever asks for that is told.
    let end = (va + len).checked_next_multiple_of(page).unwrap_or(u64::MAX - (page - 1));
    (start, end - start)
}

/// Faults the pages in, as the kernel does when it pins memory for a device; EFAULT when they are not there or may not be
/// accessed like this. (A kernel before 5.14 cannot be asked: there the pages come with their first use.)
pub(crate) fn populate(va: u64, len: u64, write: bool) -> Result<()> {
    let advice = if write { MADV_POPULATE_WRITE } else { MADV_POPULATE_READ };
    loop {
        match advise(va, len, advice) {
            0 => return Ok(()),
            libc::EINTR => {}
            // Says both that the rights are wrong and that the advice is not known.
            libc::EINVAL if advise(&raw const advice as u64, 1, MADV_POPULATE_READ) != 0 => return Ok(()),
            _ => return Err(libc::EFAULT),
        }
    }
}

/// Gives advice for whole pages; 0 or the errno.
fn advise(va: u64, len: u64, advice: i32) -> i32 {
    let (start, len) = pages(va, len);
    // SAFETY: touches pages as a read, or a write of what is there, would; reports instead of faulting.
    if unsafe { libc::madvise(start as *mut _, len as usize, advice) } == 0 {
        return 0;
    }
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EFAULT)
}

/// Tells the kernel that the pages will be needed.
pub(crate) fn will_need(va: u64, len: u64) {
    let (start, len) = pages(va, len);
    // SAFETY: advice without effect on content; a bad range is refused.
    unsafe { libc::madvise(start as *mut _, len as usize, libc::MADV_WILLNEED) };
}
