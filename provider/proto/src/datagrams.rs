//! Unreliable datagrams (UD): one packet per message, no connection, no state per peer (design D17, MR-UD-1).

use crate::burst::{Piece, TxBurst};
use crate::config::{Config, limits};
use crate::connection::packet::{piece, scatter, slices};
use crate::endpoint::{Endpoint, parts};
use crate::groups;
use crate::memory::Memory;
use crate::parts::{Parts, complete_send};
use crate::types::*;
use crate::wire::datagram::{DATAGRAM_BYTES, GROUP_BYTES};
use crate::wire::{Datagram, HEADER_BYTES, Header, PacketType};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Q_Keys with this bit mean "the QP's own" (MR-UD-2).
const QKEY_OWN: u32 = 1 << 31;

impl Endpoint {
    /// Puts a UD QP with posted sends into the round.
    pub(crate) fn enqueue_datagrams(&mut self, qpn: Qpn) {
        if let Some(qp) = self.qps.get(qpn)
            && !qp.tx.in_round
        {
            qp.tx.in_round = true;
            self.datagrams.push_back(qpn.index() as u16);
        }
    }

    /// Fills `burst` with datagrams of one QP to one destination; false if there are none.
    pub(crate) fn poll_datagrams(&mut self, now: Nanos, burst: &mut TxBurst, sink: &mut impl Sink) -> bool {
        while let Some(&index) = self.datagrams.front() {
            burst.clear();
            let most = usize::from(self.config.burst_packets_max.clamp(1, 64));
            let mut p = parts!(self, now, sink);
            while burst.packets.len() < most && add_datagram(&mut p, index, burst) {}
            let more = p.qps.at(index).is_some_and(|qp| may_send(qp.state) && !qp.tx.sq.is_empty());
            self.datagrams.pop_front();
            if more {
                self.datagrams.push_back(index);
            } else if let Some(qp) = self.qps.at(index) {
                qp.tx.in_round = false;
            }
            if !burst.packets.is_empty() {
                return true;
            }
        }
        false
    }

    /// A datagram from the network: delivered whole or dropped, never an answer.
    pub(crate) fn on_ud(
        &mut self,
        meta: &RxMeta,
        header: &Header,
        body: &[u8],
        mem: &mut impl Memory,
        sink: &mut impl Sink,
    ) {
        let Some(d) = Datagram::parse(body) else {
            self.stats.rx_malformed += 1;
            return;
        };
        // Answers go to the QP by its number: it must lead where the packet came from (MR-UD-3).
        if d.src_qpn.slot() != header.src_slot {
            self.stats.rx_malformed += 1;
            return;
        }
        if let Some(s) = self.path_stats.first_mut() {
            s.rx_packets += 1;
            s.rx_bytes += (HEADER_BYTES + body.len()) as u64;
        }
        if meta.dst_ip.is_multicast() {
            return self.on_group(meta, &d, mem, sink);
        }
        let mut p = parts!(self, 0, sink);
        if deliver(&mut p, d.dst_qpn, meta, &d, mem).is_none() {
            self.stats.datagrams_dropped += 1;
        }
    }
}

fn may_send(state: QpState) -> bool {
    state == QpState::Rts
}

/// Where a datagram goes, and the group it must name; `None` if nothing carries it there.
fn route(config: &Config, dest: &Destination) -> Option<(SocketAddr, Option<IpAddr>)> {
    if !dest.ip.is_multicast() {
        return Some((SocketAddr::new(dest.ip, config.base_port + dest.qpn.slot()), None));
    }
    let carrier = groups::carrier(config, dest.ip)?;
    let named = (carrier != dest.ip).then_some(dest.ip);
    Some((SocketAddr::new(carrier, groups::group_port(config.base_port)), named))
}

/// Adds the next datagram of the QP if it fits the burst: same destination, same size or the last and smaller.
fn add_datagram<S: Sink>(p: &mut Parts<'_, S>, index: u16, burst: &mut TxBurst) -> bool {
    let Some(qp) = p.qps.at(index).filter(|q| may_send(q.state)) else { return false };
    let Some(wqe) = qp.tx.sq.get(qp.tx.sq.base_msn()).copied() else { return false };
    let Some(dest) = wqe.wr.dest else { return finish(p, index, WcStatus::LocQpOpErr) };
    let Some((dst, group)) = route(p.config, &dest) else { return finish(p, index, WcStatus::Success) };
    let named = if group.is_some() { GROUP_BYTES } else { 0 };
    let size = (HEADER_BYTES + DATAGRAM_BYTES + named) as u32 + wqe.wr.length;
    if let Some((_, first)) = burst.packets.first().copied() {
        let ended = burst.packets.last().is_some_and(|l| l.1 < first);
        let full = burst.total_bytes() + size > 65_000;
        if dst != burst.dst || size > first || ended || full {
            return false;
        }
    }
    if wqe.wr.length > p.config.datagram_bytes_max {
        // As on hardware: no packet, and the sender does not learn of it.
        return finish(p, index, WcStatus::Success);
    }
    let (bytes, pieces) = (burst.bytes.len(), burst.pieces.len());
    let header = Header {
        kind: PacketType::Datagram,
        flags: 0,
        path: 0,
        generation: 0,
        dcid: 0,
        psn: 0,
        src_slot: p.config.slot,
        backlog: 0,
    };
    header.write(&mut burst.bytes);
    let own = dest.qkey & QKEY_OWN != 0;
    let datagram = Datagram {
        dst_qpn: dest.qpn,
        src_qpn: qp.qpn,
        qkey: if own { qp.attrs.qkey } else { dest.qkey },
        imm: (wqe.wr.opcode == Opcode::SendImm).then_some(wqe.wr.imm),
        solicited: wqe.wr.flags & send_flags::SOLICITED != 0,
        group,
        payload: &[],
    };
    datagram.write_header(wqe.wr.length as u16, &mut burst.bytes);
    let inline = wqe.wr.flags & send_flags::INLINE != 0;
    if inline {
        qp.tx.sq.copy_inline(&wqe, 0, wqe.wr.length, &mut burst.bytes);
    }
    burst.pieces.push(Piece::Bytes { start: bytes as u32, len: (burst.bytes.len() - bytes) as u32 });
    let pd = qp.init.pd;
    let gathered = inline
        || slices(qp.tx.sq.sges(&wqe), 0, wqe.wr.length, |s| {
            burst.pieces.push(piece(p.mrs, pd, s)?);
            Some(())
        })
        .is_some();
    if !gathered {
        burst.bytes.truncate(bytes);
        burst.pieces.truncate(pieces);
        return finish(p, index, WcStatus::LocProtErr);
    }
    if burst.packets.is_empty() {
        let fits = |a: &IpAddr| a.is_ipv4() == dst.is_ipv4();
        // Groups live on plane 0.
        burst.plane = match dst.ip().is_multicast() {
            true => 0,
            false => p.config.planes.iter().position(|x| x.addrs.iter().any(fits)).unwrap_or(0) as u8,
        };
        burst.entropy = index as u8 % p.config.entropies_per_plane.max(1);
        burst.dst = dst;
    }
    burst.packets.push((burst.pieces.len() as u32, size));
    let slot = usize::from(burst.plane) * usize::from(p.config.paths_per_plane);
    p.count_tx(slot, size, false, false);
    finish(p, index, WcStatus::Success)
}

/// Completes the oldest send. True: go on with the next one.
pub(crate) fn finish<S: Sink>(p: &mut Parts<'_, S>, index: u16, status: WcStatus) -> bool {
    let Some(qp) = p.qps.at(index) else { return false };
    let Some(wqe) = qp.tx.sq.pop() else { return false };
    qp.tx.cursor_msn = qp.tx.sq.base_msn();
    if status != WcStatus::Success {
        qp.state = QpState::Sqe;
        p.sink.event(Event::State(qp.qpn, QpState::Sqe));
    }
    complete_send(qp, &wqe, status, p.sink);
    if status != WcStatus::Success {
        crate::parts::flush_sends(qp, p.sink);
    }
    true
}

/// Delivers a datagram into the oldest receive of a QP; `None` if it is dropped (MR-UD-4).
pub(crate) fn deliver<S: Sink>(
    p: &mut Parts<'_, S>,
    qpn: Qpn,
    meta: &RxMeta,
    d: &Datagram<'_>,
    mem: &mut impl Memory,
) -> Option<()> {
    let qp = p.qps.get(qpn).filter(|q| q.init.qp_type == QpType::Ud && q.receives())?;
    if qp.attrs.qkey != d.qkey {
        return None;
    }
    let mut pd = qp.init.pd;
    if let Some(id) = qp.init.srq {
        pd = p.srqs.get_mut(id)?.pd;
        if qp.rq.len() == 0 {
            p.bind_receive(qpn.index() as u16);
        }
    }
    let qp = p.qps.get(qpn)?;
    let entry = qp.rq.get(qp.rq.base())?;
    let total = limits::GRH_BYTES + d.payload.len() as u32;
    if u64::from(total) > entry.capacity {
        return None;
    }
    let grh = grh(meta, d.payload.len());
    let placed = scatter(p.mrs, pd, qp.rq.sges(entry), 0, &grh, mem)
        .and_then(|()| scatter(p.mrs, pd, qp.rq.sges(entry), limits::GRH_BYTES, d.payload, mem));
    let entry = qp.rq.pop()?;
    let completion = Completion {
        status: if placed.is_some() { WcStatus::Success } else { WcStatus::LocProtErr },
        wc_flags: WC_GRH
            | if d.imm.is_some() { WC_WITH_IMM } else { 0 }
            | if meta.src.is_ipv4() && meta.dst_ip.is_ipv4() { WC_IPV4 } else { 0 },
        byte_len: total,
        imm: d.imm.unwrap_or(0),
        src_qp: d.src_qpn,
        rq_release: 1,
        solicited: d.solicited || placed.is_none(),
        ..Completion::new(entry.wr_id, WcOpcode::Recv, qp.qpn)
    };
    p.sink.complete(qp.init.recv_cq, &completion);
    if placed.is_none() {
        p.enter_error(qpn.index() as u16);
    }
    Some(())
}

/// The 40 bytes a UD receive begins with: an IPv6 header, or an IPv4 header in the second half (MR-UD-5, RoCE v2 annex).
fn grh(meta: &RxMeta, payload: usize) -> [u8; 40] {
    let mut b = [0u8; 40];
    let length = (HEADER_BYTES + DATAGRAM_BYTES + payload + 8) as u16;
    match (meta.src.ip(), meta.dst_ip) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => ipv4(&mut b[20..], src, dst, length, meta.ecn),
        (src, dst) => {
            b[0] = 0x60;
            b[1] = meta.ecn << 4;
            b[4..6].copy_from_slice(&length.to_be_bytes());
            (b[6], b[7]) = (17, 64);
            b[8..24].copy_from_slice(&v6(src).octets());
            b[24..40].copy_from_slice(&v6(dst).octets());
        }
    }
    b
}

fn v6(ip: IpAddr) -> Ipv6Addr {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

fn ipv4(b: &mut [u8], src: Ipv4Addr, dst: Ipv4Addr, length: u16, ecn: u8) {
    (b[0], b[1]) = (0x45, ecn);
    b[2..4].copy_from_slice(&(length + 20).to_be_bytes());
    b[6] = 0x40;
    (b[8], b[9]) = (64, 17);
    b[12..16].copy_from_slice(&src.octets());
    b[16..20].copy_from_slice(&dst.octets());
    // libibverbs tells IPv4 from IPv6 by this checksum.
    let mut sum: u32 = b[..20].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    b[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
}
