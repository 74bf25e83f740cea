//! The protocol core alone, without sockets, clock and copies: nanoseconds and allocations per packet on either side,
//! bytes per connection, at several numbers of connections.

use std::alloc::{GlobalAlloc, Layout, System};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use metaroce_proto::config::{Config, PlaneConfig, Tuning};
use metaroce_proto::*;
use serde_json::json;

/// Counts allocations; otherwise the system's allocator.
pub struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator, which upholds the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(memory, layout, bytes) }
    }
}

/// Options of `core`.
#[derive(ClapArgs)]
pub struct Args {
    /// Numbers of connections, one after the other.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 100, 4000])]
    connections: Vec<usize>,
    /// Packets per measurement.
    #[arg(long, default_value_t = 400_000)]
    packets: u64,
    /// Bytes per Write.
    #[arg(long, default_value_t = 65_536)]
    size: u32,
    /// Writes posted at a time on each connection: 4 of 64 KiB are the packets of one step of the engine.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=16))]
    depth: u8,
    /// One JSON object per line.
    #[arg(long)]
    json: bool,
}

const BASE_PORT: u16 = 24_576;
const BASE: u64 = 1 << 20;
const PORT_OF_ENTROPY_0: u16 = 49_152;
/// Slots per address; further peers have further addresses.
const SLOTS: usize = 1024;
/// A measurement is the median of so many parts: what interrupts some of them does not count.
const CHUNKS: u64 = 20;
/// A turn of the virtual clock: both ends have done what they could.
const TURN_NS: u64 = 1_000;

/// Memory that takes everything and keeps nothing: its cost is not the core's.
struct Nowhere;

impl Memory for Nowhere {
    fn place(&mut self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Ok(())
    }
    fn place_last(&mut self, _: u64, _: &[u8]) -> Result<(), Fault> {
        Ok(())
    }
    fn gather(&mut self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
        Ok(())
    }
    fn compare_swap(&mut self, _: u64, _: u64, _: u64) -> Result<u64, Fault> {
        Ok(0)
    }
    fn fetch_add(&mut self, _: u64, _: u64) -> Result<u64, Fault> {
        Ok(0)
    }
}

/// Completions to answer with the next Write.
#[derive(Default)]
struct Done(Vec<Qpn>);

impl Sink for Done {
    fn complete(&mut self, _: CqId, completion: &Completion) {
        assert_eq!(completion.status, WcStatus::Success, "a Write of the bench failed");
        self.0.push(completion.qpn);
    }
    fn event(&mut self, _: Event) {}
}

/// What one side has spent.
#[derive(Default, Clone, Copy)]
struct Spent {
    time: Duration,
    allocations: u64,
}

impl Spent {
    fn measure<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let (before, begun) = (ALLOCATIONS.load(Ordering::Relaxed), Instant::now());
        let result = work();
        self.time += begun.elapsed();
        self.allocations += ALLOCATIONS.load(Ordering::Relaxed) - before;
        result
    }
}

/// Packets on their way: where to, where from, and their place in one long buffer. Headers are copied there; where payload
/// would be, whatever was there before stands, since filling it would push out of the cache what the core needs.
#[derive(Default)]
struct Wire {
    bytes: Vec<u8>,
    used: usize,
    packets: Vec<(SocketAddr, RxMeta, std::ops::Range<usize>)>,
}

impl Wire {
    fn clear(&mut self) {
        self.used = 0;
        self.packets.clear();
    }

    fn take(&mut self, from: IpAddr, burst: &TxBurst) {
        let meta = RxMeta {
            src: SocketAddr::new(from, PORT_OF_ENTROPY_0 + u16::from(burst.entropy)),
            dst_ip: burst.dst.ip(),
            ecn: 2,
        };
        let mut piece = 0;
        for (end, _) in &burst.packets {
            let start = self.used;
            for part in &burst.pieces[piece..*end as usize] {
                let (from, len) = match part {
                    burst::Piece::Bytes { start, len } => (Some(*start as usize), *len as usize),
                    burst::Piece::Memory { len, .. } | burst::Piece::Zeros { len } => (None, *len as usize),
                };
                if self.bytes.len() < self.used + len {
                    self.bytes.resize(self.used + len, 0);
                }
                if let Some(from) = from {
                    self.bytes[self.used..self.used + len].copy_from_slice(&burst.bytes[from..from + len]);
                }
                self.used += len;
            }
            piece = *end as usize;
            self.packets.push((burst.dst, meta, start..self.used));
        }
    }
}

/// One sender and its peers, one connection each.
struct Bench {
    now: u64,
    sender: Endpoint,
    peers: Vec<Endpoint>,
    key: u32,
    keys: Vec<u32>,
    /// Index of the first connection's QP; the others follow it.
    first: usize,
    done: Done,
    spare: Vec<Qpn>,
    burst: TxBurst,
    out: Wire,
    back: Wire,
    sending: Spent,
    receiving: Spent,
    data_packets: u64,
    ack_packets: u64,
}

fn address(index: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, (index / SLOTS) as u8, 1).into()
}

fn endpoint(index: usize, peers: usize) -> Endpoint {
    Endpoint::new(Config {
        slot: (index % SLOTS) as u16,
        base_port: BASE_PORT,
        incarnation: index as u64 + 1,
        seed: index as u64 + 1,
        planes: vec![PlaneConfig {
            label: "p0".into(),
            addrs: vec![address(index)],
            mtu: 65_536,
            rate_bps: 0,
        }],
        paths_per_plane: 4,
        entropies_per_plane: 8,
        segment_bytes_max: 4224,
        burst_packets_max: 15,
        first_psn: 0,
        first_cpn: 0,
        datagram_bytes_max: 4096,
        receive_budget_bytes: (1 << 20) * peers.max(1) as u32,
        tuning: Tuning::default(),
    })
}

/// Brings a QP up to RTS.
fn connect(
    endpoint: &mut Endpoint,
    qpn: Qpn,
    peer: IpAddr,
    dest: Qpn,
    sink: &mut Done,
) -> Result<(), String> {
    let changes = [
        QpModify { state: Some(QpState::Init), access: Some(0xf), ..Default::default() },
        QpModify {
            state: Some(QpState::Rtr),
            dest_qpn: Some(dest),
            remote: Some(peer),
            min_rnr_timer: Some(1),
            ..Default::default()
        },
        QpModify {
            state: Some(QpState::Rts),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            ..Default::default()
        },
    ];
    for change in &changes {
        endpoint.modify_qp(0, qpn, change, sink).map_err(|error| format!("modify_qp: {error:?}"))?;
    }
    Ok(())
}

impl Bench {
    fn new(connections: usize, size: u32, depth: u8) -> Result<Bench, String> {
        let refused = |error| format!("the core refuses: {error:?}");
        let mut bench = Bench {
            now: 1_000_000,
            sender: endpoint(0, 1),
            peers: (1..=connections).map(|index| endpoint(index, 1)).collect(),
            key: 0,
            keys: Vec::new(),
            first: 0,
            done: Done::default(),
            spare: Vec::new(),
            burst: TxBurst::new(),
            out: Wire::default(),
            back: Wire::default(),
            sending: Spent::default(),
            receiving: Spent::default(),
            data_packets: 0,
            ack_packets: 0,
        };
        let init = QpInit {
            qp_type: QpType::Rc,
            pd: 1,
            send_cq: 1,
            recv_cq: 2,
            srq: None,
            xrcd: None,
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
        };
        let all = u64::from(size);
        bench.key = bench.sender.register_mr(1, BASE, BASE, all, 0xf).map_err(refused)?;
        for index in 1..=connections {
            let peer = &mut bench.peers[index - 1];
            bench.keys.push(peer.register_mr(1, BASE, BASE, all, 0xf).map_err(refused)?);
            let here = bench.sender.create_qp(&init).map_err(refused)?;
            if index == 1 {
                bench.first = here.index();
            }
            let there = peer.create_qp(&init).map_err(refused)?;
            connect(&mut bench.sender, here, address(index), there, &mut bench.done)?;
            connect(peer, there, address(0), here, &mut Done::default())?;
            bench.done.0.extend(std::iter::repeat_n(here, depth.into()));
        }
        Ok(bench)
    }

    /// Posts a Write on every stream that has finished one.
    fn post(&mut self, size: u32) {
        let mut batch = SendBatch { wqes: Vec::new(), sges: Vec::new(), inline: Vec::new() };
        // Two vectors take turns, so that neither is allocated anew within a measurement.
        let mut ready = std::mem::replace(&mut self.done.0, std::mem::take(&mut self.spare));
        for qpn in ready.drain(..) {
            batch.wqes.push(SendWqe {
                remote_addr: BASE,
                rkey: self.keys[qpn.index() - self.first],
                ..write(size)
            });
            batch.sges.push(Sge { addr: BASE, len: size, lkey: self.key });
            let (now, sender, done) = (self.now, &mut self.sender, &mut self.done);
            self.sending.measure(|| sender.post_sends(now, qpn, &mut batch, done));
            batch.wqes.clear();
            batch.sges.clear();
        }
        self.spare = ready;
    }

    /// One turn: everything that can leave the sender arrives at the peers, and their answers at the sender.
    fn turn(&mut self) {
        let (now, burst, done) = (self.now, &mut self.burst, &mut self.done);
        self.out.clear();
        self.back.clear();
        let sender = &mut self.sender;
        while self.sending.measure(|| sender.poll_burst(now, burst, done)) {
            self.out.take(address(0), burst);
        }
        let mut nobody = Done::default();
        let mut touched: Vec<usize> = Vec::new();
        // The clock is read once per run of packets to one peer, as it costs as much as a fifth of a packet.
        for run in self.out.packets.chunk_by(|a, b| a.0 == b.0) {
            let IpAddr::V4(ip) = run[0].0.ip() else { continue };
            let index = usize::from(ip.octets()[2]) * SLOTS + usize::from(run[0].0.port() - BASE_PORT) - 1;
            let (peer, bytes) = (&mut self.peers[index], &self.out.bytes);
            let data = run.iter().filter(|(_, _, range)| wire::is_data(&bytes[range.clone()])).count();
            self.data_packets += data as u64;
            self.receiving.measure(|| {
                for (_, meta, range) in run {
                    peer.on_datagram(now, meta, &bytes[range.clone()], &mut Nowhere, &mut nobody);
                }
            });
            if touched.last() != Some(&index) {
                touched.push(index);
            }
        }
        for index in touched {
            let peer = &mut self.peers[index];
            peer.flush_acks();
            while self.receiving.measure(|| peer.poll_burst(now, burst, &mut nobody)) {
                self.back.take(address(index + 1), burst);
            }
        }
        self.ack_packets += self.back.packets.len() as u64;
        let (sender, back, done) = (&mut self.sender, &self.back, &mut self.done);
        self.sending.measure(|| {
            for (_, meta, range) in &back.packets {
                sender.on_datagram(now, meta, &back.bytes[range.clone()], &mut Nowhere, done);
            }
        });
        self.now += TURN_NS;
        if self.sender.next_timeout().is_some_and(|at| at <= self.now) {
            self.sender.on_timeout(self.now, &mut Nowhere, &mut self.done);
        }
        // Peers that heard nothing have nothing to time out but their own handshake.
        if self.out.packets.is_empty() {
            for peer in self.peers.iter_mut().filter(|p| p.stats().connections > 0) {
                peer.on_timeout(self.now, &mut Nowhere, &mut nobody);
            }
        }
    }

    fn run(&mut self, packets: u64, size: u32) -> Result<(), String> {
        let until = self.data_packets + packets;
        let mut quiet = 0;
        while self.data_packets < until {
            let before = self.data_packets;
            self.post(size);
            self.turn();
            quiet = if self.data_packets == before { quiet + 1 } else { 0 };
            if quiet > 1_000_000 {
                return Err("the connections stand still".into());
            }
        }
        Ok(())
    }
}

fn write(size: u32) -> SendWqe {
    SendWqe {
        wr_id: 0,
        opcode: Opcode::Write,
        flags: send_flags::SIGNALED,
        num_sge: 1,
        inline_len: 0,
        length: size,
        imm: 0,
        remote_addr: 0,
        rkey: 0,
        compare_add: 0,
        swap: 0,
        remote_srq: 0,
        dest: None,
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs the measurements one after the other.
///
/// # Errors
/// When the core refuses the set-up or stands still.
pub fn run(args: &Args) -> Result<(), String> {
    if !args.json {
        println!(
            "{:>11} {:>10} {:>12} {:>14} {:>11} {:>14} {:>13}",
            "connections", "ns/packet", "ns/packet", "allocations", "bytes per", "bytes per", "data packets"
        );
        println!(
            "{:>11} {:>10} {:>12} {:>14} {:>11} {:>14} {:>13}",
            "", "sender", "receiver", "per 1000", "connection", "peer", "per answer"
        );
    }
    for &connections in &args.connections {
        if connections == 0 || connections > 60_000 {
            return Err(format!("--connections is 1 to 60000, not {connections}"));
        }
        let mut bench = Bench::new(connections, args.size, args.depth)?;
        // Handshakes, and queues that grow to the depth in use.
        bench.run(args.packets / 4 + 32 * connections as u64, args.size)?;
        let (data, answers) = (bench.data_packets, bench.ack_packets);
        let mut allocations = 0;
        let (mut sender, mut receiver) = (Vec::new(), Vec::new());
        for _ in 0..CHUNKS {
            (bench.sending, bench.receiving) = (Spent::default(), Spent::default());
            let before = bench.data_packets;
            bench.run(args.packets / CHUNKS, args.size)?;
            let per = |spent: Spent| spent.time.as_nanos() as f64 / (bench.data_packets - before) as f64;
            sender.push(per(bench.sending));
            receiver.push(per(bench.receiving));
            allocations += bench.sending.allocations + bench.receiving.allocations;
        }
        let (data, answers) = (bench.data_packets - data, bench.ack_packets - answers);
        let (sender, receiver) = (median(sender), median(receiver));
        let allocations = allocations as f64 * 1000.0 / data as f64;
        let bytes = bench.sender.stats().transport_bytes / connections as u64;
        let peer_bytes = bench.peers[0].stats().transport_bytes;
        let per_answer = data as f64 / answers.max(1) as f64;
        if args.json {
            let line = json!({
                "connections": connections,
                "sender_ns_per_packet": sender,
                "receiver_ns_per_packet": receiver,
                "allocations_per_1000_packets": allocations,
                "bytes_per_connection": bytes,
                "bytes_per_peer": peer_bytes,
                "data_packets_per_answer": per_answer,
            });
            println!("{line}");
        } else {
            println!(
                "{connections:>11} {sender:>10.0} {receiver:>12.0} {allocations:>14.1} {bytes:>11} {peer_bytes:>14} {per_answer:>13.1}"
            );
        }
    }
    Ok(())
}
