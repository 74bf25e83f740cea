//! Publishes the counters in the process's shared statistics record, at most once a millisecond while packets flow and
//! once more after they have stopped.

use metaroce_config::DeviceConfig;
use metaroce_proto::Nanos;
use metaroce_proto::stats::PathStats;
use metaroce_stat::{DeviceCounter, PathCounter, StatFile, StatWriter};

use crate::engine::{Done, Io};
use crate::limits::{PUBLISH_LAST_NS, PUBLISH_NS};
use crate::outbox::Outbox;
use crate::udp::rx::Rx;

/// The record and when it was written.
pub(crate) struct Snapshot {
    writer: Option<StatWriter>,
    slot: u16,
    last: Nanos,
    /// Something has changed since.
    stale: bool,
    paths: Vec<PathStats>,
}

impl Snapshot {
    /// Claims a record. Without one the device works all the same.
    pub(crate) fn new(config: &DeviceConfig, slot: u16) -> Snapshot {
        let writer = match StatFile::open_or_create() {
            Ok(file) => file.claim(&program_name()),
            Err(error) => {
                log::info!("no statistics: {error}");
                None
            }
        };
        if let Some(writer) = &writer {
            let per_plane = usize::from(config.paths_per_plane);
            for (p, plane) in config.planes.iter().enumerate() {
                for path in 0..per_plane {
                    writer.set_path_identity(p * per_plane + path, &plane.label, path as u32);
                }
            }
        }
        Snapshot { writer, slot, last: 0, stale: true, paths: Vec::new() }
    }
}

impl Snapshot {
    /// The slot of the device.
    pub(crate) fn slot(&self) -> u16 {
        self.slot
    }
}

impl Io {
    /// Publishes if it is time. Gives when it will be, if something is left to be published.
    pub(crate) fn publish_counters(&mut self, now: Nanos, out: &Outbox, done: &Done) -> Option<Nanos> {
        self.snapshot.writer.as_ref()?;
        self.snapshot.stale |= done.received > 0 || done.sent > 0;
        if !self.snapshot.stale {
            return None;
        }
        let active = done.received > 0 || done.sent > 0;
        let wait = if active { PUBLISH_NS } else { PUBLISH_LAST_NS };
        if now < self.snapshot.last + wait {
            return Some(self.snapshot.last + PUBLISH_LAST_NS);
        }
        self.snapshot.last = now;
        self.snapshot.stale = false;
        self.store_counters(out);
        None
    }

    /// Publishes the final values.
    pub(crate) fn publish_last_counters(&mut self, out: &Outbox) {
        self.store_counters(out);
    }

    fn store_counters(&mut self, out: &Outbox) {
        let Some(writer) = &self.snapshot.writer else { return };
        let endpoint = self.endpoint.stats();
        let paths = &mut self.snapshot.paths;
        self.endpoint.path_stats(paths);
        let sum = |field: fn(&PathStats) -> u64| paths.iter().map(field).sum::<u64>();
        let by_groups = |count: fn(&Rx) -> u64| self.groups.as_ref().map_or(0, |g| count(&g.rx));
        let received = |count: fn(&Rx) -> u64| count(&self.rx) + by_groups(count);
        let (dropped, dropped_data) = self.impair.as_ref().map_or((0, 0), |i| (i.dropped, i.dropped_data));
        // Packets the kernel refused are sent and lost as far as the core knows.
        let values = [
            (DeviceCounter::TxPackets, sum(|p| p.tx_packets).saturating_sub(self.tx.counters().refused)),
            (DeviceCounter::TxBytes, sum(|p| p.tx_bytes)),
            (DeviceCounter::RxPackets, sum(|p| p.rx_packets)),
            (DeviceCounter::RxBytes, sum(|p| p.rx_bytes)),
            (DeviceCounter::Retransmits, sum(|p| p.retransmits)),
            (DeviceCounter::Lost, sum(|p| p.lost)),
            (DeviceCounter::SpuriousRetransmits, endpoint.spurious_retransmits),
            (DeviceCounter::RnrSent, endpoint.rnr_sent),
            (DeviceCounter::RxMalformed, endpoint.rx_malformed + received(Rx::unreadable)),
            (DeviceCounter::RxUnknown, endpoint.rx_unknown),
            (DeviceCounter::ResetsSent, endpoint.resets_sent),
            (DeviceCounter::ImpairDropped, dropped),
            (DeviceCounter::ImpairDroppedData, dropped_data),
            (DeviceCounter::RxOverflows, received(Rx::overflows)),
            (DeviceCounter::ConnectionsOpened, endpoint.connections_opened),
            (DeviceCounter::Connections, endpoint.connections),
            (DeviceCounter::Qps, out.qp_count()),
            (DeviceCounter::TransportBytes, endpoint.transport_bytes),
            (DeviceCounter::Slot, u64::from(self.snapshot.slot)),
        ];
        for (counter, value) in values {
            writer.set(counter, value);
        }
        for (slot, path) in paths.iter().enumerate() {
            let values = [
                (PathCounter::TxPackets, path.tx_packets),
                (PathCounter::TxBytes, path.tx_bytes),
                (PathCounter::TxDataPackets, path.tx_data_packets),
                (PathCounter::Retransmits, path.retransmits),
                (PathCounter::Lost, path.lost),
                (PathCounter::RxPackets, path.rx_packets),
                (PathCounter::RxBytes, path.rx_bytes),
                (PathCounter::RxDataPackets, path.rx_data_packets),
                (PathCounter::RxCe, path.rx_ce),
                (PathCounter::RxReordered, path.rx_reordered),
                (PathCounter::RxDuplicates, path.rx_duplicates),
                (PathCounter::SrttNs, path.srtt_ns),
                (PathCounter::CwndPackets, path.cwnd_packets),
            ];
            for (counter, value) in values {
                writer.set_path(slot, counter, value);
            }
        }
        writer.touch();
    }
}

/// Name of the running program, as `ps` shows it.
fn program_name() -> String {
    std::fs::read_to_string("/proc/self/comm").map_or_else(|_| "?".into(), |name| name.trim_end().into())
}
