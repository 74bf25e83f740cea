//! Planes, addresses, GIDs and settings of `metaroce0`, read from the environment and `/etc/metaroce.toml`.
//!
//! Used by the kernel-shim (which answers for sysfs and GID ioctls) and by the engine (which binds sockets), so
//! that both see one and the same device.

#![cfg_attr(test, expect(non_snake_case, reason = "tests are named subject__case"))]

mod error;
mod followed;
mod gid;
mod guid;
mod interface;
mod link;
mod os;
mod resolve;
mod settings;

use std::net::IpAddr;
use std::path::Path;

pub use error::ConfigError;
pub use followed::Followed;
pub use gid::{GID_TABLE_LEN, GidEntry, active_mtu, gid_table, gid_table_len};
pub use guid::node_guid;
pub use interface::{Interface, NetView};
pub use link::link_rate_bps;
pub use os::{announcements, take_announcements};
pub use resolve::{ConfigFile, resolve};
pub use settings::{Setting, settings, unknown_variables};

/// The configuration file that is read when `METAROCE_CONFIG` names no other.
pub const DEFAULT_CONFIG_PATH: &str = "/etc/metaroce.toml";

/// Reads this process's configuration: file, then environment, resolved against the interfaces that exist now.
///
/// Called once by whoever opens the device and by the kernel-shim behind its re-entrancy guard. It reads files and
/// the environment, allocates, and keeps nothing.
///
/// # Errors
/// The first thing that is wrong, as one sentence that names it and its remedy.
pub fn load() -> Result<DeviceConfig, ConfigError> {
    let env = |name: &str| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let file = match env("METAROCE_CONFIG").filter(|path| !path.is_empty()) {
        Some(path) => Some(ConfigFile::read(Path::new(&path))?),
        None => ConfigFile::read_if_present(Path::new(DEFAULT_CONFIG_PATH))?,
    };
    resolve(&env, file.as_ref(), &NetView::of_this_host()?)
}

/// Everything a process needs to know about its `metaroce0`.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceConfig {
    /// Planes in configured order; never empty. Plane 0 gives the device its MTU and its first GID.
    pub planes: Vec<Plane>,
    /// First UDP port of the slot range; slot `s` receives on `base_port + s` (1024 slots).
    pub base_port: u16,
    /// Paths (entropy values) per plane and connection, 1..=16.
    pub paths_per_plane: u8,
    /// Upper bound for the bytes of one UDP payload (header and data); the route MTU bounds it further.
    pub segment_bytes_max: u32,
    /// Packets per transmit burst (GSO), 1..=64; 0 means adaptive.
    pub burst_packets_max: u8,
    /// Requested SO_RCVBUF of the slot's receive socket, bytes.
    pub rcvbuf_bytes: u32,
    /// Use UDP GSO / GRO where the kernel offers it.
    pub gso: bool,
    /// Faults to inject at the engine's edge.
    pub impairment: Impairment,
    /// Fraction of connection management packets to drop, 0.0..=1.0.
    pub cm_loss: f64,
    /// What to log: a level (`warn`) or an env_logger filter (`metaroce_engine=debug`).
    pub log: String,
}

/// One network plane: an interface and the addresses used on it.
#[derive(Debug, Clone, PartialEq)]
pub struct Plane {
    /// Name that pairs this plane with the peer's (the interface's name unless configured).
    pub label: String,
    /// Interface name (`lo`, `eth0`).
    pub ifname: String,
    /// Kernel index of the interface.
    pub ifindex: u32,
    /// Interface MTU in bytes.
    pub mtu: u32,
    /// Hardware address; all zero on loopback.
    pub mac: [u8; 6],
    /// Addresses in GID order: IPv4 first, then global IPv6, then link-local IPv6.
    pub addrs: Vec<IpAddr>,
    /// The interface is up and has carrier.
    pub up: bool,
    /// Bits per second of its link as configured (0: without limit); `None`: as the link says, see [`link_rate_bps`].
    pub rate_bps: Option<u64>,
}

/// Seeded packet faults (`METAROCE_LOSS`, `_REORDER`, `_DUP`, `_DELAY_US`, `_SEED`). Fractions are 0.0..=1.0.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Impairment {
    /// Fraction of packets dropped.
    pub loss: f64,
    /// Fraction of packets held back behind later ones.
    pub reorder: f64,
    /// Fraction of packets delivered twice.
    pub dup: f64,
    /// Delay added to every packet, microseconds.
    pub delay_us: u32,
    /// Seed of the pattern.
    pub seed: u64,
}
