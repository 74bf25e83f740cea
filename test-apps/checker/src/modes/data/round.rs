//! One round: fill, post, complete, compare.

use std::time::Instant;

use metaroce_test_verbs::constants::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_SUCCESS,
};
use metaroce_test_verbs::{RecvWr, SendWr, Wc, flags};

use super::arena::Arena;
use super::script::{Kind, Op, Piece, Profile, ReadOf};
use crate::Outcome;
use crate::expect::describe;
use crate::link::End;
use crate::pattern::{self, Chance};
use crate::session::Session;

/// Aspects a data case checks, with their counts; the first failure of each is kept.
#[derive(Default)]
pub struct Findings {
    pub completions: Finding,
    pub fields: Finding,
    pub visible: Finding,
    pub bytes: Finding,
}

/// How often one aspect was looked at, and what was wrong first.
#[derive(Default)]
pub struct Finding {
    pub count: usize,
    pub wrong: Option<String>,
}

impl Finding {
    fn note(&mut self, count: usize, wrong: Option<String>) {
        self.count += count;
        if self.wrong.is_none() {
            self.wrong = wrong;
        }
    }
}

/// Memory of an end.
pub struct Arenas {
    /// Peer's Writes, Reads and atomics go here.
    target: Arena,
    /// Peer's Sends go here.
    recv: Arena,
    /// Data of our Sends and Writes.
    source: Arena,
    /// Results of our Reads and atomics.
    sink: Arena,
    /// Address and rkey of the peer's target.
    remote: (u64, u32),
}

impl Arenas {
    /// Registers everything and learns where the peer's target is.
    pub fn new(session: &mut Session, end: &End, profile: &Profile) -> Outcome<Self> {
        // What no operation of the profile touches needs no memory.
        let arena = |access, used: fn(Kind) -> bool| {
            let share = if profile.kinds.iter().copied().any(used) { profile.share() } else { 0 };
            Arena::new(&end.pd, profile.qps, share, access)
        };
        let remote = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
        let target = arena(IBV_ACCESS_LOCAL_WRITE | remote, |kind| !kind.is_send())?;
        let recv = arena(IBV_ACCESS_LOCAL_WRITE, Kind::is_send)?;
        let sink = arena(IBV_ACCESS_LOCAL_WRITE, Kind::has_response)?;
        let source = arena(0, |kind| !kind.has_response())?;
        let remote = session.swap(&(target.mr().address(), target.mr().rkey()))?;
        Ok(Self { target, recv, source, sink, remote })
    }

    /// Registered bytes, all four areas.
    pub fn len(&self) -> usize {
        self.target.len() + self.recv.len() + self.source.len() + self.sink.len()
    }
}

/// Progress of one QP in a round.
#[derive(Default)]
struct Progress {
    /// Indices of my signaled operations and how many have completed.
    sends: Vec<usize>,
    sent: usize,
    /// Indices of the peer's operations that consume a receive and how many have arrived.
    recvs: Vec<usize>,
    received: usize,
    /// Peer's operations whose bytes have been looked at; mine whose results have.
    seen: usize,
    seen_results: usize,
}

/// A round under way.
pub struct Round<'a> {
    pub profile: &'a Profile,
    pub number: usize,
    pub end: &'a End,
    pub arenas: &'a mut Arenas,
    pub findings: &'a mut Findings,
}

/// Scripts of all QPs: mine, the peer's.
struct Scripts {
    mine: Vec<Vec<Op>>,
    theirs: Vec<Vec<Op>>,
}

impl Round<'_> {
    /// Runs the round at this end.
    pub fn run(mut self, session: &mut Session) -> Outcome {
        let scripts = self.scripts(session);
        self.fill(session, &scripts);
        let late = self.profile.late && self.number % 2 == 1;
        if !late {
            self.post_recvs(&scripts)?;
        }
        session.barrier()?;
        self.post_sends(session, &scripts)?;
        if late {
            self.post_recvs(&scripts)?;
        }
        self.complete(session, &scripts)?;
        session.barrier()?;
        let mut more = Vec::new();
        self.end.send_cq.poll(&mut more)?;
        self.end.recv_cq.poll(&mut more)?;
        let wrong = (!more.is_empty()).then(|| format!("round {}: surplus {}", self.number, describe(&more)));
        self.findings.completions.note(0, wrong);
        let arenas = &self.arenas;
        let named = [
            ("target", &arenas.target),
            ("recv", &arenas.recv),
            ("source", &arenas.source),
            ("sink", &arenas.sink),
        ];
        for (name, arena) in named {
            let wrong = arena.wrong_anywhere().map(|w| format!("round {} {name} {w}", self.number));
            self.findings.bytes.note(arena.len(), wrong);
        }
        session.barrier()
    }

    fn scripts(&self, session: &Session) -> Scripts {
        let of = |role: crate::session::Role| {
            let (index, other, round) =
                (role.index() as u64, role.other().index() as u64, self.number as u64);
            let background = session.seed_for(&[0, other, round]);
            (0..self.profile.qps)
                .map(|q| {
                    if !self.profile.both && index == 1 {
                        return Vec::new();
                    }
                    let base = Arena::base_of(self.profile.share(), q);
                    let word = |at: usize| {
                        let mut word = [0; 8];
                        pattern::fill(background, base + at, &mut word);
                        u64::from_ne_bytes(word)
                    };
                    self.profile.script(session.seed_for(&[1, index, round, q as u64]), word)
                })
                .collect()
        };
        Scripts { mine: of(session.role), theirs: of(session.role.other()) }
    }

    /// Fills all memory and works out what it must contain in the end.
    fn fill(&mut self, session: &Session, scripts: &Scripts) {
        let (me, peer) = (session.role.index() as u64, session.role.other().index() as u64);
        let round = self.number as u64;
        let arenas = &mut *self.arenas;
        arenas.target.reset(session.seed_for(&[0, me, round]));
        arenas.recv.reset(session.seed_for(&[2, me, round]));
        arenas.source.reset(session.seed_for(&[3, me, round]));
        arenas.sink.reset(session.seed_for(&[4, me, round]));
        for (q, ops) in scripts.mine.iter().enumerate() {
            for op in ops.iter().filter(|op| !op.kind.has_response()) {
                arenas.source.expect(q, &op.local, &pattern::bytes(op.seed, op.len));
            }
        }
        for arena in [&arenas.target, &arenas.recv, &arenas.source, &arenas.sink] {
            arena.store();
        }
        let background = session.seed_for(&[0, peer, round]);
        for (q, ops) in scripts.mine.iter().enumerate() {
            for op in ops.iter().filter(|op| op.kind.has_response()) {
                arenas.sink.expect(q, &op.local, &self.profile.result(ops, op, background, q));
            }
        }
        for (q, ops) in scripts.theirs.iter().enumerate() {
            for op in ops {
                let data = || pattern::bytes(op.seed, op.len);
                match op.kind {
                    Kind::Send | Kind::SendImm => arenas.recv.expect(q, &op.recv, &data()),
                    Kind::Write | Kind::WriteImm => arenas.target.expect(q, &[(op.remote, op.len)], &data()),
                    Kind::CompareSwap | Kind::FetchAdd => {
                        arenas.target.expect(q, &[(op.remote, 8)], &op.atomic.after.to_ne_bytes());
                    }
                    Kind::Read => {}
                }
            }
        }
    }

    fn post_recvs(&self, scripts: &Scripts) -> Outcome {
        for (q, ops) in scripts.theirs.iter().enumerate() {
            let wrs: Vec<RecvWr> = (0..ops.len())
                .filter(|i| ops[*i].kind.consumes_recv())
                .map(|i| RecvWr { wr_id: self.wr_id(q, i), sges: self.arenas.recv.sges(q, &ops[i].recv) })
                .collect();
            for chain in wrs.chunks(7) {
                self.end.qps[q].post_recv(chain)?;
            }
        }
        Ok(())
    }

    /// Posts every QP's operations in chains of random length, the QPs in turn.
    fn post_sends(&self, session: &Session, scripts: &Scripts) -> Outcome {
        let mut chance = Chance::new(session.seed_for(&[5, session.role.index() as u64, self.number as u64]));
        let mut next = vec![0; self.profile.qps];
        while (0..self.profile.qps).any(|q| next[q] < scripts.mine[q].len()) {
            for (q, next) in next.iter_mut().enumerate() {
                let ops = &scripts.mine[q];
                let until = (*next + 1 + chance.below(5)).min(ops.len());
                if *next >= until {
                    continue;
                }
                let chain: Vec<SendWr> = (*next..until).map(|i| self.send_wr(q, i, &ops[i])).collect();
                *next = until;
                if self.profile.extended && q % 2 == 1 {
                    self.end.qps[q].post_send_extended(&chain)?;
                } else {
                    self.end.qps[q].post_send(&chain)?;
                }
            }
        }
        Ok(())
    }

    fn send_wr(&self, q: usize, index: usize, op: &Op) -> SendWr {
        let (address, rkey) = self.arenas.remote;
        let local = if op.kind.has_response() { &self.arenas.sink } else { &self.arenas.source };
        let mut wr = SendWr::new(self.wr_id(q, index), op.opcode()).sges(local.sges(q, &op.local));
        wr = wr.remote(address + (Arena::base_of(self.profile.share(), q) + op.remote) as u64, rkey);
        if !op.signaled {
            wr = wr.unsignaled();
        }
        if op.fence {
            wr.flags |= flags::IBV_SEND_FENCE;
        }
        wr.inline = op.inline.then(|| local.parts(q, &op.local));
        wr
    }

    fn wr_id(&self, q: usize, index: usize) -> u64 {
        (self.number as u64) << 40 | (q as u64) << 16 | index as u64
    }

    /// Polls both CQs until every expected completion has come.
    fn complete(&mut self, session: &Session, scripts: &Scripts) -> Outcome {
        let pick = |ops: &[Op], want: fn(&Op) -> bool| (0..ops.len()).filter(|i| want(&ops[*i])).collect();
        let mut progress: Vec<Progress> = (0..self.profile.qps)
            .map(|q| Progress {
                sends: pick(&scripts.mine[q], |op| op.signaled),
                recvs: pick(&scripts.theirs[q], |op| op.kind.consumes_recv()),
                ..Progress::default()
            })
            .collect();
        let (mut sends, mut recvs) = (0, 0);
        let wanted_sends: usize = progress.iter().map(|p| p.sends.len()).sum();
        let wanted_recvs: usize = progress.iter().map(|p| p.recvs.len()).sum();
        let mut last = Instant::now();
        let mut wcs = Vec::new();
        while sends < wanted_sends || recvs < wanted_recvs {
            wcs.clear();
            let sent = self.end.send_cq.poll(&mut wcs)?;
            self.end.recv_cq.poll(&mut wcs)?;
            for (i, wc) in wcs.iter().enumerate() {
                if wc.status != IBV_WC_SUCCESS {
                    let side = if i < sent { "send" } else { "receive" };
                    return Err(
                        format!("round {}: {side} completion {}", self.number, describe(&[*wc])).into()
                    );
                }
                let Some(q) = self.end.qps.iter().position(|qp| qp.qpn() == wc.qpn) else {
                    self.findings
                        .completions
                        .note(0, Some(format!("completion of a foreign QP {:#x}", wc.qpn)));
                    continue;
                };
                if i < sent {
                    self.sent(&scripts.mine[q], q, &mut progress[q], wc);
                } else {
                    self.received(&scripts.theirs[q], q, &mut progress[q], wc);
                }
            }
            (sends, recvs) = (sends + sent, recvs + wcs.len() - sent);
            if !wcs.is_empty() {
                last = Instant::now();
            } else if last.elapsed() > session.stall() {
                return Err(format!(
                    "round {}: no completion for {:?}; sends {sends} of {wanted_sends}, receives {recvs} of \
                     {wanted_recvs}",
                    self.number,
                    session.stall()
                )
                .into());
            } else {
                std::thread::yield_now();
            }
        }
        Ok(())
    }

    fn sent(&mut self, mine: &[Op], q: usize, progress: &mut Progress, wc: &Wc) {
        let expected = progress.sends.get(progress.sent).copied();
        progress.sent += 1;
        if !self.in_order(expected, q, wc) {
            return;
        }
        let Some(index) = expected else { return };
        let op = &mine[index];
        let mut wrong = None;
        if wc.opcode != op.opcode().completion() {
            wrong = Some(format!("opcode of {}, want {:?}", describe(&[*wc]), op.kind));
        } else if op.kind.has_response() && wc.byte_len as usize != op.len {
            wrong = Some(format!("byte_len {} of a {:?} of {}", wc.byte_len, op.kind, op.len));
        }
        self.findings.fields.note(1, wrong);
        for done in &mine[progress.seen_results..=index] {
            if done.kind.has_response() {
                let wrong = self.arenas.sink.wrong_in(q, &done.local);
                let text =
                    wrong.map(|w| format!("result of {:?} {} B at its completion: {w}", done.kind, done.len));
                self.findings.visible.note(done.len, text);
            }
        }
        progress.seen_results = index + 1;
    }

    fn received(&mut self, theirs: &[Op], q: usize, progress: &mut Progress, wc: &Wc) {
        let expected = progress.recvs.get(progress.received).copied();
        progress.received += 1;
        if !self.in_order(expected, q, wc) {
            return;
        }
        let Some(index) = expected else { return };
        let op = &theirs[index];
        let opcode = if op.kind == Kind::WriteImm { IBV_WC_RECV_RDMA_WITH_IMM } else { IBV_WC_RECV };
        let imm = op.kind.has_imm().then_some(op.imm);
        let want = (opcode, op.len, imm);
        let got = (wc.opcode, wc.byte_len as usize, wc.imm);
        let wrong =
            (got != want).then(|| format!("{:?}: (opcode, byte_len, imm) {got:x?} want {want:x?}", op.kind));
        self.findings.fields.note(1, wrong);
        // A receive completion promises everything the peer did on this QP before.
        for done in &theirs[progress.seen..=index] {
            let (arena, pieces): (_, &[Piece]) = match done.kind {
                Kind::Send | Kind::SendImm => (&self.arenas.recv, &done.recv),
                Kind::Write | Kind::WriteImm => (&self.arenas.target, &[(done.remote, done.len)]),
                _ => continue,
            };
            let wrong = arena.wrong_in(q, pieces);
            let text = wrong.map(|w| format!("{:?} {} B at a receive completion: {w}", done.kind, done.len));
            self.findings.visible.note(done.len, text);
        }
        progress.seen = index + 1;
    }

    fn in_order(&mut self, expected: Option<usize>, q: usize, wc: &Wc) -> bool {
        let want = expected.map(|index| self.wr_id(q, index));
        let wrong = (want != Some(wc.wr_id)).then(|| {
            let want = want.map_or("none".into(), |id| format!("{id:#x}"));
            format!("round {} QP {q}: got {} want {want}", self.number, describe(&[*wc]))
        });
        let right = wrong.is_none();
        self.findings.completions.note(1, wrong);
        right
    }
}

impl Profile {
    /// What an operation with a response brings back.
    fn result(&self, ops: &[Op], op: &Op, background: u64, q: usize) -> Vec<u8> {
        match (op.kind, op.read_of) {
            (Kind::Read, ReadOf::Background) => {
                let mut bytes = vec![0; op.len];
                pattern::fill(background, Arena::base_of(self.share(), q) + op.remote, &mut bytes);
                bytes
            }
            (Kind::Read, ReadOf::Write(index)) => pattern::bytes(ops[index].seed, op.len),
            _ => op.atomic.before.to_ne_bytes().to_vec(),
        }
    }
}
