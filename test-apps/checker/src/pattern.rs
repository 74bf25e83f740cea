//! Chance and patterns that both ends compute alike from a seed: SplitMix64, so that they stay the same for
//! ever.

/// One step of SplitMix64's output function.
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A seed for a purpose, from a seed and the numbers that name the purpose.
pub fn derive(seed: u64, parts: &[u64]) -> u64 {
    parts.iter().fold(mix(seed), |seed, part| mix(seed ^ mix(*part)))
}

/// A stream of chance.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    /// Starts at `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Next 64 bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound` (0 when the bound is 0).
    pub fn below(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { (self.next() % bound as u64) as usize }
    }

    /// True once in `n`.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }

    /// `total` cut into `parts` pieces of at least one byte each (fewer pieces when there are fewer bytes).
    pub fn split(&mut self, total: usize, parts: usize) -> Vec<usize> {
        let parts = parts.min(total).max(1);
        let mut left = total;
        let mut pieces = Vec::with_capacity(parts);
        for rest in (1..parts).rev() {
            let piece = 1 + self.below(left - rest);
            pieces.push(piece);
            left -= piece;
        }
        pieces.push(left);
        pieces
    }
}

/// Writes the pattern of `seed` from its byte `at` on into `bytes`; any part of a pattern can be computed by
/// itself.
pub fn fill(seed: u64, at: usize, bytes: &mut [u8]) {
    let mut done = 0;
    while done < bytes.len() {
        let position = at + done;
        let word = mix(seed.wrapping_add((position / 8) as u64)).to_le_bytes();
        let from = position % 8;
        let count = (8 - from).min(bytes.len() - done);
        bytes[done..done + count].copy_from_slice(&word[from..from + count]);
        done += count;
    }
}

/// `len` bytes of the pattern of `seed`.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    fill(seed, 0, &mut out);
    out
}

/// Where `got` differs from `want`: first and last index and how many bytes, for a message.
pub fn difference(got: &[u8], want: &[u8]) -> Option<String> {
    if got == want {
        return None;
    }
    let differs: Vec<usize> = (0..got.len().min(want.len())).filter(|i| got[*i] != want[*i]).collect();
    let (first, last) = (*differs.first()?, *differs.last()?);
    let show = |bytes: &[u8]| {
        bytes[first..(first + 8).min(bytes.len())].iter().map(|b| format!("{b:02x}")).collect()
    };
    let (got, want): (String, String) = (show(got), show(want));
    Some(format!("{} bytes differ in {first}..={last}: got {got}.. want {want}..", differs.len()))
}

#[cfg(test)]
#[expect(non_snake_case, reason = "tests are named subject__case")]
mod tests {
    use super::*;

    #[test]
    fn fill__any_part_equals_the_whole() {
        let whole = bytes(7, 100);
        for at in 0..20 {
            let mut part = vec![0; 61];
            fill(7, at, &mut part);
            assert_eq!(part, whole[at..at + 61]);
        }
    }

    #[test]
    fn split__adds_up_and_has_no_empty_piece() {
        let mut chance = Chance::new(1);
        for total in 1..200 {
            let pieces = chance.split(total, 4);
            assert_eq!(pieces.iter().sum::<usize>(), total);
            assert!(pieces.iter().all(|p| *p > 0) && pieces.len() == total.min(4));
        }
    }

    #[test]
    fn difference__names_first_and_last() {
        assert_eq!(difference(b"abcd", b"abcd"), None);
        assert!(difference(b"axcy", b"abcd").is_some_and(|d| d.starts_with("2 bytes differ in 1..=3")));
    }
}
