//! The tables of `metaroce show`.

use serde_json::Value;

use super::What;
use crate::table::{scaled, table};

/// A column: its title and a cell of it.
type Column = (&'static str, fn(&Value) -> String);

/// Everything shown, process by process.
pub fn all(what: What, shown: &[Value]) -> String {
    let columns = columns(what);
    let titles: Vec<&str> = columns.iter().map(|(title, _)| *title).collect();
    let mut text = String::new();
    for process in shown {
        let slot = process["slot"].as_u64().map_or_else(|| "unused".into(), |slot| format!("slot {slot}"));
        text += &format!("{} pid {} ({slot})\n", plain(&process["comm"]), process["pid"]);
        let items = process["items"].as_array().map(Vec::as_slice).unwrap_or_default();
        if items.is_empty() {
            text += "  none\n";
            continue;
        }
        let row = |item: &Value| columns.iter().map(|(_, cell)| cell(item)).collect();
        let rows: Vec<Vec<String>> = items.iter().map(row).collect();
        text += &table(
            &titles,
            &["netdev", "link", "admin", "addresses", "peer", "state", "plane", "type", "kind"],
            &rows,
        );
    }
    text
}

fn columns(what: What) -> &'static [Column] {
    match what {
        What::Planes => PLANES,
        What::Paths => PATHS,
        What::Connections => CONNECTIONS,
        What::Qps => QPS,
        What::Mrs => MRS,
    }
}

const PLANES: &[Column] = &[
    ("plane", |p| plain(&p["label"])),
    ("netdev", |p| plain(&p["netdev"])),
    ("link", |p| plain(&p["link"])),
    ("admin", |p| plain(&p["admin"])),
    ("mtu", |p| plain(&p["mtu"])),
    ("tx", |p| bytes(&p["tx_bytes"])),
    ("tx rate", |p| rate(&p["tx_bps"])),
    ("rx", |p| bytes(&p["rx_bytes"])),
    ("rx rate", |p| rate(&p["rx_bps"])),
    ("rexmit", |p| plain(&p["retransmits"])),
    ("lost", |p| plain(&p["lost"])),
    ("CE", |p| plain(&p["rx_ce"])),
    ("rtt us", |p| micros(&p["srtt_ns"])),
    ("addresses", |p| {
        let addresses = p["addresses"].as_array().into_iter().flatten().map(plain);
        addresses.collect::<Vec<_>>().join(",")
    }),
];

const PATHS: &[Column] = &[
    ("conn/path", |p| format!("{}/{}", p["connection"], p["path"])),
    ("peer", peer),
    ("plane", |p| plain(&p["plane"])),
    ("ent", |p| plain(&p["entropy"])),
    ("gen", |p| plain(&p["generation"])),
    ("state", |p| match p["cause"].as_str() {
        Some("fresh") | None => plain(&p["state"]),
        Some(cause) => format!("{} ({cause} {})", plain(&p["state"]), ago(&p["since_ns"])),
    }),
    ("rtt min", |p| micros(&p["rtt_min_ns"])),
    ("rtt us", |p| micros(&p["rtt_ns"])),
    ("var", |p| micros(&p["rtt_var_ns"])),
    ("cwnd", |p| plain(&p["cwnd_packets"])),
    ("flight", |p| plain(&p["in_flight_packets"])),
    ("CE", |p| share(&p["ce"], &p["delivered"])),
    ("rate", |p| rate(&p["delivery_bps"])),
    ("sent", |p| plain(&p["sent"])),
    ("rexmit", |p| plain(&p["retransmitted"])),
    ("lost", |p| plain(&p["lost"])),
    ("spur", |p| plain(&p["spurious"])),
    ("reord", |p| plain(&p["reordered"])),
];

const CONNECTIONS: &[Column] = &[
    ("conn", |c| plain(&c["connection"])),
    ("peer", peer),
    ("state", |c| plain(&c["state"])),
    ("paths", |c| plain(&c["paths"])),
    ("qps", |c| plain(&c["qps"])),
    ("segment", |c| plain(&c["segment_bytes"])),
    ("in flight", |c| bytes(&c["in_flight_bytes"])),
    ("budget", |c| bytes(&c["budget_bytes"])),
    ("hint taken", |c| hint(&c["hint_taken_bps"])),
    ("hint given", |c| hint(&c["hint_given_bps"])),
    ("rtt us", |c| micros(&c["srtt_ns"])),
    ("silent", |c| ago(&c["silent_ns"])),
    ("repairs", |c| plain(&c["retransmits_waiting"])),
];

const QPS: &[Column] = &[
    ("qpn", |q| number(&q["qpn"])),
    ("type", |q| plain(&q["type"])),
    ("state", |q| plain(&q["state"])),
    ("pd", |q| plain(&q["pd"])),
    ("dest qpn", |q| number(&q["dest_qpn"])),
    ("peer", |q| plain(&q["peer"])),
    ("conn", |q| plain(&q["connection"])),
    ("sends", |q| plain(&q["sends"])),
    ("waiting", |q| plain(&q["sends_waiting"])),
    ("reads", |q| plain(&q["reads"])),
    ("recvs", |q| plain(&q["recvs"])),
    ("srq", |q| plain(&q["srq"])),
    ("rnr", |q| plain(&q["rnr_tries"])),
];

const MRS: &[Column] = &[
    ("key", |m| number(&m["key"])),
    ("kind", |m| plain(&m["kind"])),
    ("pd", |m| plain(&m["pd"])),
    ("address", |m| number(&m["address"])),
    ("iova", |m| number(&m["iova"])),
    ("bytes", |m| plain(&m["bytes"])),
    ("access", |m| number(&m["access"])),
    ("windows", |m| plain(&m["windows"])),
];

fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn peer(item: &Value) -> String {
    format!("{} slot {}", plain(&item["peer"]), plain(&item["peer_slot"]))
}

fn number(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".into(), |n| format!("{n:#x}"))
}

fn bytes(value: &Value) -> String {
    value.as_u64().map_or_else(|| "-".into(), |n| scaled(n as f64, "B"))
}

fn rate(value: &Value) -> String {
    value.as_f64().map_or_else(|| "-".into(), |bps| scaled(bps, "b/s"))
}

fn hint(value: &Value) -> String {
    if value.as_u64() == Some(0) { "-".into() } else { rate(value) }
}

fn micros(value: &Value) -> String {
    match value.as_u64() {
        None | Some(0) => "-".into(),
        Some(ns) => format!("{:.1}", ns as f64 / 1000.0),
    }
}

fn share(part: &Value, whole: &Value) -> String {
    let (part, whole) = (part.as_u64().unwrap_or(0), whole.as_u64().unwrap_or(0));
    if part == 0 { "0".into() } else { format!("{:.1}%", part as f64 * 100.0 / whole.max(1) as f64) }
}

fn ago(value: &Value) -> String {
    let ns = value.as_u64().unwrap_or(0);
    match ns {
        0..10_000_000_000 => format!("{} ms", ns / 1_000_000),
        _ => format!("{} s", ns / 1_000_000_000),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn all__says_what_is_missing_and_why_a_path_was_left() {
        let path = json!({ "connection": 3, "path": 1, "peer": "192.0.2.1", "peer_slot": 7, "plane": "rail1",
            "state": "left", "cause": "link", "since_ns": 12_000_000, "ce": 1, "delivered": 8,
            "delivery_bps": 2.5e9 });
        let process = json!({ "comm": "x", "pid": 5, "slot": 9, "items": [path] });
        let text = all(What::Paths, &[process, json!({ "comm": "y", "pid": 6, "slot": null, "items": [] })]);
        for part in
            ["x pid 5 (slot 9)", "3/1", "left (link 12 ms)", "12.5%", "2.5 Gb/s", "y pid 6 (unused)\n  none"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
