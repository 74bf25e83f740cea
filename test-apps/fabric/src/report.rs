//! A run as text or JSON.

use crate::run::Outcome;

/// The outcome in a few lines.
pub fn text(o: &Outcome) -> String {
    let mut s = format!(
        "{}: {:.0} us, goodput {:.2} Gb/s, Jain {:.4}, completion p50 {:.1} us p99 {:.1} us, {} messages\n",
        o.name, o.took_us, o.goodput_gbps, o.jain, o.p50_us, o.p99_us, o.messages
    );
    s += &format!(
        "  {} data packets, {} again ({} not needed), {} marked, {} dropped, {} taken by faults, {} paths left\n",
        o.data_packets, o.retransmits, o.spurious, o.marked, o.full, o.fate.lost, o.paths_left
    );
    s += &format!(
        "  queues up to {:.0} KiB (hosts' own {:.0}), busiest port {:.1} %, collectives {:.0} us, {} events, fingerprint {:016x}\n",
        o.queue_kib,
        o.host_queue_kib,
        o.port_share * 100.0,
        o.collective_us,
        o.events,
        o.fingerprint
    );
    if !o.samples.is_empty() {
        let rate = |w: &[(f64, u64)]| format!("{:.1}", (w[1].1 - w[0].1) as f64 * 8e-3 / (w[1].0 - w[0].0));
        let shown: Vec<String> = o.samples.windows(2).take(100).map(rate).collect();
        s += &format!("  Gb/s per sample: {}\n", shown.join(" "));
    }
    if o.breaches.len() > 5 {
        s += &format!("  {} breaches, the first of them:\n", o.breaches.len());
    }
    for b in o.breaches.iter().take(5) {
        s += &format!("  BREACH {b}\n");
    }
    s
}

/// The outcome as JSON.
pub fn json(o: &Outcome) -> serde_json::Value {
    serde_json::to_value(o).unwrap_or_default()
}
