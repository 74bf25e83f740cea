//! Multicast groups: which QPs are attached to which, and what carries a group's datagrams on the network (MR-MC-1).

use crate::config::{Config, limits};
use crate::datagrams::deliver;
use crate::endpoint::{Endpoint, parts};
use crate::memory::Memory;
use crate::parts::Parts;
use crate::types::*;
use crate::wire::Datagram;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The QP number that datagrams to a group carry, as on InfiniBand.
pub const MULTICAST_QPN: Qpn = Qpn(0xff_ffff);

/// The UDP port on which datagrams to groups arrive, whatever the slot (MR-MC-1).
pub fn group_port(base_port: u16) -> u16 {
    base_port.wrapping_sub(1)
}

/// The IP group that carries a group's datagrams: the group itself where plane 0 has multicast of its family, else one
/// of the other family (MR-MC-2). `None` if plane 0 has no multicast at all, or this is no group.
pub fn carrier(config: &Config, group: IpAddr) -> Option<IpAddr> {
    if !group.is_multicast() {
        return None;
    }
    let addrs = &config.planes.first()?.addrs;
    let v4 = addrs.iter().any(IpAddr::is_ipv4);
    // Loopback interfaces route IPv4 groups, but no IPv6 ones.
    let v6 = addrs.iter().any(IpAddr::is_ipv6) && !addrs.iter().any(IpAddr::is_loopback);
    match group {
        IpAddr::V4(_) if v4 => Some(group),
        IpAddr::V4(ip) if v6 => Some(v6_carrier_of_v4(ip).into()),
        IpAddr::V6(ip) if v6 => Some(routable(ip).into()),
        IpAddr::V6(ip) if v4 => Some(v4_carrier_of_v6(ip).into()),
        _ => None,
    }
}

/// ff12::a.b.c.d: transient, of the link.
fn v6_carrier_of_v4(group: Ipv4Addr) -> Ipv6Addr {
    let [a, b, c, d] = group.octets().map(u16::from);
    Ipv6Addr::new(0xff12, 0, 0, 0, 0, 0, a << 8 | b, c << 8 | d)
}

/// 239.193.x.y with x.y the exclusive or of the group's words.
fn v4_carrier_of_v6(group: Ipv6Addr) -> Ipv4Addr {
    let [x, y] = group.segments().into_iter().fold(0, |sum, word| sum ^ word).to_be_bytes();
    Ipv4Addr::new(239, 193, x, y)
}

/// A group that hosts keep to themselves by its scope goes by the scope of the link.
fn routable(group: Ipv6Addr) -> Ipv6Addr {
    let mut octets = group.octets();
    if octets[1] & 0xf < 2 {
        octets[1] = octets[1] & 0xf0 | 2;
    }
    octets.into()
}

/// Who is attached to what; sorted by group.
#[derive(Debug, Default)]
pub(crate) struct GroupTable(Vec<(IpAddr, Vec<Qpn>)>);

impl GroupTable {
    fn place(&self, group: IpAddr) -> Result<usize, usize> {
        self.0.binary_search_by_key(&group, |entry| entry.0)
    }
    fn members(&self, group: IpAddr) -> &[Qpn] {
        self.place(group).map_or(&[], |at| &self.0[at].1)
    }
    fn add(&mut self, group: IpAddr, qpn: Qpn) -> Result<(), Refused> {
        match self.place(group) {
            Ok(at) if self.0[at].1.contains(&qpn) => {}
            Ok(at) => self.0[at].1.push(qpn),
            Err(_) if self.0.len() >= limits::GROUPS_MAX => return Err(Refused::Full),
            Err(at) => self.0.insert(at, (group, vec![qpn])),
        }
        Ok(())
    }
    fn remove(&mut self, group: IpAddr, qpn: Qpn) -> Option<()> {
        let at = self.place(group).ok()?;
        let members = &mut self.0[at].1;
        let i = members.iter().position(|m| *m == qpn)?;
        members.swap_remove(i);
        if members.is_empty() {
            self.0.remove(at);
        }
        Some(())
    }
    /// A QP is gone.
    pub(crate) fn remove_qp(&mut self, qpn: Qpn) {
        self.0.retain_mut(|(_, members)| {
            members.retain(|m| *m != qpn);
            !members.is_empty()
        });
    }
}

impl Endpoint {
    /// Attaches a UD QP to a group; once more changes nothing. Full when there are too many groups, Invalid for another
    /// QP or what is no group, Unsupported where plane 0 has no multicast. The driver joins what
    /// [`Endpoint::carriers`] then tells.
    pub fn attach_group(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), Refused> {
        let qp = self.qps.peek(qpn).ok_or(Refused::NotFound)?;
        if qp.init.qp_type != QpType::Ud || !group.is_multicast() {
            return Err(Refused::Invalid);
        }
        carrier(&self.config, group).ok_or(Refused::Unsupported)?;
        self.groups.add(group, qpn)
    }
    /// Detaches a QP from a group; Invalid if it is not attached.
    pub fn detach_group(&mut self, qpn: Qpn, group: IpAddr) -> Result<(), Refused> {
        self.groups.remove(group, qpn).ok_or(Refused::Invalid)
    }
    /// The QP is attached to this group.
    pub fn is_member(&self, qpn: Qpn, group: IpAddr) -> bool {
        self.groups.members(group).contains(&qpn)
    }
    /// The QP is attached to a group.
    pub fn is_attached(&self, qpn: Qpn) -> bool {
        self.groups.0.iter().any(|(_, members)| members.contains(&qpn))
    }
    /// The IP groups that carry what the QPs are attached to, sorted, each once.
    pub fn carriers(&self) -> Vec<IpAddr> {
        let mut all: Vec<_> = self.groups.0.iter().filter_map(|g| carrier(&self.config, g.0)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// A datagram that came by a group: a copy for each QP that is attached, those of its sender's included (MR-MC-5).
    /// What does not tell its group right is malformed (MR-MC-3).
    pub(crate) fn on_group(
        &mut self,
        meta: &RxMeta,
        d: &Datagram<'_>,
        mem: &mut impl Memory,
        sink: &mut impl Sink,
    ) {
        let group = d.group.unwrap_or(meta.dst_ip);
        let told_right = group == meta.dst_ip || carrier(&self.config, group) == Some(meta.dst_ip);
        if d.dst_qpn != MULTICAST_QPN || !told_right {
            self.stats.rx_malformed += 1;
            return;
        }
        // MR-MC-5: another process's group has no members here: nobody missed anything.
        let meta = RxMeta { dst_ip: group, ..*meta };
        let mut p = parts!(self, 0, sink);
        for qpn in self.groups.members(group) {
            if deliver(&mut p, *qpn, &meta, d, mem).is_none() {
                p.stats.datagrams_dropped += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{PlaneConfig, Tuning};

    fn config(addrs: &[&str]) -> Config {
        let addrs = addrs.iter().map(|a| a.parse().unwrap()).collect();
        Config {
            slot: 1,
            base_port: 24576,
            incarnation: 1,
            seed: 1,
            planes: vec![PlaneConfig { label: "a".into(), addrs, mtu: 1500, rate_bps: 0 }],
            paths_per_plane: 1,
            entropies_per_plane: 1,
            segment_bytes_max: 1400,
            burst_packets_max: 1,
            first_psn: 0,
            first_cpn: 0,
            datagram_bytes_max: 1024,
            receive_budget_bytes: 1 << 20,
            tuning: Tuning::default(),
        }
    }

    #[test]
    fn carrier__is_the_group_where_its_family_is_there() {
        for (addrs, group, by) in [
            (&["192.0.2.1", "2001:db8::1"][..], "224.1.2.3", Some("224.1.2.3")),
            (&["192.0.2.1", "2001:db8::1"], "ff0e::7", Some("ff0e::7")),
            (&["2001:db8::1"], "224.1.2.3", Some("ff12::e001:203")),
            (&["192.0.2.1"], "ff0e::1:7", Some("239.193.255.8")),
            // Loopback has no IPv6 multicast; scopes that end at the host are of no use.
            (&["127.0.0.1", "::1"], "ff02::7", Some("239.193.255.5")),
            (&["127.0.0.1", "fd00::1"], "ff02::7", Some("239.193.255.5")),
            (&["::1"], "ff02::7", None),
            (&["2001:db8::1"], "ff01::7", Some("ff02::7")),
            (&["2001:db8::1"], "ff10::7", Some("ff12::7")),
            (&["192.0.2.1", "2001:db8::1"], "192.0.2.7", None),
        ] {
            let by = by.map(|b| b.parse::<IpAddr>().unwrap());
            assert_eq!(carrier(&config(addrs), group.parse().unwrap()), by, "{addrs:?} {group}");
        }
    }
}
