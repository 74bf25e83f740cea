//! Debian packages a task needs: asked for with dpkg-query, installed with apt only when something is missing.

use std::path::Path;
use std::process::Command;

use crate::report::progress;

/// What compiling the workspace needs besides rustup.
pub const BUILD: &[&str] = &["gcc", "libc6-dev", "libibverbs-dev", "libclang-dev"];
/// What the demo runs.
pub const DEMO: &[&str] = &["ibverbs-utils", "perftest"];
/// What the tests run.
pub const TEST: &[&str] = &[
    "g++",
    "binutils",
    "groff",
    "tshark",
    "ibverbs-utils",
    "perftest",
    "python3",
    "python3-pyverbs",
    "rdma-core",
    "iproute2",
    "nftables",
    "util-linux",
    "ucx-utils",
    "openmpi-bin",
    "libopenmpi-dev",
    "libfabric-bin",
];
/// What the benches compare with.
pub const BENCH: &[&str] = &["perftest", "iperf3", "ucx-utils", "libfabric-bin", "iproute2", "util-linux"];

/// Makes sure the packages are there. On a system without dpkg it trusts the user. The error says what to do.
pub fn ensure(groups: &[&[&'static str]]) -> Result<(), String> {
    if find_in_path("dpkg-query").is_none() {
        progress("no dpkg here: packages are not checked");
        return Ok(());
    }
    let missing = missing(groups);
    if missing.is_empty() {
        return Ok(());
    }
    let privilege: &[&str] = if is_root() {
        &[]
    } else if sudo_works() {
        &["sudo", "-n"]
    } else {
        return Err(format!(
            "packages are missing and neither root nor password-less sudo is available; run this, then again:\n  \
             sudo apt-get update && sudo apt-get install -y --no-install-recommends {}",
            missing.join(" ")
        ));
    };
    progress(&format!("installing {}", missing.join(" ")));
    apt(privilege, &["update"])?;
    let mut install = vec!["install", "-y", "--no-install-recommends"];
    install.extend(&missing);
    apt(privilege, &install)
}

/// Those of the packages that are not installed.
fn missing(groups: &[&[&'static str]]) -> Vec<&'static str> {
    let mut names: Vec<&'static str> = groups.iter().flat_map(|group| group.iter().copied()).collect();
    names.sort_unstable();
    names.dedup();
    names.retain(|name| !is_installed(name));
    names
}

/// Whether dpkg has it, or its command is there by other means (a hand-built gcc, say).
fn is_installed(name: &str) -> bool {
    let out = Command::new("dpkg-query").args(["-W", "-f=${db:Status-Status}\\n", name]).output();
    let installed =
        out.is_ok_and(|out| String::from_utf8_lossy(&out.stdout).lines().any(|line| line == "installed"));
    // Any C compiler links for rustc.
    installed || (name == "gcc" && find_in_path("cc").is_some())
}

/// Runs apt-get so that it neither asks nor gives up on a busy lock.
fn apt(privilege: &[&str], arguments: &[&str]) -> Result<(), String> {
    let line: Vec<&str> = privilege
        .iter()
        .chain(&["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-q", "-o", "DPkg::Lock::Timeout=300"])
        .chain(arguments)
        .copied()
        .collect();
    let out =
        Command::new(line[0]).args(&line[1..]).output().map_err(|error| format!("{}: {error}", line[0]))?;
    if out.status.success() {
        return Ok(());
    }
    Err(format!(
        "`{}` failed:\n{}{}",
        line.join(" "),
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    ))
}

/// Whether this process is root.
pub fn is_root() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let uid = status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().nth(1));
    uid == Some("0")
}

fn sudo_works() -> bool {
    Command::new("sudo").args(["-n", "true"]).output().is_ok_and(|out| out.status.success())
}

/// The path of a command, as the shell would find it; sbin included, as users' PATHs often lack it.
pub fn find_in_path(name: &str) -> Option<std::path::PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(|dir| Path::new(dir).to_owned()))
        .map(|dir| dir.join(name))
        .find(|candidate| candidate.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_in_path__finds_a_shell() {
        assert!(find_in_path("sh").is_some());
        assert!(find_in_path("no-such-command-here").is_none());
    }
}
