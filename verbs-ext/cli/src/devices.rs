//! `metaroce devices`: the device, its planes and its GIDs, as programs will see them.

use std::process::ExitCode;

use metaroce_config::{DeviceConfig, active_mtu, gid_table};
use serde_json::{Value, json};

use crate::output;

/// Options of `metaroce devices`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints the device; 1 when the configuration is wrong.
pub fn run(args: &Args) -> ExitCode {
    match metaroce_config::load() {
        Ok(config) if args.json => output::end(format!("{}\n", device_json(&config)), ExitCode::SUCCESS),
        Ok(config) => output::end(device_text(&config), ExitCode::SUCCESS),
        Err(error) => {
            output::tell(error);
            ExitCode::FAILURE
        }
    }
}

fn state(up: bool) -> &'static str {
    if up { "ACTIVE" } else { "DOWN" }
}

fn device_text(config: &DeviceConfig) -> String {
    let mut text = format!(
        "metaroce0/1 state {} active_mtu {} paths_per_plane {} base_port {}\n",
        state(config.planes.iter().any(|plane| plane.up)),
        active_mtu(config),
        config.paths_per_plane,
        config.base_port
    );
    for (index, plane) in config.planes.iter().enumerate() {
        text += &format!(
            "  plane {index} label {} netdev {} mtu {} state {}\n",
            plane.label,
            plane.ifname,
            plane.mtu,
            state(plane.up)
        );
    }
    for (index, gid) in gid_table(config).iter().enumerate() {
        text += &format!("  gid {index} {} RoCE v2 netdev {}\n", gid.ip, gid.ifname);
    }
    text
}

fn device_json(config: &DeviceConfig) -> Value {
    let planes: Vec<Value> = config
        .planes
        .iter()
        .map(|plane| {
            json!({ "label": plane.label, "netdev": plane.ifname, "ifindex": plane.ifindex, "mtu": plane.mtu,
                "up": plane.up, "addresses": plane.addrs })
        })
        .collect();
    let gids: Vec<Value> = gid_table(config)
        .iter()
        .map(|entry| json!({ "address": entry.ip, "netdev": entry.ifname, "plane": entry.plane, "type": "RoCE v2" }))
        .collect();
    json!({ "device": "metaroce0", "port": 1, "active_mtu": active_mtu(config), "base_port": config.base_port,
        "paths_per_plane": config.paths_per_plane, "planes": planes, "gids": gids })
}
