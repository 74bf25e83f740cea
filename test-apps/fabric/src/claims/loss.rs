//! Claims about loss, reordering and damage.

use super::{Bench, Extent, burst_name, percent, set};

const STREAM: &str = include_str!("../../scenarios/stream.toml");
const SHORT: &str = include_str!("../../scenarios/short.toml");
const SPRAY: &str = include_str!("../../scenarios/spray.toml");
const STORM: &str = include_str!("../../scenarios/storm.toml");
const COLLECTIVE: &str = include_str!("../../scenarios/collective.toml");

/// Random loss, streaming Write.
pub fn streaming(b: &mut Bench) {
    for &burst in b.extent.bursts() {
        for planes in [1, 4] {
            let base = set(&[("host.burst", burst.to_string()), ("planes", planes.to_string())]);
            let whole = b.run(STREAM, &base);
            for (loss, goal) in [(0.001, 0.995), (0.01, 0.985), (0.1, 0.88)] {
                let mut with = base.clone();
                with.push(format!("damage.loss={loss}"));
                let lossy = b.run(STREAM, &with);
                let ratio = lossy.goodput_gbps / whole.goodput_gbps;
                b.row(
                    format!("{} loss, {planes} planes, K {}", percent(loss), burst_name(burst)),
                    &format!(">= {}", percent(goal)),
                    percent(ratio),
                    ratio >= goal,
                    &[&lossy, &whole],
                );
            }
        }
    }
}

/// Ring all-reduce.
pub fn all_reduce(b: &mut Bench) {
    collective(b, "all-reduce");
}

/// All-to-all.
pub fn all_to_all(b: &mut Bench) {
    collective(b, "all-to-all");
}

fn collective(b: &mut Bench, kind: &str) {
    let hosts = if b.extent == Extent::Full { 64 } else { 32 };
    // Many rounds of short steps: a host knows of loss only once it has lost something.
    let sizes = [(1 << 20, [0.99, 0.93, 0.75]), (16 << 10, [0.95, 0.80, 0.40])];
    for &burst in b.extent.bursts() {
        for (size, goals) in sizes {
            let base = set(&[
                ("host.burst", burst.to_string()),
                ("hosts", hosts.to_string()),
                ("traffic.0.size", size.to_string()),
                ("traffic.0.count", (if size > 1 << 16 { 1 } else { 64 }).to_string()),
                ("traffic.0.pattern", format!("{{ kind = \"{kind}\" }}")),
            ]);
            let whole = b.run(COLLECTIVE, &base);
            for (loss, goal) in [0.001, 0.01, 0.1].into_iter().zip(goals) {
                let mut with = base.clone();
                with.push(format!("damage.loss={loss}"));
                let lossy = b.run(COLLECTIVE, &with);
                let ratio = whole.collective_us / lossy.collective_us.max(1e-9);
                b.row(
                    format!(
                        "{hosts} hosts, {} KiB per step, {} loss, K {}",
                        size >> 10,
                        percent(loss),
                        burst_name(burst)
                    ),
                    &format!(">= {}", percent(goal)),
                    percent(ratio),
                    ratio >= goal && lossy.collective_us > 0.0,
                    &[&lossy, &whole],
                );
            }
        }
    }
}

/// Short messages at 1 % loss.
pub fn short(b: &mut Bench) {
    for &burst in b.extent.bursts() {
        for size in [256, 4096, 16384, 65536] {
            let base = set(&[("host.burst", burst.to_string()), ("traffic.0.size", size.to_string())]);
            let whole = b.run(SHORT, &base);
            let mut with = base.clone();
            with.push("damage.loss=0.01".to_owned());
            let lossy = b.run(SHORT, &with);
            // A round trip of a full packet: four links' delay and its time on two of them.
            let rtt = 10.0 + 2.0 * 0.34;
            let over = (lossy.p99_us - whole.p99_us) / rtt;
            b.row(
                format!("{size} B, K {}", burst_name(burst)),
                "<= 3 RTT over",
                format!("{over:.2} RTT ({:.1} us, loss-free {:.1} us)", lossy.p99_us, whole.p99_us),
                over <= 3.0,
                &[&lossy, &whole],
            );
        }
    }
}

/// Switches spray, links hold packets back.
pub fn spray(b: &mut Bench) {
    for &burst in b.extent.bursts() {
        let base = set(&[("host.burst", burst.to_string())]);
        let mut ordered = base.clone();
        ordered.extend(["spray=false".to_owned(), "spread=true".to_owned()]);
        let whole = b.run(SPRAY, &ordered);
        let mut held = ordered.clone();
        held.extend(["damage.reorder=0.02".to_owned(), "damage.reorder_us=10".to_owned()]);
        for (name, settings) in [("sprayed per packet", base), ("2 % held back up to 10 us", held)] {
            let o = b.run(SPRAY, &settings);
            let ratio = o.goodput_gbps / whole.goodput_gbps;
            let spurious = o.spurious as f64 / o.data_packets as f64;
            b.row(
                format!("{name}, K {}", burst_name(burst)),
                ">= 95 %, spurious < 1 %",
                format!("{}, spurious {}", percent(ratio), percent(spurious)),
                ratio >= 0.95 && spurious < 0.01,
                &[&o, &whole],
            );
        }
    }
}

/// Real bytes under everything at once.
pub fn storm(b: &mut Bench) {
    let seeds = if b.extent == Extent::Tests { 2 } else { 20 };
    for &burst in b.extent.bursts() {
        let mut messages = 0;
        let mut worst: Option<crate::run::Outcome> = None;
        for seed in 1..=seeds {
            let o = b.run(STORM, &set(&[("host.burst", burst.to_string()), ("seed", seed.to_string())]));
            messages += o.messages;
            if worst.is_none() || !o.breaches.is_empty() {
                worst = Some(o);
            }
        }
        let runs: Vec<&crate::run::Outcome> = worst.iter().collect();
        b.row(
            format!("{seeds} seeds, Write and Read, K {}", burst_name(burst)),
            "no breach",
            format!("{messages} messages compared"),
            messages == seeds * 4000,
            &runs,
        );
    }
}
