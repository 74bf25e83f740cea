//! The completion ring of a CQ: one producer (the engine step, under the engine's lock) and one consumer at a time
//! (whoever holds the CQ's consumer lock). Entries are written as they come and become visible with
//! [`Producer::publish`] at the end of the step.
//!
//! Who may touch what: `tail` is stored by the producer only, `head` by the consumer only; slots from `head` up to
//! `tail` belong to the consumer, the others to the producer. Both indices count up and wrap; a slot is index & mask.
//! Slots are relaxed atomics, ordered by the release of `tail` and `head`, so the ring needs no unsafe code.
//! Operations on both ends at once ([`purge`], [`replace`]) need both the engine's and the consumer lock.

use metaroce_proto::{Completion, Qpn, TagInfo, WcOpcode, WcStatus};

use crate::Errno;
use crate::sync::{Arc, AtomicU32, AtomicU64, Ordering};

/// Words per entry.
const WORDS: usize = 4;

/// Words per entry for those who want to know more.
const EXTRAS: usize = 3;

/// The shared part.
#[derive(Debug)]
pub(crate) struct Ring {
    slots: Box<[[AtomicU64; WORDS]]>,
    /// What few want to know of each entry: when it was written, the tag and the word beside it.
    extras: Option<Box<[[AtomicU64; EXTRAS]]>>,
    head: Padded<AtomicU32>,
    tail: Padded<AtomicU32>,
}

/// Keeps producer's and consumer's words on different cache lines (two, because of adjacent-line prefetch).
#[derive(Debug)]
#[repr(align(128))]
struct Padded<T>(T);

/// Zeroed slots; `None` if there is not the memory for them: their number is the application's wish.
fn words<const N: usize>(count: u32) -> Option<Box<[[AtomicU64; N]]>> {
    let mut slots = Vec::new();
    slots.try_reserve_exact(count as usize).ok()?;
    slots.extend((0..count).map(|_| std::array::from_fn(|_| AtomicU64::new(0))));
    Some(slots.into_boxed_slice())
}

impl Ring {
    /// `None` if there is not the memory for it.
    fn new(entries: u32, extended: bool) -> Option<Self> {
        let slots = words(entries.next_power_of_two())?;
        let extras = if extended { Some(words(entries.next_power_of_two())?) } else { None };
        Some(Ring { slots, extras, head: Padded(AtomicU32::new(0)), tail: Padded(AtomicU32::new(0)) })
    }
    fn capacity(&self) -> u32 {
        self.slots.len() as u32
    }
    fn slot(&self, index: u32) -> &[AtomicU64; WORDS] {
        &self.slots[index as usize & (self.slots.len() - 1)]
    }
    fn extra(&self, index: u32) -> Option<&[AtomicU64; EXTRAS]> {
        let extras = self.extras.as_ref()?;
        extras.get(index as usize & (extras.len() - 1))
    }
    fn stamp(&self, index: u32) -> u64 {
        self.extra(index).map_or(0, |words| words[0].load(Ordering::Relaxed))
    }
    fn write(&self, index: u32, completion: &Completion, stamp: u64) {
        if let Some(words) = self.extra(index) {
            let TagInfo { tag, app_ctx } = completion.tags;
            for (slot, word) in words.iter().zip([stamp, tag, u64::from(app_ctx)]) {
                slot.store(word, Ordering::Relaxed);
            }
        }
        let words = encode(completion);
        for (slot, word) in self.slot(index).iter().zip(words) {
            slot.store(word, Ordering::Relaxed);
        }
    }
    fn read(&self, index: u32) -> Completion {
        let slot = self.slot(index);
        let mut completion = decode([
            slot[0].load(Ordering::Relaxed),
            slot[1].load(Ordering::Relaxed),
            slot[2].load(Ordering::Relaxed),
            slot[3].load(Ordering::Relaxed),
        ]);
        if let Some([_, tag, app_ctx]) = self.extra(index) {
            let app_ctx = app_ctx.load(Ordering::Relaxed) as u32;
            completion.tags = TagInfo { tag: tag.load(Ordering::Relaxed), app_ctx };
        }
        completion
    }
}

/// Makes a ring of at least `entries` (rounded up to a power of two), which remembers times and tags if `extended`.
///
/// # Errors
/// ENOMEM.
pub(crate) fn ring(entries: u32, extended: bool) -> Result<(Producer, Consumer), Errno> {
    let ring = Arc::new(Ring::new(entries.max(1), extended).ok_or(libc::ENOMEM)?);
    let consumer = Consumer { ring: ring.clone(), head: 0, tail_seen: 0 };
    Ok((Producer { ring, tail: 0, head_seen: 0 }, consumer))
}

/// The step's end.
#[derive(Debug)]
pub(crate) struct Producer {
    ring: Arc<Ring>,
    /// Next entry to write; ahead of the shared tail by the entries not published yet.
    tail: u32,
    /// The shared head as last read.
    head_seen: u32,
}

impl Producer {
    /// Writes an entry without showing it; `false` when the ring is full.
    #[must_use]
    pub(crate) fn push(&mut self, completion: &Completion, stamp: u64) -> bool {
        if self.tail.wrapping_sub(self.head_seen) >= self.ring.capacity() {
            self.head_seen = self.ring.head.0.load(Ordering::Acquire);
            if self.tail.wrapping_sub(self.head_seen) >= self.ring.capacity() {
                return false;
            }
        }
        self.ring.write(self.tail, completion, stamp);
        self.tail = self.tail.wrapping_add(1);
        true
    }
    /// Shows everything written so far to the consumer.
    pub(crate) fn publish(&mut self) {
        self.ring.tail.0.store(self.tail, Ordering::Release);
    }
}

/// The polling end, kept behind the CQ's consumer lock.
#[derive(Debug)]
pub(crate) struct Consumer {
    ring: Arc<Ring>,
    head: u32,
    /// The shared tail as last read.
    tail_seen: u32,
}

impl Consumer {
    /// Takes the next entry; its slot goes back to the producer with [`Consumer::release`].
    pub(crate) fn pop(&mut self) -> Option<Completion> {
        if self.head == self.tail_seen {
            self.tail_seen = self.ring.tail.0.load(Ordering::Acquire);
            if self.head == self.tail_seen {
                return None;
            }
        }
        let completion = self.ring.read(self.head);
        self.head = self.head.wrapping_add(1);
        Some(completion)
    }
    /// When the entry taken last was written; 0 if that is not remembered. Ask before [`Consumer::release`].
    pub(crate) fn stamp(&self) -> u64 {
        self.ring.stamp(self.head.wrapping_sub(1))
    }
    /// Gives the slots of all entries taken so far back.
    pub(crate) fn release(&mut self) {
        self.ring.head.0.store(self.head, Ordering::Release);
    }
    /// Entries published and not taken.
    pub(crate) fn pending(&self) -> u32 {
        self.ring.tail.0.load(Ordering::Acquire).wrapping_sub(self.head)
    }
}

/// Removes published entries for which `doomed` holds. Everything written must have been published.
pub(crate) fn purge(
    producer: &mut Producer,
    consumer: &mut Consumer,
    mut doomed: impl FnMut(&Completion) -> bool,
) {
    let ring = &producer.ring;
    let mut kept = consumer.head;
    let mut index = consumer.head;
    while index != producer.tail {
        let completion = ring.read(index);
        if !doomed(&completion) {
            if kept != index {
                ring.write(kept, &completion, ring.stamp(index));
            }
            kept = kept.wrapping_add(1);
        }
        index = index.wrapping_add(1);
    }
    producer.tail = kept;
    consumer.tail_seen = kept;
    producer.publish();
}

/// Moves the pending entries to a new ring of at least `entries`. Everything written must have been published.
///
/// # Errors
/// EINVAL if the pending entries do not fit, ENOMEM; nothing has changed then.
pub(crate) fn replace(producer: &mut Producer, consumer: &mut Consumer, entries: u32) -> Result<u32, Errno> {
    if consumer.pending() > entries {
        return Err(libc::EINVAL);
    }
    let (mut new_producer, new_consumer) = ring(entries, producer.ring.extras.is_some())?;
    while let Some(completion) = consumer.pop() {
        assert!(
            new_producer.push(&completion, consumer.stamp()),
            "the pending entries were counted under both locks"
        );
    }
    new_producer.publish();
    *producer = new_producer;
    *consumer = new_consumer;
    Ok(producer.ring.capacity())
}

/// Capacity of the ring in entries.
pub(crate) fn capacity(producer: &Producer) -> u32 {
    producer.ring.capacity()
}

fn encode(c: &Completion) -> [u64; WORDS] {
    // A receive gives back no send slots: the SRQ it is of takes their place.
    let high = c.srq.unwrap_or(c.sq_release);
    let small = u64::from(c.status as u8)
        | u64::from(c.opcode as u8) << 8
        | u64::from(c.wc_flags) << 16
        | u64::from(c.solicited) << 24
        | u64::from(c.rq_release & 1) << 25
        | u64::from(c.srq.is_some()) << 26
        | u64::from(high) << 32;
    [
        c.wr_id,
        u64::from(c.byte_len) | u64::from(c.imm) << 32,
        u64::from(c.qpn.0) | u64::from(c.src_qp.0) << 32,
        small,
    ]
}

fn decode(w: [u64; WORDS]) -> Completion {
    let (high, from_srq) = ((w[3] >> 32) as u32, w[3] >> 26 & 1 != 0);
    Completion {
        byte_len: w[1] as u32,
        imm: (w[1] >> 32) as u32,
        src_qp: Qpn((w[2] >> 32) as u32),
        status: status_from(w[3] as u8),
        wc_flags: (w[3] >> 16) as u8,
        solicited: w[3] >> 24 & 1 != 0,
        rq_release: (w[3] >> 25 & 1) as u32,
        sq_release: if from_srq { 0 } else { high },
        srq: from_srq.then_some(high),
        ..Completion::new(w[0], opcode_from((w[3] >> 8) as u8), Qpn(w[2] as u32))
    }
}

fn status_from(value: u8) -> WcStatus {
    const ALL: [WcStatus; 15] = [
        WcStatus::Success,
        WcStatus::LocLenErr,
        WcStatus::LocQpOpErr,
        WcStatus::LocProtErr,
        WcStatus::WrFlushErr,
        WcStatus::MwBindErr,
        WcStatus::BadRespErr,
        WcStatus::LocAccessErr,
        WcStatus::RemInvReqErr,
        WcStatus::RemAccessErr,
        WcStatus::RemOpErr,
        WcStatus::RetryExcErr,
        WcStatus::RnrRetryExcErr,
        WcStatus::GeneralErr,
        WcStatus::TmErr,
    ];
    ALL.into_iter().find(|s| *s as u8 == value).expect("only encode writes slots")
}

fn opcode_from(value: u8) -> WcOpcode {
    const ALL: [WcOpcode; 15] = [
        WcOpcode::Send,
        WcOpcode::RdmaWrite,
        WcOpcode::RdmaRead,
        WcOpcode::CompSwap,
        WcOpcode::FetchAdd,
        WcOpcode::BindWindow,
        WcOpcode::LocalInv,
        WcOpcode::AtomicWrite,
        WcOpcode::Recv,
        WcOpcode::RecvRdmaWithImm,
        WcOpcode::TmAdd,
        WcOpcode::TmDel,
        WcOpcode::TmSync,
        WcOpcode::TmRecv,
        WcOpcode::TmNoTag,
    ];
    ALL.into_iter().find(|o| *o as u8 == value).expect("only encode writes slots")
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn completion(wr_id: u64) -> Completion {
        Completion {
            wr_id,
            status: WcStatus::RetryExcErr,
            opcode: WcOpcode::RecvRdmaWithImm,
            wc_flags: 3,
            byte_len: 0xfedc_ba98,
            imm: wr_id as u32,
            qpn: Qpn(0xab_cdef),
            src_qp: Qpn(0x12_3456),
            sq_release: u32::MAX,
            rq_release: 1,
            srq: None,
            solicited: true,
            tags: TagInfo::default(),
        }
    }

    #[test]
    fn push__an_extended_ring_keeps_time_and_tag() {
        let (mut p, mut c) = ring(4, true).unwrap();
        let tags = TagInfo { tag: u64::MAX - 1, app_ctx: 7 };
        assert!(p.push(&Completion { tags, ..completion(1) }, 99));
        p.publish();
        assert_eq!(c.pop().map(|c| c.tags), Some(tags));
        assert_eq!(c.stamp(), 99);
    }

    #[test]
    fn encode__round_trip() {
        for status in 0..=22u8 {
            if [3, 14, 15, 16, 17, 18, 19, 20].contains(&status) {
                continue;
            }
            let mut c = completion(u64::MAX);
            c.status = status_from(status);
            c.solicited = status % 2 == 0;
            let d = decode(encode(&c));
            assert_eq!(format!("{c:?}"), format!("{d:?}"));
            (c.srq, c.sq_release) = (Some(u32::from(status)), 0);
            assert_eq!(format!("{c:?}"), format!("{:?}", decode(encode(&c))));
        }
    }

    #[test]
    fn push__invisible_until_published() {
        let (mut p, mut c) = ring(4, false).unwrap();
        assert!(p.push(&completion(1), 0));
        assert!(c.pop().is_none());
        p.publish();
        assert_eq!(c.pop().map(|c| c.wr_id), Some(1));
        assert!(c.pop().is_none());
    }

    #[test]
    fn push__full_until_released() {
        let (mut p, mut c) = ring(2, false).unwrap();
        assert!(p.push(&completion(1), 0) && p.push(&completion(2), 0));
        p.publish();
        assert!(!p.push(&completion(3), 0));
        assert!(c.pop().is_some());
        assert!(!p.push(&completion(3), 0));
        c.release();
        assert!(p.push(&completion(3), 0));
    }

    #[test]
    fn purge__keeps_order_of_the_others() {
        let (mut p, mut c) = ring(8, false).unwrap();
        for round in 0..5u64 {
            for i in 0..8 {
                assert!(p.push(&completion(round * 8 + i), 0));
            }
            p.publish();
            assert_eq!(c.pop().map(|c| c.wr_id), Some(round * 8));
            c.release();
            purge(&mut p, &mut c, |c| c.wr_id % 3 == 0);
            let left: Vec<u64> = std::iter::from_fn(|| c.pop()).map(|c| c.wr_id).collect();
            c.release();
            let want: Vec<u64> = (round * 8 + 1..round * 8 + 8).filter(|i| i % 3 != 0).collect();
            assert_eq!(left, want);
        }
    }

    #[test]
    fn replace__keeps_pending_and_refuses_too_small() {
        let (mut p, mut c) = ring(8, false).unwrap();
        for i in 0..6 {
            assert!(p.push(&completion(i), 0));
        }
        p.publish();
        assert_eq!(replace(&mut p, &mut c, 5), Err(libc::EINVAL));
        assert_eq!(replace(&mut p, &mut c, 33), Ok(64));
        assert!(p.push(&completion(6), 0));
        p.publish();
        let left: Vec<u64> = std::iter::from_fn(|| c.pop()).map(|c| c.wr_id).collect();
        assert_eq!(left, (0..7).collect::<Vec<u64>>());
    }

    #[test]
    fn stamp__stays_with_its_entry() {
        let (mut p, mut c) = ring(4, true).unwrap();
        for i in 0..4 {
            assert!(p.push(&completion(i), 100 + i));
        }
        p.publish();
        purge(&mut p, &mut c, |c| c.wr_id == 1);
        assert_eq!(replace(&mut p, &mut c, 8), Ok(8));
        let taken: Vec<_> = std::iter::from_fn(|| c.pop().map(|e| (e.wr_id, c.stamp()))).collect();
        assert_eq!(taken, [(0, 100), (2, 102), (3, 103)]);
    }

    #[test]
    fn ring__two_threads_pass_everything_in_order() {
        const COUNT: u64 = 200_000;
        let (mut p, mut c) = ring(64, false).unwrap();
        std::thread::scope(|s| {
            s.spawn(move || {
                let mut next = 0;
                while next < COUNT {
                    for _ in 0..next % 7 + 1 {
                        if next < COUNT && p.push(&completion(next), 0) {
                            next += 1;
                        }
                    }
                    p.publish();
                    std::hint::spin_loop();
                }
            });
            let mut want = 0;
            while want < COUNT {
                while let Some(got) = c.pop() {
                    assert_eq!((got.wr_id, got.imm), (want, want as u32));
                    want += 1;
                }
                c.release();
                std::thread::yield_now();
            }
        });
    }
}
