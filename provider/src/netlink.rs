//! The kernel's announcements of changes of links and addresses: a netlink socket, an eventfd to stop waiting for it,
//! and a thread that gets none of the application's signals. Part of the unsafe fence.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr;
use std::thread::JoinHandle;

/// Announcements of the network namespace of the thread that opened them.
#[derive(Debug)]
pub(crate) struct Announcements {
    socket: OwnedFd,
    stop: OwnedFd,
}

impl Announcements {
    pub(crate) fn open() -> io::Result<Self> {
        let socket = metaroce_config::announcements()?;
        // SAFETY: plain call; the result is checked.
        let stop = unsafe { owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK))? };
        Ok(Self { socket, stop })
    }

    /// Waits for an announcement or for one of `others`, however long. What was announced is not looked at: several at
    /// once, and lost ones, all mean "look again". Two entries are put behind `others` and taken away again.
    pub(crate) fn wait(&self, others: &mut Vec<libc::pollfd>) -> Woken {
        let entry = |fd: &OwnedFd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        others.extend([entry(&self.socket), entry(&self.stop)]);
        loop {
            // SAFETY: the array lives through the call.
            let count = unsafe { libc::poll(others.as_mut_ptr(), others.len() as libc::nfds_t, -1) };
            if count > 0 {
                break;
            }
            if count < 0 && io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
                return Woken { stopped: true, announced: false };
            }
        }
        let mut rung = || others.pop().is_some_and(|entry| entry.revents != 0);
        let (stopped, announced) = (rung(), rung());
        if announced {
            metaroce_config::take_announcements(&self.socket);
        }
        Woken { stopped, announced }
    }

    /// Ends the waiting.
    pub(crate) fn stop(&self) {
        let one = 1u64;
        // SAFETY: the eight bytes live through the call; a full counter means it is stopped already.
        unsafe { libc::syscall(libc::SYS_write, self.stop.as_raw_fd(), &raw const one, size_of::<u64>()) };
    }
}

/// Why the waiting ended.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Woken {
    /// It is to end for good.
    pub(crate) stopped: bool,
    /// Links or addresses have changed.
    pub(crate) announced: bool,
}

/// Effective user id of the process that made the other end of a socket of its family.
pub(crate) fn peer_uid(socket: &UnixStream) -> io::Result<u32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both live through the call, and `length` is the size of `peer`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    if result == 0 { Ok(peer.uid) } else { Err(io::Error::last_os_error()) }
}

/// Effective user id of this process.
pub(crate) fn own_uid() -> u32 {
    // SAFETY: takes no argument, cannot fail.
    unsafe { libc::geteuid() }
}

/// Starts a thread with all signals blocked: they are the application's.
pub(crate) fn spawn_without_signals(
    name: &str,
    run: impl FnOnce() + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    // SAFETY: the sets live through the calls; the old mask is put back as it was.
    unsafe {
        let (mut all, mut before) = std::mem::zeroed::<(libc::sigset_t, libc::sigset_t)>();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(128 << 10).spawn(run);
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, ptr::null_mut());
        thread
    }
}

/// # Safety
/// `fd` is the result of a call that makes a descriptor.
unsafe fn owned(fd: i32) -> io::Result<OwnedFd> {
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor nobody else knows.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
