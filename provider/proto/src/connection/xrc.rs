//! Extended reliable connections (XRC) at the responder: which receive a message takes, when each message names its
//! SRQ itself.

use super::responder::Denied;
use crate::parts::Parts;
use crate::types::*;
use crate::wire::Request;

/// Has the receive the message consumes, from the SRQ it names. Nobody knows what SRQ a message not seen yet is for, so
/// a message that overtook one comes too early (MR-XRC-3). Requesters keep such a stream to one path: only a loss lets
/// that happen.
pub fn bind<S: Sink>(p: &mut Parts<'_, S>, index: u16, f: &Request<'_>) -> Result<(), Denied> {
    if !f.opcode.consumes_recv() {
        return Ok(());
    }
    let Some(home) = f.srq.and_then(|id| Some((id, p.srqs.get(id)?.cq?))) else { return Ok(()) };
    let Some(qp) = p.qps.at(index) else { return Ok(()) };
    let ahead = f.recv_index.wrapping_sub(qp.rq.limit()) as i32;
    if ahead != 0 {
        return if ahead < 0 { Ok(()) } else { Err(Denied::Later) };
    }
    let taken = p.srqs.get_mut(home.0).is_some_and(|srq| qp.rq.take_from(&mut srq.queue, Some(home)));
    // Also when nothing was left: a limit armed on an empty queue would never be reached by taking.
    if p.srqs.limit_reached(home.0) {
        p.sink.event(Event::SrqLimit(home.0));
    }
    if taken { Ok(()) } else { Err(Denied::NoReceive(f.recv_index)) }
}
