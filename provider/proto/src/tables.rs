//! Tables of an endpoint: queue pairs by index, shared receive queues, deadlines.

use crate::config::limits;
use crate::qp::{Qp, Srq};
use crate::types::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// QP indexes never used: QPN 0 and 1 are the management QPs of every InfiniBand device, and 0xffffff is multicast.
const INDEX_FIRST: u32 = 2;
const INDEX_END: u32 = INDEX_FIRST + limits::QPS_MAX;

/// Queue pairs by the index part of their number.
#[derive(Debug, Default)]
pub struct QpTable {
    slots: Vec<Option<Box<Qp>>>,
    next: u32,
    /// Deadline armed per QP.
    armed: Vec<Nanos>,
}

impl QpTable {
    /// The next free index, round robin, so that a number is not soon reused.
    pub fn claim(&mut self) -> Option<u32> {
        (0..INDEX_END - INDEX_FIRST).find_map(|step| {
            let index = INDEX_FIRST + (self.next + step) % (INDEX_END - INDEX_FIRST);
            let free = self.slots.get(index as usize).is_none_or(Option::is_none);
            free.then(|| {
                self.next = index + 1 - INDEX_FIRST;
                index
            })
        })
    }
    /// Puts a QP in.
    pub fn insert(&mut self, index: u32, qp: Qp) {
        if self.slots.len() <= index as usize {
            self.slots.resize_with(index as usize + 1, || None);
            self.armed.resize(index as usize + 1, Nanos::MAX);
        }
        self.slots[index as usize] = Some(Box::new(qp));
        self.armed[index as usize] = Nanos::MAX;
    }
    /// Takes a QP out.
    pub fn remove(&mut self, qpn: Qpn) -> Option<Box<Qp>> {
        self.get(qpn)?;
        self.slots[qpn.index()].take()
    }
    /// By index.
    pub fn at(&mut self, index: u16) -> Option<&mut Qp> {
        self.slots.get_mut(usize::from(index))?.as_deref_mut()
    }
    /// By number.
    pub fn get(&mut self, qpn: Qpn) -> Option<&mut Qp> {
        self.slots.get_mut(qpn.index())?.as_deref_mut().filter(|q| q.qpn == qpn)
    }
    /// By number, shared.
    pub fn peek(&self, qpn: Qpn) -> Option<&Qp> {
        self.slots.get(qpn.index())?.as_deref().filter(|q| q.qpn == qpn)
    }
    /// All of them from an index on, with their indexes.
    pub fn iter_from(&self, index: usize) -> impl Iterator<Item = (usize, &Qp)> {
        let slots = self.slots.iter().enumerate().skip(index);
        slots.filter_map(|(at, slot)| Some((at, slot.as_deref()?)))
    }
    /// All of them.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Qp> {
        self.slots.iter_mut().filter_map(|s| s.as_deref_mut())
    }
    /// The armed deadline of a QP's timer.
    pub fn armed(&mut self, index: u16) -> Option<&mut Nanos> {
        self.armed.get_mut(usize::from(index))
    }
}

/// Shared receive queues.
#[derive(Debug, Default)]
pub struct SrqTable {
    slots: Vec<Option<Srq>>,
}

impl SrqTable {
    /// Adds one.
    pub fn insert(&mut self, srq: Srq) -> SrqId {
        match self.slots.iter().position(Option::is_none) {
            Some(at) => {
                self.slots[at] = Some(srq);
                at as SrqId
            }
            None => {
                self.slots.push(Some(srq));
                self.slots.len() as SrqId - 1
            }
        }
    }
    /// By number.
    pub fn get_mut(&mut self, id: SrqId) -> Option<&mut Srq> {
        self.slots.get_mut(id as usize)?.as_mut()
    }
    /// By number, shared.
    pub fn get(&self, id: SrqId) -> Option<&Srq> {
        self.slots.get(id as usize)?.as_ref()
    }
    /// Takes one out that no QP uses.
    pub fn remove(&mut self, id: SrqId) -> Result<(), Refused> {
        let slot = self.slots.get_mut(id as usize).ok_or(Refused::NotFound)?;
        match slot {
            Some(srq) if srq.users > 0 => Err(Refused::Busy),
            Some(_) => {
                *slot = None;
                Ok(())
            }
            None => Err(Refused::NotFound),
        }
    }
    /// A receive was taken: did that fall below the armed limit? Disarms it.
    pub fn limit_reached(&mut self, id: SrqId) -> bool {
        let Some(srq) = self.get_mut(id) else { return false };
        let reached = srq.limit > 0 && (srq.queue.len() as u32) < srq.limit;
        if reached {
            srq.limit = 0;
        }
        reached
    }
}

/// Whose deadline it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Timer {
    /// A connection.
    Conn(u32),
    /// A queue pair.
    Qp(u16),
}

/// Deadlines, earliest first. Entries are never removed early: whoever fires compares with what is armed now.
#[derive(Debug, Default)]
pub struct Timers {
    heap: BinaryHeap<Reverse<(Nanos, Timer)>>,
}

impl Timers {
    /// Adds a deadline.
    pub fn push(&mut self, at: Nanos, timer: Timer) {
        self.heap.push(Reverse((at, timer)));
    }
    /// The earliest deadline.
    pub fn next(&self) -> Option<Nanos> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }
    /// The earliest deadline and whose it is.
    pub fn peek(&self) -> Option<(Nanos, Timer)> {
        self.heap.peek().map(|Reverse(x)| *x)
    }
    /// Takes the earliest one that is due.
    pub fn pop_due(&mut self, now: Nanos) -> Option<(Nanos, Timer)> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse(x)| x)
    }
}
