//! Send queue and transmit stream of a QP: work requests from posting to completion.

use crate::seq::later16;
use crate::types::*;
use std::collections::VecDeque;

/// A work request in the core.
#[derive(Debug, Clone, Copy)]
pub struct Wqe {
    /// As posted.
    pub wr: SendWqe,
    /// First of its SGEs (absolute index).
    pub sge0: u64,
    /// First of its inline bytes (absolute index).
    pub inline0: u64,
    /// Receives consumed by earlier messages of the stream.
    pub recv_index: u32,
    /// Attempt it was last sent in.
    pub attempt: u16,
    /// Bytes accepted by the peer.
    pub acked: u32,
    /// Response bytes placed.
    pub answered: u32,
    /// What it does at the requester is done (it may be sent in several attempts).
    pub executed: bool,
    /// All of it is accepted (and answered).
    pub done: bool,
}

/// Work requests in order of posting; the front one has message number `base_msn`.
#[derive(Debug, Default)]
pub struct SendQueue {
    wqes: VecDeque<Wqe>,
    base_msn: u64,
    sges: VecDeque<Sge>,
    base_sge: u64,
    inline: VecDeque<u8>,
    base_inline: u64,
}

impl SendQueue {
    /// Message number of the oldest work request.
    pub fn base_msn(&self) -> u64 {
        self.base_msn
    }
    /// Message number the next one gets.
    pub fn next_msn(&self) -> u64 {
        self.base_msn + self.wqes.len() as u64
    }
    /// Nothing is posted.
    pub fn is_empty(&self) -> bool {
        self.wqes.is_empty()
    }
    /// By message number.
    pub fn get(&self, msn: u64) -> Option<&Wqe> {
        self.wqes.get(usize::try_from(msn.checked_sub(self.base_msn)?).ok()?)
    }
    /// By message number.
    pub fn get_mut(&mut self, msn: u64) -> Option<&mut Wqe> {
        self.wqes.get_mut(usize::try_from(msn.checked_sub(self.base_msn)?).ok()?)
    }
    /// Appends a batch; `recv_index` counts receives consumed.
    pub fn push_batch(&mut self, batch: &mut SendBatch, recv_index: &mut u32) {
        let (mut sge0, mut inline0) =
            (self.base_sge + self.sges.len() as u64, self.base_inline + self.inline.len() as u64);
        self.sges.extend(batch.sges.drain(..));
        self.inline.extend(batch.inline.drain(..));
        for wr in batch.wqes.drain(..) {
            self.wqes.push_back(Wqe {
                wr,
                sge0,
                inline0,
                recv_index: *recv_index,
                attempt: 0,
                acked: 0,
                answered: 0,
                executed: false,
                done: false,
            });
            sge0 += u64::from(wr.num_sge);
            inline0 += u64::from(wr.inline_len);
            if wr.opcode.consumes_recv() {
                *recv_index = recv_index.wrapping_add(1);
            }
        }
    }
    /// Takes the oldest work request off.
    pub fn pop(&mut self) -> Option<Wqe> {
        let wqe = self.wqes.pop_front()?;
        self.base_msn += 1;
        self.sges.drain(..usize::from(wqe.wr.num_sge));
        self.base_sge += u64::from(wqe.wr.num_sge);
        self.inline.drain(..usize::from(wqe.wr.inline_len));
        self.base_inline += u64::from(wqe.wr.inline_len);
        Some(wqe)
    }
    /// SGEs of a held work request.
    pub fn sges(&self, wqe: &Wqe) -> impl Iterator<Item = Sge> + '_ {
        let at = (wqe.sge0 - self.base_sge) as usize;
        self.sges.range(at..at + usize::from(wqe.wr.num_sge)).copied()
    }
    /// Appends inline bytes `offset..offset + len` of a held work request to `out`.
    pub fn copy_inline(&self, wqe: &Wqe, offset: u32, len: u32, out: &mut Vec<u8>) {
        let at = (wqe.inline0 - self.base_inline) as usize + offset as usize;
        out.extend(self.inline.range(at..at + len as usize));
    }
}

/// Requester side of a stream.
#[derive(Debug, Default)]
pub struct TxStream {
    /// Stream id: one per RTS life, unique in the endpoint.
    pub life: u32,
    /// Connection requests leave on.
    pub conn: Option<u32>,
    /// The queue.
    pub sq: SendQueue,
    /// Message being sent next and the offset in it.
    pub cursor_msn: u64,
    /// Offset in the cursor's message.
    pub cursor_offset: u32,
    /// Messages below were begun, in this attempt or one before.
    pub begun: u64,
    /// Current attempt: counts refusals.
    pub attempt: u16,
    /// Receive index the next posted message gets.
    pub post_recv_index: u32,
    /// First receive index the responder has not posted, once it told.
    pub credit: Option<u32>,
    /// Reads and atomics sent and not answered.
    pub outstanding_reads: u32,
    /// The last message of whose answer something has arrived.
    pub last_answered: u64,
    /// Nothing is sent before this time (refused).
    pub paused_until: Nanos,
    /// Refusals in a row for lack of a receive.
    pub rnr_tries: u8,
    /// Refusals in a row because the QP was not ready; while not 0 the peer's life signs do not count.
    pub not_ready_tries: u32,
    /// Message that ends in error once all before it are complete, and how.
    pub error: Option<(u64, WcStatus)>,
    /// Since when the oldest outstanding message has made no progress.
    pub stalled_since: Nanos,
    /// Something of this life was accepted by the peer.
    pub accepted: bool,
    /// Queue slots of unsignaled requests that the next completion gives back.
    pub release: u32,
    /// SQ_DRAINED was raised since the QP went to SQD.
    pub drained: bool,
    /// It is in its connection's round.
    pub in_round: bool,
}

impl TxStream {
    /// Something is posted and not complete.
    pub fn outstanding(&self) -> bool {
        !self.sq.is_empty()
    }
    /// Something was sent and is not complete.
    pub fn outstanding_sent(&self) -> bool {
        self.cursor_msn > self.sq.base_msn() || self.cursor_offset > 0
    }
    /// First message never begun; those before it are still finished in SQD.
    pub fn first_fresh(&self) -> u64 {
        self.begun.max(self.cursor_msn + u64::from(self.cursor_offset > 0))
    }
    /// All that was begun is complete.
    pub fn is_drained(&self) -> bool {
        self.sq.base_msn() >= self.first_fresh()
    }
    /// The cursor has something to send (whether it may is another question).
    pub fn unsent(&self) -> bool {
        self.cursor_msn < self.sq.next_msn()
    }
    /// A message ends in error once all before it are complete; the lowest one counts.
    pub fn fail_at(&mut self, msn: u64, status: WcStatus) {
        if self.error.is_none_or(|e| msn < e.0) {
            self.error = Some((msn, status));
        }
    }
    /// Sends again from message `msn` on, in an attempt later than all before and than `refused`.
    pub fn rewind(&mut self, msn: u64, refused: u16) {
        let last = if later16(refused, self.attempt) { refused } else { self.attempt };
        self.attempt = last.wrapping_add(1);
        self.begun = self.first_fresh();
        for m in msn..self.cursor_msn.saturating_add(1).min(self.sq.next_msn()) {
            if let Some(wqe) = self.sq.get_mut(m) {
                let sent = m < self.cursor_msn || self.cursor_offset > 0;
                if wqe.wr.opcode.has_response() && sent && !wqe.done {
                    self.outstanding_reads = self.outstanding_reads.saturating_sub(1);
                }
                wqe.acked = 0;
                // What is answered stays so: it was executed once, and there may be nothing left to answer again from.
                if !(wqe.wr.opcode.has_response() && wqe.done) {
                    wqe.answered = 0;
                    wqe.done = false;
                }
                // Late acknowledgements of the refused attempt must not count for this one.
                wqe.attempt = self.attempt;
            }
        }
        self.cursor_msn = msn;
        self.cursor_offset = 0;
    }
}
