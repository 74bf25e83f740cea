//! Seeded packet faults at the engine's edge: loss, duplication, reordering and delay, applied to every received
//! packet after the GRO split, acknowledgements and handshakes included.
//!
//! Every packet draws the same number of random words whatever its fate, so the same seed gives the same pattern for
//! the same packet sequence. Only this file allocates per packet, and only for packets it holds back.

use std::collections::VecDeque;

use metaroce_config::Impairment;
use metaroce_proto::{Nanos, RxMeta};

use crate::limits::{IMPAIR_HELD_MAX, REORDER_BEHIND_MAX, REORDER_FLUSH_NS};

/// The fault injector of one receive socket.
#[derive(Debug)]
pub(crate) struct Impair {
    random: SplitMix64,
    loss: u64,
    dup: u64,
    reorder: u64,
    delay_ns: u64,
    /// Held back behind the next packets.
    held: Vec<Held>,
    /// On the delay line, in order of their time.
    line: VecDeque<Delayed>,
    /// Buffers of packets gone, for the next ones.
    spare: Vec<Vec<u8>>,
    /// Packets dropped on purpose.
    pub(crate) dropped: u64,
    /// Those among them that carried data.
    pub(crate) dropped_data: u64,
}

#[derive(Debug)]
struct Held {
    /// Packets that still have to pass.
    behind: u64,
    /// Released then in any case.
    flush_at: Nanos,
    packet: Packet,
}

#[derive(Debug)]
struct Delayed {
    due: Nanos,
    packet: Packet,
}

#[derive(Debug)]
struct Packet {
    meta: RxMeta,
    bytes: Vec<u8>,
}

/// What happens to a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Fate {
    drop: bool,
    twice: bool,
    /// Held back behind so many packets; 0: not.
    behind: u64,
}

impl Impair {
    /// The injector for these settings; `None` when they ask for nothing. The seed must not be 0 any more.
    pub(crate) fn new(settings: &Impairment) -> Option<Impair> {
        let wanted =
            settings.loss > 0.0 || settings.reorder > 0.0 || settings.dup > 0.0 || settings.delay_us > 0;
        wanted.then(|| Impair {
            random: SplitMix64(settings.seed),
            loss: threshold(settings.loss),
            dup: threshold(settings.dup),
            reorder: threshold(settings.reorder),
            delay_ns: u64::from(settings.delay_us) * 1000,
            held: Vec::new(),
            line: VecDeque::new(),
            spare: Vec::new(),
            dropped: 0,
            dropped_data: 0,
        })
    }

    /// Takes a received packet and hands on what arrives now. `is_data` tells whether a dropped one carried data.
    pub(crate) fn pass(
        &mut self,
        now: Nanos,
        meta: &RxMeta,
        bytes: &[u8],
        is_data: impl Fn(&[u8]) -> bool,
        deliver: &mut impl FnMut(&RxMeta, &[u8]),
    ) {
        let fate = self.fate();
        if fate.drop || self.held.len() + self.line.len() >= IMPAIR_HELD_MAX {
            self.dropped += 1;
            self.dropped_data += u64::from(is_data(bytes));
            return;
        }
        if fate.behind > 0 {
            let packet = self.copy(meta, bytes);
            self.held.push(Held { behind: fate.behind, flush_at: now + REORDER_FLUSH_NS, packet });
        } else {
            self.emit(now, meta, bytes, deliver);
            self.passed(now, deliver);
        }
        if fate.twice {
            self.emit(now, meta, bytes, deliver);
        }
    }

    /// Hands on what is due.
    pub(crate) fn due(&mut self, now: Nanos, deliver: &mut impl FnMut(&RxMeta, &[u8])) {
        self.release(now, |held| held.flush_at <= now, deliver);
        while self.line.front().is_some_and(|d| d.due <= now) {
            if let Some(delayed) = self.line.pop_front() {
                deliver(&delayed.packet.meta, &delayed.packet.bytes);
                self.spare.push(delayed.packet.bytes);
            }
        }
    }

    /// When [`Impair::due`] wants to be called next.
    pub(crate) fn next_due(&self) -> Option<Nanos> {
        let flush = self.held.iter().map(|h| h.flush_at).min();
        let line = self.line.front().map(|d| d.due);
        flush.into_iter().chain(line).min()
    }

    fn fate(&mut self) -> Fate {
        let [drop, twice, hold, behind] = std::array::from_fn(|_| self.random.next());
        Fate {
            drop: drop < self.loss,
            twice: twice < self.dup,
            behind: if hold < self.reorder { 1 + behind % REORDER_BEHIND_MAX } else { 0 },
        }
    }

    /// A packet went by: those held back behind it come one closer.
    fn passed(&mut self, now: Nanos, deliver: &mut impl FnMut(&RxMeta, &[u8])) {
        for held in &mut self.held {
            held.behind -= 1;
        }
        self.release(now, |held| held.behind == 0, deliver);
    }

    fn release(
        &mut self,
        now: Nanos,
        ready: impl Fn(&Held) -> bool,
        deliver: &mut impl FnMut(&RxMeta, &[u8]),
    ) {
        let mut i = 0;
        while i < self.held.len() {
            if ready(&self.held[i]) {
                let packet = self.held.remove(i).packet;
                self.emit(now, &packet.meta, &packet.bytes, deliver);
                self.spare.push(packet.bytes);
            } else {
                i += 1;
            }
        }
    }

    /// Delivers, or puts on the delay line.
    fn emit(&mut self, now: Nanos, meta: &RxMeta, bytes: &[u8], deliver: &mut impl FnMut(&RxMeta, &[u8])) {
        if self.delay_ns == 0 {
            deliver(meta, bytes);
        } else {
            let packet = self.copy(meta, bytes);
            self.line.push_back(Delayed { due: now + self.delay_ns, packet });
        }
    }

    fn copy(&mut self, meta: &RxMeta, bytes: &[u8]) -> Packet {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(bytes);
        Packet { meta: *meta, bytes: buffer }
    }
}

/// The fraction as a bound for a random word below which it happens; 1.0 is (all but) always.
fn threshold(fraction: f64) -> u64 {
    // A float-to-integer cast saturates, which is what both ends need.
    (fraction * u64::MAX as f64) as u64
}

/// A small generator whose stream no dependency can change.
#[derive(Debug, Clone)]
pub(crate) struct SplitMix64(pub(crate) u64);

impl SplitMix64 {
    /// The next word.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const META: RxMeta = RxMeta {
        src: std::net::SocketAddr::V4(std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 1)),
        dst_ip: std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST),
        ecn: 0,
    };

    fn settings(loss: f64, reorder: f64, dup: f64, delay_us: u32, seed: u64) -> Impairment {
        Impairment { loss, reorder, dup, delay_us, seed }
    }

    /// Passes `count` numbered packets, one per microsecond, and gives the numbers delivered.
    fn run(settings: &Impairment, count: u32) -> (Vec<u32>, Impair) {
        let mut impair = Impair::new(settings).unwrap();
        let mut got = Vec::new();
        let mut deliver =
            |_: &RxMeta, b: &[u8]| got.push(u32::from_le_bytes(b.try_into().expect("four bytes went in")));
        for i in 0..count {
            let now = u64::from(i) * 1000;
            impair.due(now, &mut deliver);
            impair.pass(now, &META, &i.to_le_bytes(), |b| b[0] % 2 == 0, &mut deliver);
        }
        while let Some(due) = impair.next_due() {
            impair.due(due, &mut deliver);
        }
        (got, impair)
    }

    fn assert_near(value: usize, want: f64) {
        assert!((value as f64 - want).abs() < want * 0.1, "{value} is not near {want}");
    }

    #[test]
    fn pass__same_seed_same_pattern() {
        let one = settings(0.1, 0.1, 0.1, 0, 7);
        assert_eq!(run(&one, 10_000).0, run(&one, 10_000).0);
        assert_ne!(run(&one, 10_000).0, run(&settings(0.1, 0.1, 0.1, 0, 8), 10_000).0);
    }

    #[test]
    fn pass__which_packets_are_lost_does_not_depend_on_other_faults() {
        let lost = |s| {
            let mut got = run(&s, 10_000).0;
            got.sort_unstable();
            got.dedup();
            got
        };
        assert_eq!(lost(settings(0.05, 0.0, 0.0, 0, 3)), lost(settings(0.05, 0.3, 0.3, 20, 3)));
    }

    #[test]
    fn pass__fractions_are_met() {
        let (got, impair) = run(&settings(0.01, 0.0, 0.0, 0, 1), 100_000);
        assert_near(100_000 - got.len(), 1000.0);
        assert_eq!(impair.dropped as usize, 100_000 - got.len());
        assert_near(impair.dropped_data as usize * 2, impair.dropped as f64);
        let (got, _) = run(&settings(0.0, 0.0, 0.02, 0, 1), 100_000);
        assert_near(got.len() - 100_000, 2000.0);
        let (got, _) = run(&settings(0.0, 0.05, 0.0, 0, 1), 100_000);
        assert_eq!(got.len(), 100_000);
        let held = run(&settings(0.0, 0.05, 0.0, 0, 1), 100_000).0;
        let mut max = 0;
        let late = held.iter().filter(|&&n| {
            let is_late = n < max;
            max = max.max(n);
            is_late
        });
        assert_near(late.count(), 5000.0);
    }

    #[test]
    fn pass__all_or_nothing() {
        assert!(Impair::new(&settings(0.0, 0.0, 0.0, 0, 1)).is_none());
        assert!(run(&settings(1.0, 0.0, 0.0, 0, 1), 1000).0.is_empty());
    }

    #[test]
    fn pass__delay_keeps_order_and_time() {
        let mut impair = Impair::new(&settings(0.0, 0.0, 0.0, 50, 1)).unwrap();
        let mut got = 0;
        impair.pass(1000, &META, &[1], |_| true, &mut |_, _| got += 1);
        assert_eq!((got, impair.next_due()), (0, Some(51_000)));
        impair.due(50_999, &mut |_, _| got += 1);
        assert_eq!(got, 0);
        impair.due(51_000, &mut |_, _| got += 1);
        assert_eq!((got, impair.next_due()), (1, None));
    }

    #[test]
    fn due__releases_the_last_packet_although_nothing_follows() {
        let mut impair = Impair::new(&settings(0.0, 1.0, 0.0, 0, 1)).unwrap();
        let mut got = 0;
        impair.pass(0, &META, &[1], |_| true, &mut |_, _| got += 1);
        assert_eq!((got, impair.next_due()), (0, Some(REORDER_FLUSH_NS)));
        impair.due(REORDER_FLUSH_NS, &mut |_, _| got += 1);
        assert_eq!(got, 1);
    }

    #[test]
    fn splitmix__known_stream() {
        // Reference values of the published algorithm for seed 1234567.
        let mut random = SplitMix64(1_234_567);
        assert_eq!(random.next(), 6_457_827_717_110_365_317);
        assert_eq!(random.next(), 3_203_168_211_198_807_973);
    }
}
