//! Claims about congestion: many to one, long fat paths, shallow buffers.

use super::{Bench, Extent, burst_name, percent, set};
use crate::run::{Outcome, jain};

const INCAST: &str = include_str!("../../scenarios/incast.toml");
const FAN_IN: &str = include_str!("../../scenarios/fan-in.toml");
const REGION: &str = include_str!("../../scenarios/cross-region.toml");
const BOTH: &str = include_str!("../../scenarios/both-ways.toml");
const SHALLOW: &str = include_str!("../../scenarios/shallow.toml");

/// Senders and what else changes with their number: buffer, where measuring begins (the third round trip; with 64, whose first
/// windows take 350 us, the second such round; with a thousand the third round of one packet each) and ends.
const CROWDS: [(u32, [&str; 4]); 3] = [
    (8, ["link.buffer_kib=2048", "warmup_us=60", "duration_us=3000", "traffic.0.size=65536"]),
    (64, ["link.buffer_kib=8192", "warmup_us=600", "duration_us=6000", "traffic.0.size=65536"]),
    (1000, ["link.buffer_kib=32768", "warmup_us=1050", "duration_us=15050", "traffic.0.size=16384"]),
];

/// Many Writes to one host.
pub fn incast(b: &mut Bench) {
    crowd(b, INCAST, 1.2);
}

/// Many Reads by one host.
pub fn fan_in(b: &mut Bench) {
    crowd(b, FAN_IN, f64::MAX);
}

fn crowd(b: &mut Bench, text: &str, spread: f64) {
    for &burst in b.extent.bursts() {
        for (senders, settings) in CROWDS {
            if senders == 1000 && b.extent == Extent::Tests {
                continue;
            }
            let mut with = set(&[
                ("host.burst", burst.to_string()),
                ("hosts", (senders + 1).to_string()),
                ("traffic.0.pattern.count", senders.to_string()),
            ]);
            with.extend(settings.iter().map(|s| (*s).to_owned()));
            if text == FAN_IN && senders < 1000 {
                // The first round trip brings the requests.
                with.push("warmup_us=500".to_owned());
            }
            let o = b.run(text, &with);
            // ECN threshold and one bandwidth-delay product of 100 Gb/s and the round trip of a full packet.
            let bound = 100.0 + 12.5e3 * 11.4 / 1024.0;
            let ratio = o.p99_us / o.p50_us.max(1e-9);
            let good = o.jain >= 0.95 && o.port_share >= 0.95 && o.queue_kib <= bound && ratio <= spread;
            let mut goal = format!("Jain >= 0.95, >= 95 % of the port, queue <= {bound:.0} KiB");
            if spread < f64::MAX {
                goal += &format!(", p99/p50 <= {spread}");
            }
            b.row(
                format!("{senders} to 1, K {}", burst_name(burst)),
                &goal,
                format!(
                    "Jain {:.4}, {}, {:.0} KiB, p99/p50 {ratio:.2}",
                    o.jain,
                    percent(o.port_share),
                    o.queue_kib
                ),
                good,
                &[&o],
            );
        }
    }
}

/// Long and short flows over two bottlenecks.
pub fn cross_region(b: &mut Bench) {
    let bursts: &[u8] = if b.extent == Extent::Full { &[15, 0] } else { &[0] };
    for &burst in bursts {
        let o = b.run(REGION, &set(&[("host.burst", burst.to_string())]));
        // Flows 0 and 1 cross the first bottleneck, all three the second.
        let equal = jain(&o.per_flow_gbps[..2]);
        let used = o.per_flow_gbps.iter().sum::<f64>() / 96.7;
        b.row(
            format!("three flows, K {}", burst_name(burst)),
            ">= 90 % of the bottleneck, Jain >= 0.9 between equal flows",
            format!("{}, Jain {equal:.3} ({})", percent(used), rates(&o)),
            used >= 0.9 && equal >= 0.9,
            &[&o],
        );
    }
}

fn rates(o: &Outcome) -> String {
    let each: Vec<String> = o.per_flow_gbps.iter().map(|r| format!("{r:.1}")).collect();
    format!("{} Gb/s", each.join(" / "))
}

/// Write and Read in both directions at once.
pub fn both_ways(b: &mut Bench) {
    for &burst in b.extent.bursts() {
        let base = set(&[("host.burst", burst.to_string())]);
        let both = b.run(BOTH, &base);
        let mut with = base;
        with.push("traffic=[{ pattern = { kind = \"pair\", from = 0, to = 1 }, depth = 64 }]".to_owned());
        let one = b.run(BOTH, &with);
        // Writes by host 0 and by host 1, then Reads by each: a Read's data goes towards its initiator.
        let f = &both.per_flow_gbps;
        let (there, back) = (f[0] + f[3], f[1] + f[2]);
        let (least, fair) = (there.min(back) / one.goodput_gbps, jain(f));
        b.row(
            format!("two hosts, 4 planes, K {}", burst_name(burst)),
            "each direction >= 90 % of one alone (the rest is the other's acknowledgements), Jain >= 0.95",
            format!("{}, Jain {fair:.4} ({})", percent(least), rates(&both)),
            least >= 0.9 && fair >= 0.95,
            &[&both, &one],
        );
    }
}

/// Buffers of one bandwidth-delay product.
pub fn ecn_only(b: &mut Bench) {
    for &burst in b.extent.bursts() {
        for flows in ["known rates", "marks alone"] {
            let hints = flows == "known rates";
            let o =
                b.run(SHALLOW, &set(&[("host.burst", burst.to_string()), ("host.hints", hints.to_string())]));
            b.row(
                format!("8 to 1, {flows}, K {}", burst_name(burst)),
                "no drops after start-up",
                format!("{} drops, {} of the port", o.full, percent(o.port_share)),
                o.full == 0 && o.port_share > 0.9,
                &[&o],
            );
        }
    }
}
