//! Multicast groups of datagram ids. Joining says which GID a group has; the device takes part in the group when
//! librdmacm attaches the QP to that GID, and nothing has to be asked of anybody before.

use std::net::{IpAddr, SocketAddr};

use super::abi::{self, AhAttr, EventResp, Plain, UdParam, event};
use super::address;
use super::channel::Queued;
use super::command::Command;
use super::id::RDMA_UDP_QKEY;
use super::service::{HOP_LIMIT, Service};

/// A group that an id has joined.
#[derive(Debug)]
pub(super) struct Group {
    /// The id.
    pub id: u32,
    /// Events that the application has taken.
    pub events_reported: u32,
}

impl Command<'_> {
    pub(super) fn join_ip_mcast(&self, service: &mut Service) -> Result<(), i32> {
        let request: abi::JoinIpMcast = self.read();
        self.join(service, request.id, request.uid, request.response, &request.addr)
    }

    /// The same with flags: an id that only sends is not attached by the library, and there is no more to it.
    pub(super) fn join_mcast(&self, service: &mut Service) -> Result<(), i32> {
        const SENDONLY_FULLMEMBER: u16 = 1;
        let request: abi::JoinMcast = self.read();
        if request.join_flags > SENDONLY_FULLMEMBER || usize::from(request.addr_size) > request.addr.len() {
            return Err(libc::EINVAL);
        }
        let mut addr = [0; 28];
        addr.copy_from_slice(&request.addr[..28]);
        self.join(service, request.id, request.uid, request.response, &addr)
    }

    fn join(
        &self,
        service: &mut Service,
        number: u32,
        uid: u64,
        response: u64,
        addr: &[u8; 28],
    ) -> Result<(), i32> {
        let group = address::from_raw(addr)?.ok_or(libc::EAFNOSUPPORT)?;
        let id = self.id(service, number)?;
        let (Some(src), Some(gid_index), true) = (id.src, id.gid_index, id.is_datagram()) else {
            return Err(libc::EINVAL);
        };
        if !group.ip().is_multicast() || group.is_ipv4() != src.is_ipv4() {
            return Err(libc::EINVAL);
        }
        let param = UdParam {
            qp_num: MULTICAST_QPN,
            qkey: RDMA_UDP_QKEY,
            ah_attr: AhAttr {
                dgid: gid_of(group),
                sgid_index: gid_index as u8,
                hop_limit: HOP_LIMIT,
                traffic_class: id.traffic_class,
                is_global: 1,
                port_num: 1,
                ..AhAttr::read(&[])
            },
            ..UdParam::read(&[])
        };
        let handle = service.groups.last_key_value().map_or(0, |(last, _)| last.wrapping_add(1));
        self.respond(response, &handle.to_ne_bytes(), 4)?;
        service.groups.insert(handle, Group { id: number, events_reported: 0 });
        let joined = EventResp::new(uid, handle, event::MULTICAST_JOIN, 0).with_param(&param);
        let channel = service.channels.get_mut(&self.channel).ok_or(libc::EBADF)?;
        channel.push(Queued { counted_for: number, request: None, group: Some(handle), response: joined });
        Ok(())
    }

    pub(super) fn leave_mcast(&self, service: &mut Service) -> Result<(), i32> {
        let request: abi::DestroyId = self.read();
        let owner = service.groups.get(&request.id).map(|group| group.id).ok_or(libc::ENOENT)?;
        self.id(service, owner)?;
        let reported = service.groups.remove(&request.id).map_or(0, |group| group.events_reported);
        if let Some(channel) = service.channels.get_mut(&self.channel) {
            channel.take_group(request.id, self.fd);
        }
        self.respond(request.response, &reported.to_ne_bytes(), 4)
    }
}

/// The QP number that datagrams to a group carry.
const MULTICAST_QPN: u32 = 0xff_ffff;

/// A group's GID is its address, IPv4 mapped: RoCE v2 has no other names for groups.
fn gid_of(group: SocketAddr) -> [u8; 16] {
    match group.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}
