//! Names and places of the counters; the names are those of `metaroce_proto::stats`.

/// Declares a counter enum with its names, in the order of the file.
macro_rules! counters {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal, $kind:ident;)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$vdoc])* $variant,)* }

        impl $name {
            /// All of them, in the order of the file.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// The name users see.
            pub const fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)* }
            }

            /// The value goes both ways; else it only grows.
            pub const fn is_gauge(self) -> bool {
                matches!(self.kind(), Kind::Gauge)
            }

            /// Whether the value only grows (a counter) or goes both ways (a gauge).
            pub(crate) const fn kind(self) -> Kind {
                match self { $($name::$variant => Kind::$kind,)* }
            }
        }
    };
}

/// How a value behaves when its process opens the device again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Keeps counting on from where the former life of the device ended.
    Counter,
    /// Holds the present value.
    Gauge,
}

counters! {
    /// Counters of a process's whole device.
    DeviceCounter {
        /// Packets sent (data and control).
        TxPackets = "tx_packets", Counter;
        /// UDP payload bytes sent.
        TxBytes = "tx_bytes", Counter;
        /// Packets received.
        RxPackets = "rx_packets", Counter;
        /// UDP payload bytes received.
        RxBytes = "rx_bytes", Counter;
        /// Data packets that were retransmissions.
        Retransmits = "retransmits", Counter;
        /// Packets declared lost.
        Lost = "lost", Counter;
        /// Retransmissions that proved unnecessary.
        SpuriousRetransmits = "spurious_retransmits", Counter;
        /// Messages refused because no receive was posted.
        RnrSent = "rnr_sent", Counter;
        /// Packets that parsed as nothing of ours.
        RxMalformed = "rx_malformed", Counter;
        /// Packets for an unknown connection id.
        RxUnknown = "rx_unknown", Counter;
        /// RESETs sent.
        ResetsSent = "resets_sent", Counter;
        /// Packets dropped by injected loss (`METAROCE_LOSS`).
        ImpairDropped = "impair_dropped", Counter;
        /// Data packets among them.
        ImpairDroppedData = "impair_dropped_data", Counter;
        /// Datagrams the kernel dropped because the receive buffer was full.
        RxOverflows = "rx_overflows", Counter;
        /// Connections made so far.
        ConnectionsOpened = "connections_opened", Counter;
        /// Connections alive now.
        Connections = "connections", Gauge;
        /// Queue pairs alive now.
        Qps = "qps", Gauge;
        /// Bytes of transport state (connections, paths, windows), without QPs.
        TransportBytes = "transport_bytes", Gauge;
        /// Slot (UDP port minus base port) the process receives on.
        Slot = "slot", Gauge;
    }
}

counters! {
    /// Counters of one path, both directions, summed over connections that use the same plane and path.
    PathCounter {
        /// Packets sent (data and control).
        TxPackets = "tx_packets", Counter;
        /// UDP payload bytes sent.
        TxBytes = "tx_bytes", Counter;
        /// Data-bearing packets among them.
        TxDataPackets = "tx_data_packets", Counter;
        /// Data packets that were retransmissions.
        Retransmits = "retransmits", Counter;
        /// Packets declared lost.
        Lost = "lost", Counter;
        /// Packets received.
        RxPackets = "rx_packets", Counter;
        /// UDP payload bytes received.
        RxBytes = "rx_bytes", Counter;
        /// Data-bearing packets among them.
        RxDataPackets = "rx_data_packets", Counter;
        /// Packets received with the ECN mark CE.
        RxCe = "rx_ce", Counter;
        /// Packets received out of order within the path.
        RxReordered = "rx_reordered", Counter;
        /// Packets received twice.
        RxDuplicates = "rx_duplicates", Counter;
        /// Smoothed round trip time, nanoseconds; 0 before the first sample.
        SrttNs = "srtt_ns", Gauge;
        /// Congestion window, packets, of the connection used last.
        CwndPackets = "cwnd_packets", Gauge;
    }
}
