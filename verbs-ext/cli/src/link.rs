//! `metaroce link show` and `metaroce gids`: the port and its table of addresses, in the style of the tools for RDMA
//! hardware.

use std::net::{IpAddr, Ipv6Addr};
use std::process::ExitCode;

use metaroce_config::{DeviceConfig, GidEntry, Plane, active_mtu, gid_table};
use serde_json::{Value, json};

use crate::output;
use crate::table::table;

/// `metaroce link ...`
#[derive(Debug, clap::Args)]
pub struct LinkArgs {
    #[command(subcommand)]
    command: Option<LinkCommand>,
    /// Print one JSON array
    #[arg(long, short, global = true)]
    json: bool,
}

#[derive(Debug, Clone, Copy, clap::Subcommand)]
enum LinkCommand {
    /// Show the port, one line per plane
    Show,
}

/// `metaroce gids`
#[derive(Debug, clap::Args)]
pub struct GidArgs {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Prints the planes of the port; 1 when the configuration is wrong.
pub fn show(args: &LinkArgs) -> ExitCode {
    let _ = args.command.unwrap_or(LinkCommand::Show);
    print(|config| {
        if args.json {
            let links = config.planes.iter().enumerate().map(|(at, plane)| link_json(config, at, plane));
            format!("{}\n", Value::Array(links.collect()))
        } else {
            config.planes.iter().map(|plane| link_text(config, plane)).collect()
        }
    })
}

/// Prints the GID table; 1 when the configuration is wrong.
pub fn gids(args: &GidArgs) -> ExitCode {
    print(|config| {
        let entries = gid_table(config);
        if args.json { gids_json(config, &entries) } else { gids_text(config, &entries) }
    })
}

fn print(text: impl FnOnce(&DeviceConfig) -> String) -> ExitCode {
    match metaroce_config::load() {
        Ok(config) => output::end(text(&config), ExitCode::SUCCESS),
        Err(error) => {
            output::tell(error);
            ExitCode::FAILURE
        }
    }
}

/// State and physical state as the kernel names them.
fn states(plane: &Plane) -> (&'static str, &'static str) {
    if plane.up { ("ACTIVE", "LINK_UP") } else { ("DOWN", "DISABLED") }
}

fn link_text(config: &DeviceConfig, plane: &Plane) -> String {
    let (state, physical) = states(plane);
    format!(
        "link metaroce0/1 state {state} physical_state {physical} netdev {} plane {} mtu {} active_mtu {}\n",
        plane.ifname,
        plane.label,
        plane.mtu,
        active_mtu(config)
    )
}

fn link_json(config: &DeviceConfig, at: usize, plane: &Plane) -> Value {
    let (state, physical) = states(plane);
    json!({ "ifname": "metaroce0", "port": 1, "state": state, "physical_state": physical, "netdev": plane.ifname,
        "netdev_index": plane.ifindex, "plane": plane.label, "plane_index": at, "mtu": plane.mtu,
        "active_mtu": active_mtu(config) })
}

/// All eight groups with all their digits, as the kernel shows GIDs.
fn gid_digits(ip: IpAddr) -> String {
    let v6 = match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    Ipv6Addr::segments(&v6).map(|group| format!("{group:04x}")).join(":")
}

fn gids_text(config: &DeviceConfig, entries: &[GidEntry]) -> String {
    let row = |(index, entry): (usize, &GidEntry)| {
        let v4 = if entry.ip.is_ipv4() { entry.ip.to_string() } else { "-".into() };
        let plane = config.planes.get(entry.plane).map_or("?", |plane| &plane.label);
        let (gid, netdev) = (gid_digits(entry.ip), entry.ifname.to_string());
        vec!["metaroce0".into(), "1".into(), index.to_string(), gid, v4, "v2".into(), netdev, plane.into()]
    };
    let rows: Vec<Vec<String>> = entries.iter().enumerate().map(row).collect();
    table(
        &["DEV", "PORT", "INDEX", "GID", "IPv4", "VER", "NETDEV", "PLANE"],
        &["GID", "IPv4", "VER", "NETDEV", "PLANE"],
        &rows,
    )
}

fn gids_json(config: &DeviceConfig, entries: &[GidEntry]) -> String {
    let gid = |(index, entry): (usize, &GidEntry)| {
        json!({ "device": "metaroce0", "port": 1, "index": index, "gid": gid_digits(entry.ip), "address": entry.ip,
            "type": "RoCE v2", "netdev": entry.ifname,
            "plane": config.planes.get(entry.plane).map(|plane| &plane.label) })
    };
    format!("{}\n", Value::Array(entries.iter().enumerate().map(gid).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gid_digits__are_those_of_the_kernel() {
        assert_eq!(gid_digits("192.0.2.1".parse().unwrap()), "0000:0000:0000:0000:0000:ffff:c000:0201");
        assert_eq!(gid_digits("fe80::1".parse().unwrap()), "fe80:0000:0000:0000:0000:0000:0000:0001");
    }
}
