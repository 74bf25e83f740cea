//! What the host gives: planes, addresses, ports, buffers, kernel, environment.

use std::net::UdpSocket;

use metaroce_config::{DeviceConfig, active_mtu, gid_table};
use metaroce_stat::StatFile;

use super::Finding;
use crate::device_config;

/// Slots, each with its UDP port.
const SLOTS: u16 = 1024;
/// With fewer free slots than this, starts that draw one at random take many attempts.
const SLOTS_FREE_MIN: usize = 128;

/// Everything that follows from the configuration; one finding when there is none.
pub fn device() -> Vec<Finding> {
    match metaroce_config::load() {
        Err(error) => {
            let text = error.to_string();
            let (found, remedy) = text.split_once("; ").unwrap_or((&text, "see `metaroce config`"));
            vec![Finding::wrong("config", found, remedy)]
        }
        Ok(config) => {
            let mut findings =
                vec![planes(&config), gids(&config), mtu(&config), ports(&config), buffers(&config)];
            findings.extend(impairment(&config));
            findings
        }
    }
}

fn planes(config: &DeviceConfig) -> Finding {
    let names: Vec<String> = config
        .planes
        .iter()
        .map(|plane| format!("{} ({}, MTU {})", plane.label, plane.ifname, plane.mtu))
        .collect();
    let down: Vec<&str> =
        config.planes.iter().filter(|plane| !plane.up).map(|plane| plane.ifname.as_str()).collect();
    let list = names.join(", ");
    if down.len() == config.planes.len() {
        let remedy = format!("`ip link set {} up`, or choose others with METAROCE_PLANES", down[0]);
        Finding::wrong("planes", format!("no plane of {list} is up"), remedy)
    } else if let Some(first) = down.first() {
        Finding::advice("planes", format!("{list}; {first} is down"), format!("`ip link set {first} up`"))
    } else {
        Finding::good("planes", list)
    }
}

fn gids(config: &DeviceConfig) -> Finding {
    let table = gid_table(config);
    let list: Vec<String> =
        table.iter().enumerate().map(|(index, entry)| format!("{index} = {}", entry.ip)).collect();
    match table.first() {
        None => Finding::wrong("GIDs", "no plane has an address", "give an interface an IP address"),
        Some(first) if first.ip.is_ipv6() => Finding::advice(
            "GIDs",
            format!("{}; index 0 is not IPv4", list.join(", ")),
            "programs that expect an IPv4-mapped GID 0 need an IPv4 address on the first plane",
        ),
        Some(first) if first.ip.is_loopback() && std::env::var_os("METAROCE_PLANES").is_none() => {
            Finding::advice(
                "GIDs",
                format!("{}; other hosts cannot be reached", list.join(", ")),
                "set METAROCE_PLANES to an interface with an address, unless both ends run here",
            )
        }
        Some(_) => Finding::good("GIDs", list.join(", ")),
    }
}

fn mtu(config: &DeviceConfig) -> Finding {
    let mtu = active_mtu(config);
    let first = &config.planes[0];
    let found = format!("active_mtu {mtu} on {} (MTU {})", first.ifname, first.mtu);
    if mtu < 1024 {
        let remedy = format!("`ip link set {} mtu 1500` or more", first.ifname);
        Finding::advice("MTU", found, remedy)
    } else {
        Finding::good("MTU", found)
    }
}

/// Counts free slots by binding them for a moment, as a starting process does.
fn ports(config: &DeviceConfig) -> Finding {
    let last = config.base_port.saturating_add(SLOTS - 1);
    let v6 = UdpSocket::bind(("::", 0)).is_ok();
    let any = if v6 { "::" } else { "0.0.0.0" };
    let free = (config.base_port..=last).filter(|port| UdpSocket::bind((any, *port)).is_ok()).count();
    let found = format!("{free} of {SLOTS} UDP ports from {} are free", config.base_port);
    let remedy = "set METAROCE_BASE_PORT to another range, the same on all hosts";
    match free {
        0 => Finding::wrong("ports", found, remedy),
        1..SLOTS_FREE_MIN => Finding::advice("ports", found, remedy),
        _ => Finding::good("ports", found),
    }
}

fn buffers(config: &DeviceConfig) -> Finding {
    let limit = read_number("/proc/sys/net/core/rmem_max");
    match limit {
        Some(limit) if limit < u64::from(config.rcvbuf_bytes) => Finding::advice(
            "buffers",
            format!(
                "net.core.rmem_max is {limit}, below the {} bytes asked for: fewer packets in flight",
                config.rcvbuf_bytes
            ),
            format!(
                "as root: `sysctl -w net.core.rmem_max={}`; everything works without it, slower",
                config.rcvbuf_bytes
            ),
        ),
        Some(limit) => Finding::good("buffers", format!("net.core.rmem_max is {limit} bytes")),
        None => Finding::good("buffers", "net.core.rmem_max is not readable here; the granted size is used"),
    }
}

fn impairment(config: &DeviceConfig) -> Option<Finding> {
    let faults = config.impairment;
    let active = faults.loss > 0.0 || faults.reorder > 0.0 || faults.dup > 0.0 || faults.delay_us > 0;
    active.then(|| {
        Finding::advice(
            "faults",
            format!(
                "injected: loss {}, reorder {}, dup {}, delay {} us, seed {}",
                faults.loss, faults.reorder, faults.dup, faults.delay_us, faults.seed
            ),
            "unset METAROCE_LOSS, _REORDER, _DUP and _DELAY_US for an undisturbed device",
        )
    })
}

/// Kernel version: UDP GSO needs 4.18, UDP GRO 5.0.
pub fn kernel() -> Finding {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    match (numbers.next(), numbers.next()) {
        (Some(major), Some(_)) if major >= 5 => {
            Finding::good("kernel", format!("{release}, with UDP GSO and GRO"))
        }
        (Some(_), Some(_)) => Finding::advice(
            "kernel",
            format!("{release} lacks UDP GRO (5.0), perhaps GSO (4.18): about a third of the speed"),
            "a newer kernel; everything works without",
        ),
        _ => Finding::good("kernel", "version unknown"),
    }
}

/// Whether processes can publish their counters.
pub fn statistics() -> Finding {
    match StatFile::open_or_create() {
        Ok(file) => {
            let live = file.records().iter().filter(|record| record.live).count();
            Finding::good("statistics", format!("{live} processes have the device open"))
        }
        Err(error) => Finding::advice(
            "statistics",
            format!("no statistics file ({error}); `metaroce stat` will be empty"),
            "make /dev/shm or XDG_RUNTIME_DIR writable",
        ),
    }
}

/// Variables that look like ours and are not, and SYSFS_PATH, which would hide the device.
pub fn environment() -> Vec<Finding> {
    let misspelt = device_config::misspelt().into_iter().map(|name| {
        Finding::advice("environment", format!("{name} is no setting"), "`metaroce config` lists all of them")
    });
    let sysfs = std::env::var_os("SYSFS_PATH").map(|path| {
        let found = format!("SYSFS_PATH={} makes libibverbs look elsewhere", path.display());
        Finding::wrong("environment", found, "unset SYSFS_PATH")
    });
    misspelt.chain(sysfs).collect()
}

fn read_number(path: &str) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}
