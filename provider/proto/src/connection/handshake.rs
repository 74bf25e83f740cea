//! HELLO exchange: who the peer is, its paths, sizes and windows.

use super::{Conn, ConnState};
use crate::config::{Config, PlaneConfig, limits};
use crate::path::{PathRx, PathTx};
use crate::seq::{ORIGIN, Window};
use crate::types::*;
use crate::wire::hello::HelloPlane;
use crate::wire::{self, Header, Hello, PacketType};
use std::net::{IpAddr, SocketAddr};

/// UDP payloads tried when the larger ones meet silence: 1500-byte Ethernet and the IPv6 minimum MTU.
const FALLBACK_SEGMENTS: [u16; 2] = [1452, 1232];

/// The UDP payload to propose to a peer: what fits the planes that can reach it (MR-HELLO-7).
pub fn segment_for(config: &Config, peer: IpAddr) -> u16 {
    // A plane without IPv4 carries IPv6 whatever family the peer was named in.
    let ip_udp = |plane: &PlaneConfig| {
        if peer.is_ipv4() && plane.addrs.iter().any(IpAddr::is_ipv4) { 28 } else { 48 }
    };
    let route = config.planes.iter().map(|p| p.mtu.saturating_sub(ip_udp(p))).min().unwrap_or(1232);
    route.min(config.segment_bytes_max).clamp(512, 65_000) as u16
}

/// Data bytes of a full packet, a multiple of `unit`.
fn payload_for(segment: u32, unit: u32) -> u32 {
    (segment - limits::OVERHEAD_BYTES) / unit * unit
}

/// Bytes one connection packet number stands for: small enough that rounding wastes little of a small segment.
fn unit_for(segment: u32) -> u32 {
    if segment >= 4096 + limits::OVERHEAD_BYTES { 256 } else { 64 }
}

impl Conn {
    /// Begins to look for the peer.
    pub fn connect(&mut self, now: Nanos) {
        if self.state == ConnState::Connecting && self.hello.due.is_none() {
            self.hello.due = Some(now);
        }
    }

    /// The HELLO to send now. `wants_answer`: a request of ours; else an answer.
    pub fn make_hello(
        &mut self,
        now: Nanos,
        config: &Config,
        budget: u32,
        hints: bool,
        wants_answer: bool,
    ) -> Hello {
        // An answer proposes what was agreed: it must fit where the question came through (MR-HELLO-7).
        let mut segment = if self.segment == 0 { self.proposed_segment } else { self.segment as u16 };
        if wants_answer {
            segment = self.proposed_segment;
            let further = self.hello.tries.saturating_sub(limits::HELLOS_FULL_SIZE);
            if further % 2 == 1 {
                segment = segment.min(FALLBACK_SEGMENTS[(further / 2) as usize % FALLBACK_SEGMENTS.len()]);
            }
            // Asked again soon at first, because peers start together; then rarely (MR-HELLO-2).
            let wait = limits::HELLO_FIRST_NS << self.hello.tries.min(10);
            self.hello.due = Some(now + wait.min(limits::HELLO_MAX_NS));
            self.hello.tries += 1;
            self.hello.asked_at = now;
        }
        self.hello.ordinal += 1;
        let planes = config
            .planes
            .iter()
            .map(|p| HelloPlane { label: p.label.clone(), addrs: p.addrs.clone() })
            .collect();
        Hello {
            wants_answer,
            incarnation: config.incarnation,
            scid: self.cid,
            bound: self.peer_cid,
            ordinal: self.hello.ordinal,
            segment,
            unit: unit_for(u32::from(segment)) as u16,
            budget,
            message_window: limits::MESSAGE_WINDOW,
            paths: (config.planes.len() * usize::from(config.paths_per_plane)).min(64) as u8,
            first_cpn: [config.first_cpn; 2],
            features: wire::FEATURE_PLANES | if hints { wire::FEATURE_HINTS } else { 0 },
            planes,
        }
    }

    /// Header of a HELLO of ours to the connection `dcid` of the peer.
    pub fn hello_header(dcid: u64, config: &Config) -> Header {
        Header {
            kind: PacketType::Hello,
            flags: 0,
            path: 0,
            generation: 0,
            dcid,
            psn: 0,
            src_slot: config.slot,
            backlog: 0,
        }
    }

    /// Forgets what a HELLO said: the peer has given that connection up before it was established (MR-HELLO-3).
    pub fn unlearn(&mut self) {
        self.peer_cid = 0;
        self.peer_incarnation = 0;
        self.segment = 0;
        self.paths.clear();
        self.rx_paths.clear();
        self.hello.tries = 0;
    }

    /// Takes the peer's parameters in. Only the first HELLO of its connection changes anything, but the segment, which
    /// follows the answers until the connection is established: what they agree to has come through (MR-HELLO-4).
    pub fn learn(&mut self, hello: &Hello, answer: bool, config: &Config) {
        let first = self.peer_cid == 0;
        if first || answer && self.state == ConnState::Connecting && self.peer_cid == hello.scid {
            self.segment = u32::from(self.proposed_segment.min(hello.segment));
            self.unit = unit_for(self.segment);
            self.payload_max = payload_for(self.segment, self.unit);
        }
        if !first {
            return;
        }
        self.peer_cid = hello.scid;
        self.peer_incarnation = hello.incarnation;
        self.message_window = u64::from(hello.message_window);
        self.allowance.expected = hello.features & wire::FEATURE_HINTS != 0;
        self.takes_status = hello.features & wire::FEATURE_PLANES != 0;
        self.budget = hello.budget.max(limits::BUDGET_MIN);
        let window =
            |space: usize| Window::new(ORIGIN + u64::from(hello.first_cpn[space]), limits::CPN_WINDOW);
        self.rx_windows = [window(0), window(1)];
        self.rx_paths = vec![PathRx::default(); usize::from(hello.paths)];
        // What the peer says of itself counts once it has proved to be where it is (MR-HELLO-10).
        self.announced_ips =
            hello.planes.iter().flat_map(|p| &p.addrs).copied().take(limits::PEER_IPS_MAX).collect();
        self.make_paths(hello, config);
    }

    /// The answer to our first HELLO is the first round trip known of the peer; paths begin with it (MR-LOSS-8).
    pub fn first_rtt(&mut self, now: Nanos) {
        if self.hello.tries == 1 && self.min_rtt_ns == Nanos::MAX {
            self.min_rtt_ns = now.saturating_sub(self.hello.asked_at).max(1);
            self.rtt.seed(self.min_rtt_ns);
            self.paths.iter_mut().for_each(|p| p.rtt.seed(self.min_rtt_ns));
        }
    }

    /// The peer has echoed our id: its address is real, data may flow (MR-HELLO-6).
    pub fn establish(&mut self, now: Nanos) {
        if self.state == ConnState::Connecting && self.peer_cid != 0 {
            self.state = ConnState::Established;
            self.expires = Nanos::MAX;
            for ip in std::mem::take(&mut self.announced_ips) {
                if !self.peer_ips.contains(&ip) {
                    self.peer_ips.push(ip);
                }
            }
            self.hello.due = None;
            self.last_progress = now;
            // The peer learns of it by a packet of ours that carries its id.
            self.ack.now = true;
        }
    }

    /// Path slots, spread evenly over the planes both sides have, paired by label; else all go to the address the
    /// connection was made for (MR-HELLO-8).
    fn make_paths(&mut self, hello: &Hello, config: &Config) {
        let port = config.base_port + self.peer_slot;
        let mut routes: Vec<(u8, IpAddr, u8)> = Vec::new();
        for (i, plane) in config.planes.iter().enumerate() {
            let Some(at) = hello.planes.iter().position(|p| p.label == plane.label) else { continue };
            let theirs = &hello.planes[at];
            let reachable = |a: &IpAddr| plane.addrs.iter().any(|ours| ours.is_ipv4() == a.is_ipv4());
            let mut candidates: Vec<IpAddr> = theirs.addrs.iter().copied().filter(reachable).collect();
            // The address we were given, its family, any other: a stable sort keeps the peer's order within each.
            candidates.sort_by_key(|a| (*a != self.peer_ip, a.is_ipv4() != self.peer_ip.is_ipv4()));
            routes.extend(candidates.first().map(|addr| (i as u8, *addr, at as u8)));
        }
        if !routes.iter().any(|r| r.1 == self.peer_ip) {
            // Labels differ between the ends: planes cannot be paired, the known address serves.
            let plane = config
                .planes
                .iter()
                .position(|p| p.addrs.iter().any(|a| a.is_ipv4() == self.peer_ip.is_ipv4()));
            let theirs = hello.planes.iter().position(|p| p.addrs.contains(&self.peer_ip));
            routes = vec![(plane.unwrap_or(0) as u8, self.peer_ip, theirs.map_or(u8::MAX, |at| at as u8))];
        }
        let slots = usize::from(config.paths_per_plane);
        for slot in 0..slots {
            for (plane, addr, theirs) in &routes {
                let entropy =
                    (self.index as usize * slots + slot) % usize::from(config.entropies_per_plane.max(1));
                let dst = SocketAddr::new(*addr, port);
                let mut path =
                    PathTx::new(*plane, entropy as u8, dst, config.first_psn, config.tuning.algorithm);
                path.peer_plane = *theirs;
                self.paths.push(path);
            }
        }
        self.paths.truncate(64);
    }
}
