//! Where the shim and the provider are, and the link under which libibverbs finds the provider.
//!
//! libibverbs loads `NAME-rdmav34.so` for each NAME in RDMAV_DRIVERS, and cargo cannot name a library like that, so
//! the command makes a link. LD_PRELOAD splits at spaces and colons and expands `$`, RDMAV_DRIVERS splits at colons
//! and semicolons: both get paths that have none of them, through a private per-user directory.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

/// File name of the LD_PRELOAD shim.
pub const SHIM: &str = "libmetaroce_shim.so";
/// File name of the provider as cargo builds it.
pub const PROVIDER: &str = "libmetaroce_provider.so";
/// File name under which libibverbs with private ABI 34 loads the provider.
const LINK: &str = "libmetaroce-rdmav34.so";
/// What RDMAV_DRIVERS names: the link without libibverbs' suffix.
pub const DRIVER: &str = "libmetaroce";

/// Paths ready to go into the environment: both clean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Libraries {
    /// The shim, for LD_PRELOAD.
    pub shim: PathBuf,
    /// The provider without `-rdmav34.so`, for RDMAV_DRIVERS.
    pub driver: PathBuf,
    /// The provider's own file.
    pub provider: PathBuf,
}

/// Why the libraries cannot be offered to a program.
#[derive(Debug)]
pub enum LibError {
    /// No directory holds both files.
    Missing { searched: Vec<PathBuf> },
    /// No private directory could be used for the link; the reason per candidate.
    NoDirectory(Vec<(PathBuf, io::Error)>),
}

impl fmt::Display for LibError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LibError::Missing { searched } => {
                write!(f, "{SHIM} and {PROVIDER} are not in")?;
                for (i, dir) in searched.iter().enumerate() {
                    write!(f, "{} {}", if i == 0 { "" } else { "," }, dir.display())?;
                }
                f.write_str("; run `cargo build --release --workspace` or set METAROCE_LIBDIR")
            }
            LibError::NoDirectory(tries) => {
                f.write_str("no private directory for the provider's link:")?;
                for (dir, error) in tries {
                    write!(f, " {}: {error};", dir.display())?;
                }
                f.write_str(" make one of them writable or set XDG_RUNTIME_DIR")
            }
        }
    }
}

impl Libraries {
    /// Finds both files and makes the link where there is none. Safe against any number of concurrent starts.
    pub fn locate(uid: u32) -> Result<Libraries, LibError> {
        let searched = search_dirs();
        let dir = searched
            .iter()
            .find(|dir| dir.join(SHIM).is_file() && provider_in(dir).is_some())
            .ok_or_else(|| LibError::Missing { searched: searched.clone() })?;
        let shim = dir.join(SHIM);
        let provider = provider_in(dir).unwrap_or_else(|| dir.join(PROVIDER));
        // A package installs the link itself.
        if is_clean(dir) && dir.join(LINK).is_file() {
            return Ok(Libraries { shim, driver: dir.join(DRIVER), provider });
        }
        let mut tries = Vec::new();
        for base in link_dirs(uid) {
            match make_links(&base, uid, &shim, &provider) {
                Ok(libraries) => return Ok(libraries),
                Err(error) => tries.push((base, error)),
            }
        }
        Err(LibError::NoDirectory(tries))
    }
}

/// METAROCE_LIBDIR alone when set, else beside the executable and in `../lib/metaroce`.
fn search_dirs() -> Vec<PathBuf> {
    if let Some(dir) = std::env::var_os("METAROCE_LIBDIR").filter(|dir| !dir.is_empty()) {
        let dir = PathBuf::from(dir);
        return vec![dir.canonicalize().unwrap_or(dir)];
    }
    let Some(dir) =
        std::env::current_exe().ok().and_then(|exe| Some(exe.canonicalize().ok()?.parent()?.to_owned()))
    else {
        return Vec::new();
    };
    let installed = dir.join("../lib/metaroce");
    vec![dir, installed.canonicalize().unwrap_or(installed)]
}

/// The provider's file in `dir`, under cargo's name or the packaged one.
fn provider_in(dir: &Path) -> Option<PathBuf> {
    [PROVIDER, LINK].iter().map(|name| dir.join(name)).find(|path| path.is_file())
}

/// Directories that may hold this user's links, best first; all clean.
fn link_dirs(uid: u32) -> Vec<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(|dir| Path::new(&dir).join("metaroce"));
    let shared = ["/tmp", "/dev/shm", "/var/tmp"].map(|dir| Path::new(dir).join(format!("metaroce-{uid}")));
    runtime.into_iter().filter(|dir| dir.is_absolute() && is_clean(dir)).chain(shared).collect()
}

/// Makes the links of one pair of source files below `base`. The directory is named after the sources, so different
/// builds never fight over one link and the links in one directory never change.
fn make_links(base: &Path, uid: u32, shim: &Path, provider: &Path) -> io::Result<Libraries> {
    private_dir(base, uid)?;
    let dir = base.join(format!("{:016x}", hash_of(shim, provider)));
    private_dir(&dir, uid)?;
    link(provider, &dir.join(LINK))?;
    let shim = if is_clean(shim) {
        shim.to_owned()
    } else {
        let clean = dir.join(SHIM);
        link(shim, &clean)?;
        clean
    };
    Ok(Libraries { shim, driver: dir.join(DRIVER), provider: provider.to_owned() })
}

/// Makes sure `dir` is a directory (no link to one) that `uid` owns and nobody else may enter.
fn private_dir(dir: &Path, uid: u32) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let meta = fs::symlink_metadata(dir)?;
    if !meta.is_dir() || meta.uid() != uid {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("not a directory of user {uid} (remove it)"),
        ));
    }
    if meta.mode() & 0o077 != 0 {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    }
    Ok(())
}

/// Makes `link` point to `target`. Whoever comes second finds it made; a wrong one is replaced in one step.
fn link(target: &Path, link: &Path) -> io::Result<()> {
    for _ in 0..8 {
        match symlink(target, link) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        if fs::read_link(link).is_ok_and(|present| present == target) {
            return Ok(());
        }
        // Every process that is here wants the same target, so they may share the temporary name.
        let temporary = link.with_extension("new");
        match symlink(target, &temporary) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        match fs::rename(&temporary, link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Err(io::Error::other("the link keeps changing"))
}

/// Whether LD_PRELOAD and RDMAV_DRIVERS take the path as it is.
pub fn is_clean(path: &Path) -> bool {
    path.to_str().is_some_and(|text| {
        text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-+@,=~%".contains(&byte))
    })
}

/// FNV-1a of both paths: a name, not a proof (the link's target is compared).
fn hash_of(shim: &Path, provider: &Path) -> u64 {
    let bytes =
        [shim, provider].into_iter().flat_map(|path| path.as_os_str().as_encoded_bytes().iter().chain(&[0]));
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::user;

    /// A fresh directory, removed with it.
    struct TempDir(PathBuf);

    impl TempDir {
        fn new(name: &str) -> TempDir {
            let dir = std::env::temp_dir().join(format!("metaroce-cli-test-{}-{name}", std::process::id()));
            fs::create_dir(&dir).unwrap();
            TempDir(dir)
        }
    }

    impl Drop for TempDir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn make_links__clean_source_needs_only_the_provider_link() {
        let dir = TempDir::new("clean");
        let (shim, provider) = (dir.0.join(SHIM), dir.0.join(PROVIDER));
        let made = make_links(&dir.0.join("links"), user::effective_uid(), &shim, &provider).unwrap();
        assert_eq!(made.shim, shim);
        let link = PathBuf::from(format!("{}-rdmav34.so", made.driver.display()));
        assert_eq!(fs::read_link(link).unwrap(), provider);
        assert_eq!(fs::metadata(dir.0.join("links")).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn make_links__unclean_source_gets_a_clean_shim_too() {
        let dir = TempDir::new("unclean");
        let source = Path::new("/opt/a b:c");
        let (shim, provider) = (source.join(SHIM), source.join(PROVIDER));
        let made = make_links(&dir.0.join("links"), user::effective_uid(), &shim, &provider).unwrap();
        assert!(is_clean(&made.shim) && is_clean(&made.driver));
        assert_eq!(fs::read_link(&made.shim).unwrap(), shim);
    }

    #[test]
    fn make_links__concurrent_starts_agree() {
        let dir = TempDir::new("race");
        let (shim, provider) = (PathBuf::from("/x y/s"), PathBuf::from("/x y/p"));
        let base = dir.0.join("links");
        let all: Vec<Libraries> = std::thread::scope(|scope| {
            let start = || make_links(&base, user::effective_uid(), &shim, &provider).unwrap();
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(start)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(all.iter().all(|one| *one == all[0]));
    }

    #[test]
    fn make_links__refuses_a_planted_directory() {
        let dir = TempDir::new("planted");
        let real = dir.0.join("real");
        fs::create_dir(&real).unwrap();
        symlink(&real, dir.0.join("links")).unwrap();
        let uid = user::effective_uid();
        assert!(make_links(&dir.0.join("links"), uid, Path::new("/s"), Path::new("/p")).is_err());
        assert!(make_links(&real, uid + 1, Path::new("/s"), Path::new("/p")).is_err());
    }

    #[test]
    fn link__replaces_a_wrong_target() {
        let dir = TempDir::new("wrong");
        let path = dir.0.join(LINK);
        symlink("/elsewhere", &path).unwrap();
        link(Path::new("/right"), &path).unwrap();
        assert_eq!(fs::read_link(&path).unwrap(), Path::new("/right"));
        assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 1);
    }

    #[test]
    fn is_clean__knows_what_loaders_split_at() {
        assert!(is_clean(Path::new("/usr/lib/x86_64-linux-gnu/metaroce")));
        for text in ["/a b", "/a:b", "/a;b", "/a$ORIGIN", "/a\nb", "/ä"] {
            assert!(!is_clean(Path::new(text)), "{text}");
        }
    }
}
