//! Raw packet QPs: Ethernet frames between the QPs of one endpoint, steered by rules. Nothing of them is on the wire.

use crate::config::limits;
use crate::connection::packet::{scatter, slices};
use crate::datagrams::finish;
use crate::endpoint::{Endpoint, parts};
use crate::memory::Memory;
use crate::parts::Parts;
use crate::qp::recv_queue::RecvEntry;
use crate::steer::{Fields, Flow, Rss, dissect};
use crate::types::*;

impl Endpoint {
    /// Adds a steering rule for a raw packet QP; gives its number.
    pub fn add_flow(&mut self, flow: Flow) -> Result<u32, Refused> {
        let qp = self.qps.get(flow.qpn).ok_or(Refused::NotFound)?;
        if qp.init.qp_type != QpType::Raw {
            return Err(Refused::Invalid);
        }
        Ok(self.flows.add(flow))
    }
    /// Takes a steering rule out.
    pub fn remove_flow(&mut self, number: u32) -> Result<(), Refused> {
        if self.flows.remove(number) { Ok(()) } else { Err(Refused::NotFound) }
    }
    /// Spreads the frames of a raw packet QP over work queues, which are SRQs that complete on queues of their own.
    pub fn set_rss(&mut self, qpn: Qpn, rss: Rss) -> Result<(), Refused> {
        let known =
            rss.table.len().is_power_of_two() && rss.table.iter().all(|id| self.srqs.get(*id).is_some());
        let qp = self.qps.get(qpn).filter(|q| q.init.qp_type == QpType::Raw).ok_or(Refused::NotFound)?;
        if !known {
            return Err(Refused::Invalid);
        }
        for id in &rss.table {
            self.srqs.get_mut(*id).ok_or(Refused::NotFound)?.users += 1;
        }
        qp.rss = Some(Box::new(rss));
        Ok(())
    }
    /// Makes a work queue: receives that complete on `cq`. It takes frames when it is ready.
    pub fn create_work_queue(&mut self, pd: u32, max_wr: u32, cq: CqId) -> Result<SrqId, Refused> {
        let id = self.create_srq(pd, max_wr)?;
        let queue = self.srqs.get_mut(id).ok_or(Refused::NotFound)?;
        (queue.cq, queue.ready) = (Some(cq), false);
        Ok(id)
    }
    /// A work queue takes frames, or not; `flush` also completes what is posted with WR_FLUSH_ERR.
    pub fn set_work_queue(
        &mut self,
        id: SrqId,
        ready: bool,
        flush: bool,
        sink: &mut impl Sink,
    ) -> Result<(), Refused> {
        let queue = self.srqs.get_mut(id).ok_or(Refused::NotFound)?;
        queue.ready = ready;
        while let Some(entry) = if flush { queue.queue.pop() } else { None } {
            let failed = Completion { status: WcStatus::WrFlushErr, ..received(&entry, Qpn(0), 0) };
            sink.complete(queue.cq.unwrap_or(CqId::MAX), &Completion { srq: Some(id), ..failed });
        }
        Ok(())
    }
    /// Carries the frames that raw packet QPs have posted. Call it after posting.
    pub fn run_local(&mut self, now: Nanos, mem: &mut impl Memory, sink: &mut impl Sink) {
        while let Some(index) = self.raw.pop_front() {
            let mut frame = std::mem::take(&mut self.frame);
            let mut targets = std::mem::take(&mut self.targets);
            let mut p = parts!(self, now, sink);
            while let Some(status) = gather(&mut p, index, mem, &mut frame) {
                if status == WcStatus::Success && frame.len() <= limits::FRAME_BYTES_MAX {
                    let fields = dissect(&frame);
                    self.flows.targets(&fields, &mut targets);
                    for qpn in targets.iter().copied() {
                        if deliver(&mut p, qpn, &frame, &fields, mem).is_none() {
                            p.stats.datagrams_dropped += 1;
                        }
                    }
                }
                finish(&mut p, index, status);
            }
            if let Some(qp) = p.qps.at(index) {
                qp.tx.in_round = false;
            }
            (self.frame, self.targets) = (frame, targets);
        }
    }
    /// Puts a raw packet QP with posted sends into the round.
    pub(crate) fn enqueue_raw(&mut self, qpn: Qpn) {
        if let Some(qp) = self.qps.get(qpn)
            && !std::mem::replace(&mut qp.tx.in_round, true)
        {
            self.raw.push_back(qpn.index() as u16);
        }
    }
}

/// Copies the oldest posted frame of the QP to `frame`; gives how its request ends, or nothing if there is none.
fn gather<S: Sink>(
    p: &mut Parts<'_, S>,
    index: u16,
    mem: &mut impl Memory,
    frame: &mut Vec<u8>,
) -> Option<WcStatus> {
    let qp = p.qps.at(index).filter(|q| q.state == QpState::Rts)?;
    let wqe = *qp.tx.sq.get(qp.tx.sq.base_msn())?;
    frame.clear();
    if wqe.wr.length as usize > limits::FRAME_BYTES_MAX {
        return Some(WcStatus::LocLenErr);
    }
    if wqe.wr.flags & send_flags::INLINE != 0 {
        qp.tx.sq.copy_inline(&wqe, 0, wqe.wr.length, frame);
        return Some(WcStatus::Success);
    }
    let pd = qp.init.pd;
    let copied = slices(qp.tx.sq.sges(&wqe), 0, wqe.wr.length, |s| {
        let (va, mr) = p.mrs.check(s.lkey, pd, s.addr, u64::from(s.len), 0)?;
        let at = frame.len();
        frame.resize(at + s.len as usize, 0);
        if mr.is_null() { Some(()) } else { mem.gather(va, &mut frame[at..]).ok() }
    });
    Some(if copied.is_some() { WcStatus::Success } else { WcStatus::LocProtErr })
}

/// Puts a frame into a receive of the QP; nothing if it is dropped.
fn deliver<S: Sink>(
    p: &mut Parts<'_, S>,
    qpn: Qpn,
    frame: &[u8],
    fields: &Fields,
    mem: &mut impl Memory,
) -> Option<()> {
    let index = qpn.index() as u16;
    let qp = p.qps.get(qpn)?;
    if let Some(rss) = &qp.rss {
        let id = rss.queue(fields)?;
        let queue = p.srqs.get_mut(id).filter(|q| q.ready && q.queue.len() > 0)?;
        let (pd, cq) = (queue.pd, queue.cq?);
        let entry = *queue.queue.get(queue.queue.base())?;
        let fits = frame.len() as u64 <= entry.capacity;
        let placed = fits.then(|| scatter(p.mrs, pd, queue.queue.sges(&entry), 0, frame, mem));
        let entry = queue.queue.pop()?;
        let completion = Completion { srq: Some(id), ..outcome(&entry, qpn, frame, placed) };
        p.sink.complete(cq, &completion);
        return Some(());
    }
    if !qp.receives() {
        return None;
    }
    if qp.rq.len() == 0 {
        p.bind_receive(index);
    }
    let qp = p.qps.get(qpn)?;
    let entry = *qp.rq.get(qp.rq.base())?;
    let pd = qp.init.srq.and_then(|s| p.srqs.get_mut(s)).map_or(qp.init.pd, |s| s.pd);
    let fits = frame.len() as u64 <= entry.capacity;
    let placed = fits.then(|| scatter(p.mrs, pd, qp.rq.sges(&entry), 0, frame, mem));
    let entry = qp.rq.pop()?;
    let completion = outcome(&entry, qpn, frame, placed);
    let cq = qp.init.recv_cq;
    p.sink.complete(cq, &completion);
    if completion.status == WcStatus::LocProtErr {
        p.enter_error(index);
    }
    Some(())
}

/// The completion of a frame: `placed` is nothing if it did not fit, nothing within if its memory may not be written.
fn outcome(entry: &RecvEntry, qpn: Qpn, frame: &[u8], placed: Option<Option<()>>) -> Completion {
    let status = match placed {
        None => WcStatus::LocLenErr,
        Some(None) => WcStatus::LocProtErr,
        Some(Some(())) => WcStatus::Success,
    };
    Completion { status, ..received(entry, qpn, frame.len() as u32) }
}

fn received(entry: &RecvEntry, qpn: Qpn, byte_len: u32) -> Completion {
    Completion { byte_len, rq_release: 1, ..Completion::new(entry.wr_id, WcOpcode::Recv, qpn) }
}
