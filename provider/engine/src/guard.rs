//! Access to application memory that is registered and may not be there: unmapped, protected or cut off meanwhile. It
//! ends in an error, not in a signal.
//!
//! The accesses are a few instructions of their own. A handler for SIGSEGV and SIGBUS knows their addresses: a fault at
//! one of them goes on at the place that reports it, any other fault goes to who had the signal before. So an access
//! that succeeds costs nothing more than it does otherwise. On other processors than x86-64 the accesses are ordinary
//! ones, and the signal is the application's.

use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use nix::sys::signal::{SigSet, Signal};

/// The memory was not there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NotThere;

/// The signals a bad address raises; a thread that drives the engine must not block them.
pub(crate) fn signals() -> SigSet {
    [Signal::SIGSEGV, Signal::SIGBUS].into_iter().collect()
}

#[cfg(target_arch = "x86_64")]
mod access {
    // Leaf routines that leave the stack alone, so that going on at `fault` returns to their caller. Arguments are as
    // the C convention has them; the result is 0 or 1.
    std::arch::global_asm!(
        ".p2align 4",
        ".globl metaroce_guard_begin",
        ".hidden metaroce_guard_begin",
        "metaroce_guard_begin:",
        // copy(rdi: to, rsi: from, rdx: bytes)
        ".globl metaroce_guard_copy",
        ".hidden metaroce_guard_copy",
        "metaroce_guard_copy:",
        "cmp rdx, 64",
        "jb 3f",
        "2:",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + 16]",
        "movups xmm2, [rsi + 32]",
        "movups xmm3, [rsi + 48]",
        "movups [rdi], xmm0",
        "movups [rdi + 16], xmm1",
        "movups [rdi + 32], xmm2",
        "movups [rdi + 48], xmm3",
        "add rsi, 64",
        "add rdi, 64",
        "sub rdx, 64",
        "cmp rdx, 64",
        "jae 2b",
        "3:",
        "cmp edx, 8",
        "jb 5f",
        "4:",
        "mov rax, [rsi]",
        "mov [rdi], rax",
        "add rsi, 8",
        "add rdi, 8",
        "sub edx, 8",
        "cmp edx, 8",
        "jae 4b",
        "5:",
        "test edx, edx",
        "jz 7f",
        "6:",
        "mov al, [rsi]",
        "mov [rdi], al",
        "inc rsi",
        "inc rdi",
        "dec edx",
        "jnz 6b",
        "7:",
        "xor eax, eax",
        "ret",
        // store(rdi: to, rsi: value, edx: 1, 2, 4 or 8 bytes, aligned)
        ".globl metaroce_guard_store",
        ".hidden metaroce_guard_store",
        "metaroce_guard_store:",
        "cmp edx, 8",
        "je 8f",
        "cmp edx, 4",
        "je 4f",
        "cmp edx, 2",
        "je 2f",
        "mov [rdi], sil",
        "xor eax, eax",
        "ret",
        "2:",
        "mov [rdi], si",
        "xor eax, eax",
        "ret",
        "4:",
        "mov [rdi], esi",
        "xor eax, eax",
        "ret",
        "8:",
        "mov [rdi], rsi",
        "xor eax, eax",
        "ret",
        // compare_swap(rdi: at, rsi: compare, rdx: swap, rcx: where the old value goes)
        ".globl metaroce_guard_compare_swap",
        ".hidden metaroce_guard_compare_swap",
        "metaroce_guard_compare_swap:",
        "mov rax, rsi",
        "lock cmpxchg [rdi], rdx",
        "mov [rcx], rax",
        "xor eax, eax",
        "ret",
        // fetch_add(rdi: at, rsi: add, rdx: where the old value goes)
        ".globl metaroce_guard_fetch_add",
        ".hidden metaroce_guard_fetch_add",
        "metaroce_guard_fetch_add:",
        "lock xadd [rdi], rsi",
        "mov [rdx], rsi",
        "xor eax, eax",
        "ret",
        ".globl metaroce_guard_fault",
        ".hidden metaroce_guard_fault",
        "metaroce_guard_fault:",
        "mov eax, 1",
        "ret",
    );

    unsafe extern "C" {
        fn metaroce_guard_begin();
        fn metaroce_guard_fault();
        pub(super) fn metaroce_guard_copy(to: *mut u8, from: *const u8, bytes: usize) -> u32;
        pub(super) fn metaroce_guard_store(to: *mut u8, value: u64, bytes: usize) -> u32;
        pub(super) fn metaroce_guard_compare_swap(
            at: *mut u64,
            compare: u64,
            swap: u64,
            old: *mut u64,
        ) -> u32;
        pub(super) fn metaroce_guard_fetch_add(at: *mut u64, add: u64, old: *mut u64) -> u32;
    }
    pub(super) use metaroce_guard_compare_swap as compare_swap;
    pub(super) use metaroce_guard_copy as copy;
    pub(super) use metaroce_guard_fetch_add as fetch_add;
    pub(super) use metaroce_guard_store as store;

    /// Where the program goes on when it faulted in one of the accesses: changes the context of the signal. False: the
    /// fault is somebody else's.
    ///
    /// # Safety
    /// `context` is what the kernel gave a signal handler.
    pub(super) unsafe fn go_on(context: *mut libc::c_void) -> bool {
        let (begin, fault) =
            (metaroce_guard_begin as *const () as u64, metaroce_guard_fault as *const () as u64);
        // SAFETY: upheld by the caller.
        let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
        let at = &mut registers[libc::REG_RIP as usize];
        let ours = (begin..fault).contains(&(*at as u64));
        if ours {
            *at = fault as i64;
        }
        ours
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod access {
    use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

    /// # Safety
    /// Both ranges are there and do not overlap.
    pub(super) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> u32 {
        // SAFETY: upheld by the caller.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
        0
    }
    /// # Safety
    /// The bytes are there and aligned.
    pub(super) unsafe fn store(to: *mut u8, value: u64, bytes: usize) -> u32 {
        // SAFETY: upheld by the caller.
        unsafe {
            match bytes {
                8 => AtomicU64::from_ptr(to.cast()).store(value, Ordering::Release),
                4 => AtomicU32::from_ptr(to.cast()).store(value as u32, Ordering::Release),
                2 => AtomicU16::from_ptr(to.cast()).store(value as u16, Ordering::Release),
                _ => AtomicU8::from_ptr(to).store(value as u8, Ordering::Release),
            }
        }
        0
    }
    /// # Safety
    /// The word is there and aligned.
    pub(super) unsafe fn compare_swap(at: *mut u64, compare: u64, swap: u64, old: *mut u64) -> u32 {
        let order = Ordering::SeqCst;
        // SAFETY: upheld by the caller.
        unsafe {
            *old = AtomicU64::from_ptr(at).compare_exchange(compare, swap, order, order).unwrap_or_else(|o| o)
        };
        0
    }
    /// # Safety
    /// The word is there and aligned.
    pub(super) unsafe fn fetch_add(at: *mut u64, add: u64, old: *mut u64) -> u32 {
        // SAFETY: upheld by the caller.
        unsafe { *old = AtomicU64::from_ptr(at).fetch_add(add, Ordering::SeqCst) };
        0
    }
    /// # Safety
    /// None needed.
    pub(super) unsafe fn go_on(_: *mut libc::c_void) -> bool {
        false
    }
}

fn there(result: u32) -> Result<(), NotThere> {
    if result == 0 { Ok(()) } else { Err(NotThere) }
}

/// Copies `bytes` to application memory, ascending.
pub(crate) fn write(to: u64, bytes: &[u8]) -> Result<(), NotThere> {
    // SAFETY: the source is ours and no application memory; where the target is not there, the access reports it.
    there(unsafe { access::copy(to as *mut u8, bytes.as_ptr(), bytes.len()) })
}

/// Copies from application memory.
pub(crate) fn read(from: u64, out: &mut [u8]) -> Result<(), NotThere> {
    // SAFETY: as in `write`, the other way round.
    there(unsafe { access::copy(out.as_mut_ptr(), from as *const u8, out.len()) })
}

/// Stores 1, 2, 4 or 8 bytes at an address aligned to their number, at once. On x86-64 stores become visible in order.
pub(crate) fn store(to: u64, bytes: &[u8]) -> Result<(), NotThere> {
    let mut value = [0; 8];
    value[..bytes.len()].copy_from_slice(bytes);
    // SAFETY: as in `write`; the caller gives a legal length and alignment.
    there(unsafe { access::store(to as *mut u8, u64::from_le_bytes(value).to_le(), bytes.len()) })
}

/// Atomic compare-and-swap; gives the old value. `at` is aligned.
pub(crate) fn compare_swap(at: u64, compare: u64, swap: u64) -> Result<u64, NotThere> {
    let mut old = 0;
    // SAFETY: as in `write`; `old` is ours.
    there(unsafe { access::compare_swap(at as *mut u64, compare, swap, &raw mut old) }).map(|()| old)
}

/// Atomic addition; gives the old value. `at` is aligned.
pub(crate) fn fetch_add(at: u64, add: u64) -> Result<u64, NotThere> {
    let mut old = 0;
    // SAFETY: as in `write`; `old` is ours.
    there(unsafe { access::fetch_add(at as *mut u64, add, &raw mut old) }).map(|()| old)
}

/// A handler of the program's: its address (0 and 1 mean what SIG_DFL and SIG_IGN do) and how it is called.
struct Other {
    address: AtomicUsize,
    with_info: AtomicBool,
}

impl Other {
    const fn none() -> Other {
        Other { address: AtomicUsize::new(libc::SIG_DFL), with_info: AtomicBool::new(false) }
    }

    fn set(&self, action: &libc::sigaction) {
        self.with_info.store(action.sa_flags & libc::SA_SIGINFO != 0, Ordering::SeqCst);
        self.address.store(action.sa_sigaction, Ordering::SeqCst);
    }
}

/// Per signal: who had it when we came first, and who had it when we came last.
struct Others {
    first: Other,
    last: Other,
}

static SEGV: Others = Others { first: Other::none(), last: Other::none() };
static BUS: Others = Others { first: Other::none(), last: Other::none() };

std::thread_local! {
    /// The thread is in a handler that we called.
    static PASSED_ON: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Sees to it that our handler has both signals. A program may set its own at any time; whoever registers memory gets
/// ours in front of that again.
pub(crate) fn install() {
    static FIRST: Once = Once::new();
    for (signal, others) in [(libc::SIGSEGV, &SEGV), (libc::SIGBUS, &BUS)] {
        // SAFETY: plain reads and changes of the disposition of a signal; the handler is async-signal-safe.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &raw mut before) != 0
                || before.sa_sigaction == ours()
            {
                continue;
            }
            others.last.set(&before);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ours();
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
    FIRST.call_once(|| {
        for others in [&SEGV, &BUS] {
            others.first.address.store(others.last.address.load(Ordering::SeqCst), Ordering::SeqCst);
            others.first.with_info.store(others.last.with_info.load(Ordering::SeqCst), Ordering::SeqCst);
        }
    });
}

fn ours() -> usize {
    on_signal as *const () as usize
}

unsafe extern "C" fn on_signal(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel called us with the context of the fault.
    if unsafe { access::go_on(context) } {
        return;
    }
    let others = if signal == libc::SIGSEGV { &SEGV } else { &BUS };
    // A handler that passes on to ours, which it found before it: then it is the one before both that is meant.
    let again = PASSED_ON.replace(true);
    let other = if again { &others.first } else { &others.last };
    let address = other.address.load(Ordering::SeqCst);
    // SAFETY: the program set this handler, of this kind, for this signal; or the default is put back.
    unsafe {
        match address {
            libc::SIG_DFL | libc::SIG_IGN => {
                let mut default: libc::sigaction = std::mem::zeroed();
                default.sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, &raw const default, std::ptr::null_mut());
                // A fault comes again by itself; a signal that somebody sent does not.
                if (*info).si_code <= 0 {
                    libc::raise(signal);
                }
            }
            _ if other.with_info.load(Ordering::SeqCst) => {
                type WithInfo = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);
                std::mem::transmute::<usize, WithInfo>(address)(signal, info, context);
            }
            _ => std::mem::transmute::<usize, extern "C" fn(i32)>(address)(signal),
        }
    }
    PASSED_ON.set(again);
}

#[cfg(all(test, not(loom), target_arch = "x86_64"))]
mod tests {
    use super::*;

    /// Two pages of which the second is not there.
    fn half_there() -> (u64, u64) {
        // SAFETY: a mapping of our own, whose second page goes at once.
        unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let start = libc::mmap(std::ptr::null_mut(), 8192, rights, kind, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            let edge = start as u64 + 4096;
            assert_eq!(libc::munmap(edge as *mut _, 4096), 0);
            (start as u64, edge)
        }
    }

    #[test]
    fn copies__report_memory_that_is_not_there() {
        install();
        let (start, edge) = half_there();
        let data: Vec<u8> = (0..4096).map(|i| (i % 251) as u8).collect();
        for len in [1usize, 7, 8, 9, 63, 64, 65, 200, 1000, 4096] {
            assert_eq!(write(edge - len as u64, &data[..len]), Ok(()));
            let mut back = vec![0; len];
            assert_eq!(read(edge - len as u64, &mut back), Ok(()));
            assert_eq!(back, data[..len]);
            assert_eq!(write(edge, &data[..len]), Err(NotThere));
            assert_eq!(write(edge - len as u64 / 2, &data[..len]), Err(NotThere));
            assert_eq!(read(edge - len as u64 / 2, &mut back), Err(NotThere));
            assert_eq!(write(8, &data[..len]), Err(NotThere));
        }
        for len in [1usize, 2, 4, 8] {
            assert_eq!(store(edge - 8, &data[..len]), Ok(()));
            assert_eq!(store(edge, &data[..len]), Err(NotThere));
        }
        assert_eq!(fetch_add(edge, 1), Err(NotThere));
        assert_eq!(compare_swap(edge, 1, 2), Err(NotThere));
        assert_eq!(write(start, &[9; 8]), Ok(()));
        assert_eq!(fetch_add(start, 1), Ok(u64::from_ne_bytes([9; 8])));
    }

    #[test]
    fn copies__report_protected_memory_and_files_cut_off() {
        install();
        // SAFETY: mappings of our own.
        unsafe {
            let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let page = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ, kind, -1, 0);
            assert_eq!(write(page as u64, &[1; 100]), Err(NotThere));
            assert_eq!(read(page as u64, &mut [1; 100]), Ok(()));
            let fd = libc::memfd_create(c"cut".as_ptr(), 0);
            assert_eq!(libc::ftruncate(fd, 4096), 0);
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let file = libc::mmap(std::ptr::null_mut(), 4096, rights, libc::MAP_SHARED, fd, 0);
            assert_eq!(write(file as u64, &[1; 100]), Ok(()));
            assert_eq!(libc::ftruncate(fd, 0), 0);
            assert_eq!(write(file as u64, &[1; 100]), Err(NotThere));
            libc::close(fd);
        }
    }

    #[test]
    fn faults_of_others__reach_the_handler_of_the_program() {
        // In a child, which ends by it.
        // SAFETY: the child only sets a handler, faults and exits.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                extern "C" fn handler(_: i32) {
                    // SAFETY: ends the child.
                    unsafe { libc::_exit(33) };
                }
                let action = nix::sys::signal::SigHandler::Handler(handler);
                let _ = nix::sys::signal::signal(Signal::SIGSEGV, action);
                install();
                assert_eq!(write(8, &[1]), Err(NotThere));
                std::ptr::null_mut::<u8>().wrapping_add(8).write_volatile(1);
                libc::_exit(1);
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
            assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 33));
        }
    }
}
