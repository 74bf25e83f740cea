//! The system calls of namespaces: the unsafe code of this crate.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr;

/// Makes a new network namespace and returns a descriptor that keeps it.
pub fn new_network() -> io::Result<File> {
    // A thread of its own: only that thread moves into the new namespace, and it ends at once.
    let made = std::thread::spawn(|| {
        // SAFETY: unshare takes flags and touches no memory.
        check(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
        File::open("/proc/thread-self/ns/net")
    });
    made.join().map_err(|_| io::Error::other("the thread that makes a namespace panicked"))?
}

/// Moves the calling thread into a network namespace.
pub fn enter(namespace: &File) -> io::Result<()> {
    // SAFETY: setns takes a descriptor we own and flags, and touches no memory.
    check(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) })
}

/// Lets a command run inside a network namespace, with the /sys that belongs to it, and die with its parent.
pub fn inside<'a>(command: &'a mut Command, namespace: &File) -> &'a mut Command {
    let fd = namespace.as_raw_fd();
    // SAFETY: the closure runs between fork and exec and makes system calls only: no allocation, no lock.
    // `fd` is still open there: it is CLOEXEC, not close-on-fork, and the namespace outlives the spawn.
    unsafe { command.pre_exec(move || prepare(fd)) }
}

fn prepare(namespace: RawFd) -> io::Result<()> {
    // SAFETY: each call takes numbers and constant C strings.
    unsafe {
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        check(libc::setns(namespace, libc::CLONE_NEWNET))?;
        check(libc::unshare(libc::CLONE_NEWNS))?;
        check(mount(c"", c"/", libc::MS_SLAVE | libc::MS_REC, c""))?;
        // A container may forbid a fresh sysfs: then programs see the interfaces of the namespace by ioctl
        // and netlink all the same.
        let _ = mount(c"sysfs", c"/sys", 0, c"sysfs");
    }
    Ok(())
}

/// # Safety
///
/// None beyond valid C strings, which the types guarantee; it is unsafe to name where it may be called (after
/// fork).
unsafe fn mount(source: &CStr, target: &CStr, flags: libc::c_ulong, kind: &CStr) -> libc::c_int {
    // SAFETY: all pointers are C strings; no data is passed.
    unsafe { libc::mount(source.as_ptr(), target.as_ptr(), kind.as_ptr(), flags, ptr::null()) }
}

/// For an ordinary user: enters a user namespace of its own in which it may make networks. Must be called
/// before the process has threads. Root stays what it is.
pub fn become_root_of_own_namespace() -> io::Result<()> {
    // SAFETY: geteuid and getegid cannot fail and touch no memory.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    if uid == 0 {
        return Ok(());
    }
    // SAFETY: unshare takes flags and touches no memory.
    check(unsafe { libc::unshare(libc::CLONE_NEWUSER) })?;
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {gid} 1"))
}

fn check(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
