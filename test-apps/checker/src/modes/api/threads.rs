//! Programs with threads: many posters on shared and on own objects, pollers beside them. Verbs are thread
//! safe.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use metaroce_test_verbs::constants::{IBV_ACCESS_LOCAL_WRITE, IBV_WC_SUCCESS};
use metaroce_test_verbs::{Buffer, Cq, Mr, Opcode, QpCaps, RecvWr, SendWr, Wc};

use crate::Outcome;
use crate::expect::{collect_good, describe};
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::session::Session;

/// Receives kept posted per QP; sends outstanding per QP at most.
const DEPTH: usize = 32;
/// Sends per poster.
const SENDS: u64 = 2000;
/// Bits of a cookie that count; above them stands the poster.
const COUNT_BITS: u32 = 32;

/// The cases.
pub fn cases() -> Vec<Case> {
    vec![
        Case::new("threads-shared-cq", 120, |session| flood(session, 8, 1)),
        Case::new("threads-one-qp", 120, |session| flood(session, 1, 6)),
        Case::new("threads-own-contexts", 120, own_contexts),
    ]
}

/// What the threads of a flood share.
struct Flood<'a> {
    end: &'a End,
    memory: &'a Mr,
    /// Sends outstanding, per QP.
    outstanding: Vec<AtomicUsize>,
    /// Completions so far.
    sent: AtomicU64,
    received: AtomicU64,
    stop: AtomicBool,
    fault: Mutex<Option<String>>,
    stall: std::time::Duration,
}

impl Flood<'_> {
    fn fail(&self, why: impl ToString) {
        self.stop.store(true, Ordering::Relaxed);
        let mut fault = self.fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        fault.get_or_insert(why.to_string());
    }

    /// One poster: posts, and waits while too much is outstanding.
    fn post(&self, poster: usize) {
        let q = poster % self.end.qps.len();
        let mut moved = Instant::now();
        let mut next = 0;
        while next < SENDS && !self.stop.load(Ordering::Relaxed) {
            let taken = self.outstanding[q]
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < DEPTH).then_some(n + 1));
            if taken.is_err() {
                if moved.elapsed() > self.stall {
                    return self.fail(format!("poster {poster} waits at {next} of {SENDS}"));
                }
                std::thread::yield_now();
                continue;
            }
            moved = Instant::now();
            let cookie = (poster as u64) << COUNT_BITS | next;
            let send = SendWr::new(cookie, Opcode::Send).sges([self.memory.sge(0, 1 + next as usize % 64)]);
            if let Err(bad) = self.end.qps[q].post_send(&[send]) {
                return self.fail(format!("poster {poster}, send {next}: {bad}"));
            }
            next += 1;
        }
    }

    /// Takes completions of one CQ until `total` have come.
    fn poll(&self, cq: &Cq, count: &AtomicU64, total: u64, mut each: impl FnMut(&Wc) -> Outcome) {
        let mut wcs = Vec::new();
        let mut moved = Instant::now();
        while count.load(Ordering::Relaxed) < total && !self.stop.load(Ordering::Relaxed) {
            wcs.clear();
            if let Err(error) = cq.poll(&mut wcs) {
                return self.fail(error);
            }
            if wcs.is_empty() {
                if moved.elapsed() > self.stall {
                    return self.fail(format!("{} of {total} completions", count.load(Ordering::Relaxed)));
                }
                std::thread::yield_now();
                continue;
            }
            moved = Instant::now();
            for wc in &wcs {
                if wc.status != IBV_WC_SUCCESS {
                    return self.fail(describe(&[*wc]));
                }
                if let Err(error) = each(wc) {
                    return self.fail(error);
                }
            }
            count.fetch_add(wcs.len() as u64, Ordering::Relaxed);
        }
    }
}

fn flood(session: &mut Session, qps: usize, posters_per_qp: usize) -> Outcome {
    let caps =
        QpCaps { send_wr: DEPTH as u32, recv_wr: 2 * DEPTH as u32, send_sge: 1, recv_sge: 1, inline: 0 };
    let mut end = End::new(session, &Setup { qps, caps, cqe: qps * 2 * DEPTH, ..Setup::default() })?;
    let memory = Mr::whole(&end.pd, &Buffer::new(4096)?, IBV_ACCESS_LOCAL_WRITE)?;
    end.exchange(session)?;
    end.to_rts()?;
    let recv = |wr_id| RecvWr { wr_id, sges: vec![memory.sge(1024, 64)] };
    for qp in &end.qps {
        qp.post_recv(&(0..2 * DEPTH as u64).map(recv).collect::<Vec<_>>())?;
    }
    session.barrier()?;
    let posters = qps * posters_per_qp;
    let total = posters as u64 * SENDS;
    let flood = Flood {
        end: &end,
        memory: &memory,
        outstanding: (0..qps).map(|_| AtomicUsize::new(0)).collect(),
        sent: AtomicU64::new(0),
        received: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        fault: Mutex::new(None),
        stall: session.stall(),
    };
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for poster in 0..posters {
            let flood = &flood;
            scope.spawn(move || flood.post(poster));
        }
        scope.spawn(|| {
            // Completions of one poster come in the order it posted.
            let mut next = vec![0; posters];
            flood.poll(&end.send_cq, &flood.sent, total, |wc| {
                let poster = (wc.wr_id >> COUNT_BITS) as usize;
                let number = wc.wr_id & ((1 << COUNT_BITS) - 1);
                flood.outstanding[poster % qps].fetch_sub(1, Ordering::Relaxed);
                if number != next[poster] {
                    return Err(format!("poster {poster}: completion {number}, want {}", next[poster]).into());
                }
                next[poster] += 1;
                Ok(())
            });
        });
        scope.spawn(|| {
            // Receives of one QP complete in the order they were posted: 0, 1, ... round and round.
            let mut next = vec![0u64; qps];
            flood.poll(&end.recv_cq, &flood.received, total, |wc| {
                let q = end.qps.iter().position(|qp| qp.qpn() == wc.qpn).ok_or("a foreign QP")?;
                if wc.wr_id != next[q] % (2 * DEPTH as u64) {
                    return Err(format!("QP {q}: receive {}, want {}", wc.wr_id, next[q]).into());
                }
                next[q] += 1;
                Ok(end.qps[q].post_recv(&[recv(wc.wr_id)])?)
            });
        });
    });
    let fault = flood.fault.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    let spent = begin.elapsed().as_secs_f64();
    let detail = fault.clone().unwrap_or_else(|| format!("{total} Sends of {posters} threads, {spent:.2} s"));
    session.check("all once and in order", fault.is_none(), detail);
    session.barrier()
}

/// Each thread has a context, PD, CQs and a QP of its own and plays ping-pong with the peer's.
fn own_contexts(session: &mut Session) -> Outcome {
    let ends = (0..4)
        .map(|_| {
            let mut end = End::new(session, &Setup::default())?;
            let memory = Mr::whole(&end.pd, &Buffer::new(4096)?, IBV_ACCESS_LOCAL_WRITE)?;
            end.exchange(session)?;
            end.to_rts()?;
            end.qps[0].post_recv(&[RecvWr { wr_id: 0, sges: vec![memory.sge(0, 64)] }])?;
            Ok((memory, end))
        })
        .collect::<Outcome<Vec<(Mr, End)>>>()?;
    session.barrier()?;
    let (first, stall) = (session.is_a(), session.stall());
    let play = |(memory, end): &(Mr, End)| -> Outcome {
        let send = SendWr::new(1, Opcode::Send).sges([memory.sge(64, 64)]);
        for round in 1..=1000 {
            if first {
                end.qps[0].post_send(std::slice::from_ref(&send))?;
            }
            let wc = collect_good(&end.recv_cq, 1, stall)?[0];
            if wc.wr_id + 1 != round {
                return Err(format!("round {round}: {}", describe(&[wc])).into());
            }
            end.qps[0].post_recv(&[RecvWr { wr_id: round, sges: vec![memory.sge(0, 64)] }])?;
            if !first {
                end.qps[0].post_send(std::slice::from_ref(&send))?;
            }
            collect_good(&end.send_cq, 1, stall)?;
        }
        Ok(())
    };
    let faults: Vec<String> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            ends.iter().map(|end| scope.spawn(move || play(end).map_err(|e| e.to_string()))).collect();
        let joined = threads.into_iter().map(|t| t.join().unwrap_or_else(|_| Err("panicked".into())));
        joined.filter_map(Result::err).collect()
    });
    session.check("4 threads, 1000 rounds each", faults.is_empty(), faults.join("; "));
    session.barrier()
}
