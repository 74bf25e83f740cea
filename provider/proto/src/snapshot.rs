//! A look at an endpoint from outside: connections with their paths, queue pairs and keys, as they are at one moment.
//!
//! A look changes nothing and takes a bounded time: it gives one page, and where the next one begins. What is on one
//! page belongs to one moment.

use crate::connection::{Conn, ConnState};
use crate::endpoint::Endpoint;
use crate::path::{Health, PathTx};
use crate::qp::Qp;
use crate::stats::{Cause, PathTally};
use crate::types::*;
use std::net::{IpAddr, SocketAddr};

/// Connections on a page: with 64 paths each that is some 100 microseconds.
pub const CONNECTIONS_PER_PAGE: usize = 32;
/// Queue pairs on a page, and keys.
pub const OBJECTS_PER_PAGE: usize = 512;

/// One page, and where the next one begins; `None`: it was the last.
#[derive(Debug, Clone)]
pub struct Page<T> {
    /// What is on it.
    pub items: Vec<T>,
    /// What to ask for next.
    pub next: Option<u32>,
}

/// A connection.
#[derive(Debug, Clone)]
pub struct ConnView {
    /// Its number in the endpoint.
    pub number: u32,
    /// Where it is in its life, one word.
    pub state: &'static str,
    /// The peer's address that it was made for, and the peer's slot.
    pub peer: (IpAddr, u16),
    /// The peer's life; 0 unknown.
    pub incarnation: u64,
    /// UDP payload of a full packet, bytes; 0 before the handshake.
    pub segment: u32,
    /// Queue pairs that use it.
    pub users: u32,
    /// Bytes in flight on all paths.
    pub in_flight_bytes: u32,
    /// Bytes the peer lets us have in flight.
    pub budget_bytes: u32,
    /// Rate the peer allows us, bit/s; 0: it gives no hints.
    pub hint_taken_bps: u64,
    /// Rate we have allowed the peer last, bit/s; 0: none was told.
    pub hint_given_bps: u64,
    /// Frames waiting to be sent again.
    pub retransmits_waiting: usize,
    /// Smoothed round trip on all paths, nanoseconds.
    pub srtt_ns: Nanos,
    /// Since when nothing was heard of the peer, nanoseconds.
    pub silent_ns: Nanos,
    /// Bytes of transport state.
    pub state_bytes: usize,
    /// Transmit paths, by their number.
    pub paths: Vec<PathView>,
}

/// A transmit path of a connection.
#[derive(Debug, Clone)]
pub struct PathView {
    /// Our plane.
    pub plane: u8,
    /// Which of the plane's source ports it uses.
    pub entropy: u8,
    /// Counts changes of the source port (8 bits, as on the wire).
    pub generation: u8,
    /// Where its packets go.
    pub dst: SocketAddr,
    /// `active`; `draining`: takes nothing new; `shunned`: probed, keeps its port; `left`: probed on another port;
    /// `parked`: left and not probed.
    pub state: &'static str,
    /// Why it is in that state.
    pub cause: Cause,
    /// Since when, nanoseconds.
    pub since_ns: Nanos,
    /// Smallest round trip of this generation, nanoseconds; 0 before the first sample.
    pub rtt_min_ns: Nanos,
    /// Smoothed.
    pub rtt_smoothed_ns: Nanos,
    /// Mean deviation.
    pub rtt_var_ns: Nanos,
    /// Congestion window, packets.
    pub cwnd: u32,
    /// Packets in flight.
    pub in_flight: u32,
    /// How much later than those behind it a packet may come before it counts as lost, nanoseconds.
    pub reorder_tolerance_ns: Nanos,
    /// What it has carried.
    pub tally: PathTally,
}

/// A queue pair.
#[derive(Debug, Clone, Copy)]
pub struct QpView {
    /// Number.
    pub qpn: Qpn,
    /// Transport.
    pub qp_type: QpType,
    /// State.
    pub state: QpState,
    /// Protection domain.
    pub pd: u32,
    /// Peer QP.
    pub dest_qpn: Qpn,
    /// Peer address.
    pub remote: Option<IpAddr>,
    /// Connection its requests leave on.
    pub connection: Option<u32>,
    /// Send requests posted and not complete.
    pub sends: u64,
    /// Those never begun.
    pub sends_waiting: u64,
    /// Reads and atomics not answered.
    pub reads: u32,
    /// Receives posted to it, or bound to it from its SRQ.
    pub recvs: usize,
    /// Its SRQ.
    pub srq: Option<SrqId>,
    /// Refusals in a row for lack of a receive.
    pub rnr_tries: u8,
}

/// A key: a memory region or window.
#[derive(Debug, Clone, Copy)]
pub struct MrView {
    /// lkey and rkey.
    pub key: u32,
    /// `region`, `null`, `window1` or `window2`.
    pub kind: &'static str,
    /// Protection domain.
    pub pd: u32,
    /// Address in the process.
    pub va: u64,
    /// Address that requests name.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
    /// `IBV_ACCESS_*` bits.
    pub access: u32,
    /// Windows bound to it.
    pub windows: u32,
}

/// Takes at most `most` of what comes, and the number of the first that is left.
fn page<T>(mut all: impl Iterator<Item = (usize, T)>, most: usize) -> Page<T> {
    let items = all.by_ref().take(most).map(|(_, item)| item).collect();
    let next = all.next().and_then(|(at, _)| u32::try_from(at).ok());
    Page { items, next }
}

impl Endpoint {
    /// Connections from number `from` on, with their paths. Dead ones are left out.
    pub fn view_connections(&self, now: Nanos, from: u32) -> Page<ConnView> {
        let conns = self.each_conn().skip_while(|c| c.index < from);
        let alive = conns.filter(|c| !matches!(c.state, ConnState::Dead | ConnState::Alias(_)));
        // The page is filled from references, so that looking for where the next one begins copies nothing.
        let Page { items, next } = page(alive.map(|c| (c.index as usize, c)), CONNECTIONS_PER_PAGE);
        Page { items: items.into_iter().map(|c| conn_view(c, now)).collect(), next }
    }
    /// Queue pairs from index `from` on.
    pub fn view_qps(&self, from: u32) -> Page<QpView> {
        let Page { items, next } = page(self.qps.iter_from(from as usize), OBJECTS_PER_PAGE);
        Page { items: items.into_iter().map(qp_view).collect(), next }
    }
    /// One queue pair.
    pub fn view_qp(&self, qpn: Qpn) -> Option<QpView> {
        let (_, qp) = self.qps.iter_from(qpn.index()).next()?;
        (qp.qpn == qpn).then(|| qp_view(qp))
    }
    /// Keys from index `from` on.
    pub fn view_mrs(&self, from: u32) -> Page<MrView> {
        page(self.mrs.views_from(from as usize), OBJECTS_PER_PAGE)
    }
}

fn conn_view(c: &Conn, now: Nanos) -> ConnView {
    ConnView {
        number: c.index,
        state: match c.state {
            ConnState::Connecting => "connecting",
            ConnState::Established => "established",
            ConnState::Closing => "closing",
            ConnState::Dead | ConnState::Alias(_) => "dead",
        },
        peer: (c.peer_ip, c.peer_slot),
        incarnation: c.peer_incarnation,
        segment: c.segment,
        users: c.users,
        in_flight_bytes: c.in_flight_bytes,
        budget_bytes: c.budget,
        hint_taken_bps: c.allowance.rate_bps,
        hint_given_bps: c.demand.told_bps().unwrap_or(0),
        retransmits_waiting: c.retransmits.len(),
        srtt_ns: c.rtt.srtt_ns,
        silent_ns: now.saturating_sub(c.last_heard),
        state_bytes: c.bytes(),
        paths: c.paths.iter().map(|path| path_view(path, now)).collect(),
    }
}

fn path_view(path: &PathTx, now: Nanos) -> PathView {
    let (changed, cause) = path.changed;
    PathView {
        plane: path.plane,
        entropy: path.entropy,
        generation: path.generation,
        dst: path.dst,
        state: path_state(path),
        cause,
        since_ns: now.saturating_sub(changed),
        rtt_min_ns: path.rtt.min_ns,
        rtt_smoothed_ns: path.rtt.srtt_ns,
        rtt_var_ns: path.rtt.var_ns,
        cwnd: path.congestion.window(),
        in_flight: path.in_flight(),
        reorder_tolerance_ns: path.reorder_tolerance_ns,
        tally: path.tally,
    }
}

/// The word for the state a path is in.
pub(crate) fn path_state(path: &PathTx) -> &'static str {
    match path.health {
        Health::Active if path.draining => "draining",
        Health::Active => "active",
        Health::PARKED => "parked",
        Health::Suspect { .. } if path.shunned => "shunned",
        Health::Suspect { .. } => "left",
    }
}

fn qp_view(qp: &Qp) -> QpView {
    let sends = qp.tx.sq.next_msn() - qp.tx.sq.base_msn();
    QpView {
        qpn: qp.qpn,
        qp_type: qp.init.qp_type,
        state: qp.state,
        pd: qp.init.pd,
        dest_qpn: qp.attrs.dest_qpn,
        remote: qp.attrs.remote,
        connection: qp.tx.conn,
        sends,
        sends_waiting: qp.tx.sq.next_msn().saturating_sub(qp.tx.first_fresh()).min(sends),
        reads: qp.tx.outstanding_reads,
        recvs: qp.rq.len(),
        srq: qp.init.srq,
        rnr_tries: qp.tx.rnr_tries,
    }
}
