//! Claims beside the RoCEv2 comparator (`rocev2.rs`), on the same links with the same traffic.

use super::{Bench, Extent, percent, set};
use crate::rocev2::{self, Repeat};
use crate::scenario::Scenario;

const TREE: &str = include_str!("../../scenarios/fat-tree.toml");

/// Collectives on a fat-tree whose routes collide, at every loss rate.
pub fn fat_tree(b: &mut Bench) {
    let wide = b.extent == Extent::Full;
    for &burst in b.extent.bursts() {
        // Neighbours of the ring are in different pods, as with ranks placed wherever hosts were free.
        for (kind, more) in [("all-to-all", ""), ("all-reduce", ", stride = 5")] {
            for loss in [0.0, 0.001, 0.01, 0.1] {
                let mut with = set(&[
                    ("host.burst", burst.to_string()),
                    ("damage.loss", format!("{loss:?}")),
                    ("traffic.0.pattern", format!("{{ kind = \"{kind}\"{more} }}")),
                ]);
                if wide {
                    with.extend(["hosts=64".to_owned(), "shape.k=8".to_owned()]);
                }
                let ours = b.run(TREE, &with);
                let scenario = Scenario::parse_with(TREE, &with).expect("the same scenario");
                let mut best = f64::MAX;
                let mut told = String::new();
                for (name, repeat, lossless) in [
                    ("go-back-N", Repeat::GoBackN, false),
                    ("go-back-N with PFC", Repeat::GoBackN, true),
                    ("selective repeat", Repeat::Selective, false),
                    ("selective repeat with PFC", Repeat::Selective, true),
                ] {
                    let us = rocev2::run(&scenario, repeat, lossless).collective_us;
                    best = best.min(if us > 0.0 { us } else { f64::MAX });
                    let shown = if us > 0.0 { format!("{us:.0} us") } else { "not within 400 ms".to_owned() };
                    told += &format!("; {name} {shown}");
                }
                b.row(
                    format!(
                        "{kind}, {} hosts, {} loss, K {}",
                        scenario.hosts,
                        percent(loss),
                        super::burst_name(burst)
                    ),
                    "sooner than RoCEv2 in every form",
                    format!("{:.0} us{told}", ours.collective_us),
                    ours.collective_us > 0.0 && ours.collective_us < best,
                    &[&ours],
                );
            }
        }
    }
}
