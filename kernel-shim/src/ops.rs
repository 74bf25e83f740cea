//! Where a path leads: into our tree, to our device node, or wherever the kernel says. No libc symbol is named here.

use std::ffi::{CStr, c_int};
use std::os::unix::ffi::OsStrExt;

use crate::device::{self, Device};
use crate::rdmacm::NODE;

/// A path longer than this is none of ours.
pub(crate) const PATH_BYTES_MAX: usize = libc::PATH_MAX as usize;

/// What a call wants to do with a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Intent {
    /// Look at it.
    Read,
    /// Write, create or truncate it, which our tree refuses as sysfs does.
    Write,
    /// Match it as a pattern: a wildcard may stand where our names would.
    Pattern,
}

/// The answer for one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Route {
    /// Not ours: the call goes on as it came.
    Pass,
    /// The call goes on with the path in the buffer.
    Redirected,
    /// The call fails with this errno.
    Fail(c_int),
}

/// A NUL-terminated path on the stack, so that nothing is left to free when the real function is called.
pub(crate) struct PathBuffer {
    bytes: [u8; PATH_BYTES_MAX],
}

impl PathBuffer {
    pub(crate) fn new() -> PathBuffer {
        PathBuffer { bytes: [0; PATH_BYTES_MAX] }
    }

    pub(crate) fn as_ptr(&self) -> *const std::ffi::c_char {
        self.bytes.as_ptr().cast()
    }

    /// Takes the concatenation of `parts`; false when it is too long.
    fn set(&mut self, parts: &[&[u8]]) -> bool {
        let mut length = 0;
        for part in parts {
            let end = length + part.len();
            if end >= self.bytes.len() {
                return false;
            }
            self.bytes[length..end].copy_from_slice(part);
            length = end;
        }
        self.bytes[length] = 0;
        true
    }
}

/// Whether a path can be ours at all: the cheap test that every other path of the process stops at.
///
/// All our names have this word in them, and what lies below them is a real directory that needs no redirection.
pub(crate) fn mentions_device(path: &[u8]) -> bool {
    [WORD, NODE.as_bytes()].iter().any(|word| path.windows(word.len()).any(|window| window == *word))
}

const PORTS: &[u8] = b"/ports";
const WORD: &[u8] = b"infiniband";

/// Decides for a path that [`mentions_device`], relative to `dirfd` as in openat. Call under [`crate::guard::run`].
pub(crate) fn route(dirfd: c_int, path: &CStr, intent: Intent, buffer: &mut PathBuffer) -> Route {
    let Some((absolute, slash)) = absolute(dirfd, path.to_bytes()) else { return Route::Pass };
    if !is_candidate(&absolute) {
        return Route::Pass;
    }
    // What lies below the port shows addresses and links, which change.
    let shows_port = absolute.windows(PORTS.len()).any(|window| window == PORTS);
    let device = if shows_port { device::fresh() } else { device::current() };
    let Some(device) = device else { return Route::Pass };
    let fits = match classify(&absolute, device, intent) {
        Place::Foreign => return Route::Pass,
        Place::Node => buffer.set(&[device::NODE_PATH.as_bytes(), slash]),
        Place::Tree if intent == Intent::Write => return Route::Fail(libc::EACCES),
        Place::Tree => match device::tree(device) {
            Some(tree) => buffer.set(&[tree, &absolute, slash]),
            None => return Route::Pass,
        },
    };
    if fits { Route::Redirected } else { Route::Fail(libc::ENAMETOOLONG) }
}

/// The canonical name of our device node, if `path` is one of its spellings. Call under [`crate::guard::run`].
pub(crate) fn node_name(path: &CStr) -> Option<Vec<u8>> {
    let (absolute, slash) = absolute(libc::AT_FDCWD, path.to_bytes())?;
    if !slash.is_empty() || !is_candidate(&absolute) {
        return None;
    }
    (classify(&absolute, device::current()?, Intent::Read) == Place::Node).then_some(absolute)
}

/// Whether `path` is one of the spellings of our rdma_cm node. Call under [`crate::guard::run`].
pub(crate) fn is_rdma_cm(dirfd: c_int, path: &CStr) -> bool {
    let Some((absolute, slash)) = absolute(dirfd, path.to_bytes()) else { return false };
    let is_it = below(&absolute, DEV) == Some(NODE.as_bytes()) && slash.is_empty();
    is_it && device::current().is_some_and(Device::has_rdma_cm)
}

/// The visible path within a path into the tree (`/tmp/…/sysfs-0123456789abcdef/sys/class/…`), as its offset.
///
/// Told by its shape, not by this process's own tree: a working directory may come from the parent process.
pub(crate) fn visible_offset(path: &[u8]) -> Option<usize> {
    let marker = b"/sysfs-";
    let at = path.windows(marker.len()).position(|window| window == marker)?;
    let start = at + marker.len() + HASH_DIGITS;
    let visible = path.get(start..)?;
    let hash = &path[at + marker.len()..start];
    let within_ours = path[..at].windows(RUNTIME_NAME.len()).any(|window| window == RUNTIME_NAME);
    (within_ours && hash.iter().all(u8::is_ascii_hexdigit) && is_candidate(visible)).then_some(start)
}

const RUNTIME_NAME: &[u8] = b"/metaroce";
/// Hexadecimal digits in the name of a tree.
pub(crate) const HASH_DIGITS: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Foreign,
    Tree,
    Node,
}

const CLASS: &[u8] = b"/sys/class/infiniband";
const VERBS_CLASS: &[u8] = b"/sys/class/infiniband_verbs";
const DEV: &[u8] = b"/dev/infiniband";
const MISC: &[u8] = b"/sys/class/misc/rdma_cm";

/// What follows `prefix` in `path` as components, if `path` is `prefix` or below it.
fn below<'a>(path: &'a [u8], prefix: &[u8]) -> Option<&'a [u8]> {
    match path.strip_prefix(prefix)? {
        b"" => Some(b""),
        [b'/', rest @ ..] => Some(rest),
        _ => None,
    }
}

fn is_candidate(path: &[u8]) -> bool {
    [CLASS, VERBS_CLASS, DEV, MISC].iter().any(|prefix| below(path, prefix).is_some())
}

/// Where a normalised absolute path lies. What a real stack has stays with the kernel; the rest of each directory is
/// ours, so that a missing entry is missing in the tree too.
fn classify(path: &[u8], device: &Device, intent: Intent) -> Place {
    let real = &device.real;
    if below(path, MISC).is_some() {
        return if device.has_rdma_cm() { Place::Tree } else { Place::Foreign };
    }
    let (rest, own, kernel_has_it) = if let Some(rest) = below(path, CLASS) {
        (rest, device::NAME, real.ibdevs.is_some())
    } else if let Some(rest) = below(path, VERBS_CLASS) {
        (rest, device.uverbs.as_str(), real.uverbs.is_some())
    } else if let Some(rest) = below(path, DEV) {
        let is_cm = rest == NODE.as_bytes() && device.has_rdma_cm();
        if (rest == device.uverbs.as_bytes() || is_cm) && intent != Intent::Pattern {
            return Place::Node;
        }
        (rest, device.uverbs.as_str(), real.nodes.is_some())
    } else {
        return Place::Foreign;
    };
    let first = rest.split(|&byte| byte == b'/').next().unwrap_or_default();
    if first.is_empty() || first == own.as_bytes() || intent == Intent::Pattern || !kernel_has_it {
        Place::Tree
    } else {
        Place::Foreign
    }
}

/// The absolute path without `.`, `..` and repeated slashes, and its trailing slash apart.
fn absolute(dirfd: c_int, path: &[u8]) -> Option<(Vec<u8>, &'static [u8])> {
    let mut joined = Vec::with_capacity(path.len() + 64);
    if path.first() != Some(&b'/') {
        let base = match dirfd {
            libc::AT_FDCWD => std::env::current_dir().ok()?,
            fd => std::fs::read_link(format!("/proc/thread-self/fd/{fd}")).ok()?,
        };
        joined.extend_from_slice(base.as_os_str().as_bytes());
        joined.push(b'/');
    }
    joined.extend_from_slice(path);
    let mut clean: Vec<u8> = Vec::with_capacity(joined.len());
    for component in joined.split(|&byte| byte == b'/') {
        match component {
            b"" | b"." => {}
            b".." => clean.truncate(clean.iter().rposition(|&byte| byte == b'/').unwrap_or(0)),
            name => {
                clean.push(b'/');
                clean.extend_from_slice(name);
            }
        }
    }
    Some((clean, if path.last() == Some(&b'/') { b"/" } else { b"" }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::RealStack;
    use crate::device::tests::{device, real_stack};

    fn place(path: &str, real: RealStack, intent: Intent) -> Place {
        classify(path.as_bytes(), &device(real), intent)
    }

    #[test]
    fn classify__without_a_real_stack_everything_is_ours() {
        let alone = |path| place(path, RealStack::default(), Intent::Read);
        assert_eq!(alone("/sys/class/infiniband"), Place::Tree);
        assert_eq!(alone("/sys/class/infiniband/metaroce0/ports/1/gids/0"), Place::Tree);
        assert_eq!(alone("/sys/class/infiniband/mlx5_0"), Place::Tree);
        assert_eq!(alone("/sys/class/infiniband_verbs/abi_version"), Place::Tree);
        assert_eq!(alone("/dev/infiniband"), Place::Tree);
        assert_eq!(alone("/dev/infiniband/uverbs0"), Place::Node);
        assert_eq!(alone("/dev/infiniband/uverbs1"), Place::Tree);
        for foreign in
            ["/sys/class/infiniband_mad", "/sys/class/net/infiniband", "/dev/infiniband2", "/x/infiniband"]
        {
            assert_eq!(alone(foreign), Place::Foreign, "{foreign}");
        }
    }

    #[test]
    fn classify__real_devices_stay_with_the_kernel() {
        let beside = |path| place(path, real_stack(), Intent::Read);
        assert_eq!(beside("/sys/class/infiniband"), Place::Tree);
        assert_eq!(beside("/sys/class/infiniband/mlx5_0/ports"), Place::Foreign);
        assert_eq!(beside("/sys/class/infiniband/metaroce0"), Place::Tree);
        assert_eq!(beside("/sys/class/infiniband_verbs/abi_version"), Place::Foreign);
        assert_eq!(beside("/sys/class/infiniband_verbs/uverbs2/dev"), Place::Tree);
        assert_eq!(beside("/dev/infiniband/uverbs0"), Place::Foreign);
        assert_eq!(beside("/dev/infiniband/uverbs2"), Place::Node);
        assert_eq!(place("/sys/class/infiniband/*", real_stack(), Intent::Pattern), Place::Tree);
        assert_eq!(place("/dev/infiniband/uverbs2", real_stack(), Intent::Pattern), Place::Tree);
    }

    #[test]
    fn absolute__is_normalised() {
        let clean = |path: &str| {
            let (path, slash) = absolute(-1, path.as_bytes()).unwrap();
            String::from_utf8([path, slash.to_vec()].concat()).unwrap()
        };
        assert_eq!(clean("/sys//class/./infiniband/x/.."), "/sys/class/infiniband");
        assert_eq!(clean("/../dev/infiniband/"), "/dev/infiniband/");
        assert_eq!(clean("/.."), "");
        let here = std::env::current_dir().unwrap();
        let (path, _) = absolute(libc::AT_FDCWD, b"infiniband").unwrap();
        assert_eq!(path, here.join("infiniband").as_os_str().as_bytes());
        assert_eq!(absolute(-1, b"infiniband"), None);
    }

    #[test]
    fn mentions_device__is_a_substring_test() {
        assert!(mentions_device(b"/dev/infiniband/uverbs0") && mentions_device(b"infiniband_verbs"));
        assert!(!mentions_device(b"/dev/infinitband") && !mentions_device(b""));
    }

    #[test]
    fn visible_offset__knows_a_tree_by_its_shape() {
        let visible = |path: &'static str| visible_offset(path.as_bytes()).map(|at| &path[at..]);
        let tree = "/tmp/metaroce-0/sysfs-0123456789abcdef/sys/class/infiniband/metaroce0";
        assert_eq!(visible(tree), Some("/sys/class/infiniband/metaroce0"));
        assert_eq!(visible("/tmp/metaroce-0/sysfs-0123456789abcdef/dev/infiniband"), Some("/dev/infiniband"));
        assert_eq!(visible("/tmp/metaroce-0/sysfs-0123456789abcdef/sys/class"), None);
        assert_eq!(visible("/tmp/metaroce-0/sysfs-0123456789abcdef"), None);
        assert_eq!(visible("/tmp/metaroce-0/sysfs-012"), None);
        assert_eq!(visible("/tmp/sysfs-0123456789abcdef/sys/class/infiniband"), None);
        assert_eq!(visible("/home/user"), None);
    }

    #[test]
    fn path_buffer__refuses_what_does_not_fit() {
        let mut buffer = PathBuffer::new();
        assert!(buffer.set(&[b"/a", b"/b"]));
        assert_eq!(&buffer.bytes[..5], b"/a/b\0");
        assert!(!buffer.set(&[&[b'x'; PATH_BYTES_MAX]]));
        assert!(buffer.set(&[&[b'x'; PATH_BYTES_MAX - 1]]));
    }
}
