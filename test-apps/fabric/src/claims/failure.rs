//! Claims about planes and paths that fail, and peers that do not run.

use super::{Bench, Extent, burst_name, percent, set};
use crate::run::Outcome;

const DEATH: &str = include_str!("../../scenarios/plane-death.toml");
const LAST: &str = include_str!("../../scenarios/last-plane.toml");
const SLOW: &str = include_str!("../../scenarios/slow-path.toml");
const FROZEN: &str = include_str!("../../scenarios/descheduled.toml");

/// Goodput between two times on the scenario's clock, Gb/s; from samples.
fn between(o: &Outcome, from_us: f64, to_us: f64) -> f64 {
    let at = |t: f64| o.samples.iter().min_by(|a, b| (a.0 - t).abs().total_cmp(&(b.0 - t).abs()));
    match (at(from_us), at(to_us)) {
        (Some(a), Some(b)) if b.0 > a.0 => (b.1 - a.1) as f64 * 8e-3 / (b.0 - a.0),
        _ => 0.0,
    }
}

/// One of four planes, in all the ways one can die.
pub fn plane_death(b: &mut Bench) {
    let ways: [(&str, &[&str]); 5] = [
        ("link down", &["faults.0.what={ kind = \"link-down\" }", "faults.0.host=0"]),
        ("far link down", &["faults.0.what={ kind = \"link-down\" }", "faults.0.host=1"]),
        ("black hole", &[]),
        ("one way, data", &["faults.0.host=0", "faults.0.direction=\"up\""]),
        ("one way, acknowledgements", &["faults.0.host=1", "faults.0.direction=\"up\""]),
    ];
    for &burst in b.extent.bursts() {
        for (way, settings) in ways {
            for plane in [0, 2] {
                let mut with =
                    set(&[("host.burst", burst.to_string()), ("faults.0.plane", plane.to_string())]);
                with.extend(settings.iter().map(|s| (*s).to_owned()));
                let o = b.run(DEATH, &with);
                let whole = between(&o, 5_000.0, 10_000.0);
                let (early, late) = (between(&o, 15_000.0, 20_000.0), between(&o, 20_000.0, 40_000.0));
                let back = between(&o, 70_000.0, 80_000.0);
                // The one-way loss of acknowledgements costs no plane: the other planes carry them.
                let worst = early.min(late) / whole;
                b.row(
                    format!("{way}, plane {plane}, K {}", burst_name(burst)),
                    ">= 95 % of 3/4 after 5 ms; 4/4 within 1 s of repair (to 3 %)",
                    format!("{} of 4/4, then {} 30 ms after repair", percent(worst), percent(back / whole)),
                    worst >= 0.95 * 0.75 && back / whole >= 0.97,
                    &[&o],
                );
            }
        }
    }
}

/// No plane at all for 200 ms.
pub fn last_plane(b: &mut Bench) {
    for &burst in b.extent.bursts() {
        let o = b.run(LAST, &set(&[("host.burst", burst.to_string())]));
        b.row(
            format!("200 ms without a plane, K {}", burst_name(burst)),
            "the transfer completes",
            format!("{} messages after {:.0} ms", o.messages, o.took_us / 1000.0),
            o.messages == 2000,
            &[&o],
        );
    }
}

/// One path of sixteen.
pub fn slow_path(b: &mut Bench) {
    for &burst in b.extent.bursts() {
        let base = set(&[("host.burst", burst.to_string())]);
        let mut none = base.clone();
        none.push("faults=[]".to_owned());
        let whole = b.run(SLOW, &none);
        let mut gray = base.clone();
        gray.push("faults.0.what={ kind = \"gray\", loss = 0.05 }".to_owned());
        // Narrow middle links: then the sixteenth path's share is really missing.
        let narrow = |s: &Vec<String>| {
            let mut s = s.clone();
            s.push("middle.gbps=7".to_owned());
            s
        };
        let tight = b.run(SLOW, &narrow(&none));
        for (name, settings, of) in [
            ("ten times slower", base.clone(), &whole),
            ("5 % gray loss", gray, &whole),
            ("ten times slower, spines just wide enough", narrow(&base), &tight),
        ] {
            let o = b.run(SLOW, &settings);
            let ratio = o.goodput_gbps / of.goodput_gbps;
            let goal = 15.0 / 16.0 - 0.02;
            b.row(
                format!("{name}, K {}", burst_name(burst)),
                &format!(">= {}", percent(goal)),
                percent(ratio),
                ratio >= goal,
                &[&o, of],
            );
        }
    }
}

/// A peer that stands still.
pub fn descheduled(b: &mut Bench) {
    let times = if b.extent == Extent::Full { 50 } else { 10 };
    for &burst in b.extent.bursts() {
        let o = b.run(
            FROZEN,
            &set(&[
                ("host.burst", burst.to_string()),
                ("faults.0.times", times.to_string()),
                ("duration_us", (20_000 * times + 20_000).to_string()),
            ]),
        );
        let whole = between(&o, 5_000.0, 10_000.0);
        let back = |i: u32| {
            let thaw = 15_000.0 + 20_000.0 * f64::from(i);
            between(&o, thaw + 1_000.0, thaw + 3_000.0) / whole
        };
        let worst = (0..times).map(back).fold(f64::MAX, f64::min);
        b.row(
            format!("{times} times, K {}", burst_name(burst)),
            "no path left, rate back within 1 ms",
            format!("{} paths left, at least {} after 1 ms", o.paths_left, percent(worst)),
            o.paths_left == 0 && worst >= 0.95,
            &[&o],
        );
    }
}
