//! `idle`: an open device with connected QPs and nothing to do causes no wake-up: the threads' voluntary
//! context switches stay what they are.

use std::collections::BTreeMap;
use std::fs;
use std::thread::sleep;
use std::time::Duration;

use metaroce_test_verbs::constants::IBV_ACCESS_LOCAL_WRITE;
use metaroce_test_verbs::{Buffer, Mr, Opcode, RecvWr, SendWr};

use crate::Outcome;
use crate::expect::collect_good;
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::options::Options;
use crate::session::Session;

/// After traffic: time for acknowledgements, and for a transport to find out that it is idle.
const SETTLE: Duration = Duration::from_secs(2);

/// The cases: before any connection, and after traffic.
pub fn cases(options: &Options) -> Vec<Case> {
    let seconds = options.seconds.unwrap_or(10);
    let limit = 30 + seconds;
    vec![
        Case::new("open", limit, move |session| idle(session, seconds, false)),
        Case::new("connected", limit, move |session| idle(session, seconds, true)),
    ]
}

fn idle(session: &mut Session, seconds: u64, traffic: bool) -> Outcome {
    let mut end = End::new(session, &Setup::default())?;
    let buffer = Mr::whole(&end.pd, &Buffer::new(4096)?, IBV_ACCESS_LOCAL_WRITE)?;
    if traffic {
        end.exchange(session)?;
        end.to_rts()?;
        end.qps[0].post_recv(&[RecvWr { wr_id: 1, sges: vec![buffer.sge(0, 64)] }])?;
        session.barrier()?;
        end.qps[0].post_send(&[SendWr::new(2, Opcode::Send).sges([buffer.sge(64, 64)])])?;
        collect_good(&end.send_cq, 1, session.stall())?;
        collect_good(&end.recv_cq, 1, session.stall())?;
    }
    session.barrier()?;
    sleep(SETTLE);
    let before = switches()?;
    sleep(Duration::from_secs(seconds));
    let after = switches()?;
    let me = std::process::id();
    // This thread itself switches to sleep; every other one belongs to the device.
    let woken: Vec<String> = after
        .iter()
        .filter(|(thread, count)| **thread != me && before.get(thread) != Some(count))
        .map(|(thread, count)| format!("thread {thread}: {:?} to {count}", before.get(thread)))
        .collect();
    let detail = format!("{} threads over {seconds} s; {}", after.len(), woken.join(", "));
    session.check("voluntary context switches flat", woken.is_empty(), detail);
    session.barrier()?;
    if traffic {
        // The transport may have let go of an idle connection; the QP has not.
        end.qps[0].post_recv(&[RecvWr { wr_id: 3, sges: vec![buffer.sge(0, 64)] }])?;
        session.barrier()?;
        end.qps[0].post_send(&[SendWr::new(4, Opcode::Send).sges([buffer.sge(64, 64)])])?;
        collect_good(&end.send_cq, 1, session.stall())?;
        collect_good(&end.recv_cq, 1, session.stall())?;
        session.check("works on after the pause", true, format!("{seconds} s"));
    }
    session.barrier()
}

/// Voluntary context switches of each thread.
fn switches() -> Outcome<BTreeMap<u32, u64>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir("/proc/self/task")? {
        let entry = entry?;
        let Some(thread) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let status = fs::read_to_string(entry.path().join("status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        all.insert(thread, line.and_then(|count| count.trim().parse().ok()).unwrap_or(0));
    }
    Ok(all)
}
