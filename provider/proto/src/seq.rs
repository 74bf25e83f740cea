//! Serial numbers: 64 bits inside, 32 on the wire, and the sliding bitmap that remembers which were seen.

/// Offset of every 64-bit number, so that unwrapping near zero never underflows.
pub const ORIGIN: u64 = 1 << 32;

/// The 64-bit number nearest to `near` whose low 32 bits are `wire`.
pub fn unwrap32(wire: u32, near: u64) -> u64 {
    near.wrapping_add_signed(i64::from(wire.wrapping_sub(near as u32) as i32))
}

/// `a` is later than `b` in 16-bit serial arithmetic.
pub fn later16(a: u16, b: u16) -> bool {
    (a.wrapping_sub(b) as i16) > 0
}

/// What a range of numbers is to a [`Window`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeState {
    /// None of them was marked.
    New,
    /// All of them were.
    Old,
    /// Some were: only a broken peer does that, since segments never change within a connection.
    Mixed,
    /// Beyond the window.
    Beyond,
}

/// A sliding set of numbers: everything below `base` is in it, above it a bitmap says. Used for connection packet
/// numbers on both sides: "accepted" at the receiver, "resolved" at the sender.
#[derive(Debug)]
pub struct Window {
    base: u64,
    bits: Vec<u64>,
    span_max: u64,
}

impl Window {
    /// A window whose first number is `first`, at most `span_max` numbers wide (power of two >= 64).
    pub fn new(first: u64, span_max: u64) -> Self {
        debug_assert!(span_max.is_power_of_two() && span_max >= 64);
        Window { base: first, bits: vec![0; 1], span_max }
    }
    /// The oldest number not in the set.
    pub fn base(&self) -> u64 {
        self.base
    }
    /// Bytes of heap.
    pub fn heap_bytes(&self) -> usize {
        self.bits.capacity() * 8
    }
    /// What `first .. first + count` is.
    pub fn state(&self, first: u64, count: u64) -> RangeState {
        let end = first + count;
        if end <= self.base {
            return RangeState::Old;
        }
        if end > self.base - self.base % 64 + self.span_max {
            return RangeState::Beyond;
        }
        if first >= self.base
            && let Some((index, mask)) = self.within_word(first, end)
        {
            return match self.bits[index] & mask {
                0 => RangeState::New,
                all if all == mask => RangeState::Old,
                _ => RangeState::Mixed,
            };
        }
        let (mut set, mut clear) = (first < self.base, false);
        self.for_words(first.max(self.base), end, |word, mask| {
            set |= word & mask != 0;
            clear |= word & mask != mask;
        });
        match (set, clear) {
            (false, _) => RangeState::New,
            (true, false) => RangeState::Old,
            (true, true) => RangeState::Mixed,
        }
    }
    /// Puts the range into the set. The caller has seen `state` != Beyond.
    pub fn mark(&mut self, first: u64, count: u64) {
        let end = first + count;
        if end <= self.base {
            return;
        }
        if first >= self.base
            && let Some((index, mask)) = self.within_word(first, end)
        {
            self.bits[index] |= mask;
            // Only what closes up to the base moves it.
            if first == self.base {
                self.slide();
            }
            return;
        }
        self.grow(end);
        let mut at = first.max(self.base);
        while at < end {
            let stop = end.min(at - at % 64 + 64);
            let index = self.index(at);
            self.bits[index] |= mask(at, stop);
            at = stop;
        }
        self.slide();
    }

    /// The word of a range of numbers within the room there is, and the range's bits: most ranges have one word.
    fn within_word(&self, first: u64, end: u64) -> Option<(usize, u64)> {
        let word = first / 64;
        let held = word - self.base / 64 < self.bits.len() as u64;
        (held && (end - 1) / 64 == word).then(|| (self.index(first), mask(first, end)))
    }

    /// Place of a number's word; there are a power of two of them, so that no division is needed.
    fn index(&self, number: u64) -> usize {
        (number / 64) as usize & (self.bits.len() - 1)
    }

    fn slide(&mut self) {
        loop {
            let index = self.index(self.base);
            let word = &mut self.bits[index];
            let ones = (*word >> (self.base % 64)).trailing_ones() as u64;
            let left = 64 - self.base % 64;
            if ones < left {
                self.base += ones;
                return;
            }
            *word = 0;
            self.base += left;
        }
    }
    fn for_words(&self, mut at: u64, end: u64, mut f: impl FnMut(u64, u64)) {
        let capacity = self.bits.len() as u64 * 64;
        let held_end = self.base - self.base % 64 + capacity;
        while at < end {
            let stop = end.min(at - at % 64 + 64);
            let word = if at < held_end { self.bits[self.index(at)] } else { 0 };
            f(word, mask(at, stop));
            at = stop;
        }
    }
    fn grow(&mut self, end: u64) {
        let first_word = self.base / 64;
        let needed = end.div_ceil(64) - first_word;
        if needed <= self.bits.len() as u64 {
            return;
        }
        let old = std::mem::take(&mut self.bits);
        let words = needed.next_power_of_two();
        self.bits = vec![0; words as usize];
        for i in 0..old.len() as u64 {
            let word = first_word + i;
            self.bits[(word % words) as usize] = old[(word % old.len() as u64) as usize];
        }
    }
}

/// Bits of one word for `at..stop`, both in the same 64.
fn mask(at: u64, stop: u64) -> u64 {
    let count = stop - at;
    let ones = if count == 64 { u64::MAX } else { (1 << count) - 1 };
    ones << (at % 64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn unwrap32__around_the_wrap() {
        assert_eq!(unwrap32(5, ORIGIN - 3), ORIGIN + 5);
        assert_eq!(unwrap32(u32::MAX, ORIGIN + 2), ORIGIN - 1);
    }

    proptest! {
        /// The bitmap behaves like a set of numbers, whatever the order of marks.
        /// Proves MR-CPN-3.
        #[test]
        fn window__equals_a_set(start in 0u64..200, marks in prop::collection::vec((0u64..900, 1u64..70), 1..80)) {
            let first = ORIGIN + start;
            let mut window = Window::new(first, 1024);
            let mut model = BTreeSet::new();
            let mut base = first;
            for (offset, count) in marks {
                let at = first + offset;
                let have = (at..at + count).filter(|n| *n < base || model.contains(n)).count() as u64;
                let state = window.state(at, count);
                if state == RangeState::Beyond {
                    prop_assert!(at + count > base + 1024 - 64);
                    continue;
                }
                let expected = if have == 0 { RangeState::New } else if have == count { RangeState::Old } else { RangeState::Mixed };
                prop_assert_eq!(state, expected);
                window.mark(at, count);
                model.extend(at..at + count);
                while model.contains(&base) { base += 1; }
                prop_assert_eq!(window.base(), base);
            }
        }
    }
}
