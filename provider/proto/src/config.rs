//! Every limit and constant of the core, with units and the reason for its value.

use crate::types::Nanos;
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
    /// Packets per burst; 1 in the compliance suite; 0: adaptive, up to 15.
    pub burst_packets_max: u8,
    /// First path PSN and connection packet number; anything but 0 is for tests of the wrap.
    pub first_psn: u32,
    /// First connection packet number.
    pub first_cpn: u32,
    /// Bytes of the largest datagram (UD): the active MTU.
    pub datagram_bytes_max: u32,
    /// Bytes all peers together may have in flight towards us (what our receive buffer really holds).
    pub receive_budget_bytes: u32,
    /// Timing, windows and algorithms.
    pub tuning: Tuning,
}

/// Timing, windows and algorithms: what depends on the machine and the network, not on the protocol.
#[derive(Debug, Clone)]
pub struct Tuning {
    /// Probe timeout floor: a peer that shares its cores is descheduled for a millisecond or two without being in
    /// trouble; one with cores of its own is not.
    pub pto_min_ns: Nanos,
    /// How long an acknowledgement waits for a packet to ride on.
    pub ack_delay_ns: Nanos,
    /// Silence on a path, while packets sent later on others are answered, after which it is left.
    pub leave_after_ns: Nanos,
    /// Delay above twice a path's least that is no sign of a queue in the network.
    pub delay_slack_ns: Nanos,
    /// Share of packets lost lately, in 1/65536, from which on the tail of what is sent goes twice (MR-LOSS-9); `u32::MAX`:
    /// never. It trades bandwidth nobody uses at that moment, and processor time, for the time of a repair.
    pub tail_copies_from: u32,
    /// How far ahead of a paced link packets are handed over: a burst on its way while the next wake-up comes.
    pub link_ahead_ns: Nanos,
    /// The same in bytes, where that is longer, but not beyond `host_slack_ns`.
    pub link_ahead_bytes: u32,
    /// How much later than the network explains a host may answer, or go on sending, because its cores have other work:
    /// rate hints count that long, and what was not sent meanwhile may be caught up.
    pub host_slack_ns: Nanos,
    /// Bytes in flight per connection whatever the peer grants.
    pub connection_bytes_max: u32,
    /// What steers the window of a path.
    pub algorithm: Algorithm,
}

/// How the window of a path is steered. A further algorithm is a further variant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// Additive increase, decrease by what ECN marks say.
    EcnAimd(EcnAimd),
    /// A constant window, for comparison.
    Fixed {
        /// Packets.
        packets: u32,
    },
}

/// Parameters of [`Algorithm::EcnAimd`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EcnAimd {
    /// First window, packets.
    pub initial: u32,
    /// Least window, packets.
    pub least: u32,
    /// Marked packets that cost one packet of window.
    pub mark_divisor: u32,
    /// Cut for loss beside rising delay, percent of the window.
    pub loss_cut_percent: u32,
}

impl Default for EcnAimd {
    fn default() -> Self {
        EcnAimd {
            initial: limits::CWND_INITIAL,
            least: limits::CWND_MIN,
            mark_divisor: 3,
            loss_cut_percent: 30,
        }
    }
}

impl Default for Tuning {
    fn default() -> Self {
        Tuning {
            pto_min_ns: limits::PTO_MIN_NS,
            ack_delay_ns: limits::ACK_DELAY_NS,
            leave_after_ns: limits::LEAVE_AFTER_NS,
            delay_slack_ns: limits::DELAY_SLACK_NS,
            tail_copies_from: u32::MAX,
            link_ahead_ns: limits::LINK_AHEAD_NS,
            link_ahead_bytes: 0,
            host_slack_ns: 0,
            connection_bytes_max: limits::CONN_BYTES_MAX,
            algorithm: Algorithm::EcnAimd(EcnAimd::default()),
        }
    }
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
    /// Bits per second of its link, both ways; 0: not known. Known rates pace what is sent and let receivers give rate
    /// hints.
    pub rate_bps: u64,
}

/// Constants of the protocol engine that are not settings, each with its reason.
pub mod limits {
    use crate::types::Nanos;

    /// Bytes of an Ethernet frame of a raw packet QP: what jumbo frames have.
    pub const FRAME_BYTES_MAX: usize = 9018;
    /// Packets per path between the oldest unresolved and the next. A SACK tells of 256; receivers acknowledge every 12
    /// packets, so each number is told of twenty times before it falls out of that.
    pub const PATH_SPAN: u32 = 8192;
    /// First congestion window: one small burst on each of four paths fills a 50-packet receive buffer.
    pub const CWND_INITIAL: u32 = 32;
    /// A path never stops altogether: two packets keep an ACK clock.
    pub const CWND_MIN: u32 = 2;
    /// Connection packet numbers in flight: 2^21 of 256 bytes are 30 ms at 100 Gb/s. The bitmap grows to what is used.
    pub const CPN_WINDOW: u64 = 1 << 21;
    /// Messages per stream beyond the oldest incomplete one; bounds the responder's reassembly state.
    pub const MESSAGE_WINDOW: u16 = 256;
    /// Bytes in flight per connection whatever the peer grants: beyond 2 MiB loopback gains nothing.
    pub const CONN_BYTES_MAX: u32 = 2 << 20;
    /// Queue pairs of an endpoint: the index part of a QPN, without three numbers that are reserved.
    pub const QPS_MAX: u32 = (1 << crate::types::Qpn::INDEX_BITS) - 3;
    /// Multicast groups that an endpoint takes part in: bounds what a driver has to join.
    pub const GROUPS_MAX: usize = 1024;
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
    /// Doublings of the probe timeout, as long as it stays below `PTO_BACKED_OFF_MAX_NS`.
    pub const PTO_BACKOFF_MAX: u32 = 6;
    /// Probe timeout after doubling: short, because the patience of a QP must hold many probes. A longer one to begin with is
    /// doubled twice all the same.
    pub const PTO_BACKED_OFF_MAX_NS: Nanos = 12_000_000;
    /// Probes without an answer, while packets sent later on siblings are answered, after which a path is shunned. Two are
    /// lost together once in a hundred where packets and acknowledgements are lost one in ten; it comes back unharmed.
    pub const STRIKES_TO_SHUN: u32 = 2;
    /// How long a shunned path has to stay silent to be left.
    pub const LEAVE_AFTER_NS: Nanos = 15_000_000;
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
    /// Delay above twice a path's least that is no sign of a queue in the network: bursts and acknowledgements take time,
    /// and on shared cores either end may have to wait for its turn.
    pub const DELAY_SLACK_NS: Nanos = 3_000_000;
    /// Bytes beside the UDP payload that a packet takes of a link: IPv4, UDP, Ethernet, preamble and gap.
    pub const WIRE_OVERHEAD_BYTES: u32 = 66;
    /// Last packets of each path that go twice: what is lost before them shows by a gap.
    pub const TAIL_COPIES: u32 = 2;
    /// One more for each such share of packets lost lately, in 1/65536: about 1.5 %.
    pub const TAIL_COPIES_SHARE: u32 = 1024;
    /// How far ahead of a paced link packets are handed over by a driver that is always on time.
    pub const LINK_AHEAD_NS: Nanos = 1_000;
    /// Rate that a connection may catch up, in time: others may have the link when its turn comes.
    pub const PACE_CREDIT_NS: Nanos = 5_000;
    /// Packets per burst when it is adaptive: 15 of 4 KiB fill a GSO datagram, and the rate is flat beyond.
    pub const BURST_ADAPTIVE: u32 = 15;
    /// Packets a connection sends before the first rate hint tells it more.
    pub const FIRST_WINDOW_PACKETS: u32 = 16;
    /// Time at the rate hinted last that is sent after a pause, or to begin with, before there is a fresh hint.
    pub const FIRST_WINDOW_SPAN_NS: Nanos = 50_000;
    /// Idle connections of which one at a time is expected to begin to send.
    pub const PEERS_PER_NEWCOMER: u64 = 16;
    /// A rate hint counts for this many round trips,
    pub const HINT_LIFE_RTTS: u64 = 4;
    /// or for this many packets at its own rate,
    pub const HINT_LIFE_PACKETS: u64 = 8;
    /// or at least this long: acknowledgements may be delayed by a busy host.
    pub const HINT_LIFE_MIN_NS: Nanos = 200_000;
    /// Part of what is missing to the hinted window that a path window grows by in a round trip: one in this many.
    pub const HINT_APPROACH: u32 = 16;
    /// Part of the links' rate that is shared out, in 1/1024: what is left drains queues.
    pub const HINT_FACTOR_MAX: u64 = 1009;
    /// Least part: a queue of a thousand first packets is gone in two of their rounds.
    pub const HINT_FACTOR_MIN: u64 = 512;
    /// Growth of that part when no marks come, or the links are not full any more.
    pub const HINT_RECOVERY: u64 = 100;
    /// Marked part of the packets, in 1/1024, that lowers nothing.
    pub const HINT_MARKS_BEARABLE: u64 = 20;
    /// Part of the links' rate, in 1/1024, from which on they count as full.
    pub const HINT_FULL: u64 = 1000;
    /// Least time between two changes of that part.
    pub const HINT_ADAPT_NS: Nanos = 50_000;
    /// Least packets to judge marks by.
    pub const HINT_ADAPT_PACKETS: u32 = 32;
    /// Span over which the rate of a sender that our hint does not limit is measured.
    pub const DEMAND_SPAN_NS: Nanos = 20_000;
    /// Added per sender to the interval at which silent ones are looked for.
    pub const DEMAND_PER_SENDER_NS: Nanos = 100;
    /// Silence after which a sender wants nothing any more, unless its rate explains it.
    pub const DEMAND_IDLE_NS: Nanos = 60_000;
    /// How long after its last data a sender still counts when the receive budget is shared out.
    pub const SENDER_ACTIVE_NS: Nanos = 10_000_000;
}
