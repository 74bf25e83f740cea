//! Event channels: what an open rdma_cm descriptor is.
//!
//! The application holds one end of a socket pair, we hold the other. Its end is readable exactly while events are
//! queued, so poll, epoll, select and a blocked reader need no help of ours. It is known by its inode number, which
//! dup, fork and exec keep and which no later descriptor shares; when its last copy is closed, by whatever means, the
//! kernel tells our end.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::os::fd::OwnedFd;

use super::abi::EventResp;
use super::os;

/// An event that waits to be taken.
#[derive(Debug, Clone)]
pub(super) struct Queued {
    /// The id that it is counted for: a request is counted for its listener.
    pub counted_for: u32,
    /// The id that a request made.
    pub request: Option<u32>,
    /// The multicast group that it is about.
    pub group: Option<u32>,
    pub response: EventResp,
}

/// One open file of the rdma_cm device.
#[derive(Debug)]
pub(super) struct Channel {
    pub ours: OwnedFd,
    queue: VecDeque<Queued>,
    /// Bytes in the application's end.
    bytes: u32,
}

/// More bytes than that are never in flight: a reader that waits for edges has had its edges by then.
const BYTES_MAX: u32 = 64;

impl Channel {
    pub(super) fn new(ours: OwnedFd) -> Channel {
        Channel { ours, queue: VecDeque::new(), bytes: 0 }
    }

    /// Adds an event. Each one makes an edge, as the kernel wakes waiters for each one.
    pub(super) fn push(&mut self, event: Queued) {
        self.queue.push_back(event);
        if self.bytes < BYTES_MAX {
            self.bytes += 1;
            os::ring(&self.ours);
        }
    }

    /// Takes the oldest event. `fd` is a descriptor of the application's end.
    pub(super) fn pop(&mut self, fd: c_int) -> Option<Queued> {
        let event = self.queue.pop_front();
        self.settle(fd);
        event
    }

    /// Takes all events that are counted for an id.
    pub(super) fn take(&mut self, counted_for: u32, fd: c_int) -> Vec<Queued> {
        let taken: Vec<Queued> =
            self.queue.iter().filter(|event| event.counted_for == counted_for).cloned().collect();
        self.queue.retain(|event| event.counted_for != counted_for);
        self.settle(fd);
        taken
    }

    /// Forgets all events about a multicast group.
    pub(super) fn take_group(&mut self, group: u32, fd: c_int) {
        self.queue.retain(|event| event.group != Some(group));
        self.settle(fd);
    }

    /// Makes the end unreadable when there is nothing to read.
    fn settle(&mut self, fd: c_int) {
        if self.queue.is_empty() && self.bytes > 0 {
            os::drain(fd);
            self.bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn is_readable(fd: &OwnedFd) -> bool {
        let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: `poll` is valid for the call.
        unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
    }

    #[test]
    fn channel__is_readable_exactly_while_events_wait() {
        let [app, ours] = os::socket_pair(libc::SOCK_CLOEXEC).unwrap();
        let mut channel = Channel::new(ours);
        let event = |id| Queued {
            counted_for: id,
            request: None,
            group: None,
            response: EventResp::new(7, id, 0, 0),
        };
        assert!(!is_readable(&app) && channel.pop(app.as_raw_fd()).is_none());
        for round in 0..1000 {
            channel.push(event(round % 2));
        }
        assert!(is_readable(&app));
        assert_eq!(channel.take(1, app.as_raw_fd()).len(), 500);
        for left in (0..500).rev() {
            assert_eq!(channel.pop(app.as_raw_fd()).unwrap().response.id, 0);
            assert_eq!(is_readable(&app), left > 0);
        }
        channel.push(event(3));
        assert!(is_readable(&app));
    }
}
