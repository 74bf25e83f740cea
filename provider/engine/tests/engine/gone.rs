//! Memory that is registered and not there any more: requests end in protection errors, the process goes on.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::*;
use metaroce_config::Impairment;
use metaroce_engine::Device;
use metaroce_proto::{Opcode, Sge, WcStatus};

const CLEAN: Impairment = Impairment { loss: 0.0, reorder: 0.0, dup: 0.0, delay_us: 0, seed: 1 };
const PAGES: usize = 16 * 4096;

/// Where the next mapping goes.
static NEXT: AtomicUsize = AtomicUsize::new(0x1000_0000_0000);

/// What the application does to its memory under a live registration.
#[derive(Debug, Clone, Copy)]
enum Deed {
    Unmap,
    Protect,
    CutFile,
}

/// Registered memory of which, after the deed, nothing can be accessed.
fn gone(device: &Device, pd: u32, deed: Deed) -> (u64, u32) {
    // SAFETY: mappings of our own.
    unsafe {
        let fd = libc::memfd_create(c"gone".as_ptr(), 0);
        assert_eq!(libc::ftruncate(fd, PAGES as i64), 0);
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        // At a place that no other thread's mapping gets when it is free again.
        let kind = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
        let place = NEXT.fetch_add(1 << 24, Ordering::Relaxed);
        let start = libc::mmap(place as *mut _, PAGES, rights, kind, fd, 0);
        assert_ne!(start, libc::MAP_FAILED);
        let va = start as u64;
        let key = device.register_mr(pd, va, va, PAGES as u64, ALL_ACCESS).unwrap();
        let done = match deed {
            Deed::Unmap => libc::munmap(start, PAGES),
            Deed::Protect => libc::mprotect(start, PAGES, libc::PROT_NONE),
            Deed::CutFile => libc::ftruncate(fd, 0),
        };
        assert_eq!(done, 0);
        libc::close(fd);
        (va, key)
    }
}

/// The requester's status of one operation on the peer's lost memory, and what the peer's receive says.
fn remote(port: u16, deed: Deed, opcode: Opcode, len: usize) -> (WcStatus, Option<WcStatus>) {
    let (a, b) = pair(port, CLEAN, PAGES);
    let (va, key) = gone(&b.device, b.pd, deed);
    if opcode == Opcode::Send {
        b.qp.post_recv(7, [Sge { addr: va, len: len as u32, lkey: key }].into_iter()).unwrap();
    }
    a.post(opcode, a.sge(0, len), (va, key));
    let status = a.completions(1)[0].status;
    (status, (opcode == Opcode::Send).then(|| b.completions(1)[0].status))
}

#[test]
fn gone__of_the_peer_ends_in_an_access_error() {
    let mut port = 59_000;
    for deed in [Deed::Unmap, Deed::Protect, Deed::CutFile] {
        for (opcode, len) in
            [(Opcode::Write, 8), (Opcode::Write, PAGES), (Opcode::Read, PAGES), (Opcode::FetchAdd, 8)]
        {
            let status = remote(port, deed, opcode, len);
            assert_eq!(status, (WcStatus::RemAccessErr, None), "{deed:?} {opcode:?} {len}");
            port += 10;
        }
        for len in [8, PAGES] {
            let status = remote(port, deed, Opcode::Send, len);
            let expected = (WcStatus::RemOpErr, Some(WcStatus::LocProtErr));
            assert_eq!(status, expected, "{deed:?} Send {len}");
            port += 10;
        }
    }
}

#[test]
fn gone__of_ones_own_ends_in_a_protection_error() {
    let mut port = 61_000;
    for deed in [Deed::Unmap, Deed::Protect, Deed::CutFile] {
        for opcode in [Opcode::Write, Opcode::Read] {
            let (a, b) = pair(port, CLEAN, PAGES);
            let (va, key) = gone(&a.device, a.pd, deed);
            a.post(opcode, Sge { addr: va, len: PAGES as u32, lkey: key }, (b.va(), b.key));
            assert_eq!(a.completions(1)[0].status, WcStatus::LocProtErr, "{deed:?} {opcode:?}");
            port += 10;
        }
    }
}
