//! Responder side of a stream: messages in progress, responses owed.

use super::tags::Match;
use crate::config::limits;
use crate::seq::later16;
use crate::types::*;
use crate::wire::{RefuseCode, Request};
use std::collections::VecDeque;

/// A message that has begun to arrive and is not complete in order.
#[derive(Debug, Clone, Copy)]
pub struct RxMsg {
    /// A packet of it was accepted; else only its place is kept.
    pub seen: bool,
    /// Attempt its progress belongs to.
    pub attempt: u16,
    /// Operation.
    pub opcode: Opcode,
    /// Solicited.
    pub solicited: bool,
    /// Length in bytes.
    pub total: u32,
    /// Protection domain its memory is in.
    pub pd: u32,
    /// Bytes accepted.
    pub received: u32,
    /// Immediate.
    pub imm: u32,
    /// Remote address (of ours), key and operands of Reads and atomics.
    pub raddr: u64,
    /// Key.
    pub rkey: u32,
    /// Operand.
    pub compare_add: u64,
    /// Operand.
    pub swap: u64,
    /// Bytes of `hold` in use; the last `held` bytes of the message are (partly) in `hold`.
    pub held: u8,
    /// Held-back tail of a Write, aligned to its end: `hold[64 - held..]`.
    pub hold: [u8; limits::HOLD_BYTES],
}

impl RxMsg {
    /// Place of a message not seen yet.
    pub const EMPTY: RxMsg = RxMsg {
        seen: false,
        attempt: 0,
        opcode: Opcode::Send,
        solicited: false,
        total: 0,
        pd: 0,
        received: 0,
        imm: 0,
        raddr: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        held: 0,
        hold: [0; limits::HOLD_BYTES],
    };
    /// Notes what the packet says of its message.
    pub fn begin(&mut self, f: &Request<'_>, pd: u32) {
        *self = RxMsg {
            seen: true,
            attempt: f.attempt,
            opcode: f.opcode,
            solicited: f.solicited,
            total: f.total,
            pd,
            received: 0,
            imm: f.imm,
            raddr: f.raddr,
            rkey: f.rkey,
            compare_add: f.compare_add,
            swap: f.swap,
            held: 0,
            hold: [0; limits::HOLD_BYTES],
        };
    }
    /// A Read or atomic that was seen.
    pub fn waits_as_read(&self) -> bool {
        self.seen && self.opcode.has_response()
    }
    /// Every byte has arrived: numbers are taken once, so counting them is enough (MR-REQ-6).
    pub fn complete(&self) -> bool {
        self.seen && (self.opcode.has_response() || self.received == self.total)
    }
}

/// Why and where a stream ends at the responder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fatal {
    /// Message number.
    pub msn: u64,
    /// What the requester is told.
    pub code: RefuseCode,
    /// Status of the receive it had bound (LOC_LEN_ERR, LOC_PROT_ERR), if any.
    pub recv_status: Option<WcStatus>,
}

/// A response owed.
#[derive(Debug, Clone, Copy)]
pub struct RespJob {
    /// Connection the request came by.
    pub conn: u32,
    /// Message answered.
    pub msn: u64,
    /// Attempt answered.
    pub attempt: u16,
    /// Protection domain of its memory.
    pub pd: u32,
    /// What to send.
    pub work: RespWork,
    /// Bytes handed to packets.
    pub sent: u32,
    /// Bytes accepted by the peer.
    pub acked: u32,
    /// Length in bytes.
    pub total: u32,
    /// An empty response was sent / everything is accepted.
    pub begun: bool,
    /// Everything is accepted.
    pub done: bool,
}

/// What a response consists of.
#[derive(Debug, Clone, Copy)]
pub enum RespWork {
    /// Memory to read.
    Read {
        /// Address in the MR's iova space.
        raddr: u64,
        /// Key, checked again for each packet.
        rkey: u32,
    },
    /// Old value of an atomic.
    Atomic(u64),
}

/// Receive state of the stream bound to a QP.
#[derive(Debug, Default)]
pub struct RxStream {
    /// The bound stream id, once a packet of it was accepted.
    pub life: Option<u32>,
    /// Streams of the peer up to this id are history (with the peer endpoint's incarnation).
    pub floor: Option<(u64, u32)>,
    /// The QP was used before: packets of a stream that ended then may still be under way, and a stream is bound only
    /// when its requester is known to live.
    pub reused: bool,
    /// The stream (peer incarnation, id) whose requester is asked for an attempt later than this one.
    pub asked: Option<(u64, u32, u16)>,
    /// Connection the bound stream comes by.
    pub conn: Option<u32>,
    /// IBV_EVENT_COMM_EST was raised.
    pub established: bool,
    /// Incarnation of the bound peer endpoint.
    pub peer: u64,
    /// Counts the receive lives of this QP, so that response frames of a former one never match.
    pub epoch: u32,
    /// Messages from `next_msn` on.
    pub msgs: VecDeque<RxMsg>,
    /// Reads and atomics among them that were seen.
    pub open_reads: u32,
    /// The oldest message not complete in order.
    pub next_msn: u64,
    /// The stream ends here.
    pub fatal: Option<Fatal>,
    /// Responses owed; the front one has number `base_job`.
    pub jobs: VecDeque<RespJob>,
    /// Number of the front job.
    pub base_job: u64,
    /// Job whose packets are sent next.
    pub cursor_job: u64,
    /// Unreliable stream: the message being received and the bytes of it so far.
    pub partial: Option<(u64, u32)>,
    /// It is in its connection's round of responders.
    pub in_round: bool,
    /// The receive limit last told to the peer.
    pub told_limit: u32,
    /// The peer was refused for lack of a receive: posting one is news.
    pub starved: bool,
    /// A CREDIT frame is due.
    pub credit_due: bool,
    /// Messages that were matched by tag and have not completed, in order.
    pub matches: VecDeque<Match>,
    /// The SRQ that had no receive for the stream last (XRC).
    pub short_of: Option<SrqId>,
}

impl RxStream {
    /// Forgets the stream; its id becomes history.
    pub fn reset(&mut self) {
        let floor = self.life.map(|life| (self.peer, life)).or(self.floor);
        let (reused, asked, epoch) = (self.reused, self.asked, self.epoch.wrapping_add(1));
        *self = RxStream { floor, reused, asked, epoch, ..RxStream::default() };
    }
    /// The QP goes to RESET: whatever was answered so far proves nothing any more.
    pub fn end_of_life(&mut self) {
        self.reset();
        self.reused = true;
        if let Some((_, _, attempt)) = &mut self.asked {
            *attempt = attempt.wrapping_add(limits::PROOF_ATTEMPTS);
        }
    }
    /// The attempt its requester must exceed before the stream is bound; `None`: it lives, or no proof is needed. Only a
    /// requester that hears the refusal can exceed it, because attempts count refusals (MR-REQ-7).
    pub fn unproven(&mut self, peer: u64, life: u32, attempt: u16) -> Option<u16> {
        if !self.reused {
            return None;
        }
        match self.asked {
            Some((known, asked, least)) if (known, asked) == (peer, life) => {
                (!later16(attempt, least)).then_some(least)
            }
            // Older than the one that is asked: history.
            Some((known, asked, _)) if known == peer && (asked.wrapping_sub(life) as i32) > 0 => {
                Some(attempt)
            }
            _ => {
                let least = attempt.wrapping_add(limits::PROOF_ATTEMPTS);
                self.asked = Some((peer, life, least));
                Some(least)
            }
        }
    }
    /// The message's entry, made if it is within the window (MR-REQ-2).
    pub fn entry(&mut self, msn: u64) -> Option<&mut RxMsg> {
        let at = msn.checked_sub(self.next_msn)? as usize;
        if at >= usize::from(limits::MESSAGE_WINDOW) {
            return None;
        }
        while self.msgs.len() <= at {
            self.msgs.push_back(RxMsg::EMPTY);
        }
        self.msgs.get_mut(at)
    }
    /// Forgets what was seen of a message; its place is kept.
    pub fn forget(&mut self, msn: u64) {
        let Some(msg) = self.entry(msn).filter(|msg| msg.seen) else { return };
        msg.seen = false;
        let read = msg.opcode.has_response();
        self.open_reads -= u32::from(read);
    }
    /// Whether one more Read or atomic, message `msn`, is more than `most` that the peer cannot have the answer of
    /// (MR-RESP-3).
    pub fn exceeds(&self, msn: u64, most: u32) -> bool {
        let at = msn.checked_sub(self.next_msn).and_then(|at| usize::try_from(at).ok());
        let counted = at.and_then(|at| self.msgs.get(at)).is_some_and(RxMsg::waits_as_read);
        // Nearly always this says no, and nothing needs to be looked at one by one.
        if counted || self.open_reads + (self.jobs.len() as u32) < most {
            return false;
        }
        let unsent = self.jobs.iter().filter(|job| job.sent < job.total || !job.begun).count() as u32;
        self.open_reads + unsent >= most
    }
    /// The last Read or atomic that waits for its turn.
    pub fn last_read(&self) -> Option<u64> {
        self.msgs.iter().rposition(RxMsg::waits_as_read).map(|at| self.next_msn + at as u64)
    }
    /// A response job by number.
    pub fn job_mut(&mut self, number: u64) -> Option<&mut RespJob> {
        self.jobs.get_mut(usize::try_from(number.checked_sub(self.base_job)?).ok()?)
    }
    /// Drops finished jobs from the front.
    pub fn retire_jobs(&mut self) {
        while self.jobs.front().is_some_and(|j| j.done) {
            self.jobs.pop_front();
            self.base_job += 1;
        }
        self.cursor_job = self.cursor_job.max(self.base_job);
    }
}
