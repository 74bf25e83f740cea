//! libibverbs: which one, does it have what the provider calls, and does it list the device in the end.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Finding;
use crate::environment::{self, DeviceOptions};
use crate::libs::Libraries;
use crate::{elf, user};

/// What the provider takes from libibverbs besides the public interface, at private ABI 34.
const PRIVATE_SYMBOLS: [&str; 4] =
    ["verbs_register_driver_34", "_verbs_init_and_alloc_context", "verbs_set_ops", "verbs_uninit_context"];

/// Where libraries are looked for when `ldconfig` does not say.
pub const LIBRARY_DIRS: [&str; 6] =
    ["/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// The libibverbs that the dynamic loader would take.
pub fn library() -> Finding {
    const INSTALL: &str = "`apt install libibverbs1` (or rdma-core of your distribution)";
    let Some(path) = find_library("libibverbs.so.1") else {
        return Finding::wrong("libibverbs", "libibverbs.so.1 is not installed", INSTALL);
    };
    let real = path.canonicalize().unwrap_or_else(|_| path.clone());
    let exports = elf::read(&real).ok().and_then(|bytes| elf::parse(&bytes)).map(|elf| elf.exports);
    let Some(exports) = exports else {
        return Finding::wrong(
            "libibverbs",
            format!("{} is no library for this machine", real.display()),
            INSTALL,
        );
    };
    let version = version_of(&real).map_or(String::new(), |version| format!(", rdma-core {version}"));
    let missing: Vec<&str> =
        PRIVATE_SYMBOLS.iter().filter(|name| !exports.iter().any(|e| e == *name)).copied().collect();
    if missing.is_empty() {
        return Finding::good("libibverbs", format!("{}{version}, private ABI 34", real.display()));
    }
    let registers: Vec<&str> =
        exports.iter().filter_map(|name| name.strip_prefix("verbs_register_driver_")).collect();
    let found = match registers.first() {
        Some(abi) => {
            format!("{}{version} has private ABI {abi}, the provider is built for 34", real.display())
        }
        None => format!("{}{version} lacks {}", real.display(), missing.join(", ")),
    };
    Finding::wrong("libibverbs", found, "use rdma-core 36 to 56 (Debian 12 and 13, Ubuntu 22.04 and 24.04)")
}

/// `44.0` of `libibverbs.so.1.14.44.0`.
fn version_of(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let parts: Vec<&str> = name.strip_prefix("libibverbs.so.1.")?.split('.').collect();
    parts.get(1..).filter(|rest| !rest.is_empty()).map(|rest| rest.join("."))
}

/// Our own two files and the link.
pub fn own_libraries() -> Finding {
    match Libraries::locate(user::effective_uid()) {
        Ok(libraries) => Finding::good(
            "libraries",
            format!("{} and {}-rdmav34.so", libraries.shim.display(), libraries.driver.display()),
        ),
        Err(error) => {
            let text = error.to_string();
            let (found, remedy) = text.rsplit_once("; ").unwrap_or((&text, "reinstall metaroce"));
            Finding::wrong("libraries", found, remedy)
        }
    }
}

/// Runs `ibv_devices` as a program would be run, and looks for the device in its output.
pub fn end_to_end() -> Finding {
    let Some(program) = elf::find_program(Path::new("ibv_devices")) else {
        return Finding::advice(
            "trial",
            "ibv_devices is not installed, so nothing was tried",
            "`apt install ibverbs-utils`",
        );
    };
    let Ok(libraries) = Libraries::locate(user::effective_uid()) else {
        return Finding::advice("trial", "nothing was tried", "mend the libraries first");
    };
    let variables =
        environment::variables(&libraries, &DeviceOptions::default(), |name| std::env::var_os(name));
    match Command::new(program).envs(variables).output() {
        Err(error) => {
            Finding::wrong("trial", format!("ibv_devices does not start: {error}"), "reinstall ibverbs-utils")
        }
        Ok(out) => {
            let text = String::from_utf8_lossy(&out.stdout);
            let listed = text.lines().any(|line| line.split_whitespace().next() == Some("metaroce0"));
            let complaint = String::from_utf8_lossy(&out.stderr);
            let complaint = complaint.lines().map(str::trim).find(|line| !line.is_empty());
            match (listed, complaint) {
                (true, None) => Finding::good("trial", "ibv_devices lists metaroce0"),
                (true, Some(line)) => Finding::advice(
                    "trial",
                    format!("ibv_devices lists metaroce0 but says: {line}"),
                    "see that message",
                ),
                (false, Some(line)) => Finding::wrong(
                    "trial",
                    format!("ibv_devices does not list metaroce0: {line}"),
                    "see that message",
                ),
                (false, None) => Finding::wrong(
                    "trial",
                    "ibv_devices does not list metaroce0",
                    "set METAROCE_LOG=debug and run `metaroce run -- ibv_devices`",
                ),
            }
        }
    }
}

/// Path of a library as the loader finds it: LD_LIBRARY_PATH, ldconfig's cache, the usual directories.
pub fn find_library(name: &str) -> Option<PathBuf> {
    let by_variable = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let mut dirs: Vec<PathBuf> =
        std::env::split_paths(&by_variable).filter(|dir| !dir.as_os_str().is_empty()).collect();
    if let Some(found) = first_with(&dirs, name) {
        return Some(found);
    }
    if let Some(found) = cached(name) {
        return Some(found);
    }
    dirs = LIBRARY_DIRS.iter().map(PathBuf::from).collect();
    first_with(&dirs, name)
}

fn first_with(dirs: &[PathBuf], name: &str) -> Option<PathBuf> {
    dirs.iter().map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// Asks `ldconfig -p`: lines like `libibverbs.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libibverbs.so.1`.
fn cached(name: &str) -> Option<PathBuf> {
    let program =
        ["/sbin/ldconfig", "/usr/sbin/ldconfig"].into_iter().find(|path| Path::new(path).is_file())?;
    let out = Command::new(program).arg("-p").output().ok()?;
    let wanted = if cfg!(target_arch = "aarch64") { "AArch64" } else { "x86-64" };
    String::from_utf8_lossy(&out.stdout).lines().find_map(|line| {
        let (left, path) = line.split_once(" => ")?;
        let mut words = left.split_whitespace();
        (words.next() == Some(name) && left.contains(wanted)).then(|| PathBuf::from(OsStr::new(path.trim())))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_of__reads_the_file_name() {
        assert_eq!(version_of(Path::new("/l/libibverbs.so.1.14.44.0")).as_deref(), Some("44.0"));
        assert_eq!(version_of(Path::new("/l/libibverbs.so.1")), None);
    }

    #[test]
    fn find_library__finds_libc() {
        assert!(find_library("libc.so.6").is_some());
        assert!(find_library("libdoes-not-exist.so.9").is_none());
    }
}
