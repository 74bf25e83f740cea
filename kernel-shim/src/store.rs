//! Keeps the tree in a file system: a directory per content, shared by a user's processes, reclaimed by the next.
//!
//! A directory's name is the hash of its content, so a process finds the one an earlier process made. Whoever uses a
//! directory holds a shared lock on it, which the kernel drops when the process dies, however it dies; whoever makes a
//! new one removes those that nobody holds. A process that lost its lock, by closing descriptors it does not know,
//! notices a missing directory at its next look and makes it again.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::sys;
use crate::sysfs::{Entry, Kind};

/// Whether the tree at `path` is still there and this user may look into it.
pub(crate) fn is_there(path: &[u8]) -> bool {
    fs::metadata(Path::new(OsStr::from_bytes(path)).join("sys/class")).is_ok()
}

/// Finds or makes the directory that holds `entries` and gives its canonical path.
///
/// # Errors
/// One sentence with the cause and the remedy.
pub(crate) fn materialise(entries: &[Entry]) -> Result<Vec<u8>, String> {
    let mut causes = Vec::new();
    for candidate in candidates() {
        match runtime_directory(&candidate).and_then(|directory| in_directory(&directory, entries)) {
            Ok(path) => return Ok(path.into_os_string().into_vec()),
            Err(error) => causes.push(format!("{}: {error}", candidate.display())),
        }
    }
    Err(format!(
        "its files can be kept nowhere ({}); make XDG_RUNTIME_DIR or /tmp writable",
        causes.join("; ")
    ))
}

/// Directories that may hold trees, best first. A name in a public place may be taken by someone else, on purpose or in
/// another user namespace; the later ones are for that.
fn candidates() -> Vec<PathBuf> {
    let uid = sys::euid();
    let user_namespace = fs::metadata("/proc/self/ns/user").map_or(0, |meta| meta.ino());
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let public = |directory: &str| PathBuf::from(format!("{directory}/metaroce-{uid}"));
    let mut all: Vec<PathBuf> = runtime.map(|path| path.join("metaroce")).into_iter().collect();
    all.extend([public("/tmp"), public("/dev/shm"), public("/var/tmp")]);
    all.push(PathBuf::from(format!("/tmp/metaroce-{uid}-{user_namespace}")));
    all
}

/// Makes sure that `path` is a directory that only this user can change or read, and gives its canonical path.
fn runtime_directory(path: &Path) -> io::Result<PathBuf> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let directory = open_directory(path)?;
    let meta = directory.metadata()?;
    if meta.uid() != sys::euid() {
        return Err(io::Error::new(ErrorKind::PermissionDenied, "it belongs to another user"));
    }
    if meta.mode() & 0o777 != 0o700 {
        directory.set_permissions(Permissions::from_mode(0o700))?;
    }
    fs::canonicalize(path)
}

fn in_directory(directory: &Path, entries: &[Entry]) -> io::Result<PathBuf> {
    let path = directory.join(format!("{TREE}{:0digits$x}", hash(entries), digits = crate::ops::HASH_DIGITS));
    for _ in 0..ATTEMPTS {
        if let Some(lock) = lock(&path, libc::LOCK_SH)? {
            if is_complete(&path, entries) {
                sys::keep_open(lock);
                return Ok(path);
            }
            // A cleaner of temporary files has been here.
            discard(directory, &path)?;
        }
        match build(directory, &path, entries) {
            Ok(lock) => {
                sys::keep_open(lock);
                reclaim(directory);
                return Ok(path);
            }
            // Another process was faster, or reclaimed our directory before we had locked it.
            Err(error) if is_lost_race(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("other processes keep changing it"))
}

/// Attempts to find or build one tree; each failed one means that another process succeeded with something.
const ATTEMPTS: usize = 16;

fn is_lost_race(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty)
}

/// Opens the tree that is at `path` now, with a lock; `None` when there is none, or one that is locked against us.
fn lock(path: &Path, operation: libc::c_int) -> io::Result<Option<File>> {
    let lock = match open_directory(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    // The lock counts only if the directory was not taken away, and perhaps replaced, before we had it.
    let is_still_there = || {
        let (now, then) = (fs::symlink_metadata(path), lock.metadata());
        now.is_ok_and(|now| then.is_ok_and(|then| (now.dev(), now.ino()) == (then.dev(), then.ino())))
    };
    Ok((sys::try_flock(&lock, operation) && is_still_there()).then_some(lock))
}

/// Builds the tree under a temporary name, locked, and moves it into place with its lock.
fn build(directory: &Path, path: &Path, entries: &[Entry]) -> io::Result<File> {
    let temporary = temporary_name(directory);
    DirBuilder::new().mode(0o755).create(&temporary)?;
    // Without the lock it is being reclaimed at this moment.
    let Some(lock) = lock(&temporary, libc::LOCK_SH)? else { return Err(ErrorKind::NotFound.into()) };
    let fill = || {
        entries.iter().try_for_each(|entry| write_entry(&temporary.join(&entry.path), &entry.kind))?;
        fs::rename(&temporary, path)
    };
    match fill() {
        Ok(()) => Ok(lock),
        Err(error) => {
            // Best effort: what remains is reclaimed by the next process.
            let _ = fs::remove_dir_all(&temporary);
            Err(error)
        }
    }
}

fn write_entry(path: &Path, kind: &Kind) -> io::Result<()> {
    let directory = |path: &Path| DirBuilder::new().recursive(true).mode(0o755).create(path);
    if let Some(parent) = path.parent() {
        directory(parent)?;
    }
    match kind {
        Kind::Dir => directory(path),
        Kind::Link(target) => symlink(target, path),
        Kind::File(text) => {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o644).open(path)?;
            file.write_all(text.as_bytes())?;
            file.set_permissions(Permissions::from_mode(0o444))
        }
    }
}

fn is_complete(path: &Path, entries: &[Entry]) -> bool {
    entries.iter().all(|entry| {
        let path = path.join(&entry.path);
        match &entry.kind {
            Kind::Dir => fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir()),
            Kind::Link(target) => fs::read_link(path).is_ok_and(|found| found.as_os_str() == target.as_str()),
            Kind::File(text) => {
                fs::symlink_metadata(path).is_ok_and(|meta| meta.is_file() && meta.len() == text.len() as u64)
            }
        }
    })
}

/// Removes every tree, finished or not, that no living process holds. What cannot be removed stays for the next.
fn reclaim(directory: &Path) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if [TREE, TEMPORARY].iter().any(|prefix| name.as_bytes().starts_with(prefix.as_bytes())) {
            let path = entry.path();
            // The lock is held until the directory is gone.
            if let Ok(Some(_lock)) = lock(&path, libc::LOCK_EX) {
                let _ = discard(directory, &path);
            }
        }
    }
}

/// Takes a tree out of its place at once, then removes it; a process killed in between leaves it to the next.
fn discard(directory: &Path, path: &Path) -> io::Result<()> {
    let doomed = temporary_name(directory);
    match fs::rename(path, &doomed).and_then(|()| fs::remove_dir_all(&doomed)) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Names of trees begin with this; [`crate::ops::visible_offset`] knows them by it.
const TREE: &str = "sysfs-";
const TEMPORARY: &str = "tmp-";

fn temporary_name(directory: &Path) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // The time tells apart processes of different pid namespaces that share the directory.
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    directory.join(format!("{TEMPORARY}{}-{now:x}-{number}", std::process::id()))
}

fn open_directory(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path)
}

/// FNV-1a over everything that makes two trees differ.
fn hash(entries: &[Entry]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for byte in bytes.iter().chain(&[0]) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    for entry in entries {
        add(entry.path.as_bytes());
        match &entry.kind {
            Kind::File(text) => add(text.as_bytes()),
            Kind::Link(target) => add(format!("-> {target}").as_bytes()),
            Kind::Dir => add(b"/"),
        }
    }
    hash
}

#[cfg(test)]
mod tests;
