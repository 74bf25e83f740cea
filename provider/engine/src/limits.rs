//! Every limit and constant of the UDP driver, with its unit and the reason for its value.

/// Packets a step receives before it moves on: with a GRO run of 15 per message about 50 us of work, so that
/// whoever drives (an application inside `ibv_poll_cq`) gets its thread back.
pub(crate) const STEP_RX_PACKETS_MAX: usize = 64;
/// Packets a step sends before it moves on; the same bound for the other direction.
pub(crate) const STEP_TX_PACKETS_MAX: usize = 64;
/// Messages per `recvmmsg`: eight GRO runs are 120 packets, and eight single packets hide the cost of the call.
pub(crate) const RX_MESSAGES: usize = 8;
/// Bytes per receive buffer: the largest UDP datagram, which is also the largest GRO run.
pub(crate) const RX_BUFFER_BYTES: usize = 64 << 10;
/// Timers wait for the socket to be drained, but never longer than this (nanoseconds): a peer that keeps the socket
/// full must not stop another one's retransmissions.
pub(crate) const TIMER_LATE_NS_MAX: u64 = 5_000_000;
/// When the kernel's send buffer is full, the step tries again after this time (nanoseconds): a few bursts' worth.
pub(crate) const TX_RETRY_NS: u64 = 50_000;

/// How far ahead of a paced link packets are handed over (nanoseconds): the background thread wakes up about this late,
/// and the kernel's queues, not ours, keep the link busy meanwhile.
pub(crate) const LINK_AHEAD_NS: u64 = 100_000;
/// The same in bytes, for slow links: a thread that lost its core for a few milliseconds must not cost them rate.
pub(crate) const LINK_AHEAD_BYTES: u32 = 256 << 10;
/// How late a host may be because its cores have other work (nanoseconds): a time slice.
pub(crate) const HOST_SLACK_NS: u64 = 4_000_000;

/// Datagrams per GSO send: the kernel's UDP_MAX_SEGMENTS before 6.8.
pub(crate) const GSO_PACKETS_MAX: usize = 64;
/// Bytes per GSO send: 65,535 less the largest IP and UDP headers, rounded down.
pub(crate) const GSO_BYTES_MAX: usize = 65_000;
/// The kernel's UIO_MAXIOV.
pub(crate) const IOVECS_MAX: usize = 1024;
/// Packets per burst when the configuration says "adaptive", if they fit a GSO datagram: 15 of 4160 B fill it, and these
/// of an MTU of 1500. What a burst costs is mostly per datagram: with 15 of those a third of the bandwidth is lost.
pub(crate) const BURST_PACKETS_DEFAULT: u8 = 44;
/// Requested SO_SNDBUF of each sending socket, bytes: several GSO runs; the kernel lowers it to wmem_max.
pub(crate) const SNDBUF_BYTES: i32 = 1 << 20;

/// Slots of the UDP port range: 10 bits of the QPN.
pub(crate) const SLOTS: u16 = 1024;
/// Least number of source ports per plane and address family; a path in trouble changes to an unused one.
pub(crate) const ENTROPIES_MIN: u8 = 8;
/// Range of source ports that fabrics expect for entropy.
pub(crate) const ENTROPY_PORTS: std::ops::RangeInclusive<u16> = 0xC000..=0xFFFF;
/// Attempts to find a free source port (the range overlaps the ephemeral one) before giving up.
pub(crate) const ENTROPY_BIND_TRIES: u32 = 256;
/// Part of the granted receive buffer that peers may fill together. The rest is slack for packets smaller than a
/// segment, whose bookkeeping in the kernel outweighs them.
pub(crate) const RECEIVE_BUDGET_PERCENT: u64 = 75;
/// Upper bound of the receive budget, bytes: 0.5 to 2 MiB in flight is best, more only builds queues.
pub(crate) const RECEIVE_BUDGET_BYTES_MAX: u64 = 2 << 20;

/// QP indices of one slot (14 bits of the QPN).
pub(crate) const QPS_MAX: usize = 1 << 14;
/// Shared receive queues of a device; bounds the table of their counters.
pub(crate) const SRQS_MAX: usize = 1 << 14;
/// Entries of a CQ; bounds what an application can make us allocate (32 B each).
pub(crate) const CQE_MAX: u32 = 1 << 22;

/// A poller that drove less than this ago (nanoseconds) is taken to go on driving.
pub(crate) const POLL_RECENT_NS: u64 = 50_000;
/// How long the background thread leaves the socket to the pollers before it looks again (nanoseconds): the most a
/// packet waits when a poller stops.
pub(crate) const BACKOFF_NS: u64 = 200_000;
/// How long after the last packet the background thread of a passive application looks again before it parks
/// (nanoseconds): longer than a round trip, shorter than a wake-up saved twice.
pub(crate) const LINGER_NS: u64 = 50_000;
/// An application that ran no step for this long (nanoseconds) is passive.
pub(crate) const PASSIVE_NS: u64 = 1_000_000;
/// Offering the processor and getting it back later than this (nanoseconds) means a time slice was lost.
pub(crate) const SLICE_LOST_NS: u64 = 300_000;
/// Pause of lingering after a lost slice: first, and its ceiling (doubling; nanoseconds).
pub(crate) const LINGER_BAR_NS_MIN: u64 = 20_000_000;
/// Ceiling of that pause.
pub(crate) const LINGER_BAR_NS_MAX: u64 = 1_000_000_000;
/// Unneeded wake-ups in a row before the background thread leaves the socket to the pollers.
pub(crate) const UNNEEDED_WAKEUPS: u32 = 4;
/// Empty polls between two wake-ups of the background thread that prove a poller at work.
pub(crate) const POLLS_AT_WORK: u32 = 4;
/// Steps of pollers in a row that found nothing to do before the processor is offered to others: pollers that share
/// one must not spin out their time slices, but each offer costs as much as a step.
pub(crate) const IDLE_POLLS_BEFORE_YIELD: u32 = 4;
/// Sends of a QP not yet polled complete from which on small ones may wait for each other: below it somebody may be
/// waiting for an answer.
pub(crate) const LAZY_DEPTH_MIN: u32 = 16;
/// The largest message that waits (bytes): larger ones fill packets of their own.
pub(crate) const LAZY_BYTES_MAX: u32 = 1024;
/// Sends that wait at most: they fill a packet.
pub(crate) const LAZY_STAGE_MAX: usize = 32;
/// Rounds a driver goes on for others who rang meanwhile, before it hands over to the background thread.
pub(crate) const HANDOVER_ROUNDS: u32 = 16;

/// Least time between two publications of the counters (nanoseconds).
pub(crate) const PUBLISH_NS: u64 = 1_000_000;
/// Counters of an endpoint that fell silent are published this long (nanoseconds) after the last ones.
pub(crate) const PUBLISH_LAST_NS: u64 = 20_000_000;
/// Longest wait (nanoseconds) for the peers to confirm our CLOSE at exit (MR-CLOSE-1).
pub(crate) const CLOSE_NS_MAX: u64 = 50_000_000;

/// An impaired packet is held back behind at most this many others: enough to cross a burst.
pub(crate) const REORDER_BEHIND_MAX: u64 = 16;
/// A packet held back is released after this time (nanoseconds) if no others come to pass it.
pub(crate) const REORDER_FLUSH_NS: u64 = 500_000;
/// Packets the impairment holds at most (delay line and reordering together); more are dropped and counted.
pub(crate) const IMPAIR_HELD_MAX: usize = 1 << 16;
