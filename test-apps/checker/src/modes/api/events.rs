//! Completion channels: no event is lost between arm, poll and wait; solicited events; CQ overrun.

use std::time::{Duration, Instant};

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{Buffer, Channel, Mr, Opcode, QpCaps, RecvWr, SendWr, Wc, flags};

use crate::Outcome;
use crate::expect::{QUIET, check_event, collect_good, describe};
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::options::Options;
use crate::session::Session;

/// An event that takes longer is lost.
const LOST: Duration = Duration::from_secs(5);
/// Receives kept posted.
const DEPTH: usize = 32;

/// The cases. A soak multiplies the rounds by a hundred.
pub fn cases(options: &Options) -> Vec<Case> {
    let rounds = 10_000 * options.rounds;
    let limit = 60 + rounds as u64 / 1000;
    vec![
        Case::new("events-ping-pong", limit, move |session| ping_pong(session, rounds)),
        Case::new("events-bursts", limit, move |session| bursts(session, rounds / 10)),
        Case::new("events-solicited", 60, solicited),
        Case::new("cq-overrun", 60, cq_overrun),
    ]
}

fn setup() -> Setup {
    let caps = QpCaps { send_wr: 64, recv_wr: 2 * DEPTH as u32, send_sge: 1, recv_sge: 1, inline: 0 };
    Setup { caps, channel: true, ..Setup::default() }
}

/// The usual receive loop: poll until empty, arm, poll once more, wait.
struct Waiter<'a> {
    end: &'a End,
    channel: &'a Channel,
    memory: &'a Mr,
    events: usize,
}

impl Waiter<'_> {
    /// The next completions (at least one), and their receives posted again.
    fn next(&mut self) -> Outcome<Vec<Wc>> {
        let mut wcs = Vec::new();
        let begin = Instant::now();
        loop {
            if self.end.recv_cq.poll(&mut wcs)? > 0 {
                break;
            }
            self.end.recv_cq.arm(false)?;
            if self.end.recv_cq.poll(&mut wcs)? > 0 {
                break;
            }
            if !self.channel.event(LOST)? {
                let late = self.end.recv_cq.poll(&mut wcs)?;
                return Err(format!("no event in {LOST:?}; {late} completions were there without one").into());
            }
            self.events += 1;
            if begin.elapsed() > 2 * LOST {
                return Err("events without completions".into());
            }
        }
        if let Some(bad) = wcs.iter().find(|wc| wc.status != IBV_WC_SUCCESS) {
            return Err(describe(&[*bad]).into());
        }
        for wc in &wcs {
            self.post(wc.wr_id)?;
        }
        Ok(wcs)
    }

    fn post(&self, wr_id: u64) -> Outcome {
        Ok(self.end.qps[0].post_recv(&[RecvWr { wr_id, sges: vec![self.memory.sge(0, 64)] }])?)
    }
}

fn prepare(session: &mut Session) -> Outcome<(End, Mr)> {
    let mut end = End::new(session, &setup())?;
    let memory = Mr::whole(&end.pd, &Buffer::new(4096)?, IBV_ACCESS_LOCAL_WRITE)?;
    end.exchange(session)?;
    end.to_rts()?;
    for wr_id in 0..DEPTH as u64 {
        end.qps[0].post_recv(&[RecvWr { wr_id, sges: vec![memory.sge(0, 64)] }])?;
    }
    session.barrier()?;
    Ok((end, memory))
}

fn ping_pong(session: &mut Session, rounds: usize) -> Outcome {
    let (end, memory) = prepare(session)?;
    let channel = end.channel.clone().ok_or("a channel was asked for")?;
    let mut waiter = Waiter { end: &end, channel: &channel, memory: &memory, events: 0 };
    let send = SendWr::new(1, Opcode::Send).sges([memory.sge(64, 32)]);
    let begin = Instant::now();
    for round in 0..rounds {
        if session.is_a() {
            end.qps[0].post_send(std::slice::from_ref(&send))?;
        }
        waiter.next().map_err(|e| format!("round {round}: {e}"))?;
        if !session.is_a() {
            end.qps[0].post_send(std::slice::from_ref(&send))?;
        }
        collect_good(&end.send_cq, 1, session.stall())?;
    }
    let each = begin.elapsed().as_secs_f64() * 1e6 / rounds as f64;
    session.check(
        "no event lost",
        true,
        format!("{rounds} rounds, {} events, {each:.1} us each", waiter.events),
    );
    session.barrier()
}

/// Bursts of random length from one side, so that arming races with arrivals.
fn bursts(session: &mut Session, rounds: usize) -> Outcome {
    let (end, memory) = prepare(session)?;
    let channel = end.channel.clone().ok_or("a channel was asked for")?;
    let mut waiter = Waiter { end: &end, channel: &channel, memory: &memory, events: 0 };
    let mut chance = crate::pattern::Chance::new(session.seed);
    let send = SendWr::new(1, Opcode::Send).sges([memory.sge(64, 32)]);
    let mut total = 0;
    for round in 0..rounds {
        let count = 1 + chance.below(DEPTH - 1);
        if session.is_a() {
            for _ in 0..count {
                end.qps[0].post_send(std::slice::from_ref(&send))?;
            }
            collect_good(&end.send_cq, count, session.stall())?;
            waiter.next().map_err(|e| format!("round {round}: {e}"))?;
        } else {
            let mut got = 0;
            while got < count {
                got += waiter.next().map_err(|e| format!("round {round}, {got} of {count}: {e}"))?.len();
            }
            if got > count {
                return Err(format!("round {round}: {got} completions, want {count}").into());
            }
            end.qps[0].post_send(std::slice::from_ref(&send))?;
            collect_good(&end.send_cq, 1, session.stall())?;
        }
        total += count;
    }
    session.check(
        "no event lost",
        true,
        format!("{total} messages in {rounds} bursts, {} events", waiter.events),
    );
    session.barrier()
}

fn solicited(session: &mut Session) -> Outcome {
    let (end, memory) = prepare(session)?;
    let channel = end.channel.clone().ok_or("a channel was asked for")?;
    let plain = SendWr::new(1, Opcode::Send).sges([memory.sge(64, 32)]);
    let mut asking = plain.clone();
    asking.flags |= flags::IBV_SEND_SOLICITED;
    for round in 0..5 {
        if session.is_a() {
            session.barrier()?;
            end.qps[0].post_send(&[plain.clone(), plain.clone(), plain.clone()])?;
            collect_good(&end.send_cq, 3, session.stall())?;
            session.barrier()?;
            session.barrier()?;
            end.qps[0].post_send(std::slice::from_ref(&asking))?;
            collect_good(&end.send_cq, 1, session.stall())?;
        } else {
            end.recv_cq.arm(true)?;
            session.barrier()?;
            session.barrier()?;
            let early = channel.event(QUIET)?;
            session.barrier()?;
            let there = channel.event(LOST)?;
            let wcs = collect_good(&end.recv_cq, 4, session.stall())?;
            let right = !early && there && wcs.len() == 4;
            session.check(
                format!("round {round}: event for the solicited Send only"),
                right,
                format!("early {early}, then {there}, {} completions", wcs.len()),
            );
        }
        session.barrier()?;
    }
    Ok(())
}

/// More completions than the CQ has room for, none of them polled.
fn cq_overrun(session: &mut Session) -> Outcome {
    let caps = QpCaps { send_wr: 4096, recv_wr: 4, send_sge: 1, recv_sge: 1, inline: 0 };
    let mut end = End::new(session, &Setup { caps, cqe: 4, ..Setup::default() })?;
    let memory = Mr::whole(&end.pd, &Buffer::new(4096)?, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)?;
    let remote: (u64, u32) = session.swap(&(memory.address(), memory.rkey()))?;
    end.connect(session)?;
    if session.is_a() {
        let capacity = end.send_cq.capacity() as u64;
        let depth = u64::from(end.qps[0].caps().send_wr);
        let count = (capacity + 8).min(depth);
        let write = |id| SendWr::new(id, Opcode::Write).sges([memory.sge(0, 8)]).remote(remote.0, remote.1);
        for id in 0..count {
            end.qps[0].post_send(&[write(id)])?;
        }
        check_event(session, &end.context, IBV_EVENT_CQ_ERR, end.send_cq.element())?;
        session.check("CQ capacity", count > capacity, format!("{capacity}, {count} requests"));
    }
    session.barrier()
}
