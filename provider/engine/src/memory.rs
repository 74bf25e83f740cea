//! The engine's access to application memory: copies by way of `guard.rs`, where addresses become pointers.
//!
//! The core hands over only ranges it has found inside a live MR, and MRs are killed under the same lock a step runs
//! under, so no address outlives its check. What the core cannot know is whether the application has unmapped
//! memory it registered: then the access reports a fault, and the message ends in a protection error.

use std::sync::atomic::{Ordering, fence};

use metaroce_proto::{Fault, Memory};

use crate::guard::{self, NotThere};

impl From<NotThere> for Fault {
    fn from(_: NotThere) -> Fault {
        Fault
    }
}

/// The process's own memory.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct HostMemory;

impl Memory for HostMemory {
    fn place(&mut self, va: u64, bytes: &[u8]) -> Result<(), Fault> {
        Ok(guard::write(va, bytes)?)
    }

    fn place_last(&mut self, va: u64, bytes: &[u8]) -> Result<(), Fault> {
        let tail = tail_len(va, bytes.len());
        let (body, last) = bytes.split_at(bytes.len() - tail);
        self.place(va, body)?;
        // Programs poll the last bytes: everything placed so far must be visible before them.
        fence(Ordering::Release);
        store_ascending(va + body.len() as u64, last)
    }

    fn gather(&mut self, va: u64, out: &mut [u8]) -> Result<(), Fault> {
        Ok(guard::read(va, out)?)
    }

    fn compare_swap(&mut self, va: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
        aligned(va)?;
        Ok(guard::compare_swap(va, compare, swap)?)
    }

    fn fetch_add(&mut self, va: u64, add: u64) -> Result<u64, Fault> {
        aligned(va)?;
        Ok(guard::fetch_add(va, add)?)
    }
}

/// Atomic operations are on aligned words; a misaligned one faults.
fn aligned(va: u64) -> Result<(), Fault> {
    if va.is_multiple_of(8) { Ok(()) } else { Err(Fault) }
}

/// How many of the last bytes are stored separately: the part of the last aligned word that lies in the range.
fn tail_len(va: u64, len: usize) -> usize {
    let past_word = (va + len as u64) % 8;
    let tail = if past_word == 0 { 8 } else { past_word as usize };
    tail.min(len)
}

/// Stores up to eight bytes within one aligned word in naturally aligned pieces, ascending, each at once.
fn store_ascending(mut va: u64, mut bytes: &[u8]) -> Result<(), Fault> {
    while !bytes.is_empty() {
        let len = piece_len(va, bytes.len());
        let (piece, rest) = bytes.split_at(len);
        guard::store(va, piece)?;
        va += len as u64;
        bytes = rest;
    }
    Ok(())
}

/// The largest power of two up to 8 that fits in `len` and to which `va` is aligned.
fn piece_len(va: u64, len: usize) -> usize {
    [8usize, 4, 2].into_iter().find(|&size| size <= len && va.is_multiple_of(size as u64)).unwrap_or(1)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    /// Memory with an 8-byte aligned start.
    fn arena() -> Vec<u64> {
        vec![0u64; 64]
    }

    fn bytes_of(arena: &[u64]) -> Vec<u8> {
        arena.iter().flat_map(|w| w.to_ne_bytes()).collect()
    }

    #[test]
    fn place_last__every_offset_and_length() {
        // Alignment decides how the tail is cut; every cut must store every byte and no other.
        for offset in 0..16usize {
            for len in 0..80usize {
                let arena = arena();
                let va = arena.as_ptr() as u64 + offset as u64;
                let data: Vec<u8> = (0..len).map(|i| (i + 1) as u8).collect();
                HostMemory.place_last(va, &data).unwrap();
                let got = bytes_of(&arena);
                assert!(got[..offset].iter().all(|&b| b == 0), "before, offset {offset} len {len}");
                assert_eq!(&got[offset..offset + len], &data[..], "offset {offset} len {len}");
                assert!(got[offset + len..].iter().all(|&b| b == 0), "behind, offset {offset} len {len}");
            }
        }
    }

    #[test]
    fn tail_len__whole_word_when_aligned() {
        assert_eq!(tail_len(0, 64), 8);
        assert_eq!(tail_len(4, 4), 4);
        assert_eq!(tail_len(0, 13), 5);
        assert_eq!(tail_len(3, 2), 2);
        assert_eq!(tail_len(7, 2), 1);
        assert_eq!(tail_len(0, 0), 0);
    }

    #[test]
    fn piece_len__ends_with_the_last_byte() {
        assert_eq!(piece_len(8, 8), 8);
        assert_eq!(piece_len(8, 7), 4);
        assert_eq!(piece_len(12, 3), 2);
        assert_eq!(piece_len(13, 3), 1);
    }

    #[test]
    fn place_last__reader_sees_body_before_last_byte() {
        // A reader that polls the last byte must find every earlier byte of the same message.
        let words: Vec<AtomicU64> = (0..32).map(|_| AtomicU64::new(0)).collect();
        let len = 32 * 8;
        let va = words.as_ptr() as u64;
        std::thread::scope(|s| {
            s.spawn(|| {
                for round in 1..=2000u64 {
                    let word = (round % 255 + 1) * 0x0101_0101_0101_0101;
                    let data: Vec<u8> = std::iter::repeat_n(word.to_ne_bytes(), 32).flatten().collect();
                    HostMemory.place_last(va, &data[..len]).unwrap();
                    while words[0].load(Ordering::Acquire) != 0 {
                        std::thread::yield_now();
                    }
                }
            });
            for _ in 0..2000 {
                let last = loop {
                    let last = words[31].load(Ordering::Acquire);
                    if last != 0 {
                        break last;
                    }
                    std::thread::yield_now();
                };
                assert!(words.iter().all(|w| w.load(Ordering::Relaxed) == last));
                for word in words.iter().rev() {
                    word.store(0, Ordering::Release);
                }
            }
        });
    }

    #[test]
    fn atomics__old_value_and_alignment() {
        let word = AtomicU64::new(5);
        let va = word.as_ptr() as u64;
        assert_eq!(HostMemory.fetch_add(va, 3), Ok(5));
        assert_eq!(HostMemory.compare_swap(va, 8, 1), Ok(8));
        assert_eq!(HostMemory.compare_swap(va, 8, 2), Ok(1));
        assert_eq!(word.load(Ordering::Relaxed), 1);
        assert_eq!(HostMemory.fetch_add(va + 4, 3), Err(Fault));
    }
}
