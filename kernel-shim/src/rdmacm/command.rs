//! The commands that are written to an rdma_cm descriptor.
//!
//! Errors are those of the kernel's ucma where it has the same case. Not there: AF_IB addresses and the commands that
//! carry them (ENOSYS, so that librdmacm uses the IP commands; its port space IB works with IP addresses).

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::abi::{self, ConnParam, EVENT_BYTES_MIN, HEADER_BYTES, PathRec, Plain, cmd, event};
use super::address;
use super::id::{self, Id, RDMA_UDP_QKEY, private_bytes};
use super::machine::{Connect, State, reason};
use super::os::{self, errno_of};
use super::service::{ANY_V4, HOP_LIMIT, Service};
use super::socket::{self, Socket};
use super::wire::Terms;

/// What a command leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// GET_EVENT, and there is none.
    NoEvent,
}

/// One command as it was written, and the channel that it was written to.
pub(super) struct Command<'a> {
    pub channel: u64,
    /// The descriptor that it was written to.
    pub fd: c_int,
    pub header: abi::Header,
    pub payload: &'a [u8],
    pub now: u64,
}

impl Command<'_> {
    /// Carries it out.
    pub(super) fn run(&self, service: &mut Service) -> Result<Outcome, c_int> {
        if usize::from(self.header.bytes_in) > self.payload.len() {
            return Err(libc::EINVAL);
        }
        match self.header.cmd {
            cmd::GET_EVENT => return self.get_event(service),
            cmd::CREATE_ID => self.create_id(service),
            cmd::DESTROY_ID => self.destroy_id(service),
            cmd::BIND_IP => self.bind_ip(service),
            cmd::RESOLVE_IP => self.resolve_ip(service),
            cmd::RESOLVE_ROUTE => self.resolve_route(service),
            cmd::QUERY_ROUTE => self.query_route(service),
            cmd::CONNECT => self.connect(service),
            cmd::LISTEN => self.listen(service),
            cmd::ACCEPT => self.accept(service),
            cmd::REJECT => self.reject(service),
            cmd::DISCONNECT => self.disconnect(service),
            cmd::INIT_QP_ATTR => self.init_qp_attr(service),
            cmd::SET_OPTION => self.set_option(service),
            cmd::NOTIFY => self.notify(service),
            cmd::MIGRATE_ID => self.migrate_id(service),
            cmd::JOIN_IP_MCAST => self.join_ip_mcast(service),
            cmd::JOIN_MCAST => self.join_mcast(service),
            cmd::LEAVE_MCAST => self.leave_mcast(service),
            _ => Err(libc::ENOSYS),
        }
        .map(|()| Outcome::Done)
    }

    pub(super) fn read<T: Plain>(&self) -> T {
        T::read(self.payload)
    }

    /// Writes an answer, as much of it as the caller has room for and at least `bytes_min`.
    pub(super) fn respond(&self, address: u64, answer: &[u8], bytes_min: usize) -> Result<(), c_int> {
        let room = usize::from(self.header.bytes_out);
        if room < bytes_min {
            return Err(libc::ENOSPC);
        }
        if address == 0 {
            return Err(libc::EFAULT);
        }
        // SAFETY: the kernel interface demands that `address` has room for as many bytes as the header says.
        unsafe {
            std::ptr::copy_nonoverlapping(
                answer.as_ptr(),
                address as usize as *mut u8,
                answer.len().min(room),
            );
        }
        Ok(())
    }

    /// An id of this channel.
    pub(super) fn id<'s>(&self, service: &'s mut Service, number: u32) -> Result<&'s mut Id, c_int> {
        let id = service.ids.get_mut(&number).ok_or(libc::ENOENT)?;
        if id.channel == self.channel { Ok(id) } else { Err(libc::EINVAL) }
    }

    fn create_id(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::CreateId = self.read();
        if ![abi::RDMA_PS_IB, abi::RDMA_PS_TCP, abi::RDMA_PS_UDP].contains(&request.ps) {
            return Err(libc::EPROTONOSUPPORT);
        }
        if usize::from(self.header.bytes_out) < size_of::<u32>() || request.response == 0 {
            return Err(libc::ENOSPC);
        }
        let id = Id::new(self.channel, request.uid, request.ps, request.qp_type);
        let number = service.add_id(id)?;
        self.respond(request.response, &number.to_ne_bytes(), 4)
    }

    fn destroy_id(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::DestroyId = self.read();
        self.id(service, request.id)?;
        let reported = service.remove_id(self.now, request.id, Some(self.fd));
        self.respond(request.response, &reported.to_ne_bytes(), 4)
    }

    fn bind_ip(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::BindIp = self.read();
        let address = address::from_raw(&request.addr)?.ok_or(libc::EAFNOSUPPORT)?;
        if self.id(service, request.id)?.src.is_some() {
            return Err(libc::EINVAL);
        }
        bind(service, self.now, request.id, address)
    }

    fn resolve_ip(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::ResolveIp = self.read();
        let dst = address::from_raw(&request.dst_addr)?.ok_or(libc::EAFNOSUPPORT)?;
        let wanted = address::from_raw(&request.src_addr)?;
        let id = self.id(service, request.id)?;
        if id.listening || id.key.is_some() {
            return Err(libc::EINVAL);
        }
        if let (Some(src), None) = (wanted, id.src)
            && src.port() != 0
        {
            bind(service, self.now, request.id, src)?;
        }
        let bound = self.id(service, request.id)?.src.or(wanted);
        let src = match bound.filter(|src| !src.ip().is_unspecified()) {
            Some(src) if dst.is_ipv4() != src.is_ipv4() => return Err(libc::EINVAL),
            Some(src) => src,
            None if dst.ip().is_unspecified() => SocketAddr::new(loopback_of(dst.ip()), 0),
            None => socket::source_for(dst).map_err(|error| errno_of(&error))?,
        };
        // The kernel, too, takes the wildcard address as a destination for this host.
        let dst = if dst.ip().is_unspecified() { SocketAddr::new(src.ip(), dst.port()) } else { dst };
        let port = match bound.map(|src| src.port()) {
            Some(port) if port != 0 => port,
            _ => service.ephemeral_port(),
        };
        let gid_index = service.gid_index_now(self.now, src.ip());
        let gid_remote = gid_of(service, dst.ip());
        let id = self.id(service, request.id)?;
        let Some(gid_index) = gid_index else {
            service.post(request.id, event::ADDR_ERROR, -libc::ENODEV);
            return Ok(());
        };
        let mut src = src;
        src.set_port(port);
        (id.src, id.dst, id.gid_index, id.gid_remote) = (Some(src), Some(dst), Some(gid_index), gid_remote);
        service.post(request.id, event::ADDR_RESOLVED, 0);
        Ok(())
    }

    fn resolve_route(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::IdAndNumber = self.read();
        let id = self.id(service, request.id)?;
        if id.dst.is_none() || id.key.is_some() {
            return Err(libc::EINVAL);
        }
        id.routed = true;
        service.post(request.id, event::ROUTE_RESOLVED, 0);
        Ok(())
    }

    fn query_route(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::Query = self.read();
        let (mtu, node_guid, index) = (service.mtu(), service.device.node_guid, service.device.index);
        let gids = &service.device.gids;
        let id = self.id(service, request.id)?;
        let mut answer = abi::QueryRouteResp {
            src_addr: address::to_raw(Some(id.src.unwrap_or(ANY_V4))),
            dst_addr: address::to_raw(id.dst),
            ibdev_index: u32::MAX,
            ..abi::QueryRouteResp::read(&[])
        };
        if let Some(gid) = id.gid_index.and_then(|index| gids.get(index)?.as_ref()) {
            (answer.node_guid, answer.port_num, answer.ibdev_index) = (node_guid.to_be_bytes(), 1, index);
            answer.num_paths = id.routed.into();
            answer.ib_route[0] = PathRec {
                dgid: id.gid_remote,
                sgid: gid.gid,
                reversible: 1,
                mtu: mtu.into(),
                pkey: [0xff, 0xff],
                hop_limit: HOP_LIMIT,
                traffic_class: id.traffic_class,
                numb_path: 1,
                mtu_selector: EXACTLY,
                rate_selector: EXACTLY,
                rate: RATE_100_GBPS,
                packet_life_time_selector: EXACTLY,
                packet_life_time: ROCE_LIFE_TIME,
                ..PathRec::read(&[])
            };
        }
        // ibdev_index came later than the rest.
        self.respond(request.response, answer.bytes(), 200)
    }

    fn connect(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::Connect = self.read();
        let mtu = service.mtu();
        let id = self.id(service, request.id)?;
        let (Some(src), Some(dst), true, Some(gid_index)) = (id.src, id.dst, id.routed, id.gid_index) else {
            return Err(libc::EINVAL);
        };
        if request.conn_param.valid == 0 {
            return Err(libc::EINVAL);
        }
        let is_datagram = id.is_datagram();
        let bytes_max = if is_datagram { private_bytes::SIDR_REQ } else { private_bytes::REQ };
        let data = private_data(&request.conn_param, bytes_max)?;
        let (port_space, qp_type, key) = (id.port_space, id.qp_type, id.key);
        let terms = terms(&request.conn_param, mtu, id, [request.ece_vendor_id, request.ece_attr_mod]);
        if let Some(key) = key {
            if service.machine.conn(key).is_some_and(|conn| conn.passive || conn.state != State::Closed) {
                return Err(libc::EINVAL);
            }
            service.machine.destroy(self.now, key);
        }
        if service.is_slot(dst.port()) {
            // No listener can be there, and the QP that may be is not to be bothered.
            let (event, status) = if is_datagram {
                (event::UNREACHABLE, reason::SIDR_UNSUPPORTED)
            } else {
                (event::REJECTED, reason::INVALID_SERVICE_ID)
            };
            service.post(request.id, event, status.into());
            return Ok(());
        }
        let local_gid = service.device.gid(gid_index).unwrap_or_default();
        let connect = Connect {
            owner: request.id,
            local: src,
            remote: dst,
            port_space,
            qp_type,
            is_datagram,
            local_gid,
            terms,
            data,
        };
        let key = service.machine.connect(self.now, &connect)?;
        self.id(service, request.id)?.key = Some(key);
        Ok(())
    }

    fn listen(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::IdAndNumber = self.read();
        let id = self.id(service, request.id)?;
        if id.listening || id.key.is_some() || id.dst.is_some() {
            return Err(libc::EINVAL);
        }
        if id.src.is_none() {
            bind(service, self.now, request.id, ANY_V4)?;
        }
        let id = self.id(service, request.id)?;
        let (src, only_v6) = (id.src.unwrap_or(ANY_V4), id.only_v6);
        if id.socket.is_none() {
            let socket = Socket::bind(src, only_v6).map_err(|error| errno_of(&error))?;
            service.attach(request.id, socket)?;
        }
        let id = self.id(service, request.id)?;
        id.listening = true;
        let port_space = id.port_space;
        let backlog =
            if request.number == 0 || request.number > BACKLOG_MAX { BACKLOG_MAX } else { request.number };
        service.machine.listen(request.id, port_space, src.port(), backlog);
        Ok(())
    }

    fn accept(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::Accept = self.read();
        let mtu = service.mtu();
        let id = self.id(service, request.id)?;
        let key = id.key.ok_or(libc::EINVAL)?;
        let bytes_max = if id.is_datagram() { private_bytes::SIDR_REP } else { private_bytes::REP };
        let data = private_data(&request.conn_param, bytes_max)?;
        let terms = terms(&request.conn_param, mtu, id, [request.ece_vendor_id, request.ece_attr_mod]);
        let uid = id.uid;
        if uid == 0 {
            // Before the machine has a chance to say anything about it.
            id.uid = request.uid;
        }
        let accepted = service.machine.accept(self.now, key, &terms, data);
        if accepted.is_err() {
            self.id(service, request.id)?.uid = uid;
        }
        accepted
    }

    fn reject(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::Reject = self.read();
        let key = self.id(service, request.id)?.key.ok_or(libc::EINVAL)?;
        let reason = match request.reason {
            0 => reason::CONSUMER_DEFINED,
            reason @ (28 | 35) => reason.into(),
            _ => return Err(libc::EINVAL),
        };
        let length = usize::from(request.private_data_len);
        if length > private_bytes::REJ {
            return Err(libc::EINVAL);
        }
        service.machine.reject(self.now, key, reason, &request.private_data[..length])
    }

    fn disconnect(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::Disconnect = self.read();
        let key = self.id(service, request.id)?.key.ok_or(libc::EINVAL)?;
        service.machine.disconnect(self.now, key);
        Ok(())
    }

    fn init_qp_attr(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::Query = self.read();
        self.id(service, request.id)?;
        let id = &service.ids[&request.id];
        let conn = id.key.and_then(|key| service.machine.conn(key));
        let attr = id::qp_attr(id, conn, request.option).ok_or(libc::EINVAL)?;
        self.respond(request.response, attr.bytes(), size_of::<abi::QpAttr>())
    }

    fn set_option(&self, service: &mut Service) -> Result<(), c_int> {
        const LEVEL_ID: u32 = 0;
        const LEVEL_IB: u32 = 1;
        let request: abi::SetOption = self.read();
        let id = self.id(service, request.id)?;
        let mut value = [0u8; 4];
        let length = request.optlen as usize;
        if request.level == LEVEL_ID {
            if request.optval == 0 || length > value.len() {
                return Err(libc::EINVAL);
            }
            // SAFETY: the kernel interface demands that `optval` is valid for `optlen` bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    request.optval as usize as *const u8,
                    value.as_mut_ptr(),
                    length,
                );
            }
        }
        let is_on = u32::from_ne_bytes(value) != 0;
        match (request.level, request.optname, length) {
            (LEVEL_ID, 0, 1) => id.traffic_class = value[0],
            (LEVEL_ID, 1, 4) if id.src.is_none() || !is_on => id.reuse_address = is_on,
            (LEVEL_ID, 2, 4) if id.src.is_none() => id.only_v6 = is_on,
            (LEVEL_ID, 3, 1) if value[0] < 32 => id.ack_timeout = Some(value[0]),
            (LEVEL_ID, 0..=3, _) => return Err(libc::EINVAL),
            (LEVEL_IB, 1, _) if id.dst.is_some() && id.key.is_none() => {
                id.routed = true;
                service.post(request.id, event::ROUTE_RESOLVED, 0);
            }
            (LEVEL_IB, 1, _) => return Err(libc::EINVAL),
            _ => return Err(libc::ENOSYS),
        }
        Ok(())
    }

    fn notify(&self, service: &mut Service) -> Result<(), c_int> {
        const IBV_EVENT_COMM_EST: u32 = 4;
        let request: abi::IdAndNumber = self.read();
        let key = self.id(service, request.id)?.key.ok_or(libc::EINVAL)?;
        if request.number == IBV_EVENT_COMM_EST {
            service.machine.communication_established(self.now, key);
        }
        Ok(())
    }

    /// Written to the new channel; `fd` is one of the old.
    fn migrate_id(&self, service: &mut Service) -> Result<(), c_int> {
        let request: abi::MigrateId = self.read();
        let old_fd = request.fd as c_int;
        let old = os::socket_inode(old_fd)
            .filter(|inode| service.channels.contains_key(inode))
            .ok_or(libc::EINVAL)?;
        let id = service.ids.get_mut(&request.id).filter(|id| id.channel == old).ok_or(libc::ENOENT)?;
        id.channel = self.channel;
        let reported = id.events_reported;
        if old != self.channel {
            let moved = service.channels.get_mut(&old).map(|channel| channel.take(request.id, old_fd));
            for event in moved.unwrap_or_default() {
                // A request that waits goes with its listener.
                if let Some(id) = event.request.and_then(|number| service.ids.get_mut(&number)) {
                    id.channel = self.channel;
                }
                if let Some(channel) = service.channels.get_mut(&self.channel) {
                    channel.push(event);
                }
            }
        }
        self.respond(request.response, &reported.to_ne_bytes(), 4)
    }

    fn get_event(&self, service: &mut Service) -> Result<Outcome, c_int> {
        let request: abi::GetEvent = self.read();
        if usize::from(self.header.bytes_out) < EVENT_BYTES_MIN {
            return Err(libc::ENOSPC);
        }
        if request.response == 0 {
            return Err(libc::EFAULT);
        }
        let channel = service.channels.get_mut(&self.channel).ok_or(libc::EBADF)?;
        let Some(queued) = channel.pop(self.fd) else { return Ok(Outcome::NoEvent) };
        if let Some(id) = service.ids.get_mut(&queued.counted_for) {
            id.events_reported += 1;
        }
        if let Some(group) = queued.group.and_then(|group| service.groups.get_mut(&group)) {
            group.events_reported += 1;
        }
        if queued.request.is_some() {
            service.machine.request_taken(queued.counted_for);
        }
        self.respond(request.response, queued.response.bytes(), EVENT_BYTES_MIN)?;
        Ok(Outcome::Done)
    }
}

/// What a listener may have waiting, and what it has when it does not say (the kernel's default is the same).
const BACKLOG_MAX: u32 = 1024;
/// IB_SA_EQ, IB_RATE_100_GBPS and CMA_IBOE_PACKET_LIFETIME of the kernel.
const EXACTLY: u8 = 2;
const RATE_100_GBPS: u8 = 16;
const ROCE_LIFE_TIME: u8 = 18;

/// Binds an id to an address, and keeps the port for it.
fn bind(service: &mut Service, now: u64, number: u32, address: SocketAddr) -> Result<(), c_int> {
    if service.is_slot(address.port()) {
        return Err(libc::EADDRINUSE);
    }
    let id = service.ids.get(&number).ok_or(libc::ENOENT)?;
    // Datagram sockets over RDMA (rsocket) bind an id to the very port that their own UDP socket has, and do not listen.
    let (only_v6, reuse) = (id.only_v6, id.reuse_address || id.is_datagram());
    let port = match Socket::bind(address, only_v6) {
        // Ids that share their port take it when they listen, which only one can.
        Ok(_) if reuse && address.port() != 0 => address.port(),
        Err(error) if reuse && errno_of(&error) == libc::EADDRINUSE => address.port(),
        Err(error) => return Err(errno_of(&error)),
        Ok(socket) => {
            let mut socket = socket;
            let mut port = socket.port().map_err(|error| errno_of(&error))?;
            while service.is_slot(port) {
                socket = Socket::bind(address, only_v6).map_err(|error| errno_of(&error))?;
                port = socket.port().map_err(|error| errno_of(&error))?;
            }
            service.attach(number, socket)?;
            port
        }
    };
    let gid_index = match address.ip() {
        ip if ip.is_unspecified() => None,
        ip => match service.gid_index_now(now, ip) {
            None => {
                if let Some(id) = service.ids.get_mut(&number) {
                    id.socket = None;
                }
                return Err(libc::ENODEV);
            }
            found => found,
        },
    };
    if let Some(id) = service.ids.get_mut(&number) {
        let mut src = address;
        src.set_port(port);
        (id.src, id.gid_index) = (Some(src), gid_index);
    }
    Ok(())
}

/// The GID that an address most likely stands for; its owner says it when it answers.
fn gid_of(service: &Service, ip: IpAddr) -> [u8; 16] {
    if ip.is_loopback()
        && let Some(gid) = service.gid_index(ip).and_then(|index| service.device.gid(index))
    {
        return gid;
    }
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

fn loopback_of(ip: IpAddr) -> IpAddr {
    if ip.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() }
}

fn private_data(param: &ConnParam, bytes_max: usize) -> Result<&[u8], c_int> {
    let length = usize::from(param.private_data_len);
    if length <= bytes_max { Ok(&param.private_data[..length]) } else { Err(libc::EINVAL) }
}

fn terms(param: &ConnParam, mtu: u8, id: &Id, ece: [u32; 2]) -> Terms {
    Terms {
        qpn: param.qp_num & 0xff_ffff,
        psn: 0,
        qkey: if id.is_datagram() && param.qkey == 0 { RDMA_UDP_QKEY } else { param.qkey },
        responder_resources: param.responder_resources,
        initiator_depth: param.initiator_depth,
        flow_control: param.flow_control,
        retry_count: param.retry_count.min(7),
        rnr_retry_count: param.rnr_retry_count.min(7),
        srq: param.srq,
        mtu,
        traffic_class: id.traffic_class,
        ece_vendor_id: ece[0],
        ece_attr_mod: ece[1],
    }
}

/// Whether a buffer can be a command: the test at which every other write of the process stops.
#[inline]
pub(super) fn looks_like_one(bytes: &[u8]) -> bool {
    if bytes.len() < HEADER_BYTES + 4 || bytes.len() > COMMAND_BYTES_MAX {
        return false;
    }
    let header = abi::Header::read(bytes);
    header.cmd <= cmd::LAST && usize::from(header.bytes_in) + HEADER_BYTES <= bytes.len()
}

/// Longer than every command.
const COMMAND_BYTES_MAX: usize = 1024;

/// Name of the device's node.
pub(crate) const NODE: &str = "rdma_cm";
