//! The structures of `metaroce/metaroce.h` in Rust, and the table of functions by which `libmetaroce.so.1` reaches the
//! provider that lives in the same process. What the members mean is said in the header.
//!
//! The provider checks sizes and masks; the library only finds it. Structures grow at their end: whoever is older
//! fills, or reads, what it knows.

// SPDX-License-Identifier: MIT OR Apache-2.0

use std::ffi::{CStr, c_int, c_void};

/// Version of the interface in `metaroce.h`: major, minor. What is added raises the minor number.
pub const API: (u16, u16) = (1, 0);
/// The provider's function that gives its [`Ops`], found with `dlsym` in the object a context's functions lie in.
pub const ENTRY: &CStr = c"metaroce_private_ext_1";
/// Its type. The table lives as long as the process.
pub type Entry = extern "C" fn() -> *const Ops;

/// A structure of the header: where its members are, to compare with what a C compiler says.
pub trait Layout {
    /// Its name in C.
    const NAME: &'static str;
    /// Members: name, offset, size.
    const FIELDS: &'static [(&'static str, usize, usize)];
}

/// Size of a member, from a pointer to it that is not followed.
#[doc(hidden)]
pub const fn size_of_member<S, F>(_: fn(&S) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! structures {
    ($($(#[$doc:meta])* $name:ident = $c:literal { $($field:ident: $ty:ty,)* })*) => { $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[expect(missing_docs, reason = "the header says what the members mean")]
        pub struct $name { pub size: u32, pub comp_mask: u32, $(pub $field: $ty,)* }

        impl Layout for $name {
            const NAME: &'static str = $c;
            const FIELDS: &'static [(&'static str, usize, usize)] = &[
                ("size", 0, 4),
                ("comp_mask", 4, 4),
                $((
                    stringify!($field),
                    std::mem::offset_of!($name, $field),
                    size_of_member(|s: &$name| &s.$field),
                ),)*
            ];
        }

        impl $name {
            /// Nothing known.
            // SAFETY: integers and arrays of them.
            pub const ZERO: Self = unsafe { std::mem::zeroed() };
        }

        // SAFETY: integers and arrays of them, whose layout has no hole (`layout.rs` compares every byte).
        unsafe impl Plain for $name {}
    )* };
}

/// Structures that are integers and nothing else, in which every byte belongs to a member.
///
/// # Safety
/// Implement it only for such structures that begin with `size` and `comp_mask`.
pub unsafe trait Plain: Copy {}

structures! {
    /// Versions.
    Version = "metaroce_version" {
        api_major: u16,
        api_minor: u16,
        device_api_major: u16,
        device_api_minor: u16,
        wire: u32,
        reserved: u32,
    }
    /// What the device is and can do.
    DeviceAttr = "metaroce_device_attr" {
        caps: u64,
        now_ns: u64,
        planes: u32,
        paths_per_plane: u32,
        entropies_per_plane: u32,
        base_port: u32,
        slot: u32,
        reserved: u32,
    }
    /// A plane.
    Plane = "metaroce_plane" {
        label: [u8; 64],
        netdev: [u8; 16],
        ifindex: u32,
        mtu: u32,
        link: u32,
        admin: u32,
        denied: u64,
        rate_bps: u64,
        addr_count: u32,
        reserved: u32,
        addrs: [[u8; 16]; 8],
        tx_packets: u64,
        tx_bytes: u64,
        tx_data_packets: u64,
        retransmits: u64,
        lost: u64,
        rx_packets: u64,
        rx_bytes: u64,
        rx_data_packets: u64,
        rx_ce: u64,
        rx_reordered: u64,
        rx_duplicates: u64,
        srtt_ns: u64,
    }
    /// A connection.
    Connection = "metaroce_connection" {
        number: u32,
        state: u32,
        peer: [u8; 16],
        peer_slot: u32,
        segment: u32,
        incarnation: u64,
        qps: u32,
        paths: u32,
        in_flight_bytes: u32,
        budget_bytes: u32,
        hint_taken_bps: u64,
        hint_given_bps: u64,
        retransmits_waiting: u64,
        srtt_ns: u64,
        silent_ns: u64,
        state_bytes: u64,
    }
    /// A path of a connection.
    Path = "metaroce_path" {
        connection: u32,
        number: u32,
        plane: u32,
        entropy: u32,
        generation: u32,
        state: u32,
        cause: u32,
        dst_port: u32,
        dst: [u8; 16],
        since_ns: u64,
        rtt_min_ns: u64,
        rtt_ns: u64,
        rtt_var_ns: u64,
        reorder_tolerance_ns: u64,
        cwnd_packets: u32,
        in_flight_packets: u32,
        sent: u64,
        sent_bytes: u64,
        retransmitted: u64,
        delivered: u64,
        delivered_bytes: u64,
        lost: u64,
        spurious: u64,
        reordered: u64,
        ce: u64,
    }
    /// A queue pair.
    QueuePair = "metaroce_qp" {
        qp_num: u32,
        qp_type: u32,
        qp_state: u32,
        dest_qp_num: u32,
        has_connection: u32,
        connection: u32,
        peer: [u8; 16],
        sends: u64,
        sends_waiting: u64,
        recvs: u64,
        reads: u32,
        rnr_tries: u32,
    }
    /// What a snapshot holds.
    SnapshotInfo = "metaroce_snapshot_info" {
        taken_ns: u64,
        one_moment: u32,
        planes: u32,
        connections: u32,
        paths: u32,
        qps: u32,
        reserved: u32,
    }
    /// Something that has happened to a plane or a path.
    Event = "metaroce_event" {
        time_ns: u64,
        lost: u64,
        kind: u32,
        plane: u32,
        state: u32,
        cause: u32,
        connection: u32,
        path: u32,
        entropy: u32,
        generation: u32,
        peer: [u8; 16],
        peer_slot: u32,
        qps: u32,
        qp_num: u32,
        reserved: u32,
    }
}

/// An errno value.
pub type Errno = c_int;
const EINVAL: Errno = 22;
const EOPNOTSUPP: Errno = 95;

/// A context, queue pair, snapshot or listener as C sees it.
pub type Opaque = *mut c_void;

/// The provider's functions. It never shrinks: what a provider does not have lies beyond its `size`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "each does what the function of the header does whose name it has")]
pub struct Ops {
    /// Bytes of the table.
    pub size: u32,
    /// 0.
    pub reserved: u32,
    /// 0: a context is an open one of this provider; else ENODEV.
    pub owns: unsafe extern "C" fn(context: Opaque) -> c_int,
    pub query_version: unsafe extern "C" fn(context: Opaque, version: *mut Version) -> c_int,
    pub query_device: unsafe extern "C" fn(context: Opaque, attr: *mut DeviceAttr) -> c_int,
    pub query_plane: unsafe extern "C" fn(context: Opaque, index: u32, plane: *mut Plane) -> c_int,
    pub set_plane_admin:
        unsafe extern "C" fn(context: Opaque, plane: u32, admin: u32, kept: *mut u32) -> c_int,
    pub deny_entropy: unsafe extern "C" fn(context: Opaque, plane: u32, entropy: u32, deny: c_int) -> c_int,
    pub rehash_path: unsafe extern "C" fn(context: Opaque, connection: u32, path: u32) -> c_int,
    pub query_qp: unsafe extern "C" fn(qp: Opaque, attr: *mut QueuePair) -> c_int,
    pub take_snapshot: unsafe extern "C" fn(context: Opaque, snapshot: *mut Opaque) -> c_int,
    pub snapshot_info: unsafe extern "C" fn(snapshot: Opaque, info: *mut SnapshotInfo) -> c_int,
    pub snapshot_plane: unsafe extern "C" fn(snapshot: Opaque, index: u32, to: *mut Plane) -> c_int,
    pub snapshot_connection: unsafe extern "C" fn(snapshot: Opaque, index: u32, to: *mut Connection) -> c_int,
    pub snapshot_path: unsafe extern "C" fn(snapshot: Opaque, index: u32, to: *mut Path) -> c_int,
    pub snapshot_qp: unsafe extern "C" fn(snapshot: Opaque, index: u32, to: *mut QueuePair) -> c_int,
    pub free_snapshot: unsafe extern "C" fn(snapshot: Opaque),
    pub open_events: unsafe extern "C" fn(context: Opaque, events: *mut Opaque) -> c_int,
    pub events_fd: unsafe extern "C" fn(events: Opaque, fd: *mut c_int) -> c_int,
    pub next_event: unsafe extern "C" fn(events: Opaque, to: *mut Event) -> c_int,
    pub close_events: unsafe extern "C" fn(events: Opaque),
}

/// What the device can do, a bit each; members `caps` of [`DeviceAttr`].
pub mod caps {
    /// Planes can be steered.
    pub const PLANE_ADMIN: u64 = 1;
    /// Source ports can be denied and changed.
    pub const ENTROPY: u64 = 2;
    /// Snapshots.
    pub const SNAPSHOT: u64 = 4;
    /// Events.
    pub const EVENTS: u64 = 8;
}

/// What an event is of.
pub mod event {
    #![expect(missing_docs, reason = "as in the header")]
    pub const PATH: u32 = 0;
    pub const LINK: u32 = 1;
    pub const ADMIN: u32 = 2;
}

/// What an operator wants of a plane.
pub mod admin {
    #![expect(missing_docs, reason = "as in the header")]
    pub const UP: u32 = 0;
    pub const DRAIN: u32 = 1;
    pub const DOWN: u32 = 2;
}

/// Names of path states, by their numbers in the header.
pub const PATH_STATES: [&str; 5] = ["active", "draining", "shunned", "left", "parked"];
/// Names of connection states, by their numbers in the header.
pub const CONNECTION_STATES: [&str; 3] = ["connecting", "established", "closing"];
/// Names of causes, by their numbers in the header.
pub const CAUSES: [&str; 7] = ["fresh", "silence", "plane", "link", "peer", "answered", "operator"];
/// The number of a name; u32::MAX for one that the header does not have.
pub fn number_of(names: &[&str], name: &str) -> u32 {
    names.iter().position(|known| *known == name).map_or(u32::MAX, |at| at as u32)
}

/// Fills the caller's structure as far as it reaches: EINVAL when it is smaller than this one, or NULL; EOPNOTSUPP for
/// optional parts, of which there are none yet. What the caller's has beyond is set to 0.
///
/// # Safety
/// `to` is NULL, or the first four bytes are the number of bytes behind `to` that may be written.
pub unsafe fn fill<T: Plain + Sized>(to: *mut T, mut value: T) -> Result<(), Errno> {
    const HEAD: usize = 2 * size_of::<u32>();
    if to.is_null() {
        return Err(EINVAL);
    }
    // SAFETY: upheld by the caller: such structures begin with two u32.
    unsafe {
        let head = to.cast::<u32>();
        let (size, mask) = (head.read(), head.add(1).read());
        let known = size_of::<T>();
        if (size as usize) < known.max(HEAD) {
            return Err(EINVAL);
        }
        if mask != 0 {
            return Err(EOPNOTSUPP);
        }
        let head_of_value = (&raw mut value).cast::<u32>();
        head_of_value.write(known as u32);
        head_of_value.add(1).write(0);
        to.write(value);
        to.cast::<u8>().add(known).write_bytes(0, size as usize - known);
    }
    Ok(())
}
