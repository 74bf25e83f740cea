//! Opening the statistics file safely in a directory that others can write to.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::record::{self, RECORD_WORDS, RECORDS_MAX, Record, StatWriter};
use crate::sys::{self, Mapping};

/// Words before the first record (one page); only the first is used.
pub(crate) const HEADER_WORDS: usize = 512;
const FILE_WORDS: usize = HEADER_WORDS + RECORDS_MAX * RECORD_WORDS;
/// "metaroc" and the version of the layout; change the last byte with every change of places or meanings.
const HEADER: u64 = u64::from_be_bytes(*b"metaroc\x01");

/// The per-user statistics file, mapped.
#[derive(Debug, Clone)]
pub struct StatFile {
    map: Arc<Mapping>,
}

impl StatFile {
    /// Opens this user's file, making it where there is none: `/dev/shm/metaroce-stat-UID`, else the same name in
    /// the per-user runtime directory. The error is that of the last place tried.
    pub fn open_or_create() -> io::Result<StatFile> {
        let uid = sys::effective_uid();
        match StatFile::open_at(&shared_path(uid), uid, true) {
            Ok(file) => Ok(file),
            Err(_) => {
                let dir = runtime_dir(uid);
                std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
                StatFile::open_at(&dir.join(file_name(uid)), uid, true)
            }
        }
    }

    /// Opens this user's file for a reader; `None` when no process has made one yet.
    pub fn open() -> io::Result<Option<StatFile>> {
        let uid = sys::effective_uid();
        let mut refusal = None;
        for path in [shared_path(uid), runtime_dir(uid).join(file_name(uid))] {
            match StatFile::open_at(&path, uid, false) {
                Ok(file) => return Ok(Some(file)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => refusal = Some(error),
            }
        }
        refusal.map_or(Ok(None), Err)
    }

    /// The files of all users that this user may read (root: everybody's), with the uid each belongs to.
    pub fn open_all_users() -> Vec<(u32, StatFile)> {
        let names = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
        let uids =
            names.filter_map(|entry| entry.file_name().to_str()?.strip_prefix(FILE_PREFIX)?.parse().ok());
        let mut files: Vec<(u32, StatFile)> = uids
            .filter_map(|uid| Some((uid, StatFile::open_at(&shared_path(uid), uid, false).ok()?)))
            .collect();
        let me = sys::effective_uid();
        if !files.iter().any(|(uid, _)| *uid == me)
            && let Ok(Some(own)) = StatFile::open()
        {
            files.push((me, own));
        }
        files.sort_by_key(|(uid, _)| *uid);
        files
    }

    /// Takes a record for this process, named `comm` (at most 15 bytes are kept). Where the process had one before
    /// and released it, its counters go on from there. `None` when all records belong to live processes.
    pub fn claim(&self, comm: &str) -> Option<StatWriter> {
        record::claim(&self.map, comm)
    }

    /// All records in use, live and ended, oldest start first.
    pub fn records(&self) -> Vec<Record> {
        let mut records: Vec<Record> =
            (0..RECORDS_MAX).filter_map(|index| record::read(&self.map, index)).collect();
        records.sort_by_key(|record| (record.started_unix_s, record.pid));
        records
    }

    /// Opens or makes the file at `path`, which must belong to `uid` alone. A file of another layout is replaced;
    /// processes that still write to it keep their now nameless copy.
    pub(crate) fn open_at(path: &Path, uid: u32, create: bool) -> io::Result<StatFile> {
        for _ in 0..2 {
            let file = open_owned(path, uid, create)?;
            if !create && file.metadata()?.len() == 0 {
                return Err(io::ErrorKind::NotFound.into());
            }
            let map = Mapping::new(&file, FILE_WORDS)?;
            let header = map.word(0);
            match header.compare_exchange(0, HEADER, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) | Err(HEADER) => return Ok(StatFile { map: Arc::new(map) }),
                Err(_) if create => std::fs::remove_file(path)?,
                Err(_) => break,
            }
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "statistics file of another version"))
    }
}

const FILE_PREFIX: &str = "metaroce-stat-";

fn file_name(uid: u32) -> String {
    format!("{FILE_PREFIX}{uid}")
}

fn shared_path(uid: u32) -> PathBuf {
    Path::new("/dev/shm").join(file_name(uid))
}

/// `$XDG_RUNTIME_DIR/metaroce`, else `/tmp/metaroce-UID`.
fn runtime_dir(uid: u32) -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if Path::new(&dir).is_absolute() => Path::new(&dir).join("metaroce"),
        _ => PathBuf::from(format!("/tmp/metaroce-{uid}")),
    }
}

/// Opens a regular file that `uid` owns and nobody else can reach; follows no link, so nobody can plant one.
fn open_owned(path: &Path, uid: u32, create: bool) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() || meta.uid() != uid || meta.mode() & 0o077 != 0 || meta.nlink() > 1 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{} is not a private file of user {uid}", path.display()),
        ));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A path in a fresh private directory, removed with it.
    struct TempPath(PathBuf);

    impl TempPath {
        fn new(name: &str) -> TempPath {
            let dir = std::env::temp_dir().join(format!("metaroce-stat-test-{}-{name}", std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            TempPath(dir)
        }
        fn file(&self) -> PathBuf {
            self.0.join("stat")
        }
    }

    impl Drop for TempPath {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn open_at__creates_a_private_file_and_shares_it() {
        let dir = TempPath::new("share");
        let uid = sys::effective_uid();
        assert_eq!(StatFile::open_at(&dir.file(), uid, false).unwrap_err().kind(), io::ErrorKind::NotFound);
        let first = StatFile::open_at(&dir.file(), uid, true).unwrap();
        let second = StatFile::open_at(&dir.file(), uid, false).unwrap();
        let writer = first.claim("one").unwrap();
        assert_eq!(second.records().len(), 1);
        drop(writer);
        let meta = std::fs::metadata(dir.file()).unwrap();
        assert_eq!(meta.mode() & 0o777, 0o600);
        assert_eq!(meta.len(), (FILE_WORDS * 8) as u64);
    }

    #[test]
    fn open_at__refuses_links_open_modes_and_other_owners() {
        let dir = TempPath::new("refuse");
        let uid = sys::effective_uid();
        drop(StatFile::open_at(&dir.file(), uid, true).unwrap());
        let link = dir.0.join("link");
        std::os::unix::fs::symlink(dir.file(), &link).unwrap();
        assert!(StatFile::open_at(&link, uid, true).is_err());
        assert!(StatFile::open_at(&dir.file(), uid + 1, true).is_err());
        std::fs::set_permissions(dir.file(), std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(StatFile::open_at(&dir.file(), uid, true).is_err());
    }

    #[test]
    fn open_at__replaces_a_file_of_another_layout() {
        let dir = TempPath::new("layout");
        let uid = sys::effective_uid();
        let old = StatFile::open_at(&dir.file(), uid, true).unwrap();
        old.map.word(0).store(HEADER + 1, Ordering::Relaxed);
        assert_eq!(
            StatFile::open_at(&dir.file(), uid, false).unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        let new = StatFile::open_at(&dir.file(), uid, true).unwrap();
        assert!(new.claim("new").is_some());
        assert!(old.records().is_empty());
    }
}
