//! Multicast groups: a second receiving socket, shared by port with the other processes of the host, opened when the
//! first QP is attached to a group (MR-MC-4).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::rx::Rx;
use super::slot;
use super::socket::{self, Family};

/// Whether a socket receives what other sockets of the host have joined (`IP_MULTICAST_ALL`, `IPV6_MULTICAST_ALL`).
const ALL_OPTIONS: [(i32, i32); 2] =
    [(libc::IPPROTO_IP, libc::IP_MULTICAST_ALL), (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_ALL)];

/// The receiver of what comes by groups, and the memberships.
pub(crate) struct Groups {
    /// Receives for all of them.
    pub(crate) rx: Rx,
    family: Family,
    ifindex: u32,
    /// Sockets that hold memberships and are never read: one takes 20 of IPv4 (`igmp_max_memberships`). The first one
    /// is the receiver's own.
    holders: Vec<OwnedFd>,
    /// IP groups joined, and the holder of each; `None` is the receiver.
    joined: Vec<(IpAddr, Option<usize>)>,
}

impl Groups {
    /// Opens the receiver on `port`, which it shares, for groups on the interface `ifindex`.
    pub(crate) fn open(port: u16, ifindex: u32, rcvbuf_bytes: u32, gso: bool) -> io::Result<Groups> {
        let (socket, family) = slot::receive_socket(rcvbuf_bytes, gso)?;
        socket::set_option(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        socket::bind(&socket, slot::wildcard(family, port), 0)?;
        let groups = Groups { rx: Rx::new(socket), family, ifindex, holders: Vec::new(), joined: Vec::new() };
        groups.hear_all(false);
        Ok(groups)
    }

    /// All descriptors, for the child of a fork to close.
    pub(crate) fn fds(&self) -> impl Iterator<Item = RawFd> {
        self.holders.iter().map(AsRawFd::as_raw_fd).chain([self.rx.fd()])
    }

    /// Leaves and joins until the memberships are those in `wanted`. What cannot be joined is an error; the others
    /// are joined all the same.
    pub(crate) fn follow(&mut self, wanted: &[IpAddr]) -> io::Result<()> {
        let mut result = Ok(());
        let mut kept = std::mem::take(&mut self.joined);
        kept.retain(|(group, holder)| {
            let wanted = wanted.contains(group);
            if !wanted {
                // Fails where the interface is gone, and with it the membership.
                let _ = socket::leave(self.holder(*holder), *group, self.ifindex);
            }
            wanted
        });
        self.joined = kept;
        for group in wanted {
            if !self.joined.iter().any(|(joined, _)| joined == group) {
                match self.join(*group) {
                    Ok(holder) => self.joined.push((*group, holder)),
                    Err(error) => result = Err(error),
                }
            }
        }
        result
    }

    fn join(&mut self, group: IpAddr) -> io::Result<Option<usize>> {
        for holder in std::iter::once(None).chain((0..self.holders.len()).map(Some)) {
            match socket::join(self.holder(holder), group, self.ifindex) {
                Ok(()) => return Ok(holder),
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOBUFS | libc::ENOMEM)) => {}
                Err(e) => return Err(e),
            }
        }
        let socket = socket::udp(self.family)?;
        socket::join(socket.as_raw_fd(), group, self.ifindex)?;
        self.holders.push(socket);
        // The receiver is not a member of what others hold.
        self.hear_all(true);
        Ok(Some(self.holders.len() - 1))
    }

    fn holder(&self, holder: Option<usize>) -> RawFd {
        holder.map_or(self.rx.fd(), |i| self.holders[i].as_raw_fd())
    }

    fn hear_all(&self, all: bool) {
        for (level, option) in ALL_OPTIONS {
            // Kernels without the option hear all: some packets more to drop.
            let _ = socket::set_option(self.rx.socket(), level, option, i32::from(all));
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn follow__joins_more_than_one_socket_holds_and_leaves() {
        // Interface 1 is the loopback.
        let mut groups = Groups::open(28_990, 1, 1 << 16, true).unwrap();
        let many: Vec<IpAddr> = (1..=50u8).map(|i| IpAddr::from([239, 1, 2, i])).collect();
        groups.follow(&many).unwrap();
        assert_eq!(groups.joined.len(), 50);
        groups.follow(&many[10..11]).unwrap();
        assert_eq!(groups.joined.len(), 1);
        groups.follow(&[]).unwrap();
        assert!(groups.joined.is_empty());
        // What is no group is an error and spoils nothing.
        assert!(groups.follow(&["10.0.0.1".parse().unwrap(), many[0]]).is_err());
        assert_eq!(groups.joined, [(many[0], None)]);
    }
}
