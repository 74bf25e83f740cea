//! Memory of one end with what it must contain in the end. An arena is cut into one share per QP, each
//! between guard bytes; the whole is registered, so only correct placement, not protection, keeps the guards
//! intact.

use std::sync::Arc;

use metaroce_test_verbs::{Buffer, Mr, Pd, Sge};

use super::script::Piece;
use crate::{Outcome, pattern};

/// Untouchable bytes before, between and behind the shares.
const GUARD: usize = 4096;
/// Bytes compared at a time.
const CHUNK: usize = 1 << 16;

/// One registered area.
pub struct Arena {
    mr: Mr,
    share: usize,
    expected: Vec<u8>,
}

impl Arena {
    /// Memory for `shares` shares of `share` bytes, registered with `access`.
    pub fn new(pd: &Arc<Pd>, shares: usize, share: usize, access: u32) -> Outcome<Self> {
        let len = GUARD + shares * (share + GUARD);
        let buffer = Buffer::new(len)?;
        Ok(Self { mr: Mr::whole(pd, &buffer, access)?, share, expected: vec![0; len] })
    }

    /// First byte of share `q`.
    pub fn base(&self, q: usize) -> usize {
        GUARD + q * (self.share + GUARD)
    }

    /// The same for an arena of the peer.
    pub fn base_of(share: usize, q: usize) -> usize {
        GUARD + q * (share + GUARD)
    }

    /// The MR over everything.
    pub fn mr(&self) -> &Mr {
        &self.mr
    }

    /// Expects the background pattern of `seed` everywhere.
    pub fn reset(&mut self, seed: u64) {
        pattern::fill(seed, 0, &mut self.expected);
    }

    /// Puts what is expected now into the memory.
    pub fn store(&self) {
        self.mr.buffer().write(0, &self.expected);
    }

    /// Expects `data`, cut into `pieces` of share `q` (the rest of the last pieces stays background).
    pub fn expect(&mut self, q: usize, pieces: &[Piece], mut data: &[u8]) {
        let base = self.base(q);
        for (at, len) in pieces {
            let (now, later) = data.split_at((*len).min(data.len()));
            self.expected[base + at..base + at + now.len()].copy_from_slice(now);
            data = later;
        }
        assert!(data.is_empty(), "pieces too small for the data");
    }

    /// SGEs of pieces of share `q`.
    pub fn sges(&self, q: usize, pieces: &[Piece]) -> Vec<Sge> {
        pieces.iter().map(|(at, len)| self.mr.sge(self.base(q) + at, *len)).collect()
    }

    /// The bytes expected in `pieces` of share `q`, piece by piece.
    pub fn parts(&self, q: usize, pieces: &[Piece]) -> Vec<Vec<u8>> {
        let base = self.base(q);
        pieces.iter().map(|(at, len)| self.expected[base + at..base + at + len].to_vec()).collect()
    }

    /// What is wrong in `pieces` of share `q`, if anything.
    pub fn wrong_in(&self, q: usize, pieces: &[Piece]) -> Option<String> {
        pieces.iter().find_map(|(at, len)| self.wrong(self.base(q) + at, *len))
    }

    /// What is wrong anywhere, guards included.
    pub fn wrong_anywhere(&self) -> Option<String> {
        self.wrong(0, self.expected.len())
    }

    /// Bytes of the arena.
    pub fn len(&self) -> usize {
        self.expected.len()
    }

    fn wrong(&self, at: usize, len: usize) -> Option<String> {
        let mut got = vec![0; len.min(CHUNK)];
        for from in (at..at + len).step_by(CHUNK) {
            let count = CHUNK.min(at + len - from);
            self.mr.buffer().read(from, &mut got[..count]);
            if let Some(text) = pattern::difference(&got[..count], &self.expected[from..from + count]) {
                let share = (from.saturating_sub(GUARD)) / (self.share + GUARD);
                return Some(format!("share {share} (+{from}): {text}"));
            }
        }
        None
    }
}
