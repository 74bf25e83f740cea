//! Taking a packet of a connection in: path receipt, frames one by one, what is owed for it.

use crate::config::limits;
use crate::connection::{Conn, ConnState, completer, responder, response};
use crate::memory::Memory;
use crate::parts::Parts;
use crate::path::rx_window::Arrival;
use crate::plane_status::{self, PlaneStatus};
use crate::types::*;
use crate::wire::{self, Frame, Frames, HEADER_BYTES, Header, PacketType};

/// Takes a Data or Control packet in; true if the peer closed the connection.
pub fn take_packet<S: Sink>(
    p: &mut Parts<'_, S>,
    conn: &mut Conn,
    meta: &RxMeta,
    header: &Header,
    bytes: &[u8],
    mem: &mut impl Memory,
) -> bool {
    conn.last_heard = p.now;
    // Whoever uses our id got it from us: the HELLO that answers may be lost (MR-HDR-3).
    conn.establish(p.now);
    let data = header.kind == PacketType::Data;
    let path = usize::from(header.path);
    let ce = meta.ecn == 3;
    let arrival =
        if data { conn.rx_paths.get(path).map(|r| r.classify(header.generation, header.psn)) } else { None };
    count_rx(p, path, bytes.len(), data, ce, arrival.flatten());
    match arrival {
        // A path we were not told of (MR-PSN-5), or an earlier generation of one.
        Some(None) => return false,
        None if data => return false,
        // Its sender missed the acknowledgement, and the frames have done what they do (MR-PSN-6).
        Some(Some(Arrival::Duplicate)) => {
            conn.rx_paths[path].untold = limits::ACK_TOLD;
            conn.ack.now = true;
            conn.ack_turn = conn.ack_turn.wrapping_add(1);
            return false;
        }
        _ => {}
    }
    if data && let Some(plane) = p.config.planes.iter().position(|x| x.addrs.contains(&meta.dst_ip)) {
        conn.heard_plane = plane as u8;
    }
    let repeats = conn.repeats;
    let (mut received, mut closed) = (true, false);
    let mut frames = Frames::new(&bytes[HEADER_BYTES..]);
    for frame in frames.by_ref() {
        // What wants acknowledgement needs a number to be acknowledged by (MR-HDR-2).
        if !data && frame.wants_ack() {
            p.stats.rx_malformed += 1;
            return false;
        }
        match frame {
            Frame::Request(f) => received &= responder::on_request(p, conn, &f, mem),
            Frame::Response(f) => received &= response::on_response(p, conn, &f, mem),
            Frame::Void(f) => received &= responder::on_void(conn, &f),
            Frame::Ack(f) => completer::on_ack(p, conn, &f),
            Frame::Refuse(f) => completer::on_refuse(p, conn, &f),
            Frame::Credit { qpn, life, limit } => completer::on_credit(p, conn, qpn, life, limit),
            Frame::Hint { epoch, rate, budget } => {
                conn.budget = budget.max(limits::BUDGET_MIN);
                conn.allowance.take(p.now, epoch, rate, (conn.cid >> 24) as u16);
            }
            Frame::Planes { epoch, down } => {
                plane_status::on_status(p, conn, PlaneStatus { epoch, down });
            }
            Frame::Close => closed = true,
            Frame::CloseAck => {
                if conn.state == ConnState::Closing {
                    conn.abandon();
                    return false;
                }
            }
            Frame::Ping => conn.ack.now = true,
        }
    }
    // What the frames before the broken one did stands (MR-FRAME-1).
    if frames.broken {
        p.stats.rx_malformed += 1;
        return false;
    }
    // A packet counts as received as a whole or not at all: a PSN cannot say which of its frames was taken (MR-PSN-8).
    if data && received {
        let ancient = arrival == Some(Some(Arrival::Ancient));
        if !ancient {
            conn.rx_paths[path].record(p.now, header.generation, header.psn, ce);
        }
        conn.last_data = p.now;
        p.inbound.on_data(p.now, &mut conn.demand, bytes.len(), header.backlog, ce);
        conn.ack.packets += 1;
        if conn.repeats != repeats {
            // The peer does not know that we had it: it is told at once, another way.
            conn.ack_turn = conn.ack_turn.wrapping_add(1);
            conn.ack.now = true;
        }
        // The sender learns at once of what it has to act upon; all else may wait for company (MR-SACK-3).
        let gap = arrival == Some(Some(Arrival::InOrder { gap: true }));
        let asked = header.flags & wire::FLAG_ACK_REQUEST != 0;
        conn.ack.now |= gap || asked || ancient || conn.ack.packets >= limits::ACK_EVERY;
        conn.owe_ack(p.now, p.config.tuning.ack_delay_ns);
    }
    closed
}

fn count_rx<S: Sink>(
    p: &mut Parts<'_, S>,
    path: usize,
    bytes: usize,
    data: bool,
    ce: bool,
    arrival: Option<Arrival>,
) {
    let slots = p.path_stats.len().max(1);
    let Some(s) = p.path_stats.get_mut(path % slots) else { return };
    s.rx_packets += 1;
    s.rx_bytes += bytes as u64;
    s.rx_data_packets += u64::from(data);
    s.rx_ce += u64::from(ce);
    s.rx_duplicates += u64::from(arrival == Some(Arrival::Duplicate));
    s.rx_reordered += u64::from(matches!(arrival, Some(Arrival::Late | Arrival::Ancient)));
}
