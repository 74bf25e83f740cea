//! Protection domains, memory and its registration. A [`Buffer`] is written by the device behind the
//! program's back, so it is never seen as a slice: bytes go in and out by copy, polled bytes by atomic loads.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::{Context, Sge, check, last_error, sys};

/// A protection domain.
#[derive(Debug)]
pub struct Pd {
    raw: NonNull<sys::ibv_pd>,
    context: Arc<Context>,
}

/// Identity of a PD for messages.
pub type PdNumber = usize;

// SAFETY: verbs objects may be used from any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl Pd {
    /// Allocates one.
    pub fn new(context: &Arc<Context>) -> io::Result<Arc<Self>> {
        // SAFETY: the context is open and kept so by the Arc.
        let raw = unsafe { sys::ibv_alloc_pd(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("ibv_alloc_pd"))?;
        Ok(Arc::new(Self { raw, context: context.clone() }))
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_pd {
        self.raw.as_ptr()
    }

    /// The device it belongs to.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Calls `ibv_dealloc_pd` although objects may still use it: what a careless program does. Only an error
    /// is a right answer while there are any, and then the PD is still there.
    pub fn try_dealloc_in_use(&self) -> io::Result<()> {
        // SAFETY: the device must refuse; a device that frees a PD in use fails the test that calls this.
        check("ibv_dealloc_pd", unsafe { sys::ibv_dealloc_pd(self.raw()) })
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: MRs, QPs and SRQs hold an Arc of their PD, so none is left.
        unsafe { sys::ibv_dealloc_pd(self.raw()) };
    }
}

/// Page-aligned anonymous memory that a device may write at any time.
#[derive(Debug)]
pub struct Buffer {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: access is by copy through raw pointers and atomics; races with the device are what the tests are
// about, and are ordered by completions or by acquire loads of the polled byte.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Maps `len` zero bytes (lazily: untouched pages cost nothing).
    pub fn new(len: usize) -> io::Result<Arc<Self>> {
        // SAFETY: a fresh anonymous mapping; the arguments are constants and a length.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len.max(1),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(last_error("mmap"));
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        Ok(Arc::new(Self { base, len: len.max(1) }))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a mapping has at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of byte `at`, as a device sees it.
    pub fn address(&self, at: usize) -> u64 {
        assert!(at <= self.len, "address outside the buffer");
        self.base.as_ptr() as u64 + at as u64
    }

    fn range(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.len), "range outside the buffer");
        // SAFETY: `at` is inside the mapping, as just checked.
        unsafe { self.base.as_ptr().add(at) }
    }

    /// Copies `bytes` to `at`.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        let to = self.range(at, bytes.len());
        // SAFETY: the range is inside the mapping; `bytes` is ordinary memory and cannot overlap a private
        // mapping nobody has a slice of.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies out `into.len()` bytes from `at`.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        let from = self.range(at, into.len());
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Sets `len` bytes from `at` to `value`.
    pub fn fill(&self, at: usize, len: usize, value: u8) {
        let to = self.range(at, len);
        // SAFETY: the range is inside the mapping.
        unsafe { std::ptr::write_bytes(to, value, len) };
    }

    /// Loads one polled byte; everything stored before the byte is visible afterwards.
    pub fn load(&self, at: usize) -> u8 {
        let byte = self.range(at, 1);
        // SAFETY: inside the mapping; AtomicU8 has the layout and alignment of u8.
        unsafe { AtomicU8::from_ptr(byte) }.load(Ordering::Acquire)
    }

    /// Loads a 64-bit word at an offset divisible by 8.
    pub fn load_word(&self, at: usize) -> u64 {
        assert!(at.is_multiple_of(8), "words are aligned");
        let word = self.range(at, 8);
        // SAFETY: inside the mapping and aligned (the base is page-aligned).
        unsafe { AtomicU64::from_ptr(word.cast()) }.load(Ordering::Acquire)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours; MRs over it hold an Arc of it, so no device reaches it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A registered range of a [`Buffer`].
#[derive(Debug)]
pub struct Mr {
    raw: NonNull<sys::ibv_mr>,
    buffer: Arc<Buffer>,
    at: usize,
    len: usize,
    _pd: Arc<Pd>,
}

// SAFETY: verbs objects may be used from any thread.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers `len` bytes from `at` with `IBV_ACCESS_*` bits.
    pub fn new(pd: &Arc<Pd>, buffer: &Arc<Buffer>, at: usize, len: usize, access: u32) -> io::Result<Self> {
        let address = buffer.range(at, len);
        // SAFETY: the range stays mapped while the MR lives (it holds the Arc).
        let raw = unsafe { sys::__ibv_reg_mr(pd.raw(), address.cast(), len, access, 0) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("ibv_reg_mr"))?;
        Ok(Self { raw, buffer: buffer.clone(), at, len, _pd: pd.clone() })
    }

    /// Registers a whole buffer.
    pub fn whole(pd: &Arc<Pd>, buffer: &Arc<Buffer>, access: u32) -> io::Result<Self> {
        Self::new(pd, buffer, 0, buffer.len(), access)
    }

    /// Key for SGEs.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the MR is registered, so the struct is alive.
        unsafe { self.raw.as_ref() }.lkey
    }

    /// Key for the peer.
    pub fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { self.raw.as_ref() }.rkey
    }

    /// The memory under it.
    pub fn buffer(&self) -> &Arc<Buffer> {
        &self.buffer
    }

    /// Address of its first byte.
    pub fn address(&self) -> u64 {
        self.buffer.address(self.at)
    }

    /// An SGE for `len` bytes at `at`, counted from the MR's start.
    pub fn sge(&self, at: usize, len: usize) -> Sge {
        assert!(at + len <= self.len, "SGE outside the MR");
        Sge { addr: self.address() + at as u64, len: len as u32, lkey: self.lkey() }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: registered exactly once and not yet deregistered.
        unsafe { sys::ibv_dereg_mr(self.raw.as_ptr()) };
    }
}
