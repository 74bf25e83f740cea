//! Two or more endpoints, byte-array memory and a seeded network in virtual time. Fakes stand for the network, the
//! clock and memory, never for the transport.
#![allow(dead_code, missing_docs, reason = "shared by several test binaries, each of which uses a part")]

pub mod tap;

use metaroce_proto::config::PlaneConfig;
use metaroce_proto::wire;
use metaroce_proto::*;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

pub const MEM_BASE: u64 = 0x10_0000;
pub const BASE_PORT: u16 = 24576;

/// Byte array of one host; address 0x100000 is its first byte.
pub struct HostMem(pub Vec<u8>);

impl HostMem {
    fn range(&self, va: u64, len: usize) -> Result<std::ops::Range<usize>, Fault> {
        let at = va.checked_sub(MEM_BASE).ok_or(Fault)? as usize;
        let range = at..at + len;
        if range.end <= self.0.len() { Ok(range) } else { Err(Fault) }
    }
}

impl Memory for HostMem {
    fn place(&mut self, va: u64, bytes: &[u8]) -> Result<(), Fault> {
        let range = self.range(va, bytes.len())?;
        self.0[range].copy_from_slice(bytes);
        Ok(())
    }
    fn place_last(&mut self, va: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.place(va, bytes)
    }
    fn gather(&mut self, va: u64, out: &mut [u8]) -> Result<(), Fault> {
        let range = self.range(va, out.len())?;
        out.copy_from_slice(&self.0[range]);
        Ok(())
    }
    fn compare_swap(&mut self, va: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
        let range = self.range(va, 8)?;
        let old = u64::from_ne_bytes(self.0[range.clone()].try_into().unwrap());
        if old == compare {
            self.0[range].copy_from_slice(&swap.to_ne_bytes());
        }
        Ok(old)
    }
    fn fetch_add(&mut self, va: u64, add: u64) -> Result<u64, Fault> {
        let range = self.range(va, 8)?;
        let old = u64::from_ne_bytes(self.0[range.clone()].try_into().unwrap());
        self.0[range].copy_from_slice(&old.wrapping_add(add).to_ne_bytes());
        Ok(old)
    }
}

/// Collects what the core reports.
#[derive(Default)]
pub struct Log {
    pub completions: Vec<(CqId, Completion)>,
    pub events: Vec<Event>,
}

impl Sink for Log {
    fn complete(&mut self, cq: CqId, completion: &Completion) {
        self.completions.push((cq, *completion));
    }
    fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

pub struct Host {
    pub ep: Endpoint,
    pub mem: HostMem,
    pub log: Log,
    pub ip: IpAddr,
    pub slot: u16,
    pub alive: bool,
}

/// Says whether a packet (from, to, bytes) is dropped.
pub type Filter = Box<dyn FnMut(usize, usize, &[u8]) -> bool>;

/// Faults of the network.
#[derive(Clone, Copy, Debug)]
pub struct Faults {
    pub loss: f64,
    pub dup: f64,
    pub reorder: f64,
    pub delay_ns: u64,
}

impl Default for Faults {
    fn default() -> Self {
        Faults { loss: 0.0, dup: 0.0, reorder: 0.0, delay_ns: 10_000 }
    }
}

pub struct Net {
    pub hosts: Vec<Host>,
    pub now: Nanos,
    pub faults: Faults,
    pub rng: u64,
    pub dropped_data: u64,
    pub trace: bool,
    pub planes: usize,
    /// Planes that have IPv6 addresses and no others.
    pub ipv6_planes: Vec<usize>,
    /// Planes whose packets vanish.
    pub black_holes: Vec<usize>,
    /// Another address that reaches a host.
    pub alt: Option<(IpAddr, usize)>,
    /// Gathering from this address faults.
    pub fault_at: Option<u64>,
    /// Decides per packet (from, to, bytes) whether it is dropped, before the random faults.
    pub filter: Option<Filter>,
    queue: BTreeMap<(Nanos, u64), (usize, RxMeta, Vec<u8>)>,
    serial: u64,
    last_arrival: BTreeMap<(usize, usize, u8, u8), Nanos>,
    burst: TxBurst,
}

/// Address of a host on a plane.
pub fn ip(plane: usize, host: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, plane as u8, 0, host as u8 + 1))
}

pub fn config(host: usize, planes: usize, incarnation: u64, seed: u64) -> Config {
    Config {
        slot: host as u16 + 1,
        base_port: BASE_PORT,
        incarnation,
        seed,
        planes: (0..planes)
            .map(|p| PlaneConfig {
                label: format!("p{p}"),
                addrs: vec![ip(p, host)],
                mtu: 65536,
                rate_bps: 0,
            })
            .collect(),
        paths_per_plane: 4,
        entropies_per_plane: 8,
        segment_bytes_max: 4224,
        burst_packets_max: 15,
        first_psn: seed as u32,
        first_cpn: (seed >> 32) as u32,
        datagram_bytes_max: 4096,
        receive_budget_bytes: 1 << 20,
        tuning: metaroce_proto::config::Tuning::default(),
    }
}

impl Net {
    pub fn new(hosts: usize, seed: u64) -> Net {
        Net::with_planes(hosts, 1, seed)
    }
    pub fn with_planes(hosts: usize, planes: usize, seed: u64) -> Net {
        let mut net = Net {
            hosts: Vec::new(),
            now: 1_000_000,
            faults: Faults::default(),
            rng: seed,
            dropped_data: 0,
            trace: std::env::var("METAROCE_TRACE").is_ok(),
            planes,
            ipv6_planes: Vec::new(),
            black_holes: Vec::new(),
            alt: None,
            fault_at: None,
            filter: None,
            queue: BTreeMap::new(),
            serial: 0,
            last_arrival: BTreeMap::new(),
            burst: TxBurst::new(),
        };
        for i in 0..hosts {
            let incarnation = random(&mut net.rng) | 1;
            let seed = random(&mut net.rng);
            net.hosts.push(Host {
                ep: Endpoint::new(config(i, planes, incarnation, seed)),
                mem: HostMem(vec![0; 8 << 20]),
                log: Log::default(),
                ip: ip(0, i),
                slot: i as u16 + 1,
                alive: true,
            });
        }
        net
    }
    /// A plane has IPv6 addresses only; to be called before anything else.
    pub fn make_ipv6(&mut self, plane: usize) {
        self.ipv6_planes.push(plane);
        for host in 0..self.hosts.len() {
            let (incarnation, seed) = (random(&mut self.rng) | 1, random(&mut self.rng));
            let mut config = config(host, self.planes, incarnation, seed);
            for plane in &self.ipv6_planes {
                config.planes[*plane].addrs = vec![self.addr(*plane, host)];
            }
            self.hosts[host].ep = Endpoint::new(config);
        }
    }
    fn addr(&self, plane: usize, host: usize) -> IpAddr {
        if !self.ipv6_planes.contains(&plane) {
            return ip(plane, host);
        }
        IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, plane as u16, 0, 0, 0, host as u16 + 1))
    }
    /// The process on a host is replaced by a new one on the same slot.
    pub fn restart(&mut self, host: usize) {
        let (incarnation, seed) = (random(&mut self.rng) | 1, random(&mut self.rng));
        self.hosts[host].ep = Endpoint::new(config(host, self.planes, incarnation, seed));
        self.hosts[host].log = Log::default();
        self.hosts[host].alive = true;
    }
    pub fn chance(&mut self, p: f64) -> bool {
        (random(&mut self.rng) >> 11) as f64 / (1u64 << 53) as f64 <= p && p > 0.0
    }
    pub fn below(&mut self, n: u64) -> u64 {
        random(&mut self.rng) % n.max(1)
    }

    /// Sends everything hosts have to send now.
    pub fn flush(&mut self) {
        for h in 0..self.hosts.len() {
            let mut guard = 0;
            loop {
                let mut burst = std::mem::take(&mut self.burst);
                let host = &mut self.hosts[h];
                let more = host.ep.poll_burst(self.now, &mut burst, &mut host.log);
                if more {
                    self.transmit(h, &burst);
                }
                self.burst = burst;
                guard += 1;
                assert!(guard < 100_000, "poll_burst never ends");
                if !more {
                    break;
                }
            }
        }
    }

    fn transmit(&mut self, from: usize, burst: &TxBurst) {
        if !self.hosts[from].alive {
            return;
        }
        let faults = |p: &Piece| matches!(p, Piece::Memory { va, .. } if Some(*va) == self.fault_at);
        if burst.pieces.iter().any(faults) {
            let h = &mut self.hosts[from];
            h.ep.fault(self.now, burst, &mut h.log);
            return;
        }
        let mut piece = 0;
        assert!(!burst.packets.is_empty());
        for (i, (end, len)) in burst.packets.iter().enumerate() {
            let mut bytes = Vec::new();
            while piece < *end as usize {
                match burst.pieces[piece] {
                    Piece::Bytes { start, len } => {
                        bytes.extend_from_slice(&burst.bytes[start as usize..(start + len) as usize])
                    }
                    Piece::Zeros { len } => bytes.resize(bytes.len() + len as usize, 0),
                    Piece::Memory { va, len } => {
                        let at = bytes.len();
                        bytes.resize(at + len as usize, 0);
                        self.hosts[from].mem.gather(va, &mut bytes[at..]).expect("gather");
                    }
                }
                piece += 1;
            }
            assert_eq!(bytes.len(), *len as usize);
            let last = i + 1 == burst.packets.len();
            let first = burst.packets[0].1;
            assert!(*len == first || last && *len < first, "unequal sizes in a burst");
            self.deliver_later(from, burst, bytes);
        }
    }

    fn deliver_later(&mut self, from: usize, burst: &TxBurst, bytes: Vec<u8>) {
        let plane = usize::from(burst.plane);
        let ip = burst.dst.ip();
        if ip.is_multicast() {
            assert_eq!(burst.dst.port(), groups::group_port(BASE_PORT));
            for to in 0..self.hosts.len() {
                // A host gets its own, too.
                if self.hosts[to].ep.carriers().contains(&ip) {
                    self.deliver_to(from, to, ip, burst, bytes.clone());
                }
            }
            return;
        }
        let reached = |h: &usize| self.addr(plane, *h) == burst.dst.ip();
        let to = (0..self.hosts.len())
            .filter(reached)
            .find(|h| BASE_PORT + self.hosts[*h].slot == burst.dst.port());
        let to = to.or(self.alt.filter(|a| a.0 == burst.dst.ip()).map(|a| a.1));
        let Some(to) = to else { return };
        self.deliver_to(from, to, self.addr(plane, to), burst, bytes);
    }

    fn deliver_to(&mut self, from: usize, to: usize, dst_ip: IpAddr, burst: &TxBurst, bytes: Vec<u8>) {
        let plane = usize::from(burst.plane);
        if self.black_holes.contains(&plane) {
            return;
        }
        if self.trace {
            eprintln!("{} {from}->{to} {} {:02x?}", self.now, bytes.len(), &bytes[..bytes.len().min(64)]);
        }
        if let Some(filter) = &mut self.filter
            && filter(from, to, &bytes)
        {
            return;
        }
        if self.chance(self.faults.loss) {
            self.dropped_data += u64::from(wire::is_data(&bytes));
            return;
        }
        let meta = RxMeta {
            src: SocketAddr::new(self.addr(plane, from), 49152 + u16::from(burst.entropy)),
            dst_ip,
            ecn: 2,
        };
        let copies = 1 + usize::from(self.chance(self.faults.dup));
        for _ in 0..copies {
            let mut at = self.now + self.faults.delay_ns;
            if self.chance(self.faults.reorder) {
                at += 1 + self.below(20 * self.faults.delay_ns);
            } else {
                // In order within a path, as a network does.
                let last = self.last_arrival.entry((from, to, burst.plane, burst.entropy)).or_insert(0);
                at = at.max(*last);
                *last = at;
            }
            self.serial += 1;
            self.queue.insert((at, self.serial), (to, meta, bytes.clone()));
        }
    }

    /// One event: the next arrival or deadline, up to `until`. False when nothing is left before it.
    pub fn step(&mut self, until: Nanos) -> bool {
        self.flush();
        let arrival = self.queue.keys().next().map(|k| k.0);
        let deadline = self.hosts.iter_mut().filter(|h| h.alive).filter_map(|h| h.ep.next_timeout()).min();
        let Some(at) = [arrival, deadline].into_iter().flatten().min().filter(|at| *at <= until) else {
            self.now = self.now.max(until);
            return false;
        };
        self.now = self.now.max(at);
        while let Some(entry) = self.queue.first_entry().filter(|e| e.key().0 <= self.now) {
            let (to, meta, bytes) = entry.remove();
            let host = &mut self.hosts[to];
            if host.alive {
                host.ep.on_datagram(self.now, &meta, &bytes, &mut host.mem, &mut host.log);
            }
        }
        for host in self.hosts.iter_mut().filter(|h| h.alive) {
            if host.ep.next_timeout().is_some_and(|t| t <= self.now) {
                host.ep.on_timeout(self.now, &mut host.mem, &mut host.log);
            }
        }
        true
    }
    /// Runs for a span of virtual time.
    pub fn run(&mut self, span: Nanos) {
        let until = self.now + span;
        while self.step(until) {}
        self.flush();
    }
    /// Runs until `done` says so; panics after `span`.
    pub fn run_until(&mut self, span: Nanos, what: &str, mut done: impl FnMut(&mut Net) -> bool) {
        let until = self.now + span;
        loop {
            if done(self) {
                return;
            }
            if !self.step(until) && self.now >= until {
                assert!(done(self), "{what}: not done after {span} ns");
                return;
            }
        }
    }

    pub fn qp(&mut self, host: usize, srq: Option<SrqId>) -> Qpn {
        self.qp_of(host, QpType::Rc, srq)
    }
    pub fn qp_of(&mut self, host: usize, qp_type: QpType, srq: Option<SrqId>) -> Qpn {
        let init = QpInit {
            qp_type,
            pd: 1,
            send_cq: 1,
            recv_cq: 2,
            srq,
            xrcd: (qp_type == QpType::XrcRecv).then_some(5),
            max_send_wr: 128,
            max_recv_wr: 128,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline: 256,
        };
        self.hosts[host].ep.create_qp(&init).unwrap()
    }
    pub fn modify(&mut self, host: usize, qpn: Qpn, change: QpModify) {
        let h = &mut self.hosts[host];
        h.ep.modify_qp(self.now, qpn, &change, &mut h.log).unwrap();
    }
    pub fn make_rtr(&mut self, host: usize, qpn: Qpn, peer_host: usize, peer: Qpn) {
        self.modify(
            host,
            qpn,
            QpModify { state: Some(QpState::Init), access: Some(0xf), ..Default::default() },
        );
        let remote = self.hosts[peer_host].ip;
        self.modify(
            host,
            qpn,
            QpModify {
                state: Some(QpState::Rtr),
                dest_qpn: Some(peer),
                remote: Some(remote),
                max_dest_rd_atomic: Some(4),
                min_rnr_timer: Some(1),
                ..Default::default()
            },
        );
    }
    pub fn make_rts(&mut self, host: usize, qpn: Qpn, timeout: u8, retry_cnt: u8, rnr_retry: u8) {
        self.modify(
            host,
            qpn,
            QpModify {
                state: Some(QpState::Rts),
                timeout: Some(timeout),
                retry_cnt: Some(retry_cnt),
                rnr_retry: Some(rnr_retry),
                max_rd_atomic: Some(4),
                ..Default::default()
            },
        );
    }
    /// A connected pair of QPs, both in RTS.
    pub fn pair(&mut self, a: usize, b: usize) -> (Qpn, Qpn) {
        let (qa, qb) = (self.qp(a, None), self.qp(b, None));
        self.make_rtr(a, qa, b, qb);
        self.make_rtr(b, qb, a, qa);
        self.make_rts(a, qa, 14, 7, 7);
        self.make_rts(b, qb, 14, 7, 7);
        (qa, qb)
    }
    pub fn mr(&mut self, host: usize, offset: u64, len: u64) -> u32 {
        self.hosts[host].ep.register_mr(1, MEM_BASE + offset, MEM_BASE + offset, len, 0xf).unwrap()
    }
    pub fn send(&mut self, host: usize, qpn: Qpn, wr: SendWqe, sges: &[Sge]) {
        let mut batch = SendBatch { wqes: vec![wr], sges: sges.to_vec(), inline: Vec::new() };
        let h = &mut self.hosts[host];
        h.ep.post_sends(self.now, qpn, &mut batch, &mut h.log);
    }
    pub fn recv(&mut self, host: usize, qpn: Qpn, wr_id: u64, sge: Sge) {
        let mut batch = RecvBatch { wqes: vec![RecvWqe { wr_id, num_sge: 1 }], sges: vec![sge] };
        let h = &mut self.hosts[host];
        h.ep.post_recvs(self.now, qpn, &mut batch, &mut h.log);
    }
}

/// A work request with the fields that matter.
pub fn wr(wr_id: u64, opcode: Opcode, length: u32, num_sge: u8) -> SendWqe {
    SendWqe { length, num_sge, ..SendWqe::new(wr_id, opcode, send_flags::SIGNALED) }
}

/// A HELLO of somebody nobody knows.
pub fn stranger() -> wire::Hello {
    wire::Hello {
        wants_answer: true,
        incarnation: 77,
        scid: 99 << 24,
        ordinal: 1,
        segment: 512,
        unit: 64,
        budget: 1 << 20,
        message_window: 256,
        paths: 4,
        first_cpn: [0; 2],
        features: 0,
        bound: 0,
        planes: vec![],
    }
}

/// A piece of a host's memory.
pub fn sge(offset: u64, len: u32, lkey: u32) -> Sge {
    Sge { addr: MEM_BASE + offset, len, lkey }
}

/// What completed on a host's queue, in order.
pub fn statuses(net: &Net, host: usize, cq: CqId) -> Vec<(u64, WcStatus)> {
    net.hosts[host].log.completions.iter().filter(|c| c.0 == cq).map(|c| (c.1.wr_id, c.1.status)).collect()
}
