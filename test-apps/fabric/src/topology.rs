//! Topologies: which ports a packet passes from one host to another on a plane.
//!
//! Planes are disjoint fabrics of the same shape. Switches choose among equal routes by a hash over the five-tuple, each
//! with a salt of its own, unless the scenario lets them spray.

use crate::packet::HOPS_MAX;
use crate::port::Port;
use crate::scenario::{Link, Shape};
use metaroce_proto::random;

/// Ports of all planes and how they are connected.
#[derive(Debug)]
pub struct Topology {
    /// All ports.
    pub ports: Vec<Port>,
    shape: Shape,
    hosts: usize,
    planes: usize,
    /// Ports of one plane.
    per_plane: usize,
    spread: bool,
    salt: u64,
}

/// What a scenario may say of a port when it names those a fault hits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortKind {
    /// From a host to its switch.
    HostUp(usize),
    /// From a switch to its host.
    HostDown(usize),
    /// To or from a middle switch: its number.
    Middle(usize),
    /// Between two sites of a chain.
    Chain(usize),
}

impl Topology {
    /// Builds all planes. `rates` gives the link of each plane.
    pub fn new(
        shape: Shape,
        hosts: usize,
        links: &[Link],
        middle: &Link,
        spread: bool,
        salt: u64,
    ) -> Topology {
        let planes = links.len();
        let mut t = Topology { ports: Vec::new(), shape, hosts, planes, per_plane: 0, spread, salt };
        let middles = t.middle_ports();
        for link in links {
            for _ in 0..hosts {
                // A host's own queue holds whatever the host puts into it.
                t.ports.push(Port::new(link.bps(), link.delay_ns(), u64::MAX / 2, u64::MAX));
            }
            for _ in 0..hosts {
                t.ports.push(link.port());
            }
            for _ in 0..middles {
                t.ports.push(middle.port());
            }
        }
        t.per_plane = 2 * hosts + middles;
        t
    }
    /// The port from a host into a plane.
    pub fn host_up(&self, plane: usize, host: usize) -> usize {
        plane * self.per_plane + host
    }
    /// The port from a plane to a host.
    pub fn host_down(&self, plane: usize, host: usize) -> usize {
        plane * self.per_plane + self.hosts + host
    }
    /// What a port is, and its plane.
    pub fn kind(&self, port: usize) -> (usize, PortKind) {
        let (plane, at) = (port / self.per_plane, port % self.per_plane);
        if at < self.hosts {
            return (plane, PortKind::HostUp(at));
        }
        if at < 2 * self.hosts {
            return (plane, PortKind::HostDown(at - self.hosts));
        }
        let at = at - 2 * self.hosts;
        let kind = match self.shape {
            Shape::Star => PortKind::Middle(0),
            Shape::LeafSpine { spines, .. } => PortKind::Middle(at % spines),
            Shape::FatTree { k } => PortKind::Middle(at % (k / 2)),
            Shape::Chain { .. } => PortKind::Chain(at / 2),
        };
        (plane, kind)
    }
    /// Number of planes.
    pub fn planes(&self) -> usize {
        self.planes
    }

    fn middle_ports(&self) -> usize {
        match self.shape {
            Shape::Star => 0,
            // Leaf to spine, spine to leaf.
            Shape::LeafSpine { leaves, spines } => 2 * leaves * spines,
            // Edge to aggregation, aggregation to core, and back: k pods of k/2 edges with k/2 uplinks each.
            Shape::FatTree { k } => 4 * k * (k / 2) * (k / 2),
            // One link each way between neighbours.
            Shape::Chain { sites, .. } => 2 * (sites - 1),
        }
    }

    /// Ports from `from` to `to` for a flow hash; gives their number.
    pub fn route(&self, plane: usize, from: usize, to: usize, hash: u64, out: &mut [u32; HOPS_MAX]) -> u8 {
        let base = plane * self.per_plane + 2 * self.hosts;
        let mut hops = 0;
        let mut push = |port: usize| {
            out[hops] = port as u32;
            hops += 1;
        };
        push(self.host_up(plane, from));
        match self.shape {
            Shape::Star => {}
            Shape::LeafSpine { leaves, spines } => {
                let per_leaf = self.hosts.div_ceil(leaves);
                let (a, b) = (from / per_leaf, to / per_leaf);
                if a != b {
                    let spine = (self.mix(hash, a) % spines as u64) as usize;
                    push(base + a * spines + spine);
                    push(base + leaves * spines + b * spines + spine);
                }
            }
            Shape::FatTree { k } => {
                let half = k / 2;
                let (edge_a, edge_b) = (from / half, to / half);
                let (pod_a, pod_b) = (edge_a / half, edge_b / half);
                let quarter = k * half * half;
                let agg = (self.mix(hash, edge_a) % half as u64) as usize;
                if edge_a != edge_b {
                    push(base + edge_a * half + agg);
                    if pod_a != pod_b {
                        let core = (self.mix(hash, 1_000_000 + pod_a * half + agg) % half as u64) as usize;
                        push(base + quarter + (pod_a * half + agg) * half + core);
                        push(base + 2 * quarter + (pod_b * half + agg) * half + core);
                    }
                    push(base + 3 * quarter + edge_b * half + agg);
                }
            }
            Shape::Chain { sites, .. } => {
                let (a, b) = (self.site(from, sites), self.site(to, sites));
                (a..b).for_each(|s| push(base + 2 * s));
                (b..a).rev().for_each(|s| push(base + 2 * s + 1));
            }
        }
        push(self.host_down(plane, to));
        hops as u8
    }

    /// The site of a host in a chain: hosts are spread evenly, in order.
    fn site(&self, host: usize, sites: usize) -> usize {
        host / self.hosts.div_ceil(sites)
    }
    fn mix(&self, hash: u64, switch: usize) -> u64 {
        if self.spread {
            return hash;
        }
        let mut state = hash ^ self.salt ^ (switch as u64) << 40;
        random(&mut state)
    }
}

/// Hash over what ECMP sees of a packet: addresses stand for hosts, ports for the entropy.
pub fn five_tuple(from: usize, to: usize, sport: u16, dport: u16) -> u64 {
    let mut state = (from as u64) << 48 ^ (to as u64) << 32 ^ u64::from(sport) << 16 ^ u64::from(dport);
    random(&mut state)
}
