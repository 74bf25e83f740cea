//! One simulated host: the real endpoint, its memory, and the flows it is an end of.

use crate::memory::HostMemory;
use crate::scenario::Scenario;
use metaroce_proto::config::{PlaneConfig, Tuning};
use metaroce_proto::*;
use std::net::{IpAddr, Ipv4Addr};

/// UDP port of slot 0.
pub const BASE_PORT: u16 = 24576;
/// Slot of every simulated endpoint: one per host.
pub const SLOT: u16 = 1;

/// Collects what the core reports.
#[derive(Debug, Default)]
pub struct Log {
    /// Completions not yet looked at.
    pub completions: Vec<Completion>,
}

impl Sink for Log {
    fn complete(&mut self, _: CqId, completion: &Completion) {
        self.completions.push(*completion);
    }
    fn event(&mut self, _: Event) {}
}

/// A host.
#[derive(Debug)]
pub struct Host {
    /// The protocol.
    pub ep: Endpoint,
    /// Its memory.
    pub memory: HostMemory,
    /// What completed.
    pub log: Log,
    /// When its next wake-up is armed for.
    pub armed: Nanos,
    /// It does not run before this time.
    pub frozen_until: Nanos,
    /// Packets that wait in its socket meanwhile.
    pub inbox: Vec<u32>,
    /// Bytes of those.
    pub inbox_bytes: u64,
    /// Packets its socket dropped.
    pub overflow: u64,
    /// Flow of each QP index.
    pub flow_of: Vec<u32>,
}

/// Address of a host on a plane.
pub fn address(plane: usize, host: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, plane as u8, (host >> 8) as u8, host as u8))
}

/// The host and plane behind an address.
pub fn located(ip: IpAddr) -> (usize, usize) {
    match ip {
        IpAddr::V4(v4) => {
            let [_, plane, hi, lo] = v4.octets();
            (usize::from(plane), usize::from(hi) << 8 | usize::from(lo))
        }
        IpAddr::V6(_) => (0, 0),
    }
}

impl Host {
    /// A host of a scenario.
    pub fn new(scenario: &Scenario, host: usize, regions: usize, rng: &mut u64) -> Host {
        let s = &scenario.host;
        let planes = scenario.links();
        let plane = |(p, link): (usize, &crate::scenario::Link)| PlaneConfig {
            label: format!("p{p}"),
            addrs: vec![address(p, host)],
            mtu: link.mtu,
            rate_bps: if s.rates_known { link.bps() } else { 0 },
        };
        let config = Config {
            slot: SLOT,
            base_port: BASE_PORT,
            incarnation: random(rng) | 1,
            seed: random(rng),
            planes: planes.iter().enumerate().map(plane).collect(),
            paths_per_plane: s.paths,
            entropies_per_plane: s.paths.saturating_mul(2).max(8),
            segment_bytes_max: s.segment,
            burst_packets_max: s.burst,
            first_psn: random(rng) as u32,
            first_cpn: random(rng) as u32,
            datagram_bytes_max: 4096,
            receive_budget_bytes: s.socket_kib.saturating_mul(1024),
            tuning: Tuning {
                pto_min_ns: (s.pto_min_us * 1000.0) as Nanos,
                ack_delay_ns: (s.ack_delay_us * 1000.0) as Nanos,
                tail_copies_from: (s.tail_copies_from * 65536.0) as u32,
                delay_slack_ns: (s.delay_slack_us * 1000.0) as Nanos,
                leave_after_ns: (s.leave_after_us * 1000.0) as Nanos,
                connection_bytes_max: s.connection_kib.saturating_mul(1024),
                ..Tuning::default()
            },
        };
        let mut ep = Endpoint::new(config);
        if !s.hints {
            ep.set_inbound_capacity(0);
        }
        Host {
            ep,
            memory: HostMemory::new(regions, scenario.real_memory),
            log: Log::default(),
            armed: Nanos::MAX,
            frozen_until: 0,
            inbox: Vec::new(),
            inbox_bytes: 0,
            overflow: 0,
            flow_of: Vec::new(),
        }
    }
    /// Makes an RC QP; returns its number.
    pub fn make_qp(&mut self, flow: u32) -> Qpn {
        let init = QpInit {
            qp_type: QpType::Rc,
            pd: 1,
            send_cq: 1,
            recv_cq: 2,
            srq: None,
            max_send_wr: 1 << 14,
            max_recv_wr: 16,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            xrcd: None,
        };
        let qpn = self.ep.create_qp(&init).expect("a free QP");
        if self.flow_of.len() <= qpn.index() {
            self.flow_of.resize(qpn.index() + 1, u32::MAX);
        }
        self.flow_of[qpn.index()] = flow;
        qpn
    }
    /// Brings a QP to RTS towards a peer.
    pub fn connect(&mut self, now: Nanos, qpn: Qpn, peer: Qpn, peer_host: usize) {
        let mut change =
            |c: QpModify| self.ep.modify_qp(now, qpn, &c, &mut self.log).expect("a valid change");
        change(QpModify { state: Some(QpState::Init), access: Some(0xf), ..Default::default() });
        change(QpModify {
            state: Some(QpState::Rtr),
            dest_qpn: Some(peer),
            remote: Some(address(0, peer_host)),
            max_dest_rd_atomic: Some(64),
            min_rnr_timer: Some(1),
            ..Default::default()
        });
        change(QpModify {
            state: Some(QpState::Rts),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            max_rd_atomic: Some(64),
            ..Default::default()
        });
    }
}
