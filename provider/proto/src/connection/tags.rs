//! Tag matching at the responder: which receive a tagged message takes, and fetching the data of a rendezvous.

use super::responder::Denied;
use crate::parts::Parts;
use crate::qp::recv_queue::RecvEntry;
use crate::qp::rx_stream::RxMsg;
use crate::qp::tags::{Match, TagUse, Tagged, fin, tagged};
use crate::types::*;
use crate::wire::Request;

/// Has the receive the message consumes: an expected message it matches, or one of the SRQ. Matching is in order of the
/// stream and needs the header, so a packet that overtook it comes too early.
pub fn bind<S: Sink>(p: &mut Parts<'_, S>, index: u16, srq: SrqId, f: &Request<'_>) -> Result<(), Denied> {
    if !f.opcode.consumes_recv() {
        return Ok(());
    }
    let Some(qp) = p.qps.at(index) else { return Ok(()) };
    let ahead = f.recv_index.wrapping_sub(qp.rq.limit()) as i32;
    if ahead < 0 {
        return Ok(());
    }
    if ahead > 0 || f.offset > 0 {
        return Err(Denied::Later);
    }
    let Some(queue) = p.srqs.get_mut(srq) else { return Ok(()) };
    let (Some(list), Some(cq)) = (&mut queue.tags, queue.cq) else { return Ok(()) };
    let header = if f.opcode.is_send() { tagged(f.payload) } else { Tagged::No };
    let (info, remote) = match header {
        Tagged::No => (None, None),
        Tagged::Eager(info) => (Some(info), None),
        Tagged::Rendezvous(info, remote) => (Some(info), Some(remote)),
    };
    if let Some((info, expected)) = info.and_then(|info| Some((info, list.take(info.tag)?))) {
        qp.rq.push(expected.wr_id, std::iter::once(expected.sge));
        let kind = if remote.is_some() { TagUse::Rendezvous } else { TagUse::Eager };
        qp.rq.label_last(Some((srq, cq)), kind);
        qp.rx.matches.push_back(Match { info, expected, remote });
        return Ok(());
    }
    let taken = qp.rq.take_from(&mut queue.queue, Some((srq, cq)));
    if taken {
        let kind = if info.is_some() { TagUse::Unexpected } else { TagUse::NoTag };
        qp.rq.label_last(Some((srq, cq)), if f.opcode.is_send() { kind } else { TagUse::None });
    } else if info.is_some() {
        list.untake();
    }
    if p.srqs.limit_reached(srq) {
        p.sink.event(Event::SrqLimit(srq));
    }
    if taken { Ok(()) } else { Err(Denied::NoReceive(f.recv_index)) }
}

/// Completes a message of a tag matching SRQ; a matched rendezvous also fetches its data.
pub fn complete<S: Sink>(
    p: &mut Parts<'_, S>,
    index: u16,
    entry: &RecvEntry,
    msg: &RxMsg,
    plain: Completion,
) {
    let Some(qp) = p.qps.at(index) else { return };
    let Some(home) = entry.home else { return };
    let found = if entry.tags.matched() { qp.rx.matches.pop_front() } else { None };
    let info = found.map_or(TagInfo::default(), |m| m.info);
    let (opcode, wc_flags) = match entry.tags {
        TagUse::Eager => (WcOpcode::TmRecv, WC_TM_MATCH | WC_TM_DATA_VALID),
        TagUse::Rendezvous => (WcOpcode::TmRecv, WC_TM_MATCH),
        TagUse::NoTag => (WcOpcode::TmNoTag, 0),
        _ => (WcOpcode::TmRecv, 0),
    };
    let mut completion = Completion { opcode, wc_flags: wc_flags | plain.wc_flags, tags: info, ..plain };
    completion.byte_len =
        msg.total.saturating_sub(if entry.tags == TagUse::Eager { entry.tags.skip() } else { 0 });
    if entry.tags.matched() {
        (completion.rq_release, completion.srq) = (0, None);
    }
    if let Some((found, remote)) = found.and_then(|m| Some((m, m.remote?))) {
        completion.byte_len = remote.len;
        if remote.len > found.expected.sge.len {
            completion.status = WcStatus::TmErr;
        } else {
            fetch(p, index, &found, home.1);
        }
    }
    p.sink.complete(home.1, &completion);
}

/// Posts the Read that fetches the data, and behind it the message that says so. They are nobody's work requests.
fn fetch<S: Sink>(p: &mut Parts<'_, S>, index: u16, found: &Match, cq: CqId) {
    let (now, Some(qp)) = (p.now, p.qps.at(index)) else { return };
    let Some(remote) = found.remote else { return };
    let mut read = SendWqe::new(found.expected.wr_id, Opcode::Read, send_flags::INTERNAL);
    (read.length, read.num_sge) = (remote.len, 1);
    (read.remote_addr, read.rkey) = (remote.addr, remote.rkey);
    // Where it completes, in a member that a Read of RC does not need.
    read.remote_srq = cq;
    let bytes = fin(found.info);
    let flags = send_flags::INTERNAL | send_flags::INLINE | send_flags::FENCE;
    let mut end = SendWqe::new(0, Opcode::Send, flags);
    (end.length, end.inline_len) = (bytes.len() as u32, bytes.len() as u16);
    let sge = Sge { len: remote.len, ..found.expected.sge };
    let mut batch = SendBatch { wqes: vec![read, end], sges: vec![sge], inline: bytes.to_vec() };
    if qp.tx.sq.is_empty() {
        qp.tx.stalled_since = now;
    }
    let mut recv_index = qp.tx.post_recv_index;
    qp.tx.sq.push_batch(&mut batch, &mut recv_index);
    qp.tx.post_recv_index = recv_index;
    p.woken.push(qp.qpn);
}

/// The completion of a fetch, the second one of its message: the first one has said the tag. Nothing for the message
/// behind it.
pub fn fetched(wr: &SendWqe, status: WcStatus, qpn: Qpn) -> Option<(CqId, Completion)> {
    let completion = Completion {
        status,
        wc_flags: if status == WcStatus::Success { WC_TM_DATA_VALID } else { 0 },
        byte_len: wr.length,
        solicited: true,
        ..Completion::new(wr.wr_id, WcOpcode::TmRecv, qpn)
    };
    (wr.opcode == Opcode::Read).then_some((wr.remote_srq, completion))
}
