//! Questions to the control socket and their answers.
//!
//! A question is an object: `{"show": "planes"}`, and for what has many `"from"`, the number to begin with. An answer
//! is `{"error": "..."}` or the process (`pid`, `comm`, `slot`, `now_ns`) with its `items` and, if there are more, `next`.
//!
//! Steering: `{"plane": "eth0", "set": "up" | "down" | "drain"}`, `{"plane": "eth0", "entropy": 3, "set": "deny" | "allow"}`
//! and `{"connection": 0, "path": 2, "set": "rehash"}`; the answer has `kept`, connections that had no other path.

use metaroce_config::Followed;
use metaroce_engine::Device;
use metaroce_proto::snapshot::{ConnView, MrView, Page, PathView, QpView};
use metaroce_proto::stats::PathStats;
use metaroce_proto::steering::{Admin, PlaneState};
use metaroce_proto::{QpState, QpType};
use parking_lot::RwLock;
use serde_json::{Value, json};

/// The answer to one line.
pub(super) fn to(line: &[u8], device: &Device, state: &RwLock<Followed>) -> Value {
    let answer = match serde_json::from_slice(line) {
        Ok(question) => answer(&question, device, state),
        Err(error) => Err(format!("not understood: {error}")),
    };
    answer.unwrap_or_else(|error| json!({ "error": error }))
}

fn answer(question: &Value, device: &Device, state: &RwLock<Followed>) -> Result<Value, String> {
    if let Some(set) = question["set"].as_str() {
        let kept = steer(question, set, device)?;
        return Ok(json!({ "pid": std::process::id(), "comm": comm(), "kept": kept }));
    }
    let from = match &question["from"] {
        Value::Null => 0,
        from => from.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or("`from` is a number")?,
    };
    let config = device.config();
    let label = |plane: u8| config.planes.get(usize::from(plane)).map_or("?", |p| p.label.as_str());
    let what = question["show"].as_str().ok_or("`show` names what to show")?;
    let page = match what {
        "planes" => Page { items: planes(device, state), next: None },
        "connections" => {
            pages(device.view_connections(from), |c| connection(c, |path| path_of(path, label(path.plane))))
        }
        "qps" => pages(device.view_qps(from), qp),
        "mrs" => pages(device.view_mrs(from), mr),
        other => {
            return Err(format!("`{other}` cannot be shown: planes, connections, qps and mrs can"));
        }
    };
    Ok(json!({ "pid": std::process::id(), "comm": comm(), "slot": device.slot(), "now_ns": device.now_ns(),
        "items": page.items, "next": page.next }))
}

/// Does what is asked of a plane, a source port or a path.
fn steer(question: &Value, set: &str, device: &Device) -> Result<usize, String> {
    let number = |key: &str| question[key].as_u64().and_then(|n| u32::try_from(n).ok());
    let small =
        |key: &str| number(key).and_then(|n| u8::try_from(n).ok()).ok_or(format!("`{key}` is a number"));
    let done = if set == "rehash" {
        let connection = number("connection").ok_or("`connection` is a number")?;
        device.rehash(connection, small("path")?).map(|()| 0)
    } else {
        let name = question["plane"].as_str().ok_or("`plane` names a plane")?;
        let planes = &device.config().planes;
        let plane = planes.iter().position(|plane| plane.label == name || plane.ifname == name);
        let plane = plane.ok_or_else(|| format!("there is no plane `{name}`"))? as u8;
        match set {
            "up" => device.set_plane_admin(plane, Admin::Up),
            "down" => device.set_plane_admin(plane, Admin::Down),
            "drain" => device.set_plane_admin(plane, Admin::Drain),
            "deny" => device.deny_entropy(plane, small("entropy")?, true).map(|()| 0),
            "allow" => device.deny_entropy(plane, small("entropy")?, false).map(|()| 0),
            other => return Err(format!("`{other}` is nothing that can be done")),
        }
    };
    done.map_err(|errno| match errno {
        libc::EBUSY => "refused: too little would be left in use".to_owned(),
        libc::EINVAL => "there is none of that number".to_owned(),
        libc::ENODEV => "the device is not in use yet".to_owned(),
        errno => std::io::Error::from_raw_os_error(errno).to_string(),
    })
}

fn pages<T>(page: Option<Page<T>>, each: impl Fn(&T) -> Value) -> Page<Value> {
    let Some(Page { items, next }) = page else { return Page { items: Vec::new(), next: None } };
    Page { items: items.iter().map(each).collect(), next }
}

fn comm() -> String {
    std::fs::read_to_string("/proc/self/comm").map_or_else(|_| "?".into(), |name| name.trim_end().into())
}

fn planes(device: &Device, state: &RwLock<Followed>) -> Vec<Value> {
    let counters = device.view_planes().unwrap_or_default();
    let wanted = device.plane_states().unwrap_or_default();
    let state = state.read();
    let plane = |(at, plane): (usize, &metaroce_config::Plane)| {
        let PathStats {
            tx_packets,
            tx_bytes,
            tx_data_packets,
            retransmits,
            lost,
            rx_packets,
            rx_bytes,
            rx_data_packets,
            rx_ce,
            rx_reordered,
            rx_duplicates,
            srtt_ns,
            cwnd_packets: _,
        } = counters.get(at).copied().unwrap_or_default();
        json!({ "plane": at, "label": plane.label, "netdev": plane.ifname, "addresses": plane.addrs, "mtu": plane.mtu,
            "link": if plane.up { "up" } else { "down" }, "admin": admin_name(wanted.get(at)),
            "denied": denied(wanted.get(at)),
            "tx_packets": tx_packets, "tx_bytes": tx_bytes, "tx_data_packets": tx_data_packets,
            "retransmits": retransmits, "lost": lost, "rx_packets": rx_packets, "rx_bytes": rx_bytes,
            "rx_data_packets": rx_data_packets, "rx_ce": rx_ce, "rx_reordered": rx_reordered,
            "rx_duplicates": rx_duplicates, "srtt_ns": srtt_ns })
    };
    state.config.planes.iter().enumerate().map(plane).collect()
}

fn admin_name(state: Option<&PlaneState>) -> &'static str {
    match state.map_or(Admin::Up, |state| state.admin) {
        Admin::Up => "up",
        Admin::Drain => "drain",
        Admin::Down => "down",
    }
}

/// The source ports not to be used.
fn denied(state: Option<&PlaneState>) -> Vec<u8> {
    let bits = state.map_or(0, |state| state.denied);
    (0..64).filter(|entropy| bits >> entropy & 1 == 1).collect()
}

fn connection(c: &ConnView, path: impl Fn(&PathView) -> Value) -> Value {
    let paths: Vec<Value> = c.paths.iter().map(path).collect();
    json!({ "connection": c.number, "state": c.state, "peer": c.peer.0, "peer_slot": c.peer.1,
        "incarnation": format!("{:016x}", c.incarnation), "segment_bytes": c.segment, "qps": c.users,
        "in_flight_bytes": c.in_flight_bytes, "budget_bytes": c.budget_bytes, "hint_taken_bps": c.hint_taken_bps,
        "hint_given_bps": c.hint_given_bps, "retransmits_waiting": c.retransmits_waiting, "srtt_ns": c.srtt_ns,
        "silent_ns": c.silent_ns, "state_bytes": c.state_bytes, "paths": paths })
}

fn path_of(path: &PathView, label: &str) -> Value {
    let t = &path.tally;
    json!({ "plane": label, "entropy": path.entropy, "generation": path.generation, "dst": path.dst.to_string(),
        "state": path.state, "cause": path.cause.name(), "since_ns": path.since_ns,
        "rtt_min_ns": path.rtt_min_ns, "rtt_ns": path.rtt_smoothed_ns, "rtt_var_ns": path.rtt_var_ns,
        "cwnd_packets": path.cwnd, "in_flight_packets": path.in_flight,
        "reorder_tolerance_ns": path.reorder_tolerance_ns, "sent": t.sent, "sent_bytes": t.sent_bytes,
        "retransmitted": t.retransmitted, "delivered": t.delivered, "delivered_bytes": t.delivered_bytes,
        "lost": t.lost, "spurious": t.spurious, "reordered": t.reordered, "ce": t.marked })
}

fn qp(qp: &QpView) -> Value {
    json!({ "qpn": qp.qpn.0, "type": type_name(qp.qp_type), "state": state_name(qp.state), "pd": qp.pd,
        "dest_qpn": qp.dest_qpn.0, "peer": qp.remote, "connection": qp.connection, "sends": qp.sends,
        "sends_waiting": qp.sends_waiting, "reads": qp.reads, "recvs": qp.recvs, "srq": qp.srq,
        "rnr_tries": qp.rnr_tries })
}

fn mr(mr: &MrView) -> Value {
    json!({ "key": mr.key, "kind": mr.kind, "pd": mr.pd, "address": mr.va, "iova": mr.iova, "bytes": mr.len,
        "access": mr.access, "windows": mr.windows })
}

fn type_name(qp_type: QpType) -> &'static str {
    match qp_type {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
        QpType::Raw => "RAW",
        QpType::XrcSend => "XRC_SEND",
        QpType::XrcRecv => "XRC_RECV",
    }
}

fn state_name(state: QpState) -> &'static str {
    match state {
        QpState::Reset => "RESET",
        QpState::Init => "INIT",
        QpState::Rtr => "RTR",
        QpState::Rts => "RTS",
        QpState::Sqd => "SQD",
        QpState::Sqe => "SQE",
        QpState::Err => "ERR",
    }
}
