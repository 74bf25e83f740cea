//! The device's node GUID: from plane 0's hardware address, else from what tells this host and namespace apart.

use std::os::unix::fs::MetadataExt;

use crate::DeviceConfig;

/// The node GUID in host order: never 0, stable while the host and its network namespace live.
#[must_use]
pub fn node_guid(config: &DeviceConfig) -> u64 {
    let mac = config.planes.first().map_or([0; 6], |plane| plane.mac);
    from_mac(mac).unwrap_or_else(|| {
        // Any one of the files may be missing in a container; cloned machines may share a machine-id, but no boot_id.
        let identity: String =
            ["/etc/machine-id", "/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/hostname"]
                .iter()
                .filter_map(|file| std::fs::read_to_string(file).ok())
                .collect();
        let namespace = std::fs::metadata("/proc/thread-self/ns/net").map_or(0, |meta| meta.ino());
        from_identity(identity.as_bytes(), namespace)
    })
}

/// The modified EUI-64 of a hardware address; `None` for the zero address of loopback and tunnels.
fn from_mac(mac: [u8; 6]) -> Option<u64> {
    let [a, b, c, d, e, f] = mac;
    (mac != [0; 6]).then(|| u64::from_be_bytes([a ^ LOCAL_BIT, b, c, 0xff, 0xfe, d, e, f]))
}

/// A locally administered GUID from a host identity and the inode of a network namespace.
fn from_identity(host: &[u8], namespace: u64) -> u64 {
    // FNV-1a, then the mixer of SplitMix64, so that neighbouring inodes differ in the high bytes too.
    let fnv = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let mut hash = host.iter().chain(&namespace.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, fnv);
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^= hash >> 31;
    let mut bytes = hash.to_be_bytes();
    bytes[0] = bytes[0] & !GROUP_BIT | LOCAL_BIT;
    u64::from_be_bytes(bytes)
}

/// Locally administered (in a modified EUI-64 of a universal address this bit is set, too).
const LOCAL_BIT: u8 = 2;
/// Multicast.
const GROUP_BIT: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_mac__is_the_modified_eui64() {
        assert_eq!(from_mac([0x00, 0x16, 0x3e, 1, 2, 3]), Some(0x0216_3eff_fe01_0203));
        assert_eq!(from_mac([0; 6]), None);
    }

    #[test]
    fn from_identity__differs_per_namespace_and_host() {
        let a = from_identity(b"host", 4026531840);
        assert_ne!(a, from_identity(b"host", 4026531841));
        assert_ne!(a, from_identity(b"other", 4026531840));
        assert_ne!(from_identity(b"", 0), 0);
        assert_eq!(a.to_be_bytes()[0] & 3, 2);
    }
}
