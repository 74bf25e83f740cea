//! What is measured in every round, in this order, and the goals: yardsticks stand beside what is judged by them.

use super::programs::*;
use super::{Bound, Goal, Measure, Sample};
use crate::report::Trouble;
use crate::workspace::Workspace;

const LO: Place = Place::Loopback;
const VETH_1500: Place = Place::Veth { planes: 1, mtu: 1500 };
const VETH_9000: Place = Place::Veth { planes: 1, mtu: 9000 };
const VETH_1500_4: Place = Place::Veth { planes: 4, mtu: 1500 };
const VETH_9000_4: Place = Place::Veth { planes: 4, mtu: 9000 };

const WRITE: Perftest = perftest("ib_write_bw -s 65536 -n 30000");
const WRITE_VETH: Perftest = perftest("ib_write_bw -s 65536 -n 15000");
/// A region that no cache holds.
const WRITE_COLD: Perftest = perftest("ib_write_bw -s 268435456 -n 8 -t 2");
const WRITE_4K: Perftest = perftest("ib_write_bw -s 4096 -n 100000");
const SEND_LAT: Perftest = perftest("ib_send_lat -s 2 -n 20000");
const WRITE_LAT: Perftest = perftest("ib_write_lat -s 2 -n 20000");
const EVENTS: Perftest = perftest("ib_send_lat -s 2 -n 4000 -e");

/// One path on one plane.
const ONE_PATH: &[&str] = &["METAROCE_PATHS=1"];
const LOSS: &[&str] = &["METAROCE_LOSS=0.01", "METAROCE_SEED=7"];

const fn measure(
    name: &'static str,
    unit: &'static str,
    run: fn(&Workspace) -> Result<Sample, Trouble>,
) -> Measure {
    Measure { name, unit, run }
}

pub const MEASURES: &[Measure] = &[
    // Bandwidth on loopback.
    measure("iperf3 TCP", "Gb/s", |w| iperf3(w, LO)),
    measure("UCX tcp put_bw 64 KiB", "Gb/s", |w| ucx_put_bw(w, LO)),
    measure("memory copy, 64 KiB", "Gb/s", copy),
    measure("UDP blast", "Gb/s", |w| blast(w, "--seconds 0.7", LO)),
    measure("ib_write_bw 64 KiB", "Gb/s", |w| bandwidth(w, WRITE)),
    measure("ib_write_bw 1 MiB", "Gb/s", |w| bandwidth(w, perftest("ib_write_bw -s 1048576 -n 2000"))),
    measure("ib_send_bw 64 KiB", "Gb/s", |w| bandwidth(w, perftest("ib_send_bw -s 65536 -n 30000"))),
    measure("ib_read_bw 64 KiB", "Gb/s", |w| bandwidth(w, perftest("ib_read_bw -s 65536 -n 30000"))),
    measure("ib_write_bw 64 KiB, both ways", "Gb/s", |w| {
        bandwidth(w, perftest("ib_write_bw -s 65536 -n 20000 -b"))
    }),
    measure("ib_write_bw 64 KiB, 1 % loss", "Gb/s", |w| bandwidth(w, WRITE.with(LOSS))),
    measure("UDP blast, cold", "Gb/s", |w| blast(w, "--seconds 1.2 --buffer 268435456", LO)),
    measure("ib_write_bw 256 MiB, cold", "Gb/s", |w| bandwidth(w, WRITE_COLD)),
    measure("ib_write_bw 256 MiB, one core", "Gb/s", |w| bandwidth(w, WRITE_COLD.pinned(0, 0))),
    measure("2 processes, long run", "Gb/s", |w| pairs_together(w, 1, "ib_write_bw -s 65536 -n 60000")),
    measure("4 processes, long run", "Gb/s", |w| pairs_together(w, 2, "ib_write_bw -s 65536 -n 60000")),
    // Small messages and many QPs.
    measure("UDP, a datagram per message", "M/s", datagrams),
    measure("8 B writes, 1 QP", "M/s", |w| rate(w, perftest("ib_write_bw -s 8 -n 400000 -l 16"))),
    measure("8 B writes, 16 QPs", "M/s", |w| rate(w, perftest("ib_write_bw -s 8 -n 32000 -l 16 -q 16"))),
    measure("ib_write_bw 4 KiB, 1 QP", "Gb/s", |w| bandwidth(w, WRITE_4K)),
    measure("ib_write_bw 4 KiB, 1,000 QPs", "Gb/s", |w| {
        bandwidth(w, perftest("ib_write_bw -s 4096 -n 200 -q 1000"))
    }),
    // Latency on loopback.
    measure("UCX tcp put_lat", "us", |w| {
        Ok(Sample::of(ucx_tcp(w, "-t ucp_put_lat -s 8 -n 5000 -w 200", LO)?[1]))
    }),
    measure("libfabric tcp fi_pingpong", "us", |_| libfabric_tcp()),
    measure("UDP ping-pong, one way", "us", |w| pingpong(w, "", None)),
    measure("ib_send_lat 2 B", "us", |w| latency(w, SEND_LAT)),
    measure("ib_write_lat 2 B", "us", |w| latency(w, WRITE_LAT)),
    measure("ib_write_lat 2 B, pinned", "us", |w| latency(w, WRITE_LAT.pinned(0, 1))),
    measure("UDP ping-pong, round trip", "us", |w| Ok(pingpong(w, "", None)?.times(2.0))),
    measure("ib_read_lat 2 B", "us", |w| latency(w, perftest("ib_read_lat -s 2 -n 20000"))),
    measure("ib_atomic_lat", "us", |w| latency(w, perftest("ib_atomic_lat -n 20000"))),
    measure("UDP blocking, two cores", "us", |w| pingpong(w, "--block", Some([0, 1]))),
    measure("ib_send_lat -e, two cores", "us", |w| latency(w, EVENTS.pinned(0, 1))),
    measure("UDP blocking, one core", "us", |w| pingpong(w, "--block", Some([0, 0]))),
    measure("ib_send_lat -e, one core", "us", |w| latency(w, EVENTS.pinned(0, 0))),
    // Between two hosts.
    measure("veth 1500: iperf3 TCP", "Gb/s", |w| iperf3(w, VETH_1500)),
    measure("veth 1500: UDP blast", "Gb/s", |w| blast(w, "--seconds 0.7 --mtu 1408 --burst 30", VETH_1500)),
    measure("veth 1500: ib_write_bw, 1 plane", "Gb/s", |w| bandwidth(w, WRITE_VETH.on(VETH_1500))),
    measure("veth 1500: ib_write_bw, 4 planes", "Gb/s", |w| bandwidth(w, WRITE_VETH.on(VETH_1500_4))),
    measure("veth 9000: iperf3 TCP", "Gb/s", |w| iperf3(w, VETH_9000)),
    measure("veth 9000: UCX tcp put_bw", "Gb/s", |w| ucx_put_bw(w, VETH_9000)),
    measure("veth 9000: UDP blast", "Gb/s", |w| blast(w, "--seconds 0.7", VETH_9000)),
    measure("veth 9000: ib_write_bw, 1 path", "Gb/s", |w| {
        bandwidth(w, WRITE_VETH.on(VETH_9000).with(ONE_PATH))
    }),
    measure("veth 9000: ib_write_bw, 1 plane", "Gb/s", |w| bandwidth(w, WRITE_VETH.on(VETH_9000))),
    measure("veth 9000: ib_write_bw, 4 planes", "Gb/s", |w| bandwidth(w, WRITE_VETH.on(VETH_9000_4))),
    measure("veth 9000: UDP ping-pong, one way", "us", |w| pingpong_at(w, "", VETH_9000, None)),
    measure("veth 9000: ib_send_lat 2 B", "us", |w| latency(w, SEND_LAT.on(VETH_9000))),
    // The core alone.
    measure("core: sender", "ns/packet", |w| core(w, 1)),
    measure("core: sender, 100 connections", "ns/packet", |w| core(w, 100)),
    measure("core: sender, 4,000 connections", "ns/packet", |w| core(w, 4000)),
];

/// Rows of the issue that no measure of a round stands for, and why.
pub const LEFT_OUT: &[(&str, &str)] = &[
    (
        "4,000 connections from 8 processes",
        "a process has one connection to each other process, so 8 of them have 28; the core's rows at 4,000 stand for it",
    ),
    ("soft RoCE and siw", "they need the kernel modules rdma_rxe and siw: see packaging/soft-rdma.sh"),
];

const fn at_least(of: &'static str, to: &'static str, bound: f64) -> Goal {
    Goal { of, to: Some(to), bound: Bound::AtLeast(bound), or: None }
}

const fn at_most(of: &'static str, to: &'static str, bound: f64) -> Goal {
    Goal { of, to: Some(to), bound: Bound::AtMost(bound), or: None }
}

const fn no_more_than(of: &'static str, bound: f64) -> Goal {
    Goal { of, to: None, bound: Bound::AtMost(bound), or: None }
}

const fn shown(of: &'static str, to: &'static str) -> Goal {
    Goal { of, to: Some(to), bound: Bound::None, or: None }
}

pub const GOALS: &[Goal] = &[
    at_least("ib_write_bw 64 KiB", "UDP blast", 0.75),
    at_least("ib_write_bw 64 KiB", "iperf3 TCP", 1.2),
    at_least("ib_write_bw 64 KiB", "UCX tcp put_bw 64 KiB", 1.5),
    at_least("ib_write_bw 1 MiB", "UDP blast", 0.75),
    at_least("ib_write_bw 1 MiB", "iperf3 TCP", 1.2),
    at_least("ib_write_bw 256 MiB, cold", "UDP blast, cold", 0.8),
    shown("ib_write_bw 64 KiB", "memory copy, 64 KiB"),
    at_least("ib_send_bw 64 KiB", "ib_write_bw 64 KiB", 0.9),
    at_least("ib_read_bw 64 KiB", "ib_write_bw 64 KiB", 0.9),
    at_least("ib_write_bw 64 KiB, both ways", "ib_write_bw 64 KiB", 1.0),
    at_least("ib_write_bw 64 KiB, 1 % loss", "ib_write_bw 64 KiB", 0.9),
    at_least("ib_write_bw 256 MiB, one core", "ib_write_bw 256 MiB, cold", 0.8),
    // More processes than processors share them without getting into each other's way.
    at_least("4 processes, long run", "2 processes, long run", 0.7),
    Goal { or: Some(1.0), ..at_least("8 B writes, 1 QP", "UDP, a datagram per message", 1.5) },
    Goal { or: Some(1.0), ..at_least("8 B writes, 16 QPs", "UDP, a datagram per message", 1.5) },
    at_least("ib_write_bw 4 KiB, 1,000 QPs", "ib_write_bw 4 KiB, 1 QP", 0.85),
    at_most("ib_send_lat 2 B", "UDP ping-pong, one way", 1.5),
    at_most("ib_send_lat 2 B: p99", "UDP ping-pong, one way: p99", 2.0),
    at_most("ib_write_lat 2 B", "UDP ping-pong, one way", 4.0),
    at_most("ib_write_lat 2 B, pinned", "UDP ping-pong, one way", 4.0),
    at_most("ib_read_lat 2 B", "UDP ping-pong, round trip", 1.5),
    at_most("ib_atomic_lat", "UDP ping-pong, round trip", 1.5),
    at_most("ib_send_lat -e, two cores", "UDP blocking, two cores", 1.3),
    at_most("ib_send_lat -e, one core", "UDP blocking, one core", 3.0),
    at_least("veth 1500: ib_write_bw, 1 plane", "veth 1500: UDP blast", 0.75),
    at_least("veth 1500: ib_write_bw, 1 plane", "veth 1500: iperf3 TCP", 1.2),
    at_least("veth 1500: ib_write_bw, 4 planes", "veth 1500: ib_write_bw, 1 plane", 0.95),
    at_least("veth 9000: ib_write_bw, 1 plane", "veth 9000: UDP blast", 0.75),
    at_least("veth 9000: ib_write_bw, 1 plane", "veth 9000: iperf3 TCP", 1.2),
    at_least("veth 9000: ib_write_bw, 1 plane", "veth 9000: UCX tcp put_bw", 1.5),
    at_least("veth 9000: ib_write_bw, 4 planes", "veth 9000: ib_write_bw, 1 path", 0.95),
    at_most("veth 9000: ib_send_lat 2 B", "veth 9000: UDP ping-pong, one way", 1.5),
    no_more_than("core: sender", 120.0),
    no_more_than("core: sender: receiver", 120.0),
    no_more_than("core: sender: allocations", 0.05),
    Goal { to: None, ..at_least("core: sender: packets per answer", "", 37.0) },
    at_most("core: sender, 4,000 connections", "core: sender, 100 connections", 1.1),
    at_most("core: sender, 4,000 connections: receiver", "core: sender, 100 connections: receiver", 1.1),
    shown("ib_send_lat 2 B", "UCX tcp put_lat"),
    shown("ib_send_lat 2 B", "libfabric tcp fi_pingpong"),
];

fn blast(workspace: &Workspace, options: &str, place: Place) -> Result<Sample, Trouble> {
    let (value, cpu) = yardstick(workspace, &format!("blast {options}"), place, None)?;
    let packets = number(&value, "packets")?;
    let bytes = packets * number(&value, "mtu")?;
    Ok(Sample { cpu, bytes, messages: packets, ..Sample::of(number(&value, "gbps")?) })
}

/// What one small datagram per message reaches, in millions per second.
fn datagrams(workspace: &Workspace) -> Result<Sample, Trouble> {
    let (value, cpu) =
        yardstick(workspace, "blast --seconds 0.7 --mtu 64 --burst 1 --window 16384", LO, None)?;
    let packets = number(&value, "packets")?;
    let rate = (packets - number(&value, "lost")?) / number(&value, "seconds")? / 1e6;
    Ok(Sample { cpu, messages: packets, ..Sample::of(rate) })
}

fn pingpong(workspace: &Workspace, options: &str, cores: Option<[u32; 2]>) -> Result<Sample, Trouble> {
    pingpong_at(workspace, options, LO, cores)
}

fn pingpong_at(
    workspace: &Workspace,
    options: &str,
    place: Place,
    cores: Option<[u32; 2]>,
) -> Result<Sample, Trouble> {
    let rounds = if options.is_empty() { 40_000 } else { 5_000 };
    // The far end takes the same options but for how much there is to do.
    let line = format!("udp-pingpong --rounds {rounds} {options}");
    let (value, cpu) = yardstick(workspace, &line, place, cores)?;
    let fields = vec![("p99", number(&value, "p99_us")?)];
    Ok(Sample {
        cpu,
        fields,
        messages: number(&value, "rounds")?,
        ..Sample::of(number(&value, "one_way_us")?)
    })
}

fn ucx_put_bw(workspace: &Workspace, place: Place) -> Result<Sample, Trouble> {
    let columns = ucx_tcp(workspace, "-t ucp_put_bw -s 65536 -n 20000 -w 200", place)?;
    // MB/s of 2^20 bytes, over the whole run.
    Ok(Sample::of(columns[5] * 8.0 * 1.048_576 / 1e3))
}

fn copy(workspace: &Workspace) -> Result<Sample, Trouble> {
    let lines = alone(workspace, "copy --json")?;
    let line = lines.first().ok_or_else(|| Trouble::fail("no line of JSON"))?;
    Ok(Sample::of(number(line, "gbps")?))
}

/// The core without sockets: the sender's nanoseconds per packet, and what else there is to say.
fn core(workspace: &Workspace, connections: usize) -> Result<Sample, Trouble> {
    let lines = alone(workspace, &format!("core --json --packets 200000 --connections {connections}"))?;
    let line = lines.first().ok_or_else(|| Trouble::fail("no line of JSON"))?;
    let fields = [
        ("receiver", "receiver_ns_per_packet"),
        ("allocations", "allocations_per_1000_packets"),
        ("packets per answer", "data_packets_per_answer"),
        ("bytes per connection", "bytes_per_connection"),
    ];
    let fields = fields.map(|(name, field)| number(line, field).map(|value| (name, value)));
    let fields = fields.into_iter().collect::<Result<Vec<_>, _>>()?;
    Ok(Sample { fields, ..Sample::of(number(line, "sender_ns_per_packet")?) })
}
