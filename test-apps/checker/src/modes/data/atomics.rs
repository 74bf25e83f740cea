//! Atomics of many QPs on the same two words: sums are exact, every fetched value occurs once, and the
//! successful compare-and-swaps form one chain from the first value to the last.

use std::collections::{HashMap, HashSet};

use metaroce_test_verbs::constants::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_WC_SUCCESS};
use metaroce_test_verbs::{Buffer, Mr, Opcode, SendWr};

use crate::Outcome;
use crate::expect::{collect_good, describe};
use crate::link::{End, Setup};
use crate::session::Session;

/// Fetch-and-adds per QP.
const ADDS: usize = 200;
/// Compare-and-swaps per QP.
const SWAPS: usize = 100;
/// First value of the swapped word; every value written is different from all others.
const FIRST: u64 = 0x5eed_0000_0000_0000;

/// Both ends work on the peer's words at once.
pub fn contended(session: &mut Session, qps: usize) -> Outcome {
    let mut end = End::new(session, &Setup { qps, cqe: qps * 2, ..Setup::default() })?;
    let words = Buffer::new(16)?;
    words.write(8, &FIRST.to_ne_bytes());
    let target = Mr::whole(&end.pd, &words, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC)?;
    let results = Buffer::new(qps * 8)?;
    let sink = Mr::whole(&end.pd, &results, IBV_ACCESS_LOCAL_WRITE)?;
    let remote: (u64, u32) = session.swap(&(target.address(), target.rkey()))?;
    end.connect(session)?;
    add(session, &end, &sink, remote)?;
    let chain = swap(session, &end, &sink, remote)?;
    session.barrier()?;
    let sum = words.load_word(0);
    let want = (qps * ADDS * 3) as u64;
    session.check("sum of fetch-and-adds", sum == want, format!("{sum} (want {want})"));
    let last: u64 = session.swap(&words.load_word(8))?;
    check_chain(session, &chain, last);
    Ok(())
}

/// Each QP adds 3 again and again; together they must fetch every multiple of 3 once.
fn add(session: &mut Session, end: &End, sink: &Mr, (address, rkey): (u64, u32)) -> Outcome {
    let mut fetched = HashSet::new();
    let mut wrong = None;
    let post = |q: usize| {
        let wr = SendWr::new(q as u64, Opcode::FetchAdd(3)).sges([sink.sge(q * 8, 8)]).remote(address, rkey);
        end.qps[q].post_send(&[wr])
    };
    let total = end.qps.len() * ADDS;
    let mut left = vec![ADDS - 1; end.qps.len()];
    for q in 0..end.qps.len() {
        post(q)?;
    }
    let mut done = 0;
    while done < total {
        for wc in collect_good(&end.send_cq, 1, session.stall())? {
            done += 1;
            let q = wc.wr_id as usize;
            let value = sink.buffer().load_word(q * 8);
            if !value.is_multiple_of(3) || value >= total as u64 * 3 || !fetched.insert(value) {
                wrong.get_or_insert(format!("QP {q} fetched {value}"));
            }
            if left[q] > 0 {
                left[q] -= 1;
                post(q)?;
            }
        }
    }
    let detail = wrong.clone().unwrap_or_else(|| format!("{} distinct", fetched.len()));
    session.check("fetched values", wrong.is_none() && fetched.len() == total, detail);
    Ok(())
}

/// One compare-and-swap as it went.
struct Swap {
    compare: u64,
    new: u64,
    found: u64,
}

/// Each QP swaps what it last saw for a value of its own.
fn swap(session: &Session, end: &End, sink: &Mr, (address, rkey): (u64, u32)) -> Outcome<Vec<Swap>> {
    let qps = end.qps.len();
    let mut last_seen = vec![FIRST; qps];
    let mut done = Vec::with_capacity(qps * SWAPS);
    for round in 0..SWAPS {
        let new = |q: usize| FIRST + 1 + (round * qps + q) as u64;
        for (q, seen) in last_seen.iter().enumerate() {
            let wr = SendWr::new(q as u64, Opcode::CompareSwap(*seen, new(q)))
                .sges([sink.sge(q * 8, 8)])
                .remote(address + 8, rkey);
            end.qps[q].post_send(&[wr])?;
        }
        for wc in collect_good(&end.send_cq, qps, session.stall())? {
            let q = wc.wr_id as usize;
            if wc.status != IBV_WC_SUCCESS {
                return Err(describe(&[wc]).into());
            }
            let found = sink.buffer().load_word(q * 8);
            let compare = last_seen[q];
            done.push(Swap { compare, new: new(q), found });
            last_seen[q] = if found == compare { new(q) } else { found };
        }
    }
    Ok(done)
}

fn check_chain(session: &mut Session, swaps: &[Swap], last: u64) {
    let won: HashMap<u64, u64> =
        swaps.iter().filter(|s| s.found == s.compare).map(|s| (s.compare, s.new)).collect();
    let wins = swaps.iter().filter(|s| s.found == s.compare).count();
    let mut held = HashSet::from([FIRST]);
    let mut value = FIRST;
    while let Some(next) = won.get(&value) {
        value = *next;
        held.insert(value);
    }
    let whole = won.len() == wins && held.len() == wins + 1;
    session.check(
        "successful swaps form one chain",
        whole && wins > 0 && value == last,
        format!("{wins} of {}, ends at {value:#x}, word holds {last:#x}", swaps.len()),
    );
    let strange = swaps.iter().find(|s| !held.contains(&s.found));
    let detail = strange.map_or("all were held once".into(), |s| format!("found {:#x}, never held", s.found));
    session.check("values found by swaps", strange.is_none(), detail);
}
