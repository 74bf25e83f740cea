//! Planes, addresses, GIDs and settings of `metaroce0`, read from the environment and `/etc/metaroce.toml`.
//!
//! Used by the kernel-shim (which answers for sysfs and GID ioctls) and by the engine (which binds sockets), so
//! that both see one and the same device.

use std::net::IpAddr;

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
