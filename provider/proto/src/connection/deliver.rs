//! What becomes of a message that is complete, or of a stream that ends: completions of receives, events.

use super::{Conn, tags};
use crate::parts::Parts;
use crate::qp::tags::TagUse;
use crate::qp::{Fatal, RxMsg};
use crate::types::*;
use crate::wire::RefuseCode;

/// The completion of a receive.
pub fn deliver<S: Sink>(p: &mut Parts<'_, S>, conn: &mut Conn, index: u16, msg: &RxMsg) {
    let Some(qp) = p.qps.at(index) else { return };
    let Some(entry) = qp.rq.pop() else { return };
    let wc_flags = match msg.opcode {
        Opcode::Send => 0,
        Opcode::SendInv => WC_WITH_INV,
        _ => WC_WITH_IMM,
    };
    let opcode = if msg.opcode == Opcode::WriteImm { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
    let completion = Completion {
        wc_flags,
        byte_len: msg.total,
        imm: msg.imm,
        src_qp: qp.attrs.dest_qpn,
        rq_release: 1,
        srq: entry.home.map(|home| home.0),
        solicited: msg.solicited,
        ..Completion::new(entry.wr_id, opcode, qp.qpn)
    };
    if entry.tags == TagUse::None {
        p.sink.complete(entry.home.map_or(qp.init.recv_cq, |home| home.1), &completion);
    } else {
        tags::complete(p, index, &entry, msg, completion);
    }
    let Some(qp) = p.qps.at(index) else { return };
    // Tell the sender of new receives before it runs into the old limit (MR-CREDIT-3).
    let ahead = qp.rx.told_limit.wrapping_sub(qp.rq.base());
    // A stream on an SRQ needs none until it was refused once: before, it is not limited at all.
    let own = qp.init.srq.is_none() && !qp.is_xrc();
    let told = qp.init.qp_type.is_reliable() && (own || qp.rx.starved);
    let limit = qp.recv_limit(p.srqs);
    let half = limit.wrapping_sub(qp.rq.base()) / 2;
    if told && (ahead as i32) <= half as i32 && limit != qp.rx.told_limit {
        conn.enqueue_credit(qp);
    }
}

/// The stream's error has its turn: the receive it had bound completes with the error, the QP goes to ERR (MR-ORDER-5).
pub fn fail<S: Sink>(p: &mut Parts<'_, S>, index: u16, fatal: Fatal) {
    let Some(qp) = p.qps.at(index) else { return };
    let qpn = qp.qpn;
    if let Some(status) = fatal.recv_status
        && let Some(entry) = qp.rq.pop()
    {
        let matched = entry.tags.matched();
        if matched {
            qp.rx.matches.pop_front();
        }
        let completion = Completion {
            status,
            src_qp: qp.attrs.dest_qpn,
            rq_release: u32::from(!matched),
            srq: entry.home.map(|home| home.0).filter(|_| !matched),
            solicited: true,
            ..Completion::new(entry.wr_id, if matched { WcOpcode::TmRecv } else { WcOpcode::Recv }, qpn)
        };
        p.sink.complete(entry.home.map_or(qp.init.recv_cq, |home| home.1), &completion);
    }
    if fatal.recv_status.is_none() {
        p.sink.event(match fatal.code {
            RefuseCode::Access => Event::QpAccessErr(qpn),
            _ => Event::QpReqErr(qpn),
        });
    }
    p.enter_error(index);
}
