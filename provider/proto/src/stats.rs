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

impl PathStats {
    /// Counters added up; the round trip time is the smallest there is, the window the sum.
    pub fn sum(all: &[PathStats]) -> PathStats {
        let mut sum = PathStats::default();
        for s in all {
            sum.tx_packets += s.tx_packets;
            sum.tx_bytes += s.tx_bytes;
            sum.tx_data_packets += s.tx_data_packets;
            sum.retransmits += s.retransmits;
            sum.lost += s.lost;
            sum.rx_packets += s.rx_packets;
            sum.rx_bytes += s.rx_bytes;
            sum.rx_data_packets += s.rx_data_packets;
            sum.rx_ce += s.rx_ce;
            sum.rx_reordered += s.rx_reordered;
            sum.rx_duplicates += s.rx_duplicates;
            sum.cwnd_packets += s.cwnd_packets;
        }
        sum.srtt_ns = all.iter().map(|s| s.srtt_ns).filter(|ns| *ns > 0).min().unwrap_or(0);
        sum
    }
}

/// What one path of one connection has carried since the connection was made, whatever ports it used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathTally {
    /// Data packets sent, retransmissions included.
    pub sent: u64,
    /// Their bytes (UDP payload).
    pub sent_bytes: u64,
    /// Those that carried something again.
    pub retransmitted: u64,
    /// Packets the peer has acknowledged.
    pub delivered: u64,
    /// Their bytes, without those that were acknowledged after they had been given up.
    pub delivered_bytes: u64,
    /// Packets declared lost, by a gap or by silence.
    pub lost: u64,
    /// Packets declared lost that had arrived: their repair was not needed.
    pub spurious: u64,
    /// Those among them that later packets had overtaken.
    pub reordered: u64,
    /// Packets that arrived with the ECN mark CE, as far as acknowledgements have told.
    pub marked: u64,
    /// The peer's count of them that was told last; it begins again with each generation.
    pub(crate) marks_told: u32,
}

impl PathTally {
    /// An acknowledgement told of `newly` packets in flight with `bytes`, of `overtaken` ones that a gap had declared
    /// lost and of `ended` ones that silence had.
    pub(crate) fn on_ack(&mut self, newly: u64, bytes: u64, overtaken: u64, ended: u64) {
        self.delivered += newly + overtaken + ended;
        self.delivered_bytes += bytes;
        self.spurious += overtaken + ended;
        self.reordered += overtaken;
    }
    /// The peer's count of CE marks; an old acknowledgement may arrive late.
    pub(crate) fn on_marks(&mut self, told: u32) {
        let more = told.wrapping_sub(self.marks_told);
        if (more as i32) > 0 {
            self.marked += u64::from(more);
            self.marks_told = told;
        }
    }
}

/// Why a path is in the state it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// It was made so.
    Fresh,
    /// It did not answer while its siblings did.
    Silence,
    /// Half of its plane's paths did not.
    Plane,
    /// The link of its plane went down.
    Link,
    /// The peer says that the plane is down at its end.
    Peer,
    /// It has answered again.
    Answered,
    /// An operator or the application wanted it.
    Operator,
}

impl Cause {
    /// One word for people and programs.
    pub fn name(self) -> &'static str {
        match self {
            Cause::Fresh => "fresh",
            Cause::Silence => "silence",
            Cause::Plane => "plane",
            Cause::Link => "link",
            Cause::Peer => "peer",
            Cause::Answered => "answered",
            Cause::Operator => "operator",
        }
    }
}
