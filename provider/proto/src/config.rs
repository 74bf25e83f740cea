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
    /// First path PSN and connection packet number; anything but 0 is for tests of the wrap.
    pub first_psn: u32,
    /// First connection packet number.
    pub first_cpn: u32,
    /// Bytes of the largest datagram (UD): the active MTU.
    pub datagram_bytes_max: u32,
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

/// Constants of the protocol engine that are not settings, each with its reason.
pub mod limits {
    use crate::types::Nanos;

    /// Bytes of an Ethernet frame of a raw packet QP: what jumbo frames have.
    pub const FRAME_BYTES_MAX: usize = 9018;
    /// Packets per path between the oldest unresolved and the next: what a 256-bit SACK can tell.
    pub const PATH_SPAN: u32 = 256;
    /// First congestion window: one small burst on each of four paths fills a 50-packet receive buffer.
    pub const CWND_INITIAL: u32 = 32;
    /// A path never stops altogether: two packets keep an ACK clock.
    pub const CWND_MIN: u32 = 2;
    /// Connection packet numbers in flight; 2^16 is what 32-bit numbers and 16-bit counts allow comfortably.
    pub const CPN_WINDOW: u64 = 1 << 16;
    /// Messages per stream beyond the oldest incomplete one; bounds the responder's reassembly state.
    pub const MESSAGE_WINDOW: u16 = 256;
    /// Bytes in flight per connection whatever the peer grants: beyond 2 MiB loopback gains nothing.
    pub const CONN_BYTES_MAX: u32 = 2 << 20;
    /// Bytes a UD receive begins with: the Global Routing Header.
    pub const GRH_BYTES: u32 = 40;
    /// How long an unreliable connection looks for its peer before what is posted counts as sent into the void.
    pub const UNRELIABLE_PATIENCE_NS: Nanos = 500_000_000;
    /// Refusals waiting for confirmation per connection; further packets that would be refused count as not received.
    pub const REFUSALS_MAX: usize = 24;
    /// Responses a stream may be owed: its message window, twice.
    pub const JOBS_MAX: usize = 512;
    /// Retransmissions an idle connection keeps room for.
    pub const RETRANSMITS_KEPT: usize = 32;
    /// CREDIT frames per acknowledging packet.
    pub const CREDITS_PER_ACK: usize = 8;
    /// How far the attempt of a stream must rise to prove that its requester lives: more refusals than can be under way,
    /// far fewer than half of the 16-bit circle.
    pub const PROOF_ATTEMPTS: u16 = 1000;
    /// ACK frames per packet: with refusals and credits they stay below the smallest IPv6 MTU.
    pub const ACKS_PER_PACKET: usize = 8;
    /// Whole small messages that share one datagram.
    pub const FRAMES_PER_PACKET: u8 = 32;
    /// How long an acknowledgement waits for a packet to ride on.
    pub const ACK_DELAY_NS: Nanos = 40_000;
    /// Data packets after which an acknowledgement waits no longer: a quarter of the smallest receive buffer.
    pub const ACK_EVERY: u32 = 12;
    /// Probe timeout before the first sample.
    pub const PTO_INITIAL_NS: Nanos = 10_000_000;
    /// Probe timeout floor: on shared cores a peer is descheduled for a millisecond or two without being in trouble.
    pub const PTO_MIN_NS: Nanos = 3_000_000;
    /// Probe timeout ceiling before backoff.
    pub const PTO_MAX_NS: Nanos = 200_000_000;
    /// Doublings of the probe timeout: few, because the patience of a QP must hold many probes.
    pub const PTO_BACKOFF_MAX: u32 = 2;
    /// Probes without an answer, while siblings make progress, after which a path is left. Two are lost together once in
    /// a hundred where packets and acknowledgements are lost one in ten.
    pub const PROBES_UNANSWERED: u32 = 3;
    /// Times an acknowledgement is told: the loss of one must not stall a path whose window is full.
    pub const ACK_TOLD: u8 = 2;
    /// Probes without an answer after which it is looked whether anybody still wants the peer.
    pub const PTO_HOPELESS: u32 = 6;
    /// Reorder tolerance ceiling: above it a gap is a loss whatever the path did before.
    pub const REORDER_TOLERANCE_MAX_NS: Nanos = 10_000_000;
    /// First reorder tolerance after a spurious repair without a round trip sample.
    pub const REORDER_TOLERANCE_MIN_NS: Nanos = 50_000;
    /// Acknowledged packets after which the tolerance halves.
    pub const REORDER_DECAY_ACKS: u32 = 4096;
    /// Pause before a path that was left is probed, and its ceiling (doubling).
    pub const PROBE_FIRST_NS: Nanos = 1_000_000;
    /// Ceiling of that pause: a repaired path is used again within a second.
    pub const PROBE_MAX_NS: Nanos = 500_000_000;
    /// HELLO repeats: first interval and its ceiling.
    pub const HELLO_FIRST_NS: Nanos = 2_000_000;
    /// Ceiling of the HELLO interval.
    pub const HELLO_MAX_NS: Nanos = 25_000_000;
    /// HELLOs of the full size before smaller ones are tried between them (about 150 ms): a peer that is only late must
    /// not get small packets for life.
    pub const HELLOS_FULL_SIZE: u32 = 9;
    /// How long a connection that a stranger's HELLO made waits to be established.
    pub const STRANGER_PATIENCE_NS: Nanos = 5_000_000_000;
    /// Connections made by strangers and not yet established, at most: spoofed HELLOs must not use up the table.
    pub const STRANGERS_MAX: usize = 256;
    /// Addresses remembered per peer.
    pub const PEER_IPS_MAX: usize = 64;
    /// Pause after a QP was found not ready: first and ceiling (doubling).
    pub const NOT_READY_FIRST_NS: Nanos = 200_000;
    /// Ceiling of that pause.
    pub const NOT_READY_MAX_NS: Nanos = 10_000_000;
    /// CLOSE repeats.
    pub const CLOSE_EVERY_NS: Nanos = 2_000_000;
    /// RESETs per millisecond at most: a flood of stray packets must not make us an amplifier.
    pub const RESETS_PER_MS: u32 = 4;
    /// Connections of an endpoint (20 index bits of the id).
    pub const CONNECTIONS_MAX: usize = 1 << 16;
    /// A peer that was silent this long while nothing of a live stream was outstanding is forgotten.
    pub const DEAD_AFTER_NS: Nanos = 30_000_000_000;
    /// Bytes of a Write's tail that are held back until all before them is placed (design D6).
    pub const HOLD_BYTES: usize = 64;
    /// Bytes the header, one frame's header and a little slack take of a segment.
    pub const OVERHEAD_BYTES: u32 = 88;
    /// Receive budget never granted below this many bytes: two packets keep any sender moving.
    pub const BUDGET_MIN: u32 = 16 << 10;
    /// How long after its last data a sender still counts when the receive budget is shared out.
    pub const SENDER_ACTIVE_NS: Nanos = 10_000_000;
}
