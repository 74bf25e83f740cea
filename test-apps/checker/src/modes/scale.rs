//! `scale`: many QPs between two processes, traffic on each of them, and what that costs in memory.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use metaroce_test_verbs::constants::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE};
use metaroce_test_verbs::{Attr, Buffer, Mr, Opcode, QpCaps, RecvWr, SendWr};

use crate::expect::collect_good;
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::options::Options;
use crate::session::Session;
use crate::{Outcome, pattern};

/// Bytes each QP writes, and sends.
const MESSAGE: usize = 256;

/// The cases: one per count.
pub fn cases(options: &Options) -> Vec<Case> {
    let case = |count: &usize| {
        let count = *count;
        Case::new(format!("{count}-qps"), limit(count), move |session| scale(session, count, 1).map(|_| ()))
    };
    let mut cases: Vec<Case> = options.counts.iter().map(case).collect();
    if let (Some(most), true) = (options.counts.iter().copied().max(), options.metaroce.is_some()) {
        cases.push(Case::new("growth", limit(most), move |session| growth(session, most)));
    }
    cases
}

/// Seconds for this many QPs: making and connecting them one by one takes time.
fn limit(count: usize) -> u64 {
    60 + count as u64 / 50
}

/// `qps` QPs, a Write and a Send on each of them `each` times, all posted at once. Returns the bytes of transport
/// state afterwards, if they are known.
fn scale(session: &mut Session, qps: usize, each: usize) -> Outcome<Option<u64>> {
    let count = qps * each;
    let rss = resident_kib();
    let begin = Instant::now();
    let depth = u32::try_from(each)?;
    let caps = QpCaps { send_wr: 2 * depth, recv_wr: depth, send_sge: 1, recv_sge: 1, inline: 0 };
    let attr = Attr { max_rd_atomic: 1, max_dest_rd_atomic: 1, ..Attr::default() };
    let mut end = End::new(session, &Setup { qps, caps, cqe: 2 * count, attr, ..Setup::default() })?;
    let areas = [Buffer::new(count * MESSAGE)?, Buffer::new(count * MESSAGE)?, Buffer::new(count * MESSAGE)?];
    let [written, received, source] = &areas;
    let written = Mr::whole(&end.pd, written, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)?;
    let received = Mr::whole(&end.pd, received, IBV_ACCESS_LOCAL_WRITE)?;
    let source = Mr::whole(&end.pd, source, IBV_ACCESS_LOCAL_WRITE)?;
    let mine = pattern::bytes(session.seed_for(&[session.role.index() as u64]), count * MESSAGE);
    source.buffer().write(0, &mine);
    let remote: (u64, u32) = session.swap(&(written.address(), written.rkey()))?;
    for (i, qp) in end.qps.iter().enumerate() {
        qp.to_init(&end.attr)?;
        for m in i * each..(i + 1) * each {
            qp.post_recv(&[RecvWr { wr_id: m as u64, sges: vec![received.sge(m * MESSAGE, MESSAGE)] }])?;
        }
    }
    end.exchange(session)?;
    for (i, qp) in end.qps.iter().enumerate() {
        let attr = end.attr_for(i);
        qp.to_rtr(&attr)?;
        qp.to_rts(&attr)?;
    }
    session.barrier()?;
    let created = begin.elapsed();
    let begin = Instant::now();
    for (i, qp) in end.qps.iter().enumerate() {
        for m in i * each..(i + 1) * each {
            let sge = source.sge(m * MESSAGE, MESSAGE);
            let write = SendWr::new(m as u64, Opcode::Write).sges([sge]);
            let write = write.remote(remote.0 + (m * MESSAGE) as u64, remote.1).unsignaled();
            qp.post_send(&[write, SendWr::new(m as u64, Opcode::Send).sges([sge])])?;
        }
    }
    let sends = collect_good(&end.send_cq, count, session.stall() + created)?;
    let recvs = collect_good(&end.recv_cq, count, session.stall() + created)?;
    session.barrier()?;
    let moved = begin.elapsed();
    let mut ids: Vec<u64> = recvs.iter().map(|wc| wc.wr_id).collect();
    ids.sort_unstable();
    let each_once = ids.iter().enumerate().all(|(i, id)| *id == i as u64) && sends.len() == count;
    session.check("each message completed once", each_once, format!("{qps} QPs, {count} messages"));
    let want = pattern::bytes(session.seed_for(&[session.role.other().index() as u64]), count * MESSAGE);
    for (name, area) in [("written", &written), ("received", &received)] {
        let mut got = vec![0; count * MESSAGE];
        area.buffer().read(0, &mut got);
        let wrong = pattern::difference(&got, &want);
        session.check(
            format!("bytes {name}"),
            wrong.is_none(),
            wrong.unwrap_or_else(|| format!("{}", got.len())),
        );
    }
    let grown = resident_kib().saturating_sub(rss);
    let bytes = transport_bytes(session);
    let text = bytes.map_or(String::new(), |bytes| format!("; transport state {bytes} bytes"));
    session.check(
        "cost",
        true,
        format!(
            "made and connected in {created:.2?}, traffic {moved:.2?}, resident +{grown} KiB ({:.1} KiB per QP){text}",
            grown as f64 / qps as f64
        ),
    );
    session.barrier()?;
    Ok(bytes)
}

/// The same messages over one QP and then over many in the same two processes: the QPs share one connection, so the
/// transport does not grow.
fn growth(session: &mut Session, count: usize) -> Outcome {
    let one = scale(session, 1, count)?;
    let many = scale(session, count, 1)?;
    if let (Some(one), Some(many)) = (one, many) {
        let detail = format!("{one} bytes after {count} messages over 1 QP, {many} over {count}");
        // Windows are as large as the traffic needed them, which differs a little from run to run.
        session.check("transport state does not grow with QPs", many <= 2 * one, detail);
    }
    Ok(())
}

/// Resident memory of this process.
fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Bytes of transport state (connections, paths, windows) of this process at rest, as the device's own command tells
/// it, if one was named and it knows. Statistics lag behind the traffic by some milliseconds: asked until they stay.
fn transport_bytes(session: &Session) -> Option<u64> {
    let begin = Instant::now();
    let (mut bytes, mut since) = (told_bytes(session)?, Instant::now());
    while since.elapsed() < SETTLED && begin.elapsed() < SETTLED * 30 {
        let now = told_bytes(session)?;
        if now != bytes {
            (bytes, since) = (now, Instant::now());
        }
    }
    Some(bytes)
}

fn told_bytes(session: &Session) -> Option<u64> {
    let command = session.options.metaroce.as_ref()?;
    let me = std::process::id();
    let output = Command::new(command).args(["stat", "--json", "--pid", &me.to_string()]).output().ok()?;
    let stat: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    stat.as_array()?.iter().find(|p| p["pid"] == me)?["transport_bytes"].as_u64()
}

/// Statistics that did not change for this long are those of the device at rest.
const SETTLED: Duration = Duration::from_millis(100);
