//! What was received on one of the peer's paths.

use crate::config::limits;
use crate::seq::{ORIGIN, unwrap32};
use crate::types::Nanos;
use crate::wire::Ack;

/// Verdict on an arriving path PSN.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Next or later than all before; `gap` says numbers are missing in between.
    InOrder {
        /// Numbers between the last highest and this one are missing.
        gap: bool,
    },
    /// Fills a hole.
    Late,
    /// Already received.
    Duplicate,
    /// Too old to be said in a SACK: its data counts, its receipt cannot be reported (MR-PSN-7).
    Ancient,
}

/// Receive state of one path slot.
#[derive(Debug, Clone, Default)]
pub struct PathRx {
    generation: u8,
    /// Highest PSN received; 0 is none (numbers begin at ORIGIN).
    highest: u64,
    sack: [u64; 4],
    ce: u32,
    highest_at: Nanos,
    /// ACKs that are still to tell of the last arrival: one is owed, one more rides on the next packet with room, so that
    /// what answers a message does not arrive without the message's acknowledgement when the first is lost (MR-SACK-9).
    pub untold: u8,
}

impl PathRx {
    /// Classifies a PSN without recording it. `None`: of an earlier generation, whose numbers mean nothing any more
    /// (MR-PSN-4).
    pub fn classify(&self, generation: u8, psn: u32) -> Option<Arrival> {
        if self.highest == 0 || generation != self.generation {
            let newer = self.highest == 0 || (generation.wrapping_sub(self.generation) as i8) > 0;
            return newer.then_some(Arrival::InOrder { gap: false });
        }
        // The first number that came anchors all others (MR-PSN-2).
        let psn = unwrap32(psn, self.highest);
        if psn > self.highest {
            return Some(Arrival::InOrder { gap: psn > self.highest + 1 });
        }
        let back = self.highest - psn;
        if back >= 256 {
            return Some(Arrival::Ancient);
        }
        let seen = self.sack[(back / 64) as usize] >> (back % 64) & 1 == 1;
        Some(if seen { Arrival::Duplicate } else { Arrival::Late })
    }
    /// Records a PSN whose frames were taken (accepted or refused).
    pub fn record(&mut self, now: Nanos, generation: u8, psn: u32, ce: bool) {
        if self.highest == 0 || generation != self.generation {
            *self = PathRx {
                generation,
                highest: ORIGIN + u64::from(psn),
                sack: [1, 0, 0, 0],
                ..PathRx::default()
            };
            self.highest_at = now;
        } else {
            let psn = unwrap32(psn, self.highest);
            if psn > self.highest {
                self.shift(psn - self.highest);
                self.highest = psn;
                self.sack[0] |= 1;
                self.highest_at = now;
            } else if self.highest - psn < 256 {
                let back = self.highest - psn;
                self.sack[(back / 64) as usize] |= 1 << (back % 64);
            }
        }
        self.ce = self.ce.wrapping_add(u32::from(ce));
        self.untold = limits::ACK_TOLD;
    }
    /// Something arrived that no ACK has told.
    pub fn is_fresh(&self) -> bool {
        self.untold == limits::ACK_TOLD
    }
    /// The ACK frame for this path, if anything was received. It says all again that the one before did (MR-SACK-1).
    pub fn ack(&self, now: Nanos, path: u8) -> Option<Ack> {
        let delay_us = u16::try_from(now.saturating_sub(self.highest_at) / 1000).unwrap_or(u16::MAX);
        (self.highest != 0).then_some(Ack {
            path,
            generation: self.generation,
            highest: self.highest as u32,
            ce: self.ce,
            delay_us,
            sack: self.sack,
        })
    }

    fn shift(&mut self, by: u64) {
        if by >= 256 {
            self.sack = [0; 4];
            return;
        }
        let (words, bits) = ((by / 64) as usize, by % 64);
        for i in (0..4usize).rev() {
            let from = i.checked_sub(words).map_or(0, |j| self.sack[j]);
            let below = i.checked_sub(words + 1).map_or(0, |j| self.sack[j]);
            self.sack[i] = if bits == 0 { from } else { from << bits | below >> (64 - bits) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bitvec::prelude::*;
    use proptest::prelude::*;

    proptest! {
        /// The SACK equals a plain bit vector whatever arrives in whatever order.
        /// Proves MR-PSN-2, MR-PSN-7, MR-SACK-1.
        #[test]
        fn record__equals_a_bit_vector(start: u32, steps in prop::collection::vec(0u32..700, 1..200)) {
            let mut path = PathRx::default();
            let mut seen = bitvec![0; 2048];
            let mut highest: Option<usize> = None;
            for step in steps {
                let at = step as usize;
                let psn = start.wrapping_add(step);
                if highest.is_some_and(|h| h > at + 255) {
                    prop_assert_eq!(path.classify(0, psn), Some(Arrival::Ancient));
                    continue;
                }
                // The first number only anchors; the model is relative to it.
                if highest.is_some() {
                    prop_assert_eq!(path.classify(0, psn) == Some(Arrival::Duplicate), seen[at]);
                }
                path.record(1, 0, psn, false);
                seen.set(at, true);
                highest = Some(highest.map_or(at, |h| h.max(at)));
                let h = highest.unwrap();
                let ack = path.ack(1, 0).unwrap();
                prop_assert_eq!(ack.highest, start.wrapping_add(h as u32));
                for back in 0..256.min(h + 1) {
                    let told = ack.sack[back / 64] >> (back % 64) & 1 == 1;
                    prop_assert_eq!(told, seen[h - back], "{} back from {}", back, h);
                }
            }
        }
    }
}
