//! What a killed process leaves: its last values, readable in the shared file.

#![expect(non_snake_case, reason = "tests are named subject__case")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use metaroce_stat::{DeviceCounter, Record, StatFile};

const CHILD: &str = "METAROCE_STAT_TEST_CHILD";

/// Starts this test program again as a process that claims a record, stores `value` and waits.
fn claimant(value: u64) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child__claims_and_waits", "--nocapture"])
        .env(CHILD, value.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("claimed")), "the child claimed nothing");
    child
}

#[test]
fn child__claims_and_waits() {
    // Alone it proves nothing: it is the other process of the test below.
    let Some(value) = std::env::var(CHILD).ok().and_then(|value| value.parse().ok()) else { return };
    let writer = StatFile::open_or_create().unwrap().claim("stat-test").unwrap();
    writer.set(DeviceCounter::TxBytes, value);
    println!("claimed");
    let _ = std::io::stdin().lock().read_line(&mut String::new());
}

fn record_of(pid: u32) -> Option<Record> {
    StatFile::open()
        .unwrap()?
        .records()
        .into_iter()
        .find(|record| record.pid == pid && record.comm == "stat-test")
}

#[test]
fn killed_process__stays_readable_as_ended() {
    let mut child = claimant(4711);
    let pid = child.id();
    assert!(record_of(pid).unwrap().live);
    child.kill().unwrap();
    child.wait().unwrap();
    let ended = record_of(pid).unwrap();
    assert!(!ended.live);
    assert_eq!(ended.get(DeviceCounter::TxBytes), 4711);
}
