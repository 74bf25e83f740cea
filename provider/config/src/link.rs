//! What a network card says of the rate of its link.

use std::fs;
use std::path::{Path, PathBuf};

/// Interfaces below interfaces (a VLAN on a bond on cards) are followed this far.
const DEPTH_MAX: u32 = 4;

/// Bits per second of an interface's link; 0 where it is not known: without a link, and where there is no network card
/// below the interface, because virtual ones say what they like (a veth: 10 Gb/s).
#[must_use]
pub fn link_rate_bps(ifname: &str, ifindex: u32) -> u64 {
    rate_below(Path::new("/sys/class/net"), ifname, ifindex)
}

fn rate_below(root: &Path, ifname: &str, ifindex: u32) -> u64 {
    let interface = root.join(ifname);
    let number =
        |file: &str| -> Option<u64> { fs::read_to_string(interface.join(file)).ok()?.trim().parse().ok() };
    // The directory may show another network namespace than ours.
    let ours = number("ifindex") == Some(ifindex.into());
    if ours && is_card(&interface, DEPTH_MAX) { number("speed").unwrap_or(0) * 1_000_000 } else { 0 }
}

/// A card, or something that stands on cards alone.
fn is_card(interface: &Path, depth: u32) -> bool {
    if interface.join("device").exists() {
        return true;
    }
    let lower: Vec<PathBuf> = fs::read_dir(interface)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("lower_"))
        .map(|entry| entry.path())
        .collect();
    depth > 0 && !lower.is_empty() && lower.iter().all(|below| is_card(below, depth - 1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn rate__only_of_what_stands_on_cards() {
        let root = std::env::temp_dir().join(format!("metaroce-link-{}", std::process::id()));
        let make = |name: &str, index: u32, speed: &str, below: &[&str]| {
            let dir = root.join(name);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("ifindex"), format!("{index}\n")).unwrap();
            fs::write(dir.join("speed"), format!("{speed}\n")).unwrap();
            below.iter().for_each(|b| symlink(root.join(b), dir.join(format!("lower_{b}"))).unwrap());
        };
        make("eth0", 2, "25000", &[]);
        make("eth1", 3, "-1", &[]);
        make("veth0", 4, "10000", &[]);
        make("bond0", 5, "50000", &["eth0", "eth1"]);
        make("bond0.7", 6, "50000", &["bond0"]);
        make("br0", 7, "10000", &["veth0", "eth0"]);
        ["eth0", "eth1"].iter().for_each(|name| fs::create_dir(root.join(name).join("device")).unwrap());
        let rate = |name: &str, index| rate_below(&root, name, index) / 1_000_000_000;
        let found = [
            rate("eth0", 2),
            rate("eth1", 3),
            rate("veth0", 4),
            rate("bond0", 5),
            rate("bond0.7", 6),
            rate("br0", 7),
        ];
        let other = [rate("eth0", 3), rate("eth9", 1)];
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, [25, 0, 0, 50, 50, 0]);
        assert_eq!(other, [0, 0]);
    }
}
