//! Running a scenario and what is measured of it.

use crate::checks;
use crate::port::PortStats;
use crate::scenario::Scenario;
use crate::world::{Fate, World};
use metaroce_proto::Nanos;
use metaroce_proto::stats::PathStats;
use serde::Serialize;

/// What a run showed.
#[derive(Debug, Clone, Serialize)]
pub struct Outcome {
    /// The scenario.
    pub name: String,
    /// Virtual time it took, us.
    pub took_us: f64,
    /// Bytes placed per second in the measured span, Gb/s.
    pub goodput_gbps: f64,
    /// The same per flow.
    #[serde(skip)]
    pub per_flow_gbps: Vec<f64>,
    /// Jain's index over flows.
    pub jain: f64,
    /// Median and 99th percentile of completion times, us.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Messages completed.
    pub messages: u64,
    /// Data packets sent again, and how many of those were not needed.
    pub retransmits: u64,
    /// Repairs that were not needed.
    pub spurious: u64,
    /// Data packets sent.
    pub data_packets: u64,
    /// Paths left.
    pub paths_left: u64,
    /// Packets marked.
    pub marked: u64,
    /// Packets dropped by full queues in the measured span.
    pub full: u64,
    /// Longest queue of a switch port, KiB, in the measured span.
    pub queue_kib: f64,
    /// Longest queue of a host's own port.
    pub host_queue_kib: f64,
    /// Busiest port to a host, share of its rate in the measured span.
    pub port_share: f64,
    /// When collectives finished, us.
    pub collective_us: f64,
    /// Total bytes placed at each sample: (us, bytes).
    #[serde(skip)]
    pub samples: Vec<(f64, u64)>,
    /// Bytes of every flow at each sample.
    #[serde(skip)]
    pub flow_samples: Vec<(Nanos, Vec<u64>)>,
    /// Where packets went.
    #[serde(skip)]
    pub fate: Fate,
    /// What the checks found.
    pub breaches: Vec<String>,
    /// Simulator events.
    pub events: u64,
    /// Fingerprint of everything above, equal when a run is repeated.
    pub fingerprint: u64,
}

/// Runs a scenario to its end.
pub fn run(scenario: &Scenario) -> Outcome {
    let mut world = World::new(scenario);
    let took = world.run();
    measure(&world, took)
}

fn measure(world: &World, took: Nanos) -> Outcome {
    let s = &world.scenario;
    let span_ns = (took as f64 - s.warmup_us * 1000.0).max(1.0);
    let gbps = |bytes: u64| bytes as f64 * 8.0 / span_ns;
    let placed = world.placed();
    let per_flow: Vec<f64> = placed.iter().zip(&world.measured_from).map(|(a, b)| gbps(a - b)).collect();
    let mut latencies: Vec<Nanos> = world.flows.iter().flat_map(|f| f.latencies.iter().copied()).collect();
    latencies.sort_unstable();
    let mut out = Outcome {
        name: s.name.clone(),
        took_us: took as f64 / 1000.0,
        goodput_gbps: per_flow.iter().sum(),
        jain: jain(&per_flow),
        p50_us: percentile(&latencies, 0.50),
        p99_us: percentile(&latencies, 0.99),
        messages: world.flows.iter().map(|f| f.done).sum(),
        retransmits: 0,
        spurious: 0,
        data_packets: 0,
        paths_left: 0,
        marked: 0,
        full: world.fate.full - world.full_from,
        queue_kib: 0.0,
        host_queue_kib: 0.0,
        port_share: 0.0,
        collective_us: collective_us(world),
        samples: Vec::new(),
        flow_samples: world.samples.clone(),
        fate: world.fate,
        breaches: checks::breaches(world),
        events: world.events,
        fingerprint: 0,
        per_flow_gbps: per_flow,
    };
    out.samples = world.samples.iter().map(|(t, v)| (*t as f64 / 1000.0, v.iter().sum())).collect();
    let mut paths: Vec<PathStats> = Vec::new();
    for host in &world.hosts {
        let stats = host.ep.stats();
        out.spurious += stats.spurious_retransmits;
        out.paths_left += stats.paths_left;
        host.ep.path_stats(&mut paths);
        out.retransmits += paths.iter().map(|p| p.retransmits).sum::<u64>();
        out.data_packets += paths.iter().map(|p| p.tx_data_packets).sum::<u64>();
    }
    ports(world, span_ns, &mut out);
    out.fingerprint = fingerprint(world);
    out
}

fn ports(world: &World, span_ns: f64, out: &mut Outcome) {
    let (hosts, planes) = (world.hosts.len(), world.topology.planes());
    let kib = |s: &PortStats| s.peak as f64 / 1024.0;
    for (i, port) in world.topology.ports.iter().enumerate() {
        out.marked += port.stats.marked;
        let up = (0..planes)
            .any(|p| (world.topology.host_up(p, 0)..world.topology.host_up(p, 0) + hosts).contains(&i));
        if up {
            out.host_queue_kib = out.host_queue_kib.max(kib(&port.stats));
        } else {
            out.queue_kib = out.queue_kib.max(kib(&port.stats));
        }
    }
    for plane in 0..planes {
        for host in 0..hosts {
            let i = world.topology.host_down(plane, host);
            let port = &world.topology.ports[i];
            let from = world.wire_from.get(i).copied().unwrap_or(0);
            let share = (port.departed(world.now) - from) as f64 * 8e9 / span_ns / port.bps as f64;
            out.port_share = out.port_share.max(share);
        }
    }
}

fn collective_us(world: &World) -> f64 {
    let last = world.collectives.iter().flat_map(|c| &c.finished_at).max();
    last.map_or(0.0, |t| *t as f64 / 1000.0)
}

/// Jain's fairness index.
pub fn jain(x: &[f64]) -> f64 {
    let (sum, squares) = x.iter().fold((0.0, 0.0), |(s, q), v| (s + v, q + v * v));
    if squares == 0.0 { 1.0 } else { sum * sum / (x.len() as f64 * squares) }
}

fn percentile(sorted: &[Nanos], p: f64) -> f64 {
    if sorted.is_empty() {
        return 0.0;
    }
    let at = ((sorted.len() as f64 * p) as usize).min(sorted.len() - 1);
    sorted[at] as f64 / 1000.0
}

/// A number that differs when anything did.
fn fingerprint(world: &World) -> u64 {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |x: u64| {
        for b in x.to_le_bytes() {
            h = (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3);
        }
    };
    add(world.now);
    add(world.events);
    world.placed().into_iter().for_each(&mut add);
    world.flows.iter().for_each(|f| {
        add(f.finished_at);
        f.latencies.iter().for_each(|l| add(*l));
    });
    world.topology.ports.iter().for_each(|p| add(p.stats.wire_bytes));
    h
}
