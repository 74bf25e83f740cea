//! One record of the statistics file: claiming it, writing it, reading it.
//!
//! Layout in 64-bit words: 0 owner (packed pid and start time, 0 = never used), 1 ready (equals the owner once the
//! rest is valid), 2 released, 3 pid namespace, 4 start and 5 last store (Unix seconds), 6-7 name,
//! 16.. device counters, 64.. paths of 24 words (0 present and index, 1-4 plane label, 5.. counters).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::counters::{DeviceCounter, Kind, PathCounter};
use crate::file::HEADER_WORDS;
use crate::process::{self, ProcessId};
use crate::sys::Mapping;

/// Records in the file; more processes than this at once share the device but not the statistics.
pub const RECORDS_MAX: usize = 128;
/// Paths a record can hold.
pub const PATHS_MAX: usize = 32;

pub(crate) const RECORD_WORDS: usize = 1024;
const OWNER: usize = 0;
const READY: usize = 1;
const RELEASED: usize = 2;
const NAMESPACE: usize = 3;
const STARTED: usize = 4;
const UPDATED: usize = 5;
const COMM: usize = 6;
const COMM_WORDS: usize = 2;
const DEVICE: usize = 16;
const PATHS: usize = 64;
const PATH_WORDS: usize = 24;
const PATH_PRESENT: usize = 0;
const PATH_LABEL: usize = 1;
const PATH_LABEL_WORDS: usize = 4;
const PATH_COUNTERS: usize = PATH_LABEL + PATH_LABEL_WORDS;
/// A record of another pid namespace, whose owner we cannot look up, counts as ended after this long without a store.
const FOREIGN_SILENCE_S: u64 = 3600;
/// Rounds in which other claimants may snatch the record we chose before we give up.
const CLAIM_ROUNDS_MAX: usize = 16;

const _: () = assert!(DEVICE + DeviceCounter::ALL.len() <= PATHS);
const _: () = assert!(PATH_COUNTERS + PathCounter::ALL.len() <= PATH_WORDS);
const _: () = assert!(PATHS + PATHS_MAX * PATH_WORDS <= RECORD_WORDS);

/// A record as a reader sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Process id of the owner.
    pub pid: u32,
    /// Name of the owner's program.
    pub comm: String,
    /// The process still runs and has the device open.
    pub live: bool,
    /// When the record was claimed, Unix seconds.
    pub started_unix_s: u64,
    /// When a counter was stored last, Unix seconds.
    pub updated_unix_s: u64,
    /// Paths in use, in the order of their slots.
    pub paths: Vec<PathRecord>,
    device: [u64; DeviceCounter::ALL.len()],
}

impl Record {
    /// Value of a device counter.
    pub fn get(&self, counter: DeviceCounter) -> u64 {
        self.device[counter as usize]
    }
}

/// One path of a record as a reader sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathRecord {
    /// Label of the plane.
    pub plane: String,
    /// Index of the path within its plane.
    pub index: u32,
    counters: [u64; PathCounter::ALL.len()],
}

impl PathRecord {
    /// Value of a path counter.
    pub fn get(&self, counter: PathCounter) -> u64 {
        self.counters[counter as usize]
    }
}

/// A claimed record; the process's engine stores its counters here, from one thread at a time or many.
///
/// All stores are relaxed and allocate nothing. Values are absolute for this life of the device. Dropping the writer
/// leaves the values readable and the record free for a later process.
#[derive(Debug)]
pub struct StatWriter {
    cells: Cells,
    owner: ProcessId,
    /// Values a former writer of this process left, added to what counters are set to.
    device_base: [u64; DeviceCounter::ALL.len()],
    path_base: Box<[[u64; PathCounter::ALL.len()]; PATHS_MAX]>,
}

impl StatWriter {
    /// Stores a device counter.
    pub fn set(&self, counter: DeviceCounter, value: u64) {
        if self.is_ours() {
            let sum = value.wrapping_add(self.device_base[counter as usize]);
            self.cells.at(DEVICE + counter as usize).store(sum, Ordering::Relaxed);
        }
    }

    /// Names the path in `slot` (0..[`PATHS_MAX`]; others are ignored): its plane's label (32 bytes are kept) and
    /// its index within the plane. Paths without a name are not shown.
    pub fn set_path_identity(&self, slot: usize, plane_label: &str, path_index: u32) {
        if slot < PATHS_MAX && self.is_ours() {
            let path = PATHS + slot * PATH_WORDS;
            self.cells.store_text(path + PATH_LABEL, PATH_LABEL_WORDS, plane_label);
            let present = 1 | (u64::from(path_index) << 32);
            self.cells.at(path + PATH_PRESENT).store(present, Ordering::Release);
        }
    }

    /// Stores a counter of the path in `slot` (0..[`PATHS_MAX`]; others are ignored). A gauge set to 0 (no connection
    /// uses the path now) keeps the last value that meant something.
    pub fn set_path(&self, slot: usize, counter: PathCounter, value: u64) {
        let says_nothing = value == 0 && counter.kind() == Kind::Gauge;
        if slot < PATHS_MAX && !says_nothing && self.is_ours() {
            let sum = value.wrapping_add(self.path_base[slot][counter as usize]);
            let index = PATHS + slot * PATH_WORDS + PATH_COUNTERS + counter as usize;
            self.cells.at(index).store(sum, Ordering::Relaxed);
        }
    }

    /// Stamps the record with the present time; call it once after a batch of stores.
    pub fn touch(&self) {
        if self.is_ours() {
            self.cells.at(UPDATED).store(unix_seconds(), Ordering::Relaxed);
        }
    }

    /// False in the rare case that a process of another pid namespace took a long silent record over.
    fn is_ours(&self) -> bool {
        self.cells.at(OWNER).load(Ordering::Relaxed) == self.owner.0
    }
}

impl Drop for StatWriter {
    fn drop(&mut self) {
        // A forked child drops a copy: the record is its parent's.
        if self.owner.pid() == std::process::id() && self.is_ours() {
            for gauge in DeviceCounter::ALL.iter().filter(|counter| counter.kind() == Kind::Gauge) {
                if *gauge != DeviceCounter::Slot {
                    self.cells.at(DEVICE + *gauge as usize).store(0, Ordering::Relaxed);
                }
            }
            self.cells.at(UPDATED).store(unix_seconds(), Ordering::Relaxed);
            self.cells.at(RELEASED).store(1, Ordering::Release);
        }
    }
}

/// The words of one record.
#[derive(Debug, Clone)]
struct Cells {
    map: Arc<Mapping>,
    first: usize,
}

impl Cells {
    fn new(map: &Arc<Mapping>, index: usize) -> Cells {
        Cells { map: Arc::clone(map), first: HEADER_WORDS + index * RECORD_WORDS }
    }

    fn at(&self, word: usize) -> &AtomicU64 {
        self.map.word(self.first + word)
    }

    fn load(&self, word: usize) -> u64 {
        self.at(word).load(Ordering::Relaxed)
    }

    fn store_text(&self, word: usize, words: usize, text: &str) {
        let bytes = text.as_bytes();
        for i in 0..words {
            let mut chunk = [0; 8];
            let part = bytes.get(i * 8..).unwrap_or_default();
            let part = &part[..part.len().min(8)];
            chunk[..part.len()].copy_from_slice(part);
            self.at(word + i).store(u64::from_le_bytes(chunk), Ordering::Relaxed);
        }
    }

    fn load_text(&self, word: usize, words: usize) -> String {
        let bytes: Vec<u8> = (0..words).flat_map(|i| self.load(word + i).to_le_bytes()).collect();
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).chars().filter(|c| !c.is_control()).collect()
    }

    fn owner(&self) -> ProcessId {
        ProcessId(self.at(OWNER).load(Ordering::Acquire))
    }

    /// Whether the owner still uses the record.
    fn is_live(&self, owner: ProcessId, namespace: u64) -> bool {
        let valid = self.at(READY).load(Ordering::Acquire) == owner.0;
        if valid && self.at(RELEASED).load(Ordering::Acquire) != 0 {
            return false;
        }
        // Before "ready" the namespace is not written yet; the claim is then moments old or its owner was killed in it.
        if valid && self.load(NAMESPACE) != namespace {
            return unix_seconds().saturating_sub(self.load(UPDATED)) < FOREIGN_SILENCE_S;
        }
        owner.is_alive()
    }

    fn device_values(&self) -> [u64; DeviceCounter::ALL.len()] {
        std::array::from_fn(|i| self.load(DEVICE + i))
    }

    fn path_values(&self, slot: usize) -> [u64; PathCounter::ALL.len()] {
        std::array::from_fn(|i| self.load(PATHS + slot * PATH_WORDS + PATH_COUNTERS + i))
    }
}

/// Takes the record this process released, else an unused one, else the one that ended longest ago.
pub(crate) fn claim(map: &Arc<Mapping>, comm: &str) -> Option<StatWriter> {
    let me = ProcessId::current();
    let namespace = process::pid_namespace();
    if let Some(writer) = (0..RECORDS_MAX).find_map(|index| claim_released(Cells::new(map, index), me)) {
        return Some(writer);
    }
    for _ in 0..CLAIM_ROUNDS_MAX {
        let (cells, old) = choose(map, namespace)?;
        let taken = cells.at(OWNER).compare_exchange(old.0, me.0, Ordering::AcqRel, Ordering::Relaxed);
        if taken.is_ok() {
            return Some(initialise(cells, me, namespace, comm));
        }
    }
    None
}

/// The record this process used for a former life of its device, with the values reached as base.
fn claim_released(cells: Cells, me: ProcessId) -> Option<StatWriter> {
    if cells.owner() != me || cells.load(READY) != me.0 {
        return None;
    }
    cells.at(RELEASED).compare_exchange(1, 0, Ordering::AcqRel, Ordering::Relaxed).ok()?;
    let mut device_base = cells.device_values();
    for gauge in DeviceCounter::ALL.iter().filter(|counter| counter.kind() == Kind::Gauge) {
        device_base[*gauge as usize] = 0;
    }
    let mut path_base = Box::new(std::array::from_fn(|slot| cells.path_values(slot)));
    for path in path_base.iter_mut() {
        for gauge in PathCounter::ALL.iter().filter(|counter| counter.kind() == Kind::Gauge) {
            path[*gauge as usize] = 0;
        }
    }
    Some(StatWriter { cells, owner: me, device_base, path_base })
}

/// An unused record, else the record that ended longest ago, with the owner word seen.
fn choose(map: &Arc<Mapping>, namespace: u64) -> Option<(Cells, ProcessId)> {
    let mut oldest: Option<(u64, Cells, ProcessId)> = None;
    for index in 0..RECORDS_MAX {
        let cells = Cells::new(map, index);
        let owner = cells.owner();
        if owner.0 == 0 {
            return Some((cells, owner));
        }
        let updated = cells.load(UPDATED);
        if oldest.as_ref().is_none_or(|(best, ..)| updated < *best) && !cells.is_live(owner, namespace) {
            oldest = Some((updated, cells, owner));
        }
    }
    oldest.map(|(_, cells, owner)| (cells, owner))
}

fn initialise(cells: Cells, me: ProcessId, namespace: u64, comm: &str) -> StatWriter {
    // READY of a former owner differs from ours, unless ours was left from a pid and start time that cannot recur.
    for word in READY..RECORD_WORDS {
        cells.at(word).store(0, Ordering::Relaxed);
    }
    let mut end = comm.len().min(COMM_WORDS * 8 - 1);
    while !comm.is_char_boundary(end) {
        end -= 1;
    }
    cells.store_text(COMM, COMM_WORDS, &comm[..end]);
    cells.at(NAMESPACE).store(namespace, Ordering::Relaxed);
    let now = unix_seconds();
    cells.at(STARTED).store(now, Ordering::Relaxed);
    cells.at(UPDATED).store(now, Ordering::Relaxed);
    cells.at(READY).store(me.0, Ordering::Release);
    StatWriter {
        cells,
        owner: me,
        device_base: [0; DeviceCounter::ALL.len()],
        path_base: Box::new([[0; PathCounter::ALL.len()]; PATHS_MAX]),
    }
}

/// Reads record `index`; `None` when unused, half claimed, or claimed anew while being read.
pub(crate) fn read(map: &Arc<Mapping>, index: usize) -> Option<Record> {
    let cells = Cells::new(map, index);
    let owner = cells.owner();
    if owner.0 == 0 || cells.at(READY).load(Ordering::Acquire) != owner.0 {
        return None;
    }
    let paths = (0..PATHS_MAX).filter_map(|slot| {
        let present = cells.at(PATHS + slot * PATH_WORDS + PATH_PRESENT).load(Ordering::Acquire);
        (present & 1 == 1).then(|| PathRecord {
            plane: cells.load_text(PATHS + slot * PATH_WORDS + PATH_LABEL, PATH_LABEL_WORDS),
            index: (present >> 32) as u32,
            counters: cells.path_values(slot),
        })
    });
    let record = Record {
        pid: owner.pid(),
        comm: cells.load_text(COMM, COMM_WORDS),
        live: cells.is_live(owner, process::pid_namespace()),
        started_unix_s: cells.load(STARTED),
        updated_unix_s: cells.load(UPDATED),
        paths: paths.collect(),
        device: cells.device_values(),
    };
    (cells.owner() == owner).then_some(record)
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
#[path = "record_tests.rs"]
mod tests;
