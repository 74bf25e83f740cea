//! Every limit and constant of the core, with units and the reason for its value.

use std::net::IpAddr;

/// Settings of an endpoint; fixed for its life.
#[derive(Debug, Clone)]
pub struct Config {
    /// Our slot, 0..1024.
    pub slot: u16,
    /// UDP port of slot 0.
    pub base_port: u16,
    /// Identity of this life of the endpoint; random, never 0.
    pub incarnation: u64,
    /// Seed of connection ids and other nonces.
    pub seed: u64,
    /// Our planes in order.
    pub planes: Vec<PlaneConfig>,
    /// Paths per plane and connection.
    pub paths_per_plane: u8,
    /// Entropy values (source ports) the driver offers per plane.
    pub entropies_per_plane: u8,
    /// Upper bound of a UDP payload in bytes.
    pub segment_bytes_max: u32,
    /// Packets per burst; 1 in the compliance suite.
    pub burst_packets_max: u8,
    /// Bytes all peers together may have in flight towards us (what our receive buffer really holds).
    pub receive_budget_bytes: u32,
}

/// One plane as the core sees it.
#[derive(Debug, Clone)]
pub struct PlaneConfig {
    /// Label that pairs it with the peer's plane.
    pub label: String,
    /// Our addresses on it.
    pub addrs: Vec<IpAddr>,
    /// Interface MTU in bytes.
    pub mtu: u32,
}
