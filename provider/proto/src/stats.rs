//! Counters, plain u64s kept by the core and read by the driver.

/// Counters of an endpoint.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EndpointStats {
    /// Packets that parsed as nothing of ours.
    pub rx_malformed: u64,
    /// Packets for an unknown connection id.
    pub rx_unknown: u64,
    /// RESETs sent.
    pub resets_sent: u64,
    /// Connections made so far.
    pub connections_opened: u64,
    /// Retransmissions that proved unnecessary.
    pub spurious_retransmits: u64,
    /// Messages refused because no receive was posted.
    pub rnr_sent: u64,
    /// Datagrams dropped: no receive, too small a receive, wrong Q_Key, no such QP.
    pub datagrams_dropped: u64,
    /// Messages of unreliable connections dropped.
    pub uc_dropped: u64,
    /// Paths left because they did not answer while their siblings did, or because their plane went down.
    pub paths_left: u64,
    /// Connections alive now.
    pub connections: u64,
    /// Bytes of transport state (connections, paths, windows), without QPs.
    pub transport_bytes: u64,
}

/// Counters of one path, both directions, summed over connections that use the same plane and path slot.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathStats {
    /// Packets sent (data and control).
    pub tx_packets: u64,
    /// Bytes sent.
    pub tx_bytes: u64,
    /// Data-bearing packets among them.
    pub tx_data_packets: u64,
    /// Data packets that were retransmissions.
    pub retransmits: u64,
    /// Packets declared lost.
    pub lost: u64,
    /// Packets received.
    pub rx_packets: u64,
    /// Bytes received.
    pub rx_bytes: u64,
    /// Data-bearing packets among them.
    pub rx_data_packets: u64,
    /// Packets received with CE.
    pub rx_ce: u64,
    /// Received out of order within the path.
    pub rx_reordered: u64,
    /// Received twice.
    pub rx_duplicates: u64,
    /// Smoothed round trip time, nanoseconds; 0 before the first sample.
    pub srtt_ns: u64,
    /// Congestion window, packets, of the connection used last.
    pub cwnd_packets: u64,
}
