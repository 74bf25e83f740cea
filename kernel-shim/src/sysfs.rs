//! The contents of the tree: what /sys/class/infiniband, /sys/class/infiniband_verbs and /dev/infiniband show.

use std::fmt::Write;
use std::fs;

use crate::device::{self, Device};
use crate::rdmacm;

/// One entry of the tree; parent directories are implied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Path below the tree's root, without a leading slash.
    pub path: String,
    pub kind: Kind,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A regular file with this content.
    File(String),
    /// A symbolic link to this target.
    Link(String),
    /// A directory that may be empty.
    Dir,
}

/// The whole tree, in an order that depends on nothing but the device.
pub(crate) fn tree(device: &Device) -> Vec<Entry> {
    let mut tree = Tree::default();
    class(&mut tree, device);
    port(&mut tree, device);
    parent(&mut tree, device);
    verbs_class(&mut tree, device);
    tree.link(format!("dev/infiniband/{}", device.uverbs), device::NODE_PATH.to_owned());
    if device.has_rdma_cm() {
        tree.link(format!("dev/infiniband/{}", rdmacm::NODE), device::NODE_PATH.to_owned());
        let (major, minor) = (libc::major(device.rdev), libc::minor(device.rdev));
        tree.line("sys/class/misc/rdma_cm/dev", format_args!("{major}:{minor}"));
        tree.line("sys/class/misc/rdma_cm/abi_version", rdmacm::ABI_VERSION);
    }
    real(&mut tree, device);
    tree.entries
}

/// Driver version, shown as the firmware's.
pub(crate) const FW_VER: &str = env!("CARGO_PKG_VERSION");
/// What query_port reports as active_width 2 and active_speed 32.
const RATE: &str = "100 Gb/sec (4X EDR)";
/// IB_PORT_CM_SUP and IB_PORT_IP_BASED_GIDS of ib_verbs.h.
pub(crate) const PORT_CAP_FLAGS: u32 = 1 << 16 | 1 << 26;
/// The per-device ABI version that libibverbs hands to the provider.
pub(crate) const UVERBS_ABI: u32 = 1;

/// Standard port counters (drivers/infiniband/core/sysfs.c); all of them are there, none of them counts yet.
const COUNTERS: &[&str] = &[
    "VL15_dropped",
    "excessive_buffer_overrun_errors",
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "multicast_rcv_packets",
    "multicast_xmit_packets",
    "port_rcv_constraint_errors",
    "port_rcv_data",
    "port_rcv_errors",
    "port_rcv_packets",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors",
    "port_xmit_data",
    "port_xmit_discards",
    "port_xmit_packets",
    "port_xmit_wait",
    "symbol_error",
    "unicast_rcv_packets",
    "unicast_xmit_packets",
];

/// The counters that programs written for the kernel's soft RoCE look for (rxe_hw_counters.c).
const HW_COUNTERS: &[&str] = &[
    "ack_deferred",
    "completer_retry_err",
    "duplicate_request",
    "link_downed",
    "out_of_seq_request",
    "rcvd_pkts",
    "rcvd_rnr_err",
    "rcvd_seq_err",
    "rdma_recvs",
    "rdma_sends",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
    "send_err",
    "send_rnr_err",
    "sent_pkts",
];

#[derive(Default)]
struct Tree {
    entries: Vec<Entry>,
}

impl Tree {
    /// A file with one line, as nearly all of sysfs.
    fn line(&mut self, path: impl Into<String>, text: impl std::fmt::Display) {
        self.entries.push(Entry { path: path.into(), kind: Kind::File(format!("{text}\n")) });
    }

    fn link(&mut self, path: impl Into<String>, target: String) {
        self.entries.push(Entry { path: path.into(), kind: Kind::Link(target) });
    }

    fn dir(&mut self, path: impl Into<String>) {
        self.entries.push(Entry { path: path.into(), kind: Kind::Dir });
    }
}

fn ibdev(name: &str) -> String {
    format!("sys/class/infiniband/{}/{name}", device::NAME)
}

fn class(tree: &mut Tree, device: &Device) {
    let guid = colons(&device.node_guid.to_be_bytes());
    tree.line(ibdev("node_type"), "1: CA");
    tree.line(ibdev("node_guid"), &guid);
    tree.line(ibdev("sys_image_guid"), &guid);
    tree.line(ibdev("node_desc"), "metaroce");
    tree.line(ibdev("fw_ver"), FW_VER);
    tree.line(ibdev("hw_rev"), "1");
    tree.line(ibdev("hca_type"), "metaroce");
    tree.line(ibdev("parent"), &device.plane0().ifname);
}

fn port(tree: &mut Tree, device: &Device) {
    let port = |name: &str| ibdev(&format!("ports/1/{name}"));
    let up = device.is_up();
    tree.line(port("state"), if up { "4: ACTIVE" } else { "1: DOWN" });
    tree.line(port("phys_state"), if up { "5: LinkUp" } else { "3: Disabled" });
    tree.line(port("link_layer"), "Ethernet");
    tree.line(port("rate"), RATE);
    tree.line(port("lid"), "0x0");
    tree.line(port("lid_mask_count"), "0");
    tree.line(port("sm_lid"), "0x0");
    tree.line(port("sm_sl"), "0");
    tree.line(port("cap_mask"), format_args!("{PORT_CAP_FLAGS:#010x}"));
    tree.line(port("pkeys/0"), "0xffff");
    tree.dir(port("gid_attrs/ndevs"));
    for index in 0..device.gid_table_len {
        let entry = device.gids.get(index).and_then(Option::as_ref);
        tree.line(port(&format!("gids/{index}")), colons(&entry.map_or([0; 16], |entry| entry.gid)));
        // Only populated entries have attributes; a reader of an empty one gets an error from a real kernel, too.
        if let Some(entry) = entry {
            tree.line(port(&format!("gid_attrs/types/{index}")), "RoCE v2");
            tree.line(port(&format!("gid_attrs/ndevs/{index}")), &entry.ifname);
        }
    }
    for name in COUNTERS {
        tree.line(port(&format!("counters/{name}")), 0);
    }
    for name in HW_COUNTERS {
        tree.line(port(&format!("hw_counters/{name}")), 0);
    }
    tree.line(port("hw_counters/lifespan"), 10);
}

/// `device/`, which real devices share with their PCI function: the netdevs, where the device sits, its nodes.
fn parent(tree: &mut Tree, device: &Device) {
    let parent = |name: &str| ibdev(&format!("device/{name}"));
    let read = |path: String| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let ifname = &device.plane0().ifname;
    let numa = read(format!("/sys/class/net/{ifname}/device/numa_node")).unwrap_or_else(|| "-1".to_owned());
    tree.line(parent("numa_node"), numa);
    let cpus = read("/sys/devices/system/cpu/online".to_owned()).unwrap_or_else(|| "0".to_owned());
    tree.line(parent("local_cpus"), cpu_mask(&cpus));
    tree.line(parent("local_cpulist"), cpus);
    tree.link(parent(&format!("infiniband/{}", device::NAME)), "../..".to_owned());
    let verbs = format!("../../../../infiniband_verbs/{}", device.uverbs);
    tree.link(parent(&format!("infiniband_verbs/{}", device.uverbs)), verbs);
    for (index, plane) in device.config.planes.iter().enumerate() {
        if device.config.planes[..index].iter().all(|earlier| earlier.ifname != plane.ifname) {
            netdev(tree, &parent(&format!("net/{}", plane.ifname)), plane);
        }
    }
}

/// A link to the real netdev, or a directory in its place where /sys shows another network namespace.
fn netdev(tree: &mut Tree, path: &str, plane: &metaroce_config::Plane) {
    let real = format!("/sys/class/net/{}", plane.ifname);
    let shown = fs::read_to_string(format!("{real}/ifindex")).ok().and_then(|text| text.trim().parse().ok());
    if shown == Some(plane.ifindex) {
        tree.link(path, real);
        return;
    }
    let mac: Vec<String> = plane.mac.iter().map(|byte| format!("{byte:02x}")).collect();
    tree.line(format!("{path}/address"), mac.join(":"));
    tree.line(format!("{path}/dev_id"), "0x0");
    tree.line(format!("{path}/dev_port"), 0);
    tree.line(format!("{path}/ifindex"), plane.ifindex);
    tree.line(format!("{path}/mtu"), plane.mtu);
    tree.line(format!("{path}/operstate"), if plane.up { "up" } else { "down" });
}

fn verbs_class(tree: &mut Tree, device: &Device) {
    let class = |name: &str| format!("sys/class/infiniband_verbs/{name}");
    let (major, minor) = (libc::major(device.rdev), libc::minor(device.rdev));
    tree.line(class(&format!("{}/ibdev", device.uverbs)), device::NAME);
    tree.line(class(&format!("{}/dev", device.uverbs)), format_args!("{major}:{minor}"));
    tree.line(class(&format!("{}/abi_version", device.uverbs)), UVERBS_ABI);
    if device.real.uverbs.is_none() {
        tree.line(class("abi_version"), 6);
    }
}

/// What a real stack has, as links, so that a listing shows both.
fn real(tree: &mut Tree, device: &Device) {
    let real = &device.real;
    let lists = [
        ("sys/class/infiniband", &real.ibdevs),
        ("sys/class/infiniband_verbs", &real.uverbs),
        ("dev/infiniband", &real.nodes),
    ];
    for (directory, names) in lists {
        // A node of the kernel's that stands for no device gives way to ours.
        let ours = |name: &&String| !(device.has_rdma_cm() && *name == rdmacm::NODE);
        for name in names.iter().flatten().filter(ours) {
            tree.link(format!("{directory}/{name}"), format!("/{directory}/{name}"));
        }
    }
}

/// Bytes as sysfs writes GUIDs and GIDs: groups of two bytes in hexadecimal.
fn colons(bytes: &[u8]) -> String {
    let groups: Vec<String> = bytes.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect();
    groups.join(":")
}

/// The mask of a CPU list (`0-3,8`) as sysfs writes it: comma-separated 32-bit words, highest first.
fn cpu_mask(list: &str) -> String {
    let mut words = vec![0u32];
    for range in list.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (Ok(low), Ok(high)) = (low.parse::<usize>(), high.parse::<usize>()) else { continue };
        for cpu in low..=high.min(CPUS_MAX) {
            if words.len() <= cpu / 32 {
                words.resize(cpu / 32 + 1, 0);
            }
            words[cpu / 32] |= 1 << (cpu % 32);
        }
    }
    let mut text = String::new();
    for (position, word) in words.iter().rev().enumerate() {
        let separator = if position == 0 { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{word:08x}");
    }
    text
}

/// More than any kernel is built for; bounds the mask if the file is not what it should be.
const CPUS_MAX: usize = 16384;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::RealStack;
    use crate::device::tests::{device, real_stack};

    fn content(tree: &[Entry], path: &str) -> Option<String> {
        match &tree.iter().find(|entry| entry.path == path)?.kind {
            Kind::File(text) => Some(text.clone()),
            Kind::Link(target) => Some(target.clone()),
            Kind::Dir => None,
        }
    }

    #[test]
    fn tree__says_what_programs_look_for() {
        let tree = tree(&device(RealStack::default()));
        let has = |path: &str, text: &str| assert_eq!(content(&tree, path).as_deref(), Some(text), "{path}");
        has("sys/class/infiniband/metaroce0/node_guid", "0000:00ff:fe00:0001\n");
        has("sys/class/infiniband/metaroce0/ports/1/state", "4: ACTIVE\n");
        has("sys/class/infiniband/metaroce0/ports/1/gids/0", "0000:0000:0000:0000:0000:ffff:c000:0201\n");
        has("sys/class/infiniband/metaroce0/ports/1/gids/15", "0000:0000:0000:0000:0000:0000:0000:0000\n");
        has("sys/class/infiniband/metaroce0/ports/1/gid_attrs/types/1", "RoCE v2\n");
        has("sys/class/infiniband/metaroce0/ports/1/gid_attrs/ndevs/1", "test0\n");
        has("sys/class/infiniband/metaroce0/ports/1/cap_mask", "0x04010000\n");
        has("sys/class/infiniband/metaroce0/device/net/test0/ifindex", "77\n");
        has("sys/class/infiniband_verbs/uverbs0/dev", "1:3\n");
        has("sys/class/infiniband_verbs/abi_version", "6\n");
        has("dev/infiniband/uverbs0", "/dev/null");
        assert_eq!(content(&tree, "sys/class/infiniband/metaroce0/ports/1/gid_attrs/types/2"), None);
    }

    #[test]
    fn tree__is_the_same_for_the_same_device_and_has_no_entry_twice() {
        let entries = tree(&device(real_stack()));
        assert_eq!(entries, tree(&device(real_stack())));
        for (index, entry) in entries.iter().enumerate() {
            assert!(
                entries[..index].iter().all(|earlier| earlier.path != entry.path),
                "{} twice",
                entry.path
            );
        }
    }

    #[test]
    fn tree__links_to_a_real_stack() {
        let tree = tree(&device(real_stack()));
        assert_eq!(
            content(&tree, "sys/class/infiniband/mlx5_0").as_deref(),
            Some("/sys/class/infiniband/mlx5_0")
        );
        assert_eq!(content(&tree, "dev/infiniband/uverbs0").as_deref(), Some("/dev/infiniband/uverbs0"));
        assert_eq!(content(&tree, "dev/infiniband/uverbs2").as_deref(), Some("/dev/null"));
        assert!(content(&tree, "sys/class/infiniband_verbs/abi_version").unwrap().starts_with("/sys/"));
    }

    #[test]
    fn cpu_mask__is_in_sysfs_format() {
        assert_eq!(cpu_mask("0-1"), "00000003");
        assert_eq!(cpu_mask("0-3,33"), "00000002,0000000f");
        assert_eq!(cpu_mask("nonsense"), "00000000");
    }
}
