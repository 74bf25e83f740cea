//! From what the core lets see to the structures of `metaroce.h`.

use std::net::{IpAddr, Ipv6Addr};

use metaroce_config::DeviceConfig;
use metaroce_engine::{Device, Everything, Heard, plane_rate_bps};
use metaroce_ext_abi::{
    CONNECTION_STATES, Connection, DeviceAttr, Event, PATH_STATES, Path, Plane, QueuePair, SnapshotInfo,
    admin, caps, event, number_of,
};
use metaroce_proto::journal::{Happened, PlaneEvent};
use metaroce_proto::snapshot::{ConnView, PathView, QpView};
use metaroce_proto::stats::{Cause, PathStats};
use metaroce_proto::steering::{Admin, PlaneState};

/// What the device is and can do.
pub(super) fn device(device: &Device) -> DeviceAttr {
    let config = device.config();
    DeviceAttr {
        caps: caps::PLANE_ADMIN | caps::ENTROPY | caps::SNAPSHOT | caps::EVENTS,
        now_ns: device.now_ns(),
        planes: config.planes.len() as u32,
        paths_per_plane: config.paths_per_plane.into(),
        entropies_per_plane: device.entropies_per_plane().into(),
        base_port: config.base_port.into(),
        slot: device.slot().map_or(u32::MAX, u32::from),
        ..DeviceAttr::ZERO
    }
}

/// A plane: what is configured, as far as it goes what is wanted of it, and what it has carried.
pub(super) fn plane(
    plane: &metaroce_config::Plane,
    state: Option<&PlaneState>,
    counters: Option<&PathStats>,
) -> Plane {
    let state = state.copied().unwrap_or_default();
    let c = counters.copied().unwrap_or_default();
    let mut addrs = [[0; 16]; 8];
    for (to, from) in addrs.iter_mut().zip(&plane.addrs) {
        *to = bytes_of(*from);
    }
    Plane {
        label: text(&plane.label),
        netdev: text(&plane.ifname),
        ifindex: plane.ifindex,
        mtu: plane.mtu,
        link: plane.up.into(),
        admin: admin_number(state.admin),
        denied: state.denied,
        rate_bps: plane_rate_bps(plane),
        addr_count: plane.addrs.len() as u32,
        addrs,
        tx_packets: c.tx_packets,
        tx_bytes: c.tx_bytes,
        tx_data_packets: c.tx_data_packets,
        retransmits: c.retransmits,
        lost: c.lost,
        rx_packets: c.rx_packets,
        rx_bytes: c.rx_bytes,
        rx_data_packets: c.rx_data_packets,
        rx_ce: c.rx_ce,
        rx_reordered: c.rx_reordered,
        rx_duplicates: c.rx_duplicates,
        srtt_ns: c.srtt_ns,
        ..Plane::ZERO
    }
}

fn admin_number(wanted: Admin) -> u32 {
    match wanted {
        Admin::Up => admin::UP,
        Admin::Drain => admin::DRAIN,
        Admin::Down => admin::DOWN,
    }
}

/// The place of its name in [`metaroce_ext_abi::CAUSES`].
fn cause_number(cause: Cause) -> u32 {
    match cause {
        Cause::Fresh => 0,
        Cause::Silence => 1,
        Cause::Plane => 2,
        Cause::Link => 3,
        Cause::Peer => 4,
        Cause::Answered => 5,
        Cause::Operator => 6,
    }
}

/// An event, and what was lost before it.
pub(super) fn event(heard: &Heard) -> Event {
    let PlaneEvent { at, plane, what } = heard.event;
    let event = Event { time_ns: at, lost: heard.lost, plane: plane.into(), ..Event::ZERO };
    match what {
        Happened::Link(up) => Event { kind: event::LINK, state: up.into(), ..event },
        Happened::Admin(wanted) => Event { kind: event::ADMIN, state: admin_number(wanted), ..event },
        Happened::Path(news) => Event {
            kind: event::PATH,
            state: number_of(&PATH_STATES, news.state),
            cause: cause_number(news.cause),
            connection: news.connection,
            path: news.path.into(),
            entropy: news.entropy.into(),
            generation: news.generation.into(),
            peer: bytes_of(news.peer.0),
            peer_slot: news.peer.1.into(),
            qps: news.users,
            qp_num: news.qpn.map_or(0, |qpn| qpn.0),
            ..event
        },
    }
}

/// A connection.
pub(super) fn connection(c: &ConnView) -> Connection {
    Connection {
        number: c.number,
        state: number_of(&CONNECTION_STATES, c.state),
        peer: bytes_of(c.peer.0),
        peer_slot: c.peer.1.into(),
        segment: c.segment,
        incarnation: c.incarnation,
        qps: c.users,
        paths: c.paths.len() as u32,
        in_flight_bytes: c.in_flight_bytes,
        budget_bytes: c.budget_bytes,
        hint_taken_bps: c.hint_taken_bps,
        hint_given_bps: c.hint_given_bps,
        retransmits_waiting: c.retransmits_waiting as u64,
        srtt_ns: c.srtt_ns,
        silent_ns: c.silent_ns,
        state_bytes: c.state_bytes as u64,
        ..Connection::ZERO
    }
}

/// A path of a connection.
pub(super) fn path(connection: u32, number: usize, path: &PathView) -> Path {
    let t = &path.tally;
    Path {
        connection,
        number: number as u32,
        plane: path.plane.into(),
        entropy: path.entropy.into(),
        generation: path.generation.into(),
        state: number_of(&PATH_STATES, path.state),
        cause: cause_number(path.cause),
        dst_port: path.dst.port().into(),
        dst: bytes_of(path.dst.ip()),
        since_ns: path.since_ns,
        rtt_min_ns: path.rtt_min_ns,
        rtt_ns: path.rtt_smoothed_ns,
        rtt_var_ns: path.rtt_var_ns,
        reorder_tolerance_ns: path.reorder_tolerance_ns,
        cwnd_packets: path.cwnd,
        in_flight_packets: path.in_flight,
        sent: t.sent,
        sent_bytes: t.sent_bytes,
        retransmitted: t.retransmitted,
        delivered: t.delivered,
        delivered_bytes: t.delivered_bytes,
        lost: t.lost,
        spurious: t.spurious,
        reordered: t.reordered,
        ce: t.marked,
        ..Path::ZERO
    }
}

/// A queue pair.
pub(super) fn qp(qp: &QpView) -> QueuePair {
    QueuePair {
        qp_num: qp.qpn.0,
        qp_type: qp.qp_type as u32,
        qp_state: qp.state as u32,
        dest_qp_num: qp.dest_qpn.0,
        has_connection: qp.connection.is_some().into(),
        connection: qp.connection.unwrap_or_default(),
        peer: qp.remote.map_or([0; 16], bytes_of),
        sends: qp.sends,
        sends_waiting: qp.sends_waiting,
        recvs: qp.recvs as u64,
        reads: qp.reads,
        rnr_tries: qp.rnr_tries.into(),
        ..QueuePair::ZERO
    }
}

/// All of a device, in the structures of the header.
pub(super) struct Snapshot {
    pub(super) info: SnapshotInfo,
    pub(super) planes: Vec<Plane>,
    pub(super) connections: Vec<Connection>,
    pub(super) paths: Vec<Path>,
    pub(super) qps: Vec<QueuePair>,
}

impl Snapshot {
    /// What was seen; nothing of a device that nothing was made with yet, but its planes.
    pub(super) fn of(seen: Option<Everything>, config: &DeviceConfig, now: u64) -> Self {
        let nothing = Everything { taken_ns: now, one_moment: true, ..Everything::default() };
        let seen = seen.unwrap_or(nothing);
        let planes = config.planes.iter().enumerate();
        let planes: Vec<_> =
            planes.map(|(at, x)| plane(x, seen.wanted.get(at), seen.counters.get(at))).collect();
        let paths_of = |c: &ConnView| -> Vec<Path> {
            c.paths.iter().enumerate().map(|(at, x)| path(c.number, at, x)).collect()
        };
        let paths: Vec<_> = seen.connections.iter().flat_map(paths_of).collect();
        let info = SnapshotInfo {
            taken_ns: seen.taken_ns,
            one_moment: seen.one_moment.into(),
            planes: planes.len() as u32,
            connections: seen.connections.len() as u32,
            paths: paths.len() as u32,
            qps: seen.qps.len() as u32,
            ..SnapshotInfo::ZERO
        };
        Self {
            info,
            planes,
            connections: seen.connections.iter().map(connection).collect(),
            paths,
            qps: seen.qps.iter().map(qp).collect(),
        }
    }
}

/// An address as 16 bytes, IPv4 as mapped.
fn bytes_of(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => Ipv6Addr::octets(&v6),
    }
}

/// A text of C that ends with 0, cut if need be.
fn text<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    for (to, from) in bytes[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use metaroce_ext_abi::CAUSES;

    #[test]
    fn names_of_causes_agree() {
        use Cause::*;
        for cause in [Fresh, Silence, Plane, Link, Peer, Answered, Operator] {
            assert_eq!(CAUSES[cause_number(cause) as usize], cause.name());
        }
    }

    #[test]
    fn text_is_cut_and_ends() {
        assert_eq!(text::<4>("eth0"), *b"eth\0");
        assert_eq!(text::<4>("a"), *b"a\0\0\0");
    }
}
