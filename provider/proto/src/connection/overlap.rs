//! Writes of one stream to the same memory: whatever order packets arrive in, the youngest bytes stay (MR-ORDER-9).

use crate::memory::{Fault, Memory};
use crate::mr::MrTable;
use crate::qp::{Qp, RxMsg};
use crate::types::{Opcode, access};

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

    /// Address ranges, in the order of messages.
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

    /// Places `bytes` at `va`, but for those that a younger Write puts there or will. A message's last bytes are visible
    /// last only where nothing younger covers it.
    ///
    /// # Errors
    /// The memory is not there.
    pub fn place_below(self, va: u64, bytes: &[u8], mem: &mut impl Memory) -> Result<(), Fault> {
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
                mem.place_last(at, &bytes[(at - va) as usize..(stop - va) as usize])?;
            }
            at = covered.unwrap_or(stop);
        }
        Ok(())
    }
}
