//! Faults at given times: which ports they hit, and what they change.

use crate::port::Damage;
use crate::scenario::{Direction, FaultKind, FaultSpec, Scenario};
use crate::topology::{PortKind, Topology};
use metaroce_proto::Nanos;

/// A change at a point in time.
#[derive(Debug, Clone, Copy)]
pub struct Change {
    /// When.
    pub at: Nanos,
    /// Which fault of the scenario.
    pub fault: usize,
    /// It begins, else it ends.
    pub begins: bool,
    /// When this occurrence ends.
    pub until: Nanos,
}

/// All changes of a scenario in order of time.
pub fn schedule(scenario: &Scenario) -> Vec<Change> {
    let us = |x: f64| (x * 1000.0) as Nanos;
    let mut all = Vec::new();
    for (fault, f) in scenario.faults.iter().enumerate() {
        for i in 0..f.times {
            let shift = us(f.every_us) * u64::from(i);
            let at = us(f.at_us) + shift;
            let until = if f.until_us == 0.0 { Nanos::MAX } else { us(f.until_us) + shift };
            all.push(Change { at, fault, begins: true, until });
            if until != Nanos::MAX {
                all.push(Change { at: until, fault, begins: false, until });
            }
        }
    }
    all.sort_by_key(|c| c.at);
    all
}

/// Whether a fault hits a port.
fn hits(spec: &FaultSpec, topology: &Topology, port: usize) -> bool {
    let (plane, kind) = topology.kind(port);
    if spec.plane.is_some_and(|p| p != plane) {
        return false;
    }
    let way = |d: Direction| spec.direction.is_none_or(|w| w == d);
    match kind {
        PortKind::HostUp(h) => {
            spec.middle.is_none() && spec.host.is_none_or(|x| x == h) && way(Direction::Up)
        }
        PortKind::HostDown(h) => {
            spec.middle.is_none() && spec.host.is_none_or(|x| x == h) && way(Direction::Down)
        }
        PortKind::Middle(m) | PortKind::Chain(m) => {
            spec.host.is_none() && spec.middle.is_some_and(|x| x == m)
        }
    }
}

/// Applies or takes back a fault's effect on ports.
pub fn apply(spec: &FaultSpec, begins: bool, topology: &mut Topology, normal: Damage) {
    for port in 0..topology.ports.len() {
        if !hits(spec, topology, port) {
            continue;
        }
        let down = matches!(topology.kind(port).1, PortKind::HostDown(_));
        let p = &mut topology.ports[port];
        match spec.what {
            FaultKind::LinkDown | FaultKind::BlackHole => p.damage.hole = begins,
            FaultKind::Gray { loss } => {
                p.damage.loss = if begins {
                    loss
                } else if down {
                    normal.loss
                } else {
                    0.0
                }
            }
            FaultKind::Slow { factor } if begins => p.bps = (p.bps as f64 / factor) as u64,
            FaultKind::Slow { factor } => p.bps = (p.bps as f64 * factor) as u64,
            FaultKind::Freeze => {}
        }
    }
}

/// The faults of a scenario that are there all the time, on links into hosts.
pub fn normal(scenario: &Scenario) -> Damage {
    let d = &scenario.damage;
    Damage {
        loss: d.loss,
        corrupt: d.corrupt,
        duplicate: d.duplicate,
        reorder: d.reorder,
        reorder_ns: (d.reorder_us * 1000.0) as Nanos,
        hole: false,
    }
}
