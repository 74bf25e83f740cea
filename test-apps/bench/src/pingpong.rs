//! UDP ping-pong: what one small datagram costs from process to process, spinning (with or without giving the
//! processor away between looks) or blocking in the kernel.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::pair::{Ends, Peer, READY};
use crate::socket;

/// A datagram that has not come back after this long is lost: send again.
const LOST: Duration = Duration::from_millis(200);
/// The echo side exits when nothing came for this long.
const SILENCE: Duration = Duration::from_secs(5);
/// Rounds before the clock starts.
const WARM_UP: usize = 200;

/// Options of the ping-pong.
#[derive(clap::Args, Clone)]
pub struct Args {
    #[command(flatten)]
    ends: Ends,
    /// Bytes per datagram.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(8..=1400))]
    size: u16,
    /// Rounds to measure.
    #[arg(long, default_value_t = 100_000)]
    rounds: usize,
    /// Block in the kernel instead of spinning.
    #[arg(long = "block", conflicts_with = "yield_between")]
    block: bool,
    /// Spin, but sched_yield between two empty looks.
    #[arg(long = "yield")]
    yield_between: bool,
    /// One JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// Runs one end, or both.
pub fn run(args: &Args) -> io::Result<()> {
    let wait = match (args.block, args.yield_between) {
        (true, _) => Wait::Block,
        (_, true) => Wait::Yield,
        _ => Wait::Spin,
    };
    if let Some(address) = args.ends.listen {
        return echo(address, wait);
    }
    let mut far = Vec::new();
    far.extend(args.block.then(|| "--block".to_owned()));
    far.extend(args.yield_between.then(|| "--yield".to_owned()));
    let peer = Peer::start(&args.ends, "udp-pingpong", &far)?;
    let mut one_way = ping(args, peer.address, wait)?;
    one_way.sort_unstable();
    let at = |part: f64| one_way[((one_way.len() - 1) as f64 * part) as usize] as f64 / 1e3;
    let (median, p99, best) = (at(0.5), at(0.99), at(0.0));
    if args.json {
        let out = json!({"bench": "udp-pingpong", "one_way_us": median, "p99_us": p99, "min_us": best,
            "size": args.size, "rounds": one_way.len(), "mode": wait.name(), "address": peer.address.ip().to_string()});
        println!("{out}");
    } else {
        println!(
            "udp-pingpong {} ({}): one way {median:.2} us median, {best:.2} min, {p99:.2} p99 ({} B, {} rounds)",
            peer.address.ip(),
            wait.name(),
            args.size,
            one_way.len(),
        );
    }
    Ok(())
}

/// How an end waits for the next datagram.
#[derive(Clone, Copy)]
enum Wait {
    Spin,
    Yield,
    Block,
}

impl Wait {
    fn name(self) -> &'static str {
        match self {
            Wait::Spin => "spinning",
            Wait::Yield => "yielding",
            Wait::Block => "blocking",
        }
    }

    /// Waits for one datagram; its length, or None when `limit` passed.
    fn receive(self, socket: &UdpSocket, buffer: &mut [u8], limit: Duration) -> io::Result<Option<usize>> {
        let begin = Instant::now();
        // The clock costs a tenth of a round trip: look at it rarely.
        for turn in 1u32.. {
            match self {
                Wait::Block if !socket::wait_readable(socket, limit)? => return Ok(None),
                Wait::Yield if turn > 1 => socket::yield_now(),
                _ => {}
            }
            if let Some(got) = socket::receive(socket, buffer)? {
                return Ok(Some(got.bytes));
            }
            if turn % 1024 == 0 && begin.elapsed() > limit {
                break;
            }
        }
        Ok(None)
    }
}

/// Half of each round trip, in nanoseconds.
fn ping(args: &Args, peer: SocketAddr, wait: Wait) -> io::Result<Vec<u64>> {
    let any: IpAddr = if peer.is_ipv4() { [0, 0, 0, 0].into() } else { [0u16; 8].into() };
    let socket = socket::open(SocketAddr::new(any, 0))?;
    socket.connect(peer)?;
    let mut out = vec![0u8; usize::from(args.size)];
    let mut inbox = vec![0u8; 2048];
    let mut halves = Vec::with_capacity(args.rounds.max(1));
    let mut lost = 0;
    let mut number = 0u64;
    while halves.len() < args.rounds.max(1) {
        number += 1;
        out[..8].copy_from_slice(&number.to_le_bytes());
        let begin = Instant::now();
        socket.send(&out)?;
        loop {
            match wait.receive(&socket, &mut inbox, LOST)? {
                Some(bytes) if bytes >= 8 && inbox[..8] == out[..8] => break,
                Some(_) => {}
                None if lost < 20 => {
                    lost += 1;
                    socket.send(&out)?;
                }
                None => return Err(io::Error::other("the peer does not answer")),
            }
        }
        if number as usize > WARM_UP {
            halves.push(begin.elapsed().as_nanos() as u64 / 2);
        }
    }
    Ok(halves)
}

fn echo(address: IpAddr, wait: Wait) -> io::Result<()> {
    let socket = socket::open(SocketAddr::new(address, 0))?;
    println!("{READY}{}", socket.local_addr()?);
    let mut buffer = vec![0u8; 2048];
    if !socket::wait_readable(&socket, SILENCE)? {
        return Err(io::Error::other("no peer came"));
    }
    let (_, peer) = socket.peek_from(&mut buffer)?;
    socket.connect(peer)?;
    while let Some(bytes) = wait.receive(&socket, &mut buffer, SILENCE)? {
        // A reply that cannot be sent is a lost datagram: the peer sends again.
        let _ = socket.send(&buffer[..bytes]);
    }
    Ok(())
}
