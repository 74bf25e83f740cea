//! The blast: a sender keeps a window of GSO bursts in flight, the receiver copies each payload once to where
//! its header says and returns credit. Nothing is repaired; loss is counted. What a reliable transport cannot
//! pass.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::pair::{Ends, Peer, READY};
use crate::socket::{self, GSO_BYTES_MAX};

/// Bytes of header in front of each payload: as much as a transport's.
const HEADER_BYTES: usize = 64;
/// No credit for this long: what is in flight is lost, send on.
const STALL: Duration = Duration::from_millis(20);
/// The receiver gives credit after this many packets, and whenever it has nothing left to read.
const CREDIT_EVERY: u64 = 15;
/// The receiver gives up when nothing came for this long.
const SILENCE: Duration = Duration::from_secs(10);
/// First header byte of each kind of datagram.
const DATA: u8 = 1;
const CREDIT: u8 = 2;
const FINISH: u8 = 3;

/// Options of the blast.
#[derive(clap::Args, Clone)]
pub struct Args {
    #[command(flatten)]
    ends: Ends,
    /// Payload bytes per packet; 64 header bytes (and IP, UDP) come on top.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u16).range(64..=9000))]
    mtu: u16,
    /// Packets per GSO burst (as many as fit in 65,000 bytes at most).
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u16).range(1..=30))]
    burst: u16,
    /// Bytes of payload in flight at most.
    #[arg(long, default_value_t = 1 << 20)]
    window: usize,
    /// Bytes of the source and of the destination buffer; 1 MiB stays in the cache, 256 MiB does not.
    #[arg(long, default_value_t = 1 << 20)]
    buffer: usize,
    /// How long to send.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// One JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// Runs one end, or both.
pub fn run(args: &Args) -> io::Result<()> {
    if args.buffer < GSO_BYTES_MAX || args.window < usize::from(args.mtu) {
        return Err(io::Error::other("--buffer must be at least 65000 and --window at least --mtu"));
    }
    if let Some(address) = args.ends.listen {
        return receiver(address, args.buffer);
    }
    let peer = Peer::start(&args.ends, "blast", &["--buffer".into(), args.buffer.to_string()])?;
    let report = sender(args, peer.address)?;
    let gbps = report.received_bytes as f64 * 8.0 / report.elapsed.as_secs_f64() / 1e9;
    let lost = report.sent_packets.saturating_sub(report.received_packets);
    if args.json {
        let out = json!({"bench": "blast", "gbps": gbps, "packets": report.sent_packets, "lost": lost,
            "seconds": report.elapsed.as_secs_f64(), "mtu": args.mtu, "burst": report.burst, "window": args.window,
            "buffer": args.buffer, "address": peer.address.ip().to_string()});
        println!("{out}");
    } else {
        println!(
            "blast {}: {gbps:.2} Gb/s payload ({} packets of {} + {HEADER_BYTES} B, burst {}, lost {lost}, {:.2} s)",
            peer.address.ip(),
            report.sent_packets,
            args.mtu,
            report.burst,
            report.elapsed.as_secs_f64(),
        );
    }
    Ok(())
}

struct Report {
    sent_packets: u64,
    received_packets: u64,
    received_bytes: u64,
    elapsed: Duration,
    burst: usize,
}

/// What a datagram's header says. Data: `number` is the packet's, `value` its offset in the destination.
/// Credit and finish: `number` is the first packet not yet seen, `value` the packets and `bytes` the payload
/// received.
struct Header {
    kind: u8,
    number: u64,
    value: u64,
    bytes: u64,
}

impl Header {
    fn put(&self, to: &mut [u8]) {
        to[0] = self.kind;
        to[8..16].copy_from_slice(&self.number.to_le_bytes());
        to[16..24].copy_from_slice(&self.value.to_le_bytes());
        to[24..32].copy_from_slice(&self.bytes.to_le_bytes());
    }

    fn get(from: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_le_bytes(from.get(at..at + 8)?.try_into().ok()?));
        (from.len() >= HEADER_BYTES)
            .then(|| Some(Self { kind: from[0], number: word(8)?, value: word(16)?, bytes: word(24)? }))?
    }
}

/// Credit as the sender knows it: nothing below `next` is in flight any more.
#[derive(Default)]
struct Credit {
    next: u64,
    packets: u64,
    bytes: u64,
    finished: bool,
}

impl Credit {
    /// Takes in every credit that has arrived; true when there was one.
    fn drain(&mut self, socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<bool> {
        let mut any = false;
        while let Some(got) = socket::receive(socket, buffer)? {
            for datagram in buffer[..got.bytes].chunks(got.segment) {
                let Some(header) = Header::get(datagram) else { continue };
                any = true;
                self.next = self.next.max(header.number);
                self.packets = self.packets.max(header.value);
                self.bytes = self.bytes.max(header.bytes);
                self.finished |= header.kind == FINISH;
            }
        }
        Ok(any)
    }
}

fn sender(args: &Args, peer: SocketAddr) -> io::Result<Report> {
    let any: IpAddr = if peer.is_ipv4() { [0, 0, 0, 0].into() } else { [0u16; 8].into() };
    let socket = socket::open(SocketAddr::new(any, 0))?;
    socket.connect(peer)?;
    let mtu = usize::from(args.mtu);
    let packet = HEADER_BYTES + mtu;
    let burst = usize::from(args.burst).min(GSO_BYTES_MAX / packet).max(1);
    let window = (args.window / mtu).max(1) as u64;
    let source: Vec<u8> = (0..args.buffer).map(|i| i as u8).collect();
    let mut headers = vec![0u8; burst * HEADER_BYTES];
    let mut inbox = vec![0u8; 1 << 16];
    let mut credit = Credit::default();
    let (mut next, mut lost_below) = (0u64, 0u64);
    let (begin, mut heard) = (Instant::now(), Instant::now());
    let mut now = begin;
    let mut offset = 0;
    while now.duration_since(begin).as_secs_f64() < args.seconds {
        if credit.drain(&socket, &mut inbox)? {
            heard = now;
        }
        let in_flight = next - credit.next.max(lost_below);
        if in_flight + burst as u64 > window.max(burst as u64) {
            if now.duration_since(heard) > STALL {
                (lost_below, heard) = (next, now);
            }
            socket::yield_now();
        } else {
            if offset + burst * mtu > source.len() {
                offset = 0;
            }
            for (i, header) in headers.chunks_mut(HEADER_BYTES).enumerate() {
                let value = (offset + i * mtu) as u64;
                Header { kind: DATA, number: next + i as u64, value, bytes: 0 }.put(header);
            }
            send_burst(&socket, &headers, &source[offset..offset + burst * mtu], mtu)?;
            next += burst as u64;
            offset += burst * mtu;
        }
        now = Instant::now();
    }
    finish(&socket, &mut credit, &mut inbox)?;
    Ok(Report {
        sent_packets: next,
        received_packets: credit.packets,
        received_bytes: credit.bytes,
        elapsed: now.duration_since(begin),
        burst,
    })
}

/// One GSO burst: headers from the slab, payload straight from the source.
fn send_burst(socket: &UdpSocket, headers: &[u8], payload: &[u8], mtu: usize) -> io::Result<()> {
    let mut parts: [&[u8]; 64] = [&[]; 64];
    let mut count = 0;
    for (header, chunk) in headers.chunks(HEADER_BYTES).zip(payload.chunks(mtu)) {
        parts[count] = header;
        parts[count + 1] = chunk;
        count += 2;
    }
    match socket::send_segments(socket, &parts[..count], (HEADER_BYTES + mtu) as u16) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => Err(io::Error::other(
            "packets of this --mtu do not fit the interface (IP 20/40, UDP 8, header 64 on top)",
        )),
        other => other.map(|_| ()),
    }
}

/// Tells the receiver that it is over and waits for its totals.
fn finish(socket: &UdpSocket, credit: &mut Credit, inbox: &mut [u8]) -> io::Result<()> {
    let mut header = [0u8; HEADER_BYTES];
    Header { kind: FINISH, number: 0, value: 0, bytes: 0 }.put(&mut header);
    for _ in 0..50 {
        socket.send(&header)?;
        if socket::wait_readable(socket, Duration::from_millis(20))? {
            credit.drain(socket, inbox)?;
        }
        if credit.finished {
            return Ok(());
        }
    }
    Err(io::Error::other("the receiver does not answer"))
}

fn receiver(address: IpAddr, buffer: usize) -> io::Result<()> {
    let socket = socket::open(SocketAddr::new(address, 0))?;
    println!("{READY}{}", socket.local_addr()?);
    let mut destination = vec![0u8; buffer];
    let mut inbox = vec![0u8; 1 << 16];
    let mut total = Header { kind: CREDIT, number: 0, value: 0, bytes: 0 };
    let mut reply = [0u8; HEADER_BYTES];
    let mut credited = 0;
    let mut connected = false;
    let mut heard = Instant::now();
    loop {
        if !connected {
            if !socket::wait_readable(&socket, SILENCE)? {
                return Err(io::Error::other("no sender came"));
            }
            let (_, sender) = socket.peek_from(&mut inbox)?;
            socket.connect(sender)?;
            connected = true;
        }
        let Some(got) = socket::receive(&socket, &mut inbox)? else {
            if total.value > credited {
                give(&socket, &total, &mut reply, &mut credited);
                continue;
            }
            if heard.elapsed() > SILENCE {
                return Err(io::Error::other("the sender went silent"));
            }
            socket::yield_now();
            continue;
        };
        heard = Instant::now();
        for datagram in inbox[..got.bytes].chunks(got.segment) {
            let Some(header) = Header::get(datagram) else { continue };
            if header.kind == FINISH {
                total.kind = FINISH;
                continue;
            }
            let (payload, at) = (&datagram[HEADER_BYTES..], header.value as usize);
            let Some(to) = at.checked_add(payload.len()).and_then(|end| destination.get_mut(at..end)) else {
                continue;
            };
            to.copy_from_slice(payload);
            total.number = total.number.max(header.number + 1);
            total.value += 1;
            total.bytes += payload.len() as u64;
        }
        if total.kind == FINISH || total.value >= credited + CREDIT_EVERY {
            give(&socket, &total, &mut reply, &mut credited);
        }
        if total.kind == FINISH {
            std::hint::black_box(&destination);
            return Ok(());
        }
    }
}

/// Tells the sender what has arrived.
fn give(socket: &UdpSocket, total: &Header, reply: &mut [u8], credited: &mut u64) {
    total.put(reply);
    *credited = total.value;
    // A credit that does not fit the peer's buffer is made up for by the next one.
    let _ = socket.send(reply);
}
