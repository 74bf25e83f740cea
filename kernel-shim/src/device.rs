//! The device the shim shows: configuration, numbers and names, and what a real RDMA stack has next to it.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};

use metaroce_config::{DeviceConfig, Followed, GidEntry, NetView};

use crate::sys::{self, Published};
use crate::{netlink, store, sysfs};

/// Name of the device.
pub(crate) const NAME: &str = "metaroce0";
/// A device that is always there, opens for everyone and does nothing: our uverbs node is this one by another name.
pub(crate) const NODE_PATH: &str = "/dev/null";

/// Everything the kernel interfaces say about the device.
#[derive(Debug)]
pub(crate) struct Device {
    pub config: DeviceConfig,
    /// The table; `None` where an address is gone.
    pub gids: Vec<Option<GidEntry>>,
    /// What both were taken from, for the next change.
    followed: Followed,
    pub gid_table_len: usize,
    /// Host order.
    pub node_guid: u64,
    /// Netlink index.
    pub index: u32,
    /// `uverbsN`, the first name that no real device has.
    pub uverbs: String,
    /// Device number of [`NODE_PATH`], as stat gives it.
    pub rdev: u64,
    pub real: RealStack,
}

/// What the kernel itself has; `None` where the class or directory does not exist.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct RealStack {
    /// Entries of /sys/class/infiniband.
    pub ibdevs: Option<Vec<String>>,
    /// Entries of /sys/class/infiniband_verbs.
    pub uverbs: Option<Vec<String>>,
    /// Entries of /dev/infiniband.
    pub nodes: Option<Vec<String>>,
    /// The kernel has RDMA netlink.
    pub netlink: bool,
}

impl Device {
    fn new() -> Result<Device, String> {
        let config = metaroce_config::load().map_err(|error| error.to_string())?;
        let node = fs::metadata(NODE_PATH)
            .ok()
            .filter(|meta| meta.file_type().is_char_device())
            .ok_or_else(|| format!("{NODE_PATH} is not a character device; mount a usual /dev here"))?;
        let real = RealStack::of_this_host();
        let followed = Followed::new(&config, NetView::of_this_host().ok().as_ref());
        Ok(Device {
            gids: entries(&followed),
            gid_table_len: followed.gid_table_len(),
            followed,
            node_guid: metaroce_config::node_guid(&config),
            index: if real.has_devices() { FIRST_INDEX_BESIDE_REAL } else { 0 },
            uverbs: real.free_uverbs(),
            rdev: node.rdev(),
            real,
            config,
        })
    }

    /// The device after changes of addresses or links; `None` when there were none.
    fn after(&self, here: &NetView) -> Option<Device> {
        let mut followed = self.followed.clone();
        followed.follow(here);
        (followed != self.followed).then(|| Device {
            config: followed.config.clone(),
            gids: entries(&followed),
            gid_table_len: followed.gid_table_len(),
            followed,
            node_guid: self.node_guid,
            index: self.index,
            uverbs: self.uverbs.clone(),
            rdev: self.rdev,
            real: self.real.clone(),
        })
    }

    /// The GID at an index of the table.
    pub(crate) fn gid(&self, index: usize) -> Option<[u8; 16]> {
        Some(self.gids.get(index)?.as_ref()?.gid)
    }

    /// The index of a GID in the table.
    pub(crate) fn index_of_gid(&self, gid: [u8; 16]) -> Option<usize> {
        self.gids.iter().position(|entry| entry.as_ref().is_some_and(|entry| entry.gid == gid))
    }

    /// The index of an address in the GID table.
    pub(crate) fn gid_index(&self, ip: IpAddr) -> Option<usize> {
        self.gids.iter().position(|entry| entry.as_ref().is_some_and(|entry| entry.ip == ip))
    }

    /// The node's number as netlink carries it: the kernel's huge_encode_dev, minor bits 8 and up above the major.
    pub(crate) fn chardev(&self) -> u64 {
        let (major, minor) = (u64::from(libc::major(self.rdev)), u64::from(libc::minor(self.rdev)));
        minor & 0xff | major << 8 | (minor & !0xff) << 12
    }

    /// Whether the rdma_cm node is ours. Where the kernel has RDMA devices it is the kernel's, which serves those.
    pub(crate) fn has_rdma_cm(&self) -> bool {
        !self.real.has_devices()
    }

    /// Whether the port is active: it is while any plane is.
    pub(crate) fn is_up(&self) -> bool {
        self.config.planes.iter().any(|plane| plane.up)
    }

    /// Whether the device is no more: no plane's interface exists.
    pub(crate) fn is_gone(&self, here: &NetView) -> bool {
        let is_of = |plane: &metaroce_config::Plane, i: &metaroce_config::Interface| {
            i.name == plane.ifname || i.index == plane.ifindex
        };
        !self.config.planes.iter().any(|plane| here.interfaces.iter().any(|i| is_of(plane, i)))
    }

    /// Plane 0, whose interface stands for the device where there is room for one.
    pub(crate) fn plane0(&self) -> &metaroce_config::Plane {
        &self.config.planes[0]
    }
}

/// The table's entries, each in its place.
fn entries(followed: &Followed) -> Vec<Option<GidEntry>> {
    let all = metaroce_config::gid_table(&followed.config);
    followed.gids.iter().map(|ip| all.iter().find(|entry| Some(entry.ip) == *ip).cloned()).collect()
}

/// Kernel indices count up from 0, so a real device never reaches this one.
const FIRST_INDEX_BESIDE_REAL: u32 = 1000;

impl RealStack {
    fn of_this_host() -> RealStack {
        let list = |directory: &str| {
            let names =
                fs::read_dir(directory).ok()?.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
            let mut names: Vec<String> = names.collect();
            names.sort();
            Some(names)
        };
        RealStack {
            ibdevs: list("/sys/class/infiniband"),
            uverbs: list("/sys/class/infiniband_verbs"),
            nodes: list("/dev/infiniband"),
            netlink: netlink::kernel_has_it(),
        }
    }

    fn has_devices(&self) -> bool {
        self.ibdevs.as_ref().is_some_and(|names| !names.is_empty())
    }

    /// The first `uverbsN` that neither sysfs nor /dev has.
    fn free_uverbs(&self) -> String {
        let taken = |name: &String| {
            [&self.uverbs, &self.nodes]
                .iter()
                .any(|names| names.as_ref().is_some_and(|names| names.contains(name)))
        };
        (0..).map(|number| format!("uverbs{number}")).find(|name| !taken(name)).unwrap_or_default()
    }
}

/// What this process has found out; replaced as a whole when it moved to another network namespace or user.
struct State {
    netns: u64,
    euid: u32,
    device: Result<Device, String>,
    /// Path of the tree in the file system, once a path has led into it.
    tree: Published<Vec<u8>>,
}

static STATE: Published<State> = Published::nothing();

/// The device, or `None` when its configuration is broken, which is then said once. Call under [`crate::guard::run`].
pub(crate) fn current() -> Option<&'static Device> {
    let no_device = |message: &String| complain(&format!("no device {NAME}: {message}"));
    state().device.as_ref().map_err(no_device).ok()
}

/// The device as it is now: addresses and links may have changed since anybody asked last. For what shows them.
pub(crate) fn fresh() -> Option<&'static Device> {
    let device = current()?;
    let changed = NetView::of_this_host().ok().and_then(|here| device.after(&here));
    let Some(changed) = changed else { return Some(device) };
    let state = state();
    let (netns, euid) = (state.netns, state.euid);
    let next = State { netns, euid, device: Ok(changed), tree: Published::nothing() };
    STATE.publish(next).device.as_ref().ok()
}

/// The path of `device`'s tree, made or remade when it is not there; `None` when that fails, which is then said once.
pub(crate) fn tree(device: &Device) -> Option<&'static [u8]> {
    let state = state();
    if let Some(path) = state.tree.get().filter(|path| store::is_there(path)) {
        return Some(path);
    }
    match store::materialise(&sysfs::tree(device)) {
        Ok(path) => Some(state.tree.publish(path)),
        Err(message) => {
            complain(&format!("{NAME} is missing in sysfs: {message}"));
            None
        }
    }
}

fn state() -> &'static State {
    let netns = fs::metadata("/proc/thread-self/ns/net").map_or(0, |meta| meta.ino());
    let euid = sys::euid();
    STATE.get().filter(|state| state.netns == netns && state.euid == euid).unwrap_or_else(|| {
        STATE.publish(State { netns, euid, device: Device::new(), tree: Published::nothing() })
    })
}

/// Says once per process, in one line on stderr, what is wrong.
fn complain(message: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        sys::say(&format!("metaroce: {message}\n"));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use metaroce_config::{Interface, NetView};

    /// A device on an interface with one IPv4 and one IPv6 address, beside `real`.
    pub(crate) fn device(real: RealStack) -> Device {
        let interface = Interface {
            name: "test0".into(),
            index: 77,
            mtu: 1500,
            mac: [2, 0, 0, 0, 0, 1],
            addrs: vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
            up: true,
            running: true,
            loopback: false,
        };
        let net = NetView { interfaces: vec![interface], default_route: None };
        let config = metaroce_config::resolve(&|_| None, None, &net).unwrap();
        let followed = Followed::new(&config, Some(&net));
        Device {
            gids: entries(&followed),
            gid_table_len: followed.gid_table_len(),
            followed,
            node_guid: metaroce_config::node_guid(&config),
            index: 0,
            uverbs: real.free_uverbs(),
            rdev: libc::makedev(1, 3),
            real,
            config,
        }
    }

    /// A host with one real device.
    pub(crate) fn real_stack() -> RealStack {
        RealStack {
            ibdevs: Some(vec!["mlx5_0".into()]),
            uverbs: Some(vec!["abi_version".into(), "uverbs0".into()]),
            nodes: Some(vec!["rdma_cm".into(), "uverbs0".into(), "uverbs1".into()]),
            netlink: true,
        }
    }

    #[test]
    fn free_uverbs__is_the_first_that_nobody_has() {
        assert_eq!(RealStack::default().free_uverbs(), "uverbs0");
        assert_eq!(real_stack().free_uverbs(), "uverbs2");
    }
}
