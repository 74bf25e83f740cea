//! `identity`: who is who. Peers that restart in the same place, queue pairs that are reset while packets of their
//! former life are still under way, both ends opening at once, handshakes and farewells that get lost, receivers
//! without receives. Right data or the right error, never a byte or a completion of a former life. Every case makes
//! its rounds from the seed; where the device can damage packets on purpose, it is told to.

mod lives;
mod receives;
mod restart;

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{Attr, Buffer, Mr};

use crate::Outcome;
use crate::link::End;
use crate::modes::Case;
use crate::options::Options;
use crate::pattern::{self, Chance};
use crate::session::Session;

/// Every right.
const ALL: u32 =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
/// What lies where nothing was written.
const EMPTY: u8 = 0x5a;

/// The cases.
pub fn cases(options: &Options) -> Vec<Case> {
    let rounds = 20 * options.rounds as u64;
    let limit = 60 + 3 * rounds;
    let mut cases = vec![
        Case::new("reset-to-rts", limit, move |session| lives::reset_to_rts(session, rounds)),
        Case::new("simultaneous-open", limit, move |session| lives::simultaneous_open(session, rounds)),
        Case::new("to-itself", limit, move |session| lives::to_itself(session, rounds)),
        Case::new("lost-handshakes", limit, move |session| lives::lost_handshakes(session, rounds)),
        Case::new("rnr-beside-traffic", limit, move |session| receives::rnr_beside_traffic(session, rounds)),
        Case::new("srq-last-receive", limit, move |session| receives::srq_last_receive(session, rounds)),
    ];
    // Only this device has places that a restarted process can be given again.
    if options.metaroce.is_some() {
        cases.push(Case::new("restart-same-slot", limit, move |session| restart::same_slot(session, rounds)));
    }
    cases
}

/// How the device damages packets; other devices do not look at it.
#[derive(Debug, Clone, Copy, Default)]
struct Faults {
    loss: f64,
    reorder: f64,
    dup: f64,
    delay_us: u32,
}

impl Faults {
    /// For devices opened from now on. To be called while no other thread runs: before the first device, or when the
    /// last is closed.
    fn set(self, seed: u64) {
        let seed = seed.max(1);
        for (name, value) in [
            ("METAROCE_LOSS", self.loss.to_string()),
            ("METAROCE_REORDER", self.reorder.to_string()),
            ("METAROCE_DUP", self.dup.to_string()),
            ("METAROCE_DELAY_US", self.delay_us.to_string()),
            ("METAROCE_SEED", seed.to_string()),
        ] {
            crate::process::set_variable(name, &value);
        }
    }

    fn by_chance(chance: &mut Chance) -> Self {
        Self {
            loss: chance.pick(&[0.0, 0.02, 0.1]),
            reorder: chance.pick(&[0.0, 0.1, 0.3]),
            dup: chance.pick(&[0.0, 0.1]),
            delay_us: chance.pick(&[0, 0, 200]),
        }
    }
}

/// Patience for data through heavy damage: a quarter of a minute.
fn patient() -> Attr {
    Attr { timeout: 19, retry_cnt: 7, rnr_retry: 7, min_rnr_timer: 1, ..Attr::default() }
}

/// The first thing that went wrong, if any.
#[derive(Debug, Default)]
struct Finding(Option<String>);

impl Finding {
    fn expect(&mut self, good: bool, what: impl FnOnce() -> String) {
        if !good && self.0.is_none() {
            self.0 = Some(what());
        }
    }

    /// Expects the pattern of `seed` in `len` bytes at `at`.
    fn expect_bytes(&mut self, mr: &Mr, at: usize, seed: u64, len: usize, what: &str) {
        let mut got = vec![0; len];
        mr.buffer().read(at, &mut got);
        if let Some(text) = pattern::difference(&got, &pattern::bytes(seed, len)) {
            self.expect(false, || format!("{what}: {text}"));
        }
    }

    /// Expects that nothing was written to `len` bytes at `at`.
    fn expect_empty(&mut self, mr: &Mr, at: usize, len: usize, what: &str) {
        let mut got = vec![0; len];
        mr.buffer().read(at, &mut got);
        let touched = got.iter().position(|b| *b != EMPTY);
        self.expect(touched.is_none(), || format!("{what}: byte {} was written", touched.unwrap_or(0)));
    }

    fn tell(self, session: &mut Session, name: &str, rounds: u64) {
        let good = self.0.is_none();
        session.check(name, good, self.0.unwrap_or_else(|| format!("{rounds} rounds")));
    }
}

/// Memory of `len` bytes with nothing in it.
fn memory(end: &End, len: usize) -> Outcome<Mr> {
    let buffer = Buffer::new(len)?;
    buffer.fill(0, len, EMPTY);
    Ok(Mr::whole(&end.pd, &buffer, ALL)?)
}

/// Lets a time pass that chance chooses, up to `most` microseconds, with the processor given away.
fn pause(chance: &mut Chance, most: usize) {
    let time = std::time::Duration::from_micros(chance.below(most) as u64);
    let begin = std::time::Instant::now();
    while begin.elapsed() < time {
        std::thread::yield_now();
    }
}
