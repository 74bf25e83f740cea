//! Receives: the queue of a QP, filled by posting or by binding from an SRQ, and the SRQ itself.

use super::tags::{TagList, TagUse};
use crate::tables::SrqTable;
use crate::types::*;
use std::collections::VecDeque;

/// A posted receive.
#[derive(Debug, Clone, Copy)]
pub struct RecvEntry {
    /// Cookie.
    pub wr_id: u64,
    /// Number of SGEs.
    pub num_sge: u8,
    /// Sum of their lengths.
    pub capacity: u64,
    /// Bytes of a message may have been placed into it.
    pub touched: bool,
    /// The SRQ it came from and the queue it completes on, if those are not the QP's own (XRC).
    pub home: Option<(SrqId, CqId)>,
    /// What it is for on a tag matching SRQ.
    pub tags: TagUse,
    sge0: u64,
}

impl RecvEntry {
    /// Where in the receive a part of a message goes, and what of it.
    pub fn part<'a>(&self, offset: u32, payload: &'a [u8]) -> (u32, &'a [u8]) {
        let header = self.tags.skip().saturating_sub(offset) as usize;
        (offset.saturating_sub(self.tags.skip()), &payload[header.min(payload.len())..])
    }
}

/// Receives in order; the front one has index `base`.
#[derive(Debug, Default)]
pub struct RecvQueue {
    entries: VecDeque<RecvEntry>,
    base: u32,
    sges: VecDeque<Sge>,
    base_sge: u64,
}

impl RecvQueue {
    /// Index of the oldest receive.
    pub fn base(&self) -> u32 {
        self.base
    }
    /// First index that is not posted.
    pub fn limit(&self) -> u32 {
        self.base.wrapping_add(self.entries.len() as u32)
    }
    /// Receives held.
    pub fn len(&self) -> usize {
        self.entries.len()
    }
    /// The receive with this index.
    pub fn get(&self, index: u32) -> Option<&RecvEntry> {
        self.entries.get(index.wrapping_sub(self.base) as usize)
    }
    /// Its SGEs.
    pub fn sges(&self, entry: &RecvEntry) -> impl Iterator<Item = Sge> + '_ {
        let at = entry.sge0.wrapping_sub(self.base_sge) as usize;
        self.sges.range(at..at + usize::from(entry.num_sge)).copied()
    }
    /// Appends a batch.
    pub fn push_batch(&mut self, batch: &mut RecvBatch) {
        let mut sges = batch.sges.drain(..);
        for wqe in batch.wqes.drain(..) {
            self.push(wqe.wr_id, sges.by_ref().take(usize::from(wqe.num_sge)));
        }
    }
    /// Appends one receive.
    pub fn push(&mut self, wr_id: u64, sges: impl Iterator<Item = Sge>) {
        let sge0 = self.base_sge.wrapping_add(self.sges.len() as u64);
        self.sges.extend(sges);
        let num_sge = self.base_sge.wrapping_add(self.sges.len() as u64).wrapping_sub(sge0) as u8;
        let tail = self.sges.len() - usize::from(num_sge);
        let capacity = self.sges.range(tail..).map(|s| u64::from(s.len)).sum();
        self.entries.push_back(RecvEntry {
            wr_id,
            num_sge,
            capacity,
            touched: false,
            home: None,
            tags: TagUse::None,
            sge0,
        });
    }
    /// Takes the oldest off.
    pub fn pop(&mut self) -> Option<RecvEntry> {
        let entry = self.entries.pop_front()?;
        self.base = self.base.wrapping_add(1);
        self.sges.drain(..usize::from(entry.num_sge));
        self.base_sge = self.base_sge.wrapping_add(u64::from(entry.num_sge));
        Some(entry)
    }
    /// Moves the oldest of `from` to the end of this queue, and notes where it came from.
    pub fn take_from(&mut self, from: &mut RecvQueue, home: Option<(SrqId, CqId)>) -> bool {
        let Some(entry) = from.entries.front().copied() else { return false };
        let sge0 = self.base_sge.wrapping_add(self.sges.len() as u64);
        self.sges.extend(from.sges.range(..usize::from(entry.num_sge)));
        self.entries.push_back(RecvEntry { sge0, home, ..entry });
        from.pop();
        true
    }
    /// Says of the last receive where it came from and what it is for.
    pub fn label_last(&mut self, home: Option<(SrqId, CqId)>, tags: TagUse) {
        if let Some(entry) = self.entries.back_mut() {
            (entry.home, entry.tags) = (home, tags);
        }
    }
    /// Notes that bytes are placed into the receive with this index.
    pub fn touch(&mut self, index: u32) {
        if let Some(entry) = self.entries.get_mut(index.wrapping_sub(self.base) as usize) {
            entry.touched = true;
        }
    }
    /// Moves receives that were bound and not consumed to the front of the queues they came from, in their order: `all`
    /// of them, or those no byte was placed into (MR-CREDIT-4). The ones that stay may only be popped.
    pub fn give_back(&mut self, srqs: &mut SrqTable, own: Option<SrqId>, all: bool) {
        let mut kept = RecvQueue::default();
        while let Some(entry) = self.entries.back().copied() {
            // What is expected by tag is not the SRQ's.
            let home = entry.home.map(|home| home.0).or(own).filter(|_| !entry.tags.matched());
            match home.and_then(|id| srqs.get_mut(id)).filter(|_| all || !entry.touched) {
                Some(srq) => self.move_last(&mut srq.queue, None),
                None => self.move_last(&mut kept, entry.home),
            };
        }
        (self.entries, self.sges) = (kept.entries, kept.sges);
    }
    /// Moves the last receive to the front of `to`.
    fn move_last(&mut self, to: &mut RecvQueue, home: Option<(SrqId, CqId)>) {
        let Some(mut entry) = self.entries.pop_back() else { return };
        let from = self.sges.len() - usize::from(entry.num_sge);
        // It was taken from there, so the numbers before its base were used before.
        to.base = to.base.wrapping_sub(1);
        to.base_sge = to.base_sge.wrapping_sub(u64::from(entry.num_sge));
        let tags = if home.is_some() { entry.tags } else { TagUse::None };
        (entry.sge0, entry.touched, entry.home, entry.tags) = (to.base_sge, false, home, tags);
        to.entries.push_front(entry);
        self.sges.drain(from..).rev().for_each(|sge| to.sges.push_front(sge));
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    /// Protection domain.
    pub pd: u32,
    /// Depth.
    pub max_wr: u32,
    /// Armed limit; 0: none.
    pub limit: u32,
    /// QPs on it.
    pub users: u32,
    /// XRC domain.
    pub xrcd: Option<u32>,
    /// Where its receives complete, if that is not the QP's business.
    pub cq: Option<CqId>,
    /// It takes frames (work queues).
    pub ready: bool,
    /// Expected messages (tag matching).
    pub tags: Option<TagList>,
    /// Receives not bound to a QP.
    pub queue: RecvQueue,
}
