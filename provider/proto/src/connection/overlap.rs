//! Messages of one stream that write to the same memory: whatever order packets arrive in, the youngest bytes stay, of
//! Writes at the responder (MR-ORDER-9) and of Reads and atomics at the requester (MR-ORDER-10).

use crate::memory::{Fault, Memory};
use crate::mr::MrTable;
use crate::qp::{Qp, RxMsg};
use crate::types::{Opcode, access};

/// Where younger messages, of which something has arrived, put their bytes.
pub trait Covered: Copy {
    /// Address ranges (first byte, byte after the last), in any order.
    fn ranges(self) -> impl Iterator<Item = (u64, u64)>;

    /// Calls `part` for each part of `bytes`, which are for `va`, that nothing younger covers, in order.
    ///
    /// # Errors
    /// The memory is not there.
    fn place_below(
        self,
        va: u64,
        bytes: &[u8],
        mut part: impl FnMut(u64, &[u8]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let end = va + bytes.len() as u64;
        let mut at = va;
        while at < end {
            let mut stop = end;
            let mut covered = None;
            for (begin, until) in self.ranges() {
                if begin <= at && at < until {
                    covered = Some(until.min(end));
                    break;
                }
                if at < begin {
                    stop = stop.min(begin);
                }
            }
            if covered.is_none() {
                part(at, &bytes[(at - va) as usize..(stop - va) as usize])?;
            }
            at = covered.unwrap_or(stop);
        }
        Ok(())
    }
}

/// Where younger Writes of a stream, of which something has arrived, put their bytes.
#[derive(Clone, Copy)]
pub struct Younger<'a> {
    mrs: &'a MrTable,
    qp: &'a Qp,
    /// First of the messages in progress that is younger.
    from: usize,
}

impl<'a> Younger<'a> {
    /// Those younger than message `msn`.
    pub fn than(mrs: &'a MrTable, qp: &'a Qp, msn: u64) -> Self {
        Younger { mrs, qp, from: (msn - qp.rx.next_msn) as usize + 1 }
    }

    /// Nothing younger has arrived, as nearly always: bytes need not be looked at.
    pub fn is_empty(self) -> bool {
        self.qp.rx.msgs.len() <= self.from
    }

    /// Places `bytes` at `va`, but for those that a younger Write puts there or will. A message's last bytes are visible
    /// last only where nothing younger covers it.
    ///
    /// # Errors
    /// The memory is not there.
    pub fn place_last(self, va: u64, bytes: &[u8], mem: &mut impl Memory) -> Result<(), Fault> {
        self.place_below(va, bytes, |va, part| mem.place_last(va, part))
    }
}

impl Covered for Younger<'_> {
    fn ranges(self) -> impl Iterator<Item = (u64, u64)> {
        let writes = |msg: &&RxMsg| {
            let write = matches!(msg.opcode, Opcode::Write | Opcode::WriteImm | Opcode::AtomicWrite);
            write && msg.seen && msg.total > 0
        };
        self.qp.rx.msgs.iter().skip(self.from).filter(writes).filter_map(move |msg| {
            let (who, len) = ((msg.pd, self.qp.qpn), u64::from(msg.total));
            let target = self.mrs.check_remote(msg.rkey, who, msg.raddr, len, access::REMOTE_WRITE);
            target.map(|(va, _)| (va, va.wrapping_add(len)))
        })
    }
}

/// Where answers of younger Reads and atomics, of which something has arrived, go at the requester.
#[derive(Clone, Copy)]
pub struct YoungerAnswers<'a> {
    mrs: &'a MrTable,
    qp: &'a Qp,
    /// Message number of the answer to be placed.
    msn: u64,
}

impl<'a> YoungerAnswers<'a> {
    /// Those younger than message `msn`; `None` if there is none, as nearly always.
    pub fn than(mrs: &'a MrTable, qp: &'a Qp, msn: u64) -> Option<Self> {
        (qp.tx.last_answered > msn).then_some(YoungerAnswers { mrs, qp, msn })
    }
}

impl Covered for YoungerAnswers<'_> {
    fn ranges(self) -> impl Iterator<Item = (u64, u64)> {
        let sq = &self.qp.tx.sq;
        let answered = (self.msn + 1..=self.qp.tx.last_answered).filter_map(|msn| sq.get(msn));
        answered.filter(|wqe| wqe.answered > 0).flat_map(|wqe| sq.sges(wqe)).filter_map(move |s| {
            let len = u64::from(s.len);
            let target = self.mrs.check(s.lkey, self.qp.init.pd, s.addr, len, access::LOCAL_WRITE);
            target.filter(|(_, mr)| !mr.is_null()).map(|(va, _)| (va, va.wrapping_add(len)))
        })
    }
}
