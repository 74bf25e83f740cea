//! The connection manager of this process: its channels, ids, sockets and machine, and what moves between them.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};

use metaroce_config::NetView;

use super::abi::{self, AhAttr, ConnParam, EventResp, Plain, UdParam, event};
use super::channel::{Channel, Queued};
use super::id::{Id, private_bytes};
use super::machine::{self, Arrival, Conn, Key, Machine, Output};
use super::multicast::Group;
use super::os::{self, Epoll, errno_of};
use super::places::{self, Places};
use super::socket::{Received, Socket};
use super::wire::PACKET_BYTES_MAX;
use crate::device::{self, Device};

/// Ids that a process can have at once: librdmacm looks them up by a 16-bit number.
const IDS_MAX: u32 = 1 << 16;
/// Datagrams taken between two looks at the timers.
const BATCH: usize = 256;

/// What a token of the epoll instance stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Wake,
    /// The socket that everything is sent from.
    Shared,
    /// The socket of a bound id.
    Id(u32),
    Channel(u64),
    /// Announcements of changes of addresses and interfaces.
    Places,
}

impl Source {
    fn token(self) -> u64 {
        match self {
            Source::Wake => 0,
            Source::Shared => 1,
            Source::Id(id) => 2 | u64::from(id) << 8,
            Source::Channel(inode) => 3 | inode << 8,
            Source::Places => 4,
        }
    }

    fn of(token: u64) -> Source {
        match token & 0xff {
            0 => Source::Wake,
            1 => Source::Shared,
            2 => Source::Id((token >> 8) as u32),
            4 => Source::Places,
            _ => Source::Channel(token >> 8),
        }
    }
}

#[derive(Debug)]
pub(super) struct Service {
    pub device: &'static Device,
    pub machine: Machine,
    pub ids: BTreeMap<u32, Id>,
    pub channels: BTreeMap<u64, Channel>,
    /// Multicast groups that ids have joined.
    pub groups: BTreeMap<u32, Group>,
    shared: Option<Socket>,
    pub epoll: Epoll,
    wake: Wake,
    /// Where the host's addresses were when that was looked at last.
    pub places: Places,
    /// When the thread wakes up by itself; `None` while it is awake.
    sleeps_until: Option<u64>,
    impairment: Impairment,
}

/// What wakes the thread; a socket pair, because those have an inode number of their own.
#[derive(Debug)]
struct Wake {
    listens: OwnedFd,
    calls: OwnedFd,
    inode: u64,
    /// Tells of changes of addresses and interfaces; `None` where there is no such thing.
    announcements: Option<OwnedFd>,
}

/// Loss and duplication on request, for tests.
#[derive(Debug)]
struct Impairment {
    loss: f64,
    dup: f64,
    random: u64,
}

impl Impairment {
    /// How many copies of a packet go out.
    fn copies(&mut self) -> u32 {
        let mut chance = |fraction: f64| {
            self.random =
                self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            fraction > 0.0 && ((self.random >> 11) as f64 / (1u64 << 53) as f64) < fraction
        };
        if chance(self.loss) { 0 } else { 1 + u32::from(chance(self.dup)) }
    }
}

impl Service {
    pub(super) fn new() -> Result<Service, c_int> {
        let device = device::current().ok_or(libc::ENODEV)?;
        let faults = device.config.impairment;
        let impairment = Impairment {
            loss: device.config.cm_loss,
            dup: faults.dup,
            random: faults.seed ^ u64::from(std::process::id()),
        };
        let (epoll, wake) = Service::waiting()?;
        Ok(Service {
            device,
            machine: Machine::new(os::entropy()),
            ids: BTreeMap::new(),
            channels: BTreeMap::new(),
            groups: BTreeMap::new(),
            shared: None,
            epoll,
            wake,
            places: NetView::of_this_host().map(|here| Places::of(&here)).unwrap_or_default(),
            sleeps_until: None,
            impairment,
        })
    }

    fn waiting() -> Result<(Epoll, Wake), c_int> {
        let make = || {
            let epoll = Epoll::new()?;
            let [listens, calls] = os::socket_pair(libc::SOCK_CLOEXEC)?;
            let listens = os::out_of_the_way(listens)?;
            let inode = os::socket_inode(listens.as_raw_fd()).ok_or(io::ErrorKind::Unsupported)?;
            epoll.add(&listens, Source::Wake.token(), true)?;
            let announcements = places::announcements().ok();
            if let Some(fd) = &announcements {
                epoll.add(fd, Source::Places.token(), true)?;
            }
            Ok((epoll, Wake { listens, calls, inode, announcements }))
        };
        make().map_err(|error: io::Error| errno_of(&error))
    }

    /// Whether our descriptors are still ours: a program may close all that it does not know, as daemons do. Then its
    /// own ends of the channels are closed too, so nothing that was there is missed, and nothing may be touched.
    pub(super) fn is_intact(&self) -> bool {
        os::socket_inode(self.wake.listens.as_raw_fd()) == Some(self.wake.inode)
    }

    /// Takes over what a parent process left to us: the parent's epoll instance is the parent's.
    pub(super) fn adopt_after_fork(&mut self) -> Result<(), c_int> {
        (self.epoll, self.wake) = Service::waiting()?;
        self.sleeps_until = None;
        let add = || {
            for (inode, channel) in &self.channels {
                self.epoll.add(&channel.ours, Source::Channel(*inode).token(), false)?;
            }
            for (number, id) in &self.ids {
                if let Some(socket) = &id.socket {
                    self.epoll.add(&socket.fd, Source::Id(*number).token(), true)?;
                }
            }
            self.shared
                .as_ref()
                .map_or(Ok(()), |socket| self.epoll.add(&socket.fd, Source::Shared.token(), true))
        };
        add().map_err(|error: io::Error| errno_of(&error))
    }

    /// Opens the device.
    pub(super) fn open(&mut self, flags: c_int) -> Result<c_int, c_int> {
        let mut pair = || -> io::Result<c_int> {
            let flags = flags & (libc::O_CLOEXEC | libc::O_NONBLOCK);
            let [app, ours] = os::socket_pair(flags)?;
            let app = os::above_others(app, flags & libc::O_CLOEXEC != 0);
            let inode = os::socket_inode(app.as_raw_fd()).ok_or(io::ErrorKind::Unsupported)?;
            self.epoll.add(&ours, Source::Channel(inode).token(), false)?;
            self.channels.insert(inode, Channel::new(ours));
            Ok(app.into_raw_fd())
        };
        pair().map_err(|error| errno_of(&error))
    }

    /// The index of the device's GID for a local address. Loopback addresses always lead to the device.
    pub(super) fn gid_index(&self, ip: IpAddr) -> Option<usize> {
        let own = self.device.gid_index(ip.to_canonical());
        own.or_else(|| (ip.to_canonical().is_loopback() && !self.device.gids.is_empty()).then_some(0))
    }

    /// Stores a new id under the lowest free number, as the kernel does.
    pub(super) fn add_id(&mut self, id: Id) -> Result<u32, c_int> {
        let mut number = 0;
        for taken in self.ids.keys() {
            if *taken != number {
                break;
            }
            number += 1;
        }
        if number >= IDS_MAX {
            return Err(libc::ENOMEM);
        }
        self.ids.insert(number, id);
        Ok(number)
    }

    /// Removes an id, with the ids of requests that wait in its queue; gives how many of its events were taken.
    /// `fd` is a descriptor of its channel, if there still is one.
    pub(super) fn remove_id(&mut self, now: u64, number: u32, fd: Option<c_int>) -> u32 {
        let Some(id) = self.ids.remove(&number) else { return 0 };
        self.machine.unlisten(number);
        self.groups.retain(|_, group| group.id != number);
        if let Some(key) = id.key {
            self.machine.destroy(now, key);
        }
        let waiting = match (self.channels.get_mut(&id.channel), fd) {
            (Some(channel), Some(fd)) => channel.take(number, fd),
            _ => Vec::new(),
        };
        for request in waiting.iter().filter_map(|event| event.request) {
            self.remove_id(now, request, None);
        }
        id.events_reported
    }

    /// The last descriptor of a channel was closed.
    fn close(&mut self, now: u64, inode: u64) {
        let numbers: Vec<u32> =
            self.ids.iter().filter(|(_, id)| id.channel == inode).map(|(number, _)| *number).collect();
        for number in numbers {
            self.remove_id(now, number, None);
        }
        self.channels.remove(&inode);
    }

    /// Queues an event for an id.
    pub(super) fn post(&mut self, number: u32, event: u32, status: c_int) {
        if let Some(id) = self.ids.get(&number) {
            self.push(number, None, EventResp::new(id.uid, number, event, status));
        }
    }

    fn push(&mut self, counted_for: u32, request: Option<u32>, response: EventResp) {
        let channel = self.ids.get(&counted_for).map(|id| id.channel);
        if let Some(channel) = channel.and_then(|inode| self.channels.get_mut(&inode)) {
            channel.push(Queued { counted_for, request, group: None, response });
        }
    }

    /// Does what the machine wants done, and sees to it that the thread is awake when it next wants something.
    pub(super) fn flush(&mut self, now: u64) {
        while let Some(output) = self.machine.pop_output() {
            match output {
                Output::Send { from, to, packet } => {
                    for _ in 0..self.impairment.copies() {
                        self.send(now, from.ip(), to, &packet);
                    }
                }
                Output::Request { listener, key } => self.on_request(now, listener, key),
                Output::Event { owner, event } => self.on_event(owner, &event),
            }
        }
        let next = self.machine.next_timeout();
        if let (Some(next), Some(until)) = (next, self.sleeps_until)
            && next < until
        {
            os::ring(&self.wake.calls);
        }
    }

    fn send(&mut self, now: u64, from: IpAddr, to: SocketAddr, packet: &[u8]) {
        if self.shared.is_none() {
            let open = || {
                let socket = Socket::any()?;
                self.epoll.add(&socket.fd, Source::Shared.token(), true)?;
                Ok::<_, io::Error>(socket)
            };
            // Without a socket the packet is lost like any other, and is sent again.
            self.shared = open().ok();
        }
        let Some(socket) = &self.shared else { return };
        let sent = socket.send(from, to, packet).or_else(|_| socket.send(from, to, packet));
        // An earlier packet's refusal is reported here too, but only the first time.
        let Err(error) = sent else { return };
        let errno = errno_of(&error);
        if NO_WAY.contains(&errno) {
            self.machine.on_undeliverable(now, to, packet, errno);
        }
    }

    fn on_request(&mut self, now: u64, listener: u32, key: Key) {
        let (Some(parent), Some(conn)) = (self.ids.get(&listener), self.machine.conn(key)) else {
            self.machine.destroy(now, key);
            return;
        };
        let mut id = Id::new(parent.channel, 0, parent.port_space, parent.qp_type);
        id.gid_index = self.device.index_of_gid(conn.local_gid);
        (id.src, id.dst) = (Some(conn.local), Some(conn.remote));
        (id.routed, id.key, id.traffic_class) = (true, Some(key), conn.theirs.traffic_class);
        id.gid_remote = conn.remote_gid;
        let uid = parent.uid;
        let response = EventResp::new(uid, 0, event::CONNECT_REQUEST, 0);
        let response = if conn.is_datagram {
            response.with_param(&ud_param(conn, &id, private_bytes::SIDR_REQ))
        } else {
            with_ece(response.with_param(&conn_param(conn, private_bytes::REQ)), conn)
        };
        match self.add_id(id) {
            Ok(number) => {
                self.machine.adopt(key, number);
                self.push(listener, Some(number), EventResp { id: number, ..response });
            }
            Err(_) => {
                self.machine.destroy(now, key);
                self.machine.request_taken(listener);
            }
        }
    }

    fn on_event(&mut self, number: u32, happened: &machine::Event) {
        // As in the kernel, nothing is said of a request before the application accepts it.
        let Some(id) = self.ids.get_mut(&number).filter(|id| id.uid != 0) else { return };
        let uid = id.uid;
        let conn = id.key.and_then(|key| self.machine.conn(key));
        let plain = |event, status| EventResp::new(uid, number, event, status);
        let response = match (happened, conn) {
            (machine::Event::Response, Some(conn)) if conn.is_datagram => {
                id.gid_remote = conn.remote_gid;
                let param = ud_param(conn, id, private_bytes::SIDR_REP);
                plain(event::ESTABLISHED, 0).with_param(&param)
            }
            (machine::Event::Response, Some(conn)) => {
                id.gid_remote = conn.remote_gid;
                let param = conn_param(conn, private_bytes::REP);
                with_ece(plain(event::CONNECT_RESPONSE, 0).with_param(&param), conn)
            }
            (machine::Event::Response, None) => return,
            (machine::Event::Established, _) => plain(event::ESTABLISHED, 0),
            (machine::Event::Rejected { reason, data }, _) => {
                let param = with_data(ConnParam::read(&[]), data, private_bytes::REJ);
                plain(event::REJECTED, c_int::from(*reason)).with_param(&param)
            }
            (machine::Event::Unreachable { status }, _) => plain(event::UNREACHABLE, *status),
            (machine::Event::Disconnected { status }, _) => plain(event::DISCONNECTED, *status),
            (machine::Event::TimewaitExit, _) => plain(event::TIMEWAIT_EXIT, 0),
        };
        self.push(number, None, response);
    }

    /// What the thread does between two sleeps; gives how long to sleep, `None` for ever.
    pub(super) fn step(&mut self, tokens: &[u64]) -> Option<u64> {
        self.sleeps_until = None;
        let now = os::now_us();
        let mut drained = true;
        // First, because a packet may be for an address that is new.
        if tokens.contains(&Source::Places.token()) {
            self.wake.announcements.iter().for_each(metaroce_config::take_announcements);
            self.look_around(now);
        }
        for token in tokens {
            match Source::of(*token) {
                Source::Wake => os::drain(self.wake.listens.as_raw_fd()),
                Source::Shared => drained &= self.drain(now, None),
                Source::Id(number) => drained &= self.drain(now, Some(number)),
                Source::Channel(inode) => self.close(now, inode),
                Source::Places => {}
            }
        }
        self.flush(now);
        if !drained {
            return Some(0);
        }
        // Only when no packet waits: a late step must not take an answer that has arrived for silence.
        let now = os::now_us();
        self.machine.on_timeout(now);
        self.flush(now);
        let next = self.machine.next_timeout();
        self.sleeps_until = Some(next.unwrap_or(u64::MAX));
        next.map(|at| at.saturating_sub(now))
    }

    /// Takes a batch from a socket; false when there may be more.
    fn drain(&mut self, now: u64, id: Option<u32>) -> bool {
        let mut buffer = [0; PACKET_BYTES_MAX + 1];
        for _ in 0..BATCH {
            let (socket, listener) = match id {
                None => (self.shared.as_ref(), None),
                Some(number) => {
                    let found = self.ids.get(&number);
                    let listens = found.is_some_and(|id| id.listening);
                    (found.and_then(|id| id.socket.as_ref()), listens.then_some(number))
                }
            };
            match socket.and_then(|socket| socket.receive(&mut buffer)) {
                None => return true,
                Some(Received::Datagram { bytes, from, local }) => {
                    let local_gid = self.gid_index(local.ip()).and_then(|index| self.device.gid(index));
                    let arrival = Arrival { local, from, listener, local_gid, mtu: self.mtu() };
                    self.machine.on_packet(now, &arrival, &buffer[..bytes]);
                }
                Some(Received::Undeliverable { bytes, to, errno }) => {
                    self.machine.on_undeliverable(now, to, &buffer[..bytes], errno);
                }
            }
            self.flush(now);
        }
        false
    }

    /// The device's MTU as enum ibv_mtu.
    pub(super) fn mtu(&self) -> u8 {
        let bytes = metaroce_config::active_mtu(&self.device.config);
        (bytes / 128).ilog2().clamp(1, 5) as u8
    }

    /// Makes the socket of a bound id known to the thread.
    pub(super) fn attach(&mut self, number: u32, socket: Socket) -> Result<(), c_int> {
        let token = Source::Id(number).token();
        self.epoll.add(&socket.fd, token, true).map_err(|error| errno_of(&error))?;
        if let Some(id) = self.ids.get_mut(&number) {
            id.socket = Some(socket);
        }
        Ok(())
    }

    /// A port that none of this process's ids has, for one that need not be found.
    pub(super) fn ephemeral_port(&self) -> u16 {
        const LOW: u16 = 32768;
        const COUNT: u64 = 28232;
        let taken = |port: u16| self.ids.values().any(|id| id.src.is_some_and(|src| src.port() == port));
        for _ in 0..64 {
            let port = LOW + (os::entropy() % COUNT) as u16;
            if !self.is_slot(port) && !taken(port) {
                return port;
            }
        }
        LOW
    }

    /// Whether a port belongs to the device: those of its QPs, and the one below them, where groups are received.
    pub(super) fn is_slot(&self, port: u16) -> bool {
        const SLOTS: u32 = 1024;
        let base = u32::from(self.device.config.base_port);
        (base.saturating_sub(1)..base + SLOTS).contains(&u32::from(port))
    }
}

/// What sending fails with when the packet will not get there next time either.
const NO_WAY: [c_int; 5] =
    [libc::ENETUNREACH, libc::EHOSTUNREACH, libc::EADDRNOTAVAIL, libc::EINVAL, libc::EACCES];

/// An unspecified IPv4 address without a port.
pub(super) const ANY_V4: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

fn with_ece(response: EventResp, conn: &Conn) -> EventResp {
    let (ece_vendor_id, ece_attr_mod) = (conn.theirs.ece_vendor_id, conn.theirs.ece_attr_mod);
    EventResp { ece_vendor_id, ece_attr_mod, ..response }
}

/// The peer's terms, each side's view of Reads and atomics turned round, and its private data.
fn conn_param(conn: &Conn, data_bytes: usize) -> ConnParam {
    let theirs = &conn.theirs;
    let param = ConnParam {
        qp_num: theirs.qpn,
        srq: theirs.srq,
        responder_resources: theirs.initiator_depth,
        initiator_depth: theirs.responder_resources,
        flow_control: theirs.flow_control,
        retry_count: theirs.retry_count,
        rnr_retry_count: theirs.rnr_retry_count,
        valid: 1,
        ..ConnParam::read(&[])
    };
    with_data(param, &conn.data, data_bytes)
}

/// Private data as InfiniBand shows it: always the whole field, zeros at its end.
fn with_data(mut param: ConnParam, data: &[u8], data_bytes: usize) -> ConnParam {
    let length = data.len().min(data_bytes);
    param.private_data[..length].copy_from_slice(&data[..length]);
    param.private_data_len = data_bytes as u8;
    param
}

fn ud_param(conn: &Conn, id: &Id, data_bytes: usize) -> UdParam {
    let filled = with_data(ConnParam::read(&[]), &conn.data, data_bytes);
    UdParam {
        qp_num: conn.theirs.qpn,
        qkey: conn.theirs.qkey,
        ah_attr: ah_attr(id),
        private_data: filled.private_data,
        private_data_len: filled.private_data_len,
        ..UdParam::read(&[])
    }
}

/// The address vector that leads to an id's peer.
pub(super) fn ah_attr(id: &Id) -> AhAttr {
    AhAttr {
        dgid: id.gid_remote,
        sgid_index: id.gid_index.unwrap_or(0) as u8,
        hop_limit: HOP_LIMIT,
        traffic_class: id.traffic_class,
        is_global: 1,
        port_num: 1,
        ..AhAttr::read(&[])
    }
}

/// As the kernel's default for IP packets.
pub(super) const HOP_LIMIT: u8 = 64;

const _: () = assert!(private_bytes::REP < 256 && abi::EVENT_BYTES_MIN < size_of::<EventResp>());
