//! System calls that connection management needs, as safe functions.

use std::ffi::c_int;
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

/// Microseconds of a clock that never goes back.
pub(super) fn now_us() -> u64 {
    // SAFETY: all zero is a valid timespec, and it is valid for the call.
    let mut now: libc::timespec = unsafe { zeroed() };
    // SAFETY: as above.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000
}

/// A number that nobody else can know.
pub(super) fn entropy() -> u64 {
    let mut bytes = [0u8; 8];
    // SAFETY: `bytes` is valid for its length.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), libc::GRND_NONBLOCK) };
    if got == 8 { u64::from_ne_bytes(bytes) } else { now_us() ^ u64::from(std::process::id()) << 40 }
}

/// The inode number of a socket; `None` for every other kind of descriptor.
pub(super) fn socket_inode(fd: c_int) -> Option<u64> {
    let mut stat = MaybeUninit::<libc::stat>::zeroed();
    // SAFETY: `stat` is valid for the call, and all zero is a valid value of it.
    let stat = unsafe {
        if libc::fstat(fd, stat.as_mut_ptr()) != 0 {
            return None;
        }
        stat.assume_init()
    };
    (stat.st_mode & libc::S_IFMT == libc::S_IFSOCK).then_some(stat.st_ino)
}

/// Two connected stream sockets: the application's, and ours, which never blocks and is out of the application's way.
pub(super) fn socket_pair(app_flags: c_int) -> io::Result<[OwnedFd; 2]> {
    let mut ends = [0; 2];
    // SAFETY: `ends` has room for two descriptors.
    check(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM | app_flags, 0, ends.as_mut_ptr()) })?;
    // SAFETY: the descriptors are new and nobody else's.
    let [app, ours] = ends.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
    Ok([app, out_of_the_way(ours)?])
}

/// Moves a descriptor above those that programs with fixed-size tables count on, and closes it on exec.
pub(super) fn out_of_the_way(fd: OwnedFd) -> io::Result<OwnedFd> {
    const HIGH: c_int = 500;
    // SAFETY: a system call on a descriptor that `fd` keeps open.
    let high = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH) };
    if high < 0 {
        // The limit is lower than that: stay, but still close on exec.
        // SAFETY: as above.
        check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC) })?;
        return Ok(fd);
    }
    // SAFETY: the descriptor is new and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(high) })
}

/// Gives the application's end a number above those of its other descriptors, where there is one. librspreload takes a
/// socket's descriptor for any other of the same number as the socket's event channel, if that is lower: then select()
/// reports the wrong one, and iperf3 waits for ever. Below what select() can hold.
pub(super) fn above_others(fd: OwnedFd, close_on_exec: bool) -> OwnedFd {
    const ABOVE: c_int = 200;
    let command = if close_on_exec { libc::F_DUPFD_CLOEXEC } else { libc::F_DUPFD };
    // SAFETY: a system call on a descriptor that `fd` keeps open.
    let high = unsafe { libc::fcntl(fd.as_raw_fd(), command, ABOVE) };
    if high < 0 {
        return fd;
    }
    // SAFETY: the descriptor is new and nobody else's.
    let high = unsafe { OwnedFd::from_raw_fd(high) };
    if (high.as_raw_fd() as usize) < libc::FD_SETSIZE { high } else { fd }
}

/// Sends one byte without blocking; a full buffer means that there are bytes enough.
pub(super) fn ring(fd: &OwnedFd) {
    // SAFETY: the byte is valid for the call.
    unsafe { libc::send(fd.as_raw_fd(), [1u8].as_ptr().cast(), 1, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
}

/// Takes all bytes that are there, without blocking.
pub(super) fn drain(fd: c_int) {
    let mut bytes = [0u8; 256];
    // SAFETY: `bytes` is valid for its length.
    while unsafe { libc::recv(fd, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) }
        == bytes.len() as isize
    {}
}

/// Whether a descriptor is open and does not block.
pub(super) fn is_nonblocking(fd: c_int) -> bool {
    // SAFETY: a system call without pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    flags >= 0 && flags & libc::O_NONBLOCK != 0
}

/// An epoll instance.
#[derive(Debug)]
pub(super) struct Epoll(OwnedFd);

impl Epoll {
    pub(super) fn new() -> io::Result<Epoll> {
        // SAFETY: a system call without pointers.
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the descriptor is new and nobody else's.
        Ok(Epoll(out_of_the_way(unsafe { OwnedFd::from_raw_fd(fd) })?))
    }

    pub(super) fn fd(&self) -> c_int {
        self.0.as_raw_fd()
    }

    /// Reports `fd` under `token` when it is readable (`readable`), and in any case when it has an error or hung up.
    pub(super) fn add(&self, fd: &OwnedFd, token: u64, readable: bool) -> io::Result<()> {
        let events = if readable { libc::EPOLLIN as u32 } else { 0 };
        let mut event = libc::epoll_event { events, u64: token };
        // SAFETY: `event` is valid for the call.
        check(unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event) })?;
        Ok(())
    }
}

/// Waits on an epoll instance; gives the tokens that are ready. `None`: for ever.
pub(super) fn wait(epoll: c_int, timeout_us: Option<u64>, tokens: &mut Vec<u64>) {
    let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
    let timeout_ms = timeout_us.map_or(-1, |us| us.div_ceil(1000).min(1 << 30) as c_int);
    // SAFETY: `events` is valid for its length.
    let count = unsafe { libc::epoll_wait(epoll, events.as_mut_ptr(), events.len() as c_int, timeout_ms) };
    tokens.clear();
    tokens.extend(events.iter().take(count.max(0) as usize).map(|event| event.u64));
}

/// Runs `start` with all signals blocked, so that a thread it starts never runs a handler of the application's.
pub(super) fn with_signals_blocked<R>(start: impl FnOnce() -> R) -> R {
    let (mut all, mut old) =
        (MaybeUninit::<libc::sigset_t>::uninit(), MaybeUninit::<libc::sigset_t>::uninit());
    // SAFETY: both sets are valid for the calls; `old` is filled by the second.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let result = start();
    // SAFETY: `old` was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), ptr::null_mut()) };
    result
}

/// A result of -1 as an error.
pub(super) fn check(result: c_int) -> io::Result<c_int> {
    if result >= 0 { Ok(result) } else { Err(io::Error::last_os_error()) }
}

/// An error's number.
pub(super) fn errno_of(error: &io::Error) -> c_int {
    error.raw_os_error().unwrap_or(libc::EIO)
}
