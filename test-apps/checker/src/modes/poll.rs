//! `poll`: programs that never look at a completion of the data they wait for. A reader spins on the last
//! byte of a Write and then compares every byte at once; what it sees must be whole, and earlier Writes must
//! be there too.

use std::time::{Duration, Instant};

use metaroce_test_verbs::constants::{IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_WRITE};
use metaroce_test_verbs::{Buffer, Mr, Opcode, SendWr, Wc};

use crate::Outcome;
use crate::expect::describe;
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::options::Options;
use crate::pattern::{self, Chance};
use crate::session::{Role, Session};

/// Bytes of the polled area.
const AREA: usize = 1 << 16;
/// Largest polled message.
const LARGEST: usize = 4096;
/// Untouchable bytes on both sides of a message, compared with it.
const GUARD: usize = 16;
/// What lies where nothing was written.
const EMPTY: u8 = 0;
/// Writes of one train.
const TRAIN: usize = 16;
/// Looks at memory between two looks at the clock.
const LOOKS: u32 = 1 << 14;

/// The cases.
pub fn cases(options: &Options) -> Vec<Case> {
    let seconds = options.seconds.unwrap_or(2) * options.rounds as u64;
    let limit = 30 + 4 * seconds;
    let spin = move |wait, size| move |session: &mut Session| ping_pong(session, seconds, wait, size);
    vec![
        // As ib_write_lat does: the CQ is looked at after each post.
        Case::new("ping-pong", limit, spin(Wait::Memory, LARGEST)),
        Case::new("ping-pong-small", limit, spin(Wait::Memory, 64)),
        // The CQ is polled between looks at memory: the spinning program itself may drive the device.
        Case::new("ping-pong-polling-cq", limit, spin(Wait::MemoryAndCq, LARGEST)),
        Case::new("ping-pong-yielding", limit, spin(Wait::Yield, LARGEST)),
        Case::new("trains", limit, move |session| trains(session, seconds)),
        Case::new("counter", limit, move |session| counter(session, seconds)),
    ]
}

/// What a reader does between two looks at the byte it waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Memory,
    MemoryAndCq,
    Yield,
}

/// One end: a QP, an area the peer writes, a source of our own Writes.
struct Poller {
    end: End,
    area: Mr,
    source: Mr,
    remote: (u64, u32),
    wcs: Vec<Wc>,
    outstanding: usize,
}

/// When a read part of the test ends.
struct Stop {
    begin: Instant,
    stall: Duration,
}

impl Poller {
    fn new(session: &mut Session) -> Outcome<Self> {
        let mut end = End::new(session, &Setup::default())?;
        let (area, source) = (Buffer::new(AREA)?, Buffer::new(AREA)?);
        let area = Mr::whole(&end.pd, &area, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)?;
        let source = Mr::whole(&end.pd, &source, IBV_ACCESS_LOCAL_WRITE)?;
        let remote = session.swap(&(area.address(), area.rkey()))?;
        end.connect(session)?;
        Ok(Self { end, area, source, remote, wcs: Vec::new(), outstanding: 0 })
    }

    /// Posts a Write of `bytes` to `at` of the peer's area, from the same place of our source.
    fn write(&mut self, at: usize, bytes: &[u8]) -> Outcome {
        self.source.buffer().write(at, bytes);
        let (address, rkey) = self.remote;
        let wr = SendWr::new(at as u64, Opcode::Write).sges([self.source.sge(at, bytes.len())]);
        self.end.qps[0].post_send(&[wr.remote(address + at as u64, rkey)])?;
        self.outstanding += 1;
        Ok(())
    }

    /// Takes completions; an error completion is a fault.
    fn poll(&mut self) -> Outcome {
        self.wcs.clear();
        self.outstanding -= self.end.send_cq.poll(&mut self.wcs)?;
        match self.wcs.iter().find(|wc| wc.status != 0) {
            Some(bad) => Err(describe(&[*bad]).into()),
            None => Ok(()),
        }
    }

    /// Waits until at most `left` Writes are outstanding.
    fn drain(&mut self, left: usize, stall: Duration) -> Outcome {
        let begin = Instant::now();
        while self.outstanding > left {
            self.poll()?;
            if begin.elapsed() > stall {
                return Err(format!("{} Writes without completion after {stall:?}", self.outstanding).into());
            }
        }
        Ok(())
    }

    /// Spins until byte `at` is `token`.
    fn wait_for(&mut self, at: usize, token: u8, wait: Wait, stop: &Stop) -> Outcome {
        let begin = Instant::now();
        for look in 1u32.. {
            if self.area.buffer().load(at) == token {
                return Ok(());
            }
            match wait {
                Wait::MemoryAndCq => self.poll()?,
                Wait::Yield => std::thread::yield_now(),
                Wait::Memory => std::hint::spin_loop(),
            }
            if look % LOOKS == 0 && begin.elapsed() > stop.stall {
                let spent = stop.begin.elapsed();
                return Err(format!("byte {at} never became {token:#x} ({spent:.1?} into the test)").into());
            }
        }
        Ok(())
    }
}

/// A message of a ping-pong: both ends compute it alike.
fn message(seed: u64, turn: u64, largest: usize) -> (usize, Vec<u8>) {
    let mut chance = Chance::new(pattern::derive(seed, &[turn]));
    let len = 1 + chance.below(largest);
    let at = GUARD + chance.below(AREA - len - 2 * GUARD);
    let mut bytes = pattern::bytes(chance.next(), len);
    // The byte the reader waits for differs from what lies there now.
    bytes[len - 1] = 1 + (turn % 255) as u8;
    (at, bytes)
}

fn ping_pong(session: &mut Session, seconds: u64, wait: Wait, largest: usize) -> Outcome {
    let mut poller = Poller::new(session)?;
    let me = session.role.index() as u64;
    let stop = Stop { begin: Instant::now(), stall: session.stall() };
    let (mut turns, mut bytes, mut wrong) = (0u64, 0, None);
    // The near end decides when it is over and says so with a message's length parity: a flag byte in front.
    let mut over = false;
    for turn in 0u64.. {
        let (at, mut data) = message(session.seed, turn, largest);
        let flag = at - 1;
        if turn % 2 == me {
            over |= session.role == Role::A && stop.begin.elapsed().as_secs() >= seconds;
            data.insert(0, u8::from(over));
            // The answer has come, so this is quick; a source must not change before its Write has completed.
            poller.drain(0, stop.stall)?;
            poller.write(flag, &data)?;
            if over {
                break;
            }
        } else {
            let end = at + data.len() - 1;
            poller.wait_for(end, data[data.len() - 1], wait, &stop)?;
            let (from, len) = (flag - (GUARD - 1), data.len() + 2 * GUARD);
            let mut got = vec![0; len];
            poller.area.buffer().read(from, &mut got);
            over = got[GUARD - 1] == 1;
            let mut want = vec![EMPTY; len];
            want[GUARD - 1] = u8::from(over);
            want[GUARD..GUARD + data.len()].copy_from_slice(&data);
            if let Some(text) = pattern::difference(&got, &want) {
                wrong.get_or_insert(format!("turn {turn}, {} B at {at}: {text}", data.len()));
            }
            poller.area.buffer().fill(from, len, EMPTY);
            (turns, bytes) = (turns + 1, bytes + data.len());
            if over {
                break;
            }
        }
    }
    poller.drain(0, stop.stall)?;
    let spent = stop.begin.elapsed();
    let half = spent.as_secs_f64() * 1e6 / (2.0 * turns.max(1) as f64);
    let detail =
        wrong.clone().unwrap_or_else(|| format!("{turns} messages, {bytes} bytes, {half:.1} us each way"));
    session.check("every byte once the last is seen", wrong.is_none() && turns > 0, detail);
    session.barrier()
}

/// The writer posts a train of Writes; the reader spins on the last byte of the last one only, then all must
/// be whole.
fn trains(session: &mut Session, seconds: u64) -> Outcome {
    let mut poller = Poller::new(session)?;
    let stop = Stop { begin: Instant::now(), stall: session.stall() };
    let slot = AREA / TRAIN;
    let (mut count, mut wrong) = (0u64, None);
    for turn in 0u64.. {
        let train: Vec<(usize, Vec<u8>)> = (0..TRAIN as u64)
            .map(|i| {
                let mut chance = Chance::new(session.seed_for(&[turn, i]));
                let len = 1 + chance.below(slot - 2 * GUARD);
                let mut bytes = pattern::bytes(chance.next(), len);
                bytes[len - 1] = 1 + (turn % 255) as u8;
                (i as usize * slot + GUARD + chance.below(slot - 2 * GUARD - len), bytes)
            })
            .collect();
        if session.is_a() {
            for (at, bytes) in &train {
                poller.write(*at, bytes)?;
            }
            poller.drain(0, stop.stall)?;
        } else {
            let (at, bytes) = &train[TRAIN - 1];
            poller.wait_for(at + bytes.len() - 1, bytes[bytes.len() - 1], Wait::Memory, &stop)?;
            let mut got = vec![0; AREA];
            poller.area.buffer().read(0, &mut got);
            let mut want = vec![EMPTY; AREA];
            for (at, bytes) in &train {
                want[*at..at + bytes.len()].copy_from_slice(bytes);
            }
            if let Some(text) = pattern::difference(&got, &want) {
                wrong.get_or_insert(format!("train {turn}: {text}"));
            }
            poller.area.buffer().fill(0, AREA, EMPTY);
        }
        count += 1;
        let over = session.is_a() && stop.begin.elapsed().as_secs() >= seconds;
        if session.swap(&over)? || over {
            break;
        }
    }
    if !session.is_a() {
        let detail = wrong.clone().unwrap_or_else(|| format!("{count} trains of {TRAIN} Writes"));
        session.check("all Writes there once the last is seen", wrong.is_none() && count > 0, detail);
    }
    session.barrier()
}

/// The writer overwrites one 8-byte counter without waiting, the idiom of credits and doorbells: the reader
/// must see it only grow, and end at the last value.
fn counter(session: &mut Session, seconds: u64) -> Outcome {
    const LAST: u64 = u64::MAX;
    let mut poller = Poller::new(session)?;
    let stop = Stop { begin: Instant::now(), stall: session.stall() };
    if session.is_a() {
        let mut posted = 0u64;
        while stop.begin.elapsed().as_secs() < seconds {
            posted += 1;
            // Each from its own place: the source of a Write in flight must not change.
            let from = (posted as usize % 64) * 8;
            poller.source.buffer().write(from, &posted.to_ne_bytes());
            write_counter(&mut poller, from)?;
            poller.drain(48, stop.stall)?;
        }
        poller.source.buffer().write(512, &LAST.to_ne_bytes());
        write_counter(&mut poller, 512)?;
        poller.drain(0, stop.stall)?;
        session.check("counter writer", true, format!("{posted} Writes"));
        return session.barrier();
    }
    let (mut last, mut seen, mut back) = (0u64, 0u64, None);
    let mut moved = Instant::now();
    while last != LAST {
        let now = poller.area.buffer().load_word(0);
        if now < last {
            back.get_or_insert(format!("went back from {last} to {now}"));
        }
        if now != last {
            (last, seen, moved) = (now, seen + 1, Instant::now());
        } else if moved.elapsed() > stop.stall {
            return Err(format!("counter stays at {now}").into());
        }
        if back.is_some() && moved.elapsed() > Duration::from_secs(1) {
            break;
        }
    }
    session.barrier()?;
    let end = poller.area.buffer().load_word(0);
    let detail = back.clone().unwrap_or_else(|| format!("{seen} values seen, end {end:#x}"));
    session.check("overwritten counter only grows", back.is_none() && end == LAST, detail);
    Ok(())
}

fn write_counter(poller: &mut Poller, from: usize) -> Outcome {
    let (address, rkey) = poller.remote;
    let wr = SendWr::new(from as u64, Opcode::Write).sges([poller.source.sge(from, 8)]).remote(address, rkey);
    poller.end.qps[0].post_send(&[wr])?;
    poller.outstanding += 1;
    Ok(())
}
