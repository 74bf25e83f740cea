//! `messages`: numbered messages over every service, from own and from shared receive queues, polled and waited for.
//! Reliable ones arrive each once and in order; of unreliable ones whole messages may be missing, and nothing else may
//! be wrong with any of them: no byte of another message, no half, no second copy, nothing beside its place.

use std::time::{Duration, Instant};

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{Ah, Attr, Buffer, Destination, Mr, Opcode, QpCaps, RecvWr, SendWr, Transport, Wc};

use crate::Outcome;
use crate::expect::{collect_good, describe};
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::options::Options;
use crate::pattern::{self, Chance};
use crate::session::{Role, Session};

/// QPs of a case.
const QPS: usize = 3;
/// Receives kept posted, per QP or in the shared queue.
const RECVS: usize = 64;
/// Messages under way at most.
const BATCH: usize = 32;
/// Longest message but for datagrams.
const LONGEST: usize = 12_000;
/// Bytes of a GRH in front of a datagram.
const GRH: usize = 40;
/// Bytes behind the longest message that nothing may touch.
const GUARD: usize = 64;
/// What lies where nothing has arrived.
const EMPTY: u8 = 0x5a;
/// A message of an unreliable service that takes longer is lost.
const QUIET: Duration = Duration::from_millis(30);

/// What a case exchanges.
#[derive(Debug, Clone, Copy)]
struct Profile {
    transport: Transport,
    /// Receives come from one queue for all QPs.
    shared: bool,
    /// The receiver sleeps on a completion channel.
    events: bool,
    /// Receives are posted late and few at a time, so that senders run into their lack (reliable only).
    late: bool,
    /// Messages each way.
    count: usize,
}

/// The cases.
pub fn cases(options: &Options) -> Vec<Case> {
    use Transport::{Rc, Uc, Ud};
    let count = 600 * options.rounds;
    let base = Profile { transport: Rc, shared: false, events: false, late: false, count };
    let shared = Profile { shared: true, ..base };
    [
        ("rc-events", Profile { events: true, ..base }),
        ("rc-srq", shared),
        ("rc-srq-late", Profile { late: true, ..shared }),
        ("rc-srq-events", Profile { events: true, ..shared }),
        ("uc", Profile { transport: Uc, ..base }),
        ("uc-events", Profile { transport: Uc, events: true, ..base }),
        ("uc-srq", Profile { transport: Uc, ..shared }),
        ("ud", Profile { transport: Ud, ..base }),
        ("ud-events", Profile { transport: Ud, events: true, ..base }),
        ("ud-srq", Profile { transport: Ud, ..shared }),
    ]
    .into_iter()
    .map(|(name, profile)| {
        let limit = 60 + count as u64 / 10;
        Case::new(name, limit, move |session| exchange(session, profile))
    })
    .collect()
}

/// A message as both ends compute it.
#[derive(Debug, Clone, Copy)]
struct Message {
    qp: usize,
    len: usize,
    /// Written to a place of its own instead of sent.
    written: bool,
    seed: u64,
}

impl Message {
    fn new(seed: u64, number: usize, transport: Transport, longest: usize) -> Self {
        let mut chance = Chance::new(pattern::derive(seed, &[number as u64]));
        let len = match chance.below(6) {
            0 => chance.below(3),
            1 => 4000 + chance.below(200),
            2 => longest,
            _ => chance.below(longest),
        };
        let written = transport != Transport::Ud && chance.one_in(3);
        Self { qp: chance.below(QPS), len: len.min(longest), written, seed: chance.next() }
    }
}

fn exchange(session: &mut Session, profile: Profile) -> Outcome {
    let depth = u32::try_from(RECVS)?;
    let setup = Setup {
        transport: profile.transport,
        qps: QPS,
        caps: QpCaps { send_wr: BATCH as u32, recv_wr: depth, send_sge: 1, recv_sge: 2, inline: 0 },
        cqe: 2 * QPS * RECVS,
        channel: profile.events,
        srq: profile.shared.then_some(depth),
        attr: Attr { min_rnr_timer: 1, ..Attr::default() },
        ..Setup::default()
    };
    let mut end = End::new(session, &setup)?;
    let longest = match profile.transport {
        // The smaller of both ends.
        Transport::Ud => session.swap(&end.info.active_mtu)?.min(end.info.active_mtu) as usize,
        _ => LONGEST,
    };
    end.connect(session)?;
    for sender in [Role::A, Role::B] {
        let seed = session.seed_for(&[sender.index() as u64]);
        if session.role == sender {
            Sender { end: &end, profile, seed, longest }.run(session)?;
        } else {
            Receiver::new(&end, profile, seed, longest)?.run(session)?;
        }
        session.barrier()?;
    }
    Ok(())
}

/// The end that sends.
struct Sender<'a> {
    end: &'a End,
    profile: Profile,
    seed: u64,
    longest: usize,
}

impl Sender<'_> {
    fn run(&self, session: &mut Session) -> Outcome {
        let area = self.longest + GUARD;
        let source = Mr::whole(&self.end.pd, &Buffer::new(BATCH * area)?, IBV_ACCESS_LOCAL_WRITE)?;
        let (address, rkey): (u64, u32) = session.hear()?;
        let destinations = if self.profile.transport == Transport::Ud {
            let one = |remote: &metaroce_test_verbs::Remote| -> Outcome<Destination> {
                let ah = Ah::new(&self.end.pd, remote.gid, self.end.attr.gid_index)?;
                Ok(Destination { ah, qpn: remote.qpn, qkey: self.end.attr.qkey })
            };
            self.end.remotes.iter().map(one).collect::<Outcome<Vec<_>>>()?
        } else {
            Vec::new()
        };
        for first in (0..self.profile.count).step_by(BATCH) {
            let last = (first + BATCH).min(self.profile.count);
            // The receiver has as many receives posted as are sent now, or is late with them on purpose.
            session.barrier()?;
            for number in first..last {
                let message = Message::new(self.seed, number, self.profile.transport, self.longest);
                let at = (number - first) * area;
                source.buffer().write(at, &pattern::bytes(message.seed, message.len));
                let imm = number as u32;
                let opcode = if message.written { Opcode::WriteImm(imm) } else { Opcode::SendImm(imm) };
                let mut wr = SendWr::new(number as u64, opcode).sges([source.sge(at, message.len)]);
                if message.written {
                    wr = wr.remote(address + (number * self.longest) as u64, rkey);
                }
                if let Some(destination) = destinations.get(message.qp) {
                    wr = wr.to(destination);
                }
                self.end.qps[message.qp].post_send(&[wr])?;
            }
            collect_good(&self.end.send_cq, last - first, session.stall())?;
            session.barrier()?;
        }
        Ok(())
    }
}

/// The end that receives and compares.
struct Receiver<'a> {
    end: &'a End,
    profile: Profile,
    seed: u64,
    longest: usize,
    /// Where Sends arrive, one place per receive.
    places: Mr,
    /// Where Writes arrive, one place per message.
    written: Mr,
    /// Receives not posted, of a receiver that is late with them.
    kept: Vec<usize>,
    /// Number expected next at least, per QP.
    next: Vec<usize>,
    arrived: Vec<bool>,
    events: usize,
    wrong: Option<String>,
}

impl<'a> Receiver<'a> {
    fn new(end: &'a End, profile: Profile, seed: u64, longest: usize) -> Outcome<Self> {
        let queues = if profile.shared { 1 } else { QPS };
        let places = Buffer::new(queues * RECVS * (GRH + longest + GUARD))?;
        let written = Buffer::new(profile.count * longest)?;
        places.fill(0, places.len(), EMPTY);
        written.fill(0, written.len(), EMPTY);
        Ok(Self {
            places: Mr::whole(&end.pd, &places, IBV_ACCESS_LOCAL_WRITE)?,
            written: Mr::whole(&end.pd, &written, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)?,
            end,
            profile,
            seed,
            longest,
            kept: (0..queues * RECVS).collect(),
            next: vec![0; QPS],
            arrived: vec![false; profile.count],
            events: 0,
            wrong: None,
        })
    }

    fn place(&self) -> usize {
        GRH + self.longest + GUARD
    }

    fn run(mut self, session: &mut Session) -> Outcome {
        session.tell(&(self.written.address(), self.written.rkey()))?;
        let now = if self.profile.late { 1 } else { self.kept.len() };
        for slot in self.kept.drain(..now).collect::<Vec<_>>() {
            self.post(slot)?;
        }
        let begin = Instant::now();
        let mut chance = Chance::new(self.seed ^ 1);
        for first in (0..self.profile.count).step_by(BATCH) {
            let last = (first + BATCH).min(self.profile.count);
            session.barrier()?;
            self.take(last - first, session.stall(), &mut chance)?;
            session.barrier()?;
        }
        self.verdict(session, begin.elapsed());
        // Receives may be left; their keys die here, and nothing is sent to these QPs any more.
        Ok(())
    }

    fn post(&mut self, slot: usize) -> Outcome {
        let place = self.place();
        self.places.buffer().fill(slot * place, place, EMPTY);
        // In two pieces, the first of a length that differs from slot to slot.
        let first = 1 + slot * 37 % (place - GUARD - 1);
        let sges = vec![
            self.places.sge(slot * place, first),
            self.places.sge(slot * place + first, place - GUARD - first),
        ];
        let recv = [RecvWr { wr_id: slot as u64, sges }];
        match &self.end.srq {
            Some(srq) => srq.post_recv(&recv)?,
            None => self.end.qps[slot / RECVS].post_recv(&recv)?,
        }
        Ok(())
    }

    /// Takes the messages of a batch: all of them, or as many as come.
    fn take(&mut self, count: usize, stall: Duration, chance: &mut Chance) -> Outcome {
        let reliable = self.profile.transport == Transport::Rc;
        let limit = if reliable { stall } else { QUIET };
        let mut moved = Instant::now();
        let mut armed = false;
        let mut got = 0;
        while got < count {
            let mut wcs = Vec::new();
            if self.end.recv_cq.poll(&mut wcs)? > 0 {
                moved = Instant::now();
                got += wcs.len();
                for wc in wcs {
                    let slot = self.compare(&wc)?;
                    if self.profile.late { self.kept.push(slot) } else { self.post(slot)? }
                }
                continue;
            }
            if !self.kept.is_empty() {
                // One or two at a time, so that mostly a single one is left.
                let slot = self.kept.swap_remove(chance.below(self.kept.len()));
                self.post(slot)?;
            }
            let over = match &self.end.channel {
                None => {
                    std::thread::yield_now();
                    moved.elapsed() > limit
                }
                // What comes from here on raises an event; what was there already is polled once more.
                Some(_) if !armed => {
                    self.end.recv_cq.arm(false)?;
                    armed = true;
                    false
                }
                Some(channel) => {
                    armed = !channel.event(limit)?;
                    self.events += usize::from(!armed);
                    armed
                }
            };
            if over && reliable {
                let late = self.end.recv_cq.poll(&mut Vec::new())?;
                return Err(
                    format!("{got} of {count} messages after {limit:?}, {late} without an event").into()
                );
            }
            if over {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Compares a message with what was sent; gives its receive.
    fn compare(&mut self, wc: &Wc) -> Outcome<usize> {
        if wc.status != IBV_WC_SUCCESS {
            return Err(describe(&[*wc]).into());
        }
        let slot = wc.wr_id as usize;
        let fault = self.fault_of(wc, slot).map(|text| format!("{text} ({wc:?})"));
        self.wrong = self.wrong.take().or(fault);
        Ok(slot)
    }

    fn fault_of(&mut self, wc: &Wc, slot: usize) -> Option<String> {
        let number = wc.imm? as usize;
        let Some(arrived) = self.arrived.get_mut(number) else { return Some("never sent".into()) };
        if std::mem::replace(arrived, true) {
            return Some("a second copy".into());
        }
        let message = Message::new(self.seed, number, self.profile.transport, self.longest);
        let datagram = self.profile.transport == Transport::Ud;
        let head = if datagram { GRH } else { 0 };
        if wc.qpn != self.end.qps[message.qp].qpn() {
            return Some("another QP's".into());
        }
        if datagram && (!wc.grh || wc.src_qpn != self.end.remotes[message.qp].qpn) {
            return Some("no GRH or another sender".into());
        }
        // Datagrams may overtake each other; everything else keeps its order.
        if !datagram && number < self.next[message.qp] {
            return Some(format!("{number} after {}", self.next[message.qp]));
        }
        self.next[message.qp] = number + 1;
        let want = pattern::bytes(message.seed, message.len);
        let place = self.place();
        let mut got = vec![0; place];
        self.places.buffer().read(slot * place, &mut got);
        // A lost message of an unreliable connection may have left some of its bytes in the receive: the next one takes
        // it, and behind its end nothing is promised but that the guard is untouched.
        let sent = if message.written { 0 } else { head + message.len };
        let from = if self.profile.transport == Transport::Uc { place - GUARD } else { sent };
        if message.written {
            let mut bytes = vec![0; message.len];
            self.written.buffer().read(number * self.longest, &mut bytes);
            let untouched = got[from..].iter().all(|b| *b == EMPTY);
            return pattern::difference(&bytes, &want)
                .or((!untouched).then(|| "a Write in the receive".into()));
        }
        if wc.byte_len as usize != head + message.len {
            return Some(format!("{} bytes, sent {}", wc.byte_len, message.len));
        }
        let rest = got[from..].iter().all(|b| *b == EMPTY);
        pattern::difference(&got[head..head + message.len], &want)
            .or((!rest).then(|| "bytes behind the message".into()))
    }

    /// Places of Writes that never completed hold nothing but bytes of that message.
    fn stray(&self) -> Option<String> {
        (0..self.profile.count).find_map(|number| {
            let message = Message::new(self.seed, number, self.profile.transport, self.longest);
            let mut bytes = vec![0; self.longest];
            self.written.buffer().read(number * self.longest, &mut bytes);
            let len = if message.written { message.len } else { 0 };
            let want = pattern::bytes(message.seed, len);
            let strange = |(at, byte): (usize, &u8)| *byte != EMPTY && want.get(at) != Some(byte);
            bytes.iter().enumerate().any(|(at, b)| strange((at, b))).then(|| format!("message {number}"))
        })
    }

    fn verdict(&self, session: &mut Session, spent: Duration) {
        let count = self.arrived.iter().filter(|arrived| **arrived).count();
        let of = self.profile.count;
        let detail = self.wrong.clone().unwrap_or_else(|| {
            format!("{count} of {of} messages, {} events, {:.2} s", self.events, spent.as_secs_f64())
        });
        session.check("whole messages only, each once, in order", self.wrong.is_none(), detail);
        let stray = self.stray();
        session.check("no byte of another message", stray.is_none(), stray.unwrap_or_default());
        let reliable = self.profile.transport == Transport::Rc;
        // Of unreliable ones most come through whatever these tests inject; it must not be that none was looked at.
        let enough = if reliable { count == of } else { count * 2 > of };
        session.check("messages arrive", enough, format!("{count} of {of}"));
    }
}
