//! Claims about planes and connections, and that runs repeat.

use super::{Bench, Extent, burst_name, set};

const PLANES: &str = include_str!("../../scenarios/planes.toml");
const CONNECTIONS: &str = include_str!("../../scenarios/connections.toml");
const STORM: &str = include_str!("../../scenarios/storm.toml");

/// One pair of hosts, more planes.
pub fn planes(b: &mut Bench) {
    for &burst in b.extent.bursts() {
        let run = |b: &Bench, planes: u32| {
            b.run(PLANES, &set(&[("host.burst", burst.to_string()), ("planes", planes.to_string())]))
        };
        let one = run(b, 1);
        for (planes, goal) in [(4, 3.95), (8, 7.9)] {
            let many = run(b, planes);
            let ratio = many.goodput_gbps / one.goodput_gbps;
            b.row(
                format!("{planes} planes, K {}", burst_name(burst)),
                &format!(">= {goal}x"),
                format!("{ratio:.3}x ({:.1} Gb/s)", many.goodput_gbps),
                ratio >= goal,
                &[&many, &one],
            );
        }
    }
}

/// All pairs of 64 hosts.
pub fn connections(b: &mut Bench) {
    for &burst in b.extent.bursts() {
        let run = |b: &Bench, planes: u32| {
            b.run(
                CONNECTIONS,
                &set(&[
                    ("host.burst", burst.to_string()),
                    ("planes", planes.to_string()),
                    ("link.gbps", "10".to_owned()),
                ]),
            )
        };
        let one = run(b, 1);
        let many = if b.extent == Extent::Full { vec![4, 8] } else { vec![4] };
        for planes in many {
            let o = run(b, planes);
            let ratio = o.goodput_gbps / one.goodput_gbps / f64::from(planes);
            b.row(
                format!("{planes} planes, K {}", burst_name(burst)),
                "linear within 2 %, Jain >= 0.98",
                format!("{ratio:.3} of linear ({:.0} Gb/s), Jain {:.4}", o.goodput_gbps, o.jain),
                ratio >= 0.98 && o.jain >= 0.98,
                &[&o, &one],
            );
        }
    }
}

/// The same twice.
pub fn repeatable(b: &mut Bench) {
    let (first, second) = (b.run(STORM, &[]), b.run(STORM, &[]));
    b.row(
        "storm, seed 1".to_owned(),
        "equal fingerprints",
        format!("{:016x} and {:016x}", first.fingerprint, second.fingerprint),
        first.fingerprint == second.fingerprint,
        &[],
    );
}
