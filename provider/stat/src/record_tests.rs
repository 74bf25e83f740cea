//! Tests of claiming, reclaiming and reading records.

use super::*;

/// A mapping of a file that has no name any more.
fn nameless() -> Arc<Mapping> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("metaroce-stat-records-{}-{serial}", std::process::id()));
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    Arc::new(Mapping::new(&file, HEADER_WORDS + RECORDS_MAX * RECORD_WORDS).unwrap())
}

fn all(map: &Arc<Mapping>) -> Vec<Record> {
    (0..RECORDS_MAX).filter_map(|index| read(map, index)).collect()
}

/// An identity that no live process has.
fn dead(pid: u32) -> ProcessId {
    ProcessId::new(pid, 1 << 41)
}

/// Puts a finished record of a dead process at `index`.
fn bury(map: &Arc<Mapping>, index: usize, updated: u64) {
    let cells = Cells::new(map, index);
    let owner = dead(1 + index as u32);
    cells.at(OWNER).store(owner.0, Ordering::Relaxed);
    drop(initialise(cells.clone(), owner, process::pid_namespace(), "dead"));
    cells.at(UPDATED).store(updated, Ordering::Relaxed);
}

#[test]
fn writer__values_reach_readers() {
    let map = nameless();
    let writer = claim(&map, "ib_write_bw").unwrap();
    writer.set(DeviceCounter::TxBytes, 1 << 40);
    writer.set(DeviceCounter::Qps, 3);
    writer.set_path_identity(5, "eth0", 1);
    writer.set_path(5, PathCounter::TxPackets, 77);
    writer.set_path(PATHS_MAX, PathCounter::TxPackets, 1);
    writer.touch();
    let records = all(&map);
    assert_eq!(records.len(), 1);
    let record = &records[0];
    assert_eq!((record.pid, record.comm.as_str(), record.live), (std::process::id(), "ib_write_bw", true));
    assert_eq!((record.get(DeviceCounter::TxBytes), record.get(DeviceCounter::Qps)), (1 << 40, 3));
    assert_eq!(record.paths.len(), 1);
    assert_eq!((record.paths[0].plane.as_str(), record.paths[0].index), ("eth0", 1));
    assert_eq!(record.paths[0].get(PathCounter::TxPackets), 77);
    assert!(record.updated_unix_s >= record.started_unix_s && record.started_unix_s > 0);
}

#[test]
fn writer__release_keeps_values_and_a_second_life_counts_on() {
    let map = nameless();
    let writer = claim(&map, "app").unwrap();
    writer.set(DeviceCounter::TxPackets, 10);
    writer.set(DeviceCounter::Connections, 2);
    writer.set_path_identity(0, "lo", 0);
    writer.set_path(0, PathCounter::Lost, 4);
    writer.set_path(0, PathCounter::SrttNs, 900);
    // The last connection is gone: the last round trip time stays.
    writer.set_path(0, PathCounter::SrttNs, 0);
    drop(writer);
    let ended = &all(&map)[0];
    assert!(!ended.live);
    assert_eq!(ended.paths[0].get(PathCounter::SrttNs), 900);
    assert_eq!((ended.get(DeviceCounter::TxPackets), ended.get(DeviceCounter::Connections)), (10, 0));

    let again = claim(&map, "app").unwrap();
    again.set(DeviceCounter::TxPackets, 5);
    again.set_path(0, PathCounter::Lost, 1);
    again.set_path(0, PathCounter::SrttNs, 300);
    let records = all(&map);
    assert_eq!(records.len(), 1);
    assert!(records[0].live);
    assert_eq!(records[0].get(DeviceCounter::TxPackets), 15);
    assert_eq!(records[0].paths[0].get(PathCounter::Lost), 5);
    assert_eq!(records[0].paths[0].get(PathCounter::SrttNs), 300);
}

#[test]
fn claim__takes_unused_then_the_one_that_ended_longest_ago() {
    let map = nameless();
    for index in 0..RECORDS_MAX - 1 {
        bury(&map, index, 1000 + ((index as u64 * 37) % 127));
    }
    let first = claim(&map, "first").unwrap();
    assert_eq!(first.cells.first, Cells::new(&map, RECORDS_MAX - 1).first);
    // 37 * i = 0 mod 127 only for i = 0: that one is the oldest.
    let second = claim(&map, "second").unwrap();
    assert_eq!(second.cells.first, Cells::new(&map, 0).first);
    assert_eq!(all(&map).iter().filter(|record| record.live).count(), 2);
}

#[test]
fn claim__gives_nothing_while_all_owners_live() {
    let map = nameless();
    let writers: Vec<_> = (0..RECORDS_MAX).map(|_| claim(&map, "many").unwrap()).collect();
    assert!(claim(&map, "late").is_none());
    drop(writers);
    assert!(claim(&map, "late").is_some());
}

#[test]
fn claim__a_claimant_killed_half_way_is_hidden_and_reclaimed() {
    let map = nameless();
    for index in 0..RECORDS_MAX {
        bury(&map, index, 1000);
    }
    let half = Cells::new(&map, 9);
    half.at(OWNER).store(dead(500).0, Ordering::Relaxed);
    half.at(UPDATED).store(1, Ordering::Relaxed);
    assert_eq!(all(&map).len(), RECORDS_MAX - 1);
    assert_eq!(claim(&map, "new").unwrap().cells.first, half.first);
}

#[test]
fn claim__threads_never_share_a_record() {
    let map = nameless();
    let mut firsts: Vec<usize> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| (0..8).map(|_| claim(&map, "t").unwrap()).collect::<Vec<_>>()))
            .collect();
        let writers: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        writers.iter().map(|writer| writer.cells.first).collect()
    });
    firsts.sort_unstable();
    firsts.dedup();
    assert_eq!(firsts.len(), 64);
}

#[test]
fn record__of_another_pid_namespace_lives_until_it_falls_silent() {
    let map = nameless();
    let cells = Cells::new(&map, 0);
    cells.at(OWNER).store(dead(7).0, Ordering::Relaxed);
    let writer = initialise(cells.clone(), dead(7), process::pid_namespace() + 1, "guest");
    assert!(all(&map)[0].live);
    cells.at(UPDATED).store(unix_seconds() - FOREIGN_SILENCE_S - 1, Ordering::Relaxed);
    assert!(!all(&map)[0].live);
    // Its writer notices that the record was taken over and stays silent.
    cells.at(OWNER).store(dead(8).0, Ordering::Relaxed);
    writer.set(DeviceCounter::TxBytes, 9);
    assert_eq!(cells.load(DEVICE + DeviceCounter::TxBytes as usize), 0);
}

#[test]
fn text__is_cut_and_cleaned() {
    let map = nameless();
    let writer = claim(&map, "a-name-of-more-than-fifteen-bytes").unwrap();
    writer.set_path_identity(0, "e\nth\t0", 0);
    let record = &all(&map)[0];
    assert_eq!(record.comm, "a-name-of-more-");
    assert_eq!(record.paths[0].plane, "eth0");
}
