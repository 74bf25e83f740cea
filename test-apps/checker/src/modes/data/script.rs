//! The script of a round: what one end does to the other on one QP. Computed from seeds alone, so the
//! responder knows what is coming without being told.

use metaroce_test_verbs::Opcode;

use crate::pattern::Chance;

/// An operation without its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
    CompareSwap,
    FetchAdd,
}

impl Kind {
    pub fn is_atomic(self) -> bool {
        matches!(self, Kind::CompareSwap | Kind::FetchAdd)
    }

    pub fn is_write(self) -> bool {
        matches!(self, Kind::Write | Kind::WriteImm)
    }

    pub fn is_send(self) -> bool {
        matches!(self, Kind::Send | Kind::SendImm)
    }

    /// Its result lands in the requester's memory.
    pub fn has_response(self) -> bool {
        self == Kind::Read || self.is_atomic()
    }

    pub fn has_imm(self) -> bool {
        matches!(self, Kind::SendImm | Kind::WriteImm)
    }

    pub fn consumes_recv(self) -> bool {
        self.is_send() || self == Kind::WriteImm
    }
}

/// A part of one QP's share of an arena: where it begins, how long it is.
pub type Piece = (usize, usize);

/// A case of the data mode: what its scripts are made of.
#[derive(Debug, Clone)]
pub struct Profile {
    /// Operations to draw from.
    pub kinds: Vec<Kind>,
    /// Message sizes: taken in turn, so that each occurs.
    pub sizes: Vec<usize>,
    /// QPs.
    pub qps: usize,
    /// Repetitions.
    pub rounds: usize,
    /// Operations per QP, direction and round.
    pub ops: usize,
    /// SGEs per WR at most.
    pub sges: usize,
    /// Largest inline message; 0 for none.
    pub inline: usize,
    /// Receives are posted after the peer's sends in every other round (RNR).
    pub late: bool,
    /// Every odd QP posts by `ibv_wr_*`.
    pub extended: bool,
    /// Both ends are requesters at once.
    pub both: bool,
    /// Payload bytes per QP, direction and round at most (but one message always fits).
    pub budget: usize,
    /// Path MTUs of the two ends, instead of those of the options.
    pub mtus: Option<[u32; 2]>,
}

/// Where a Read's bytes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadOf {
    /// The background the responder filled in before the round.
    Background,
    /// What the operation of this index wrote before.
    Write(usize),
}

/// One operation.
#[derive(Debug, Clone)]
pub struct Op {
    /// What.
    pub kind: Kind,
    /// Message length in bytes.
    pub len: usize,
    /// Local memory: in the source share (data goes out) or the sink share (data comes back).
    pub local: Vec<Piece>,
    /// First byte in the responder's target share.
    pub remote: usize,
    /// Pattern of the data that goes out.
    pub seed: u64,
    /// Posted inline.
    pub inline: bool,
    /// Has a completion.
    pub signaled: bool,
    /// Posted with the fence flag.
    pub fence: bool,
    /// Immediate, if the kind has one.
    pub imm: u32,
    /// The receive it consumes, in the responder's receive share.
    pub recv: Vec<Piece>,
    /// Reads only.
    pub read_of: ReadOf,
    /// Atomics: add or compare value, swap value, and the value that must come back.
    pub atomic: Atomic,
}

/// Operands and outcome of an atomic.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Atomic {
    /// Addend or compare value.
    pub compare_add: u64,
    /// New value of a compare-and-swap.
    pub swap: u64,
    /// What the word holds before.
    pub before: u64,
    /// What it holds afterwards.
    pub after: u64,
}

impl Op {
    /// The verbs opcode with its operands.
    pub fn opcode(&self) -> Opcode {
        match self.kind {
            Kind::Send => Opcode::Send,
            Kind::SendImm => Opcode::SendImm(self.imm),
            Kind::Write => Opcode::Write,
            Kind::WriteImm => Opcode::WriteImm(self.imm),
            Kind::Read => Opcode::Read,
            Kind::CompareSwap => Opcode::CompareSwap(self.atomic.compare_add, self.atomic.swap),
            Kind::FetchAdd => Opcode::FetchAdd(self.atomic.compare_add),
        }
    }
}

/// Largest gap between two pieces; odd gaps make addresses unaligned.
const GAP: usize = 61;

impl Profile {
    /// Bytes of one QP's share of each arena: enough for any script of this profile.
    pub fn share(&self) -> usize {
        let largest = self.sizes.iter().copied().max().unwrap_or(0);
        let gaps = self.ops * (2 * self.sges + 2) * (GAP + 8);
        (self.budget + largest + gaps).next_multiple_of(4096)
    }

    /// The script of one direction of one QP in one round. `word` is the background at an offset of the
    /// responder's target share, as the atomics will find it.
    pub fn script(&self, seed: u64, word: impl Fn(usize) -> u64) -> Vec<Op> {
        let mut writer = Writer {
            chance: Chance::new(seed),
            source: 0,
            sink: 0,
            target: 0,
            recv: 0,
            left: self.budget,
            ops: Vec::with_capacity(self.ops),
        };
        for i in 0..self.ops {
            let op = writer.op(self, i, &word);
            writer.ops.push(op);
        }
        if let Some(last) = writer.ops.last_mut() {
            last.signaled = true;
        }
        writer.ops
    }
}

/// Makes a script; the numbers are the first free bytes of each share.
struct Writer {
    chance: Chance,
    source: usize,
    sink: usize,
    target: usize,
    recv: usize,
    left: usize,
    ops: Vec<Op>,
}

impl Writer {
    fn op(&mut self, profile: &Profile, index: usize, word: &impl Fn(usize) -> u64) -> Op {
        let kind = self.chance.pick(&profile.kinds);
        let mut len = self.length(profile, kind, index);
        let mut op = Op {
            kind,
            len,
            local: Vec::new(),
            remote: 0,
            seed: self.chance.next(),
            inline: false,
            signaled: !self.chance.one_in(4),
            fence: self.chance.one_in(8),
            imm: self.chance.next() as u32,
            recv: Vec::new(),
            read_of: ReadOf::Background,
            atomic: Atomic::default(),
        };
        match kind {
            Kind::Read => len = self.read_target(&mut op),
            Kind::Write | Kind::WriteImm => len = self.write_target(&mut op),
            Kind::CompareSwap | Kind::FetchAdd => self.atomic_target(&mut op, word),
            Kind::Send | Kind::SendImm => {}
        }
        op.len = len;
        let sges = 1 + self.chance.below(profile.sges);
        op.inline = !kind.has_response() && len <= profile.inline && self.chance.one_in(2);
        let share = if kind.has_response() { &mut self.sink } else { &mut self.source };
        op.local = place(&mut self.chance, share, len, if kind.is_atomic() { 1 } else { sges });
        if kind.is_send() {
            // Exactly fitting or with room to spare, which must stay untouched.
            let spare = self.chance.pick(&[0, 0, 1, 37]);
            op.recv = place(&mut self.chance, &mut self.recv, len + spare, sges);
        }
        op
    }

    fn length(&mut self, profile: &Profile, kind: Kind, index: usize) -> usize {
        if kind.is_atomic() {
            return 8;
        }
        let start =
            if profile.ops >= profile.sizes.len() { 0 } else { self.chance.below(profile.sizes.len()) };
        let wanted = profile.sizes[(start + index) % profile.sizes.len()];
        let first = self.ops.is_empty();
        let len = if wanted <= self.left || first { wanted } else { self.left.min(64) };
        self.left = self.left.saturating_sub(len);
        len
    }

    /// A Read of fresh background, or of what an earlier Write of this QP put there: it must see it.
    fn read_target(&mut self, op: &mut Op) -> usize {
        let written: Vec<usize> = (0..self.ops.len())
            .filter(|i| self.ops[*i].kind.is_write() && self.ops[*i].len <= op.len)
            .collect();
        if !written.is_empty() && self.chance.one_in(3) {
            let of = self.chance.pick(&written);
            op.read_of = ReadOf::Write(of);
            op.remote = self.ops[of].remote;
            return self.ops[of].len;
        }
        op.remote = self.bump_target(op.len, 1);
        op.len
    }

    /// A Write to a fresh place, or, fenced, to where an earlier Read looked: that Read must see the old
    /// bytes.
    fn write_target(&mut self, op: &mut Op) -> usize {
        let taken = |remote: usize, ops: &[Op]| ops.iter().any(|o| o.kind.is_write() && o.remote == remote);
        let read: Vec<usize> = (0..self.ops.len())
            .filter(|i| {
                let o = &self.ops[*i];
                o.kind == Kind::Read && o.len <= op.len && o.len > 0 && !taken(o.remote, &self.ops)
            })
            .collect();
        if !read.is_empty() && self.chance.one_in(4) {
            let over = self.chance.pick(&read);
            op.remote = self.ops[over].remote;
            op.fence = true;
            return self.ops[over].len;
        }
        op.remote = self.bump_target(op.len, 1);
        op.len
    }

    /// An atomic on a fresh word or on one an earlier atomic of this QP left behind; operands with a known
    /// outcome.
    fn atomic_target(&mut self, op: &mut Op, word: &impl Fn(usize) -> u64) {
        let again = self.ops.iter().rev().find(|o| o.kind.is_atomic()).map(|o| (o.remote, o.atomic.after));
        let (remote, before) = match again {
            Some(again) if !self.chance.one_in(3) => again,
            _ => {
                let remote = self.bump_target(8, 8);
                (remote, word(remote))
            }
        };
        let operand = self.chance.next();
        let atomic = &mut op.atomic;
        op.remote = remote;
        atomic.before = before;
        if op.kind == Kind::FetchAdd {
            atomic.compare_add = operand;
            atomic.after = before.wrapping_add(operand);
        } else {
            let hit = self.chance.one_in(2);
            atomic.swap = operand;
            atomic.compare_add = if hit { before } else { before ^ (operand | 1) };
            atomic.after = if hit { operand } else { before };
        }
    }

    fn bump_target(&mut self, len: usize, align: usize) -> usize {
        let at = (self.target + self.chance.below(GAP)).next_multiple_of(align);
        self.target = at + len;
        at
    }
}

/// Takes `len` bytes in at most `parts` pieces with gaps before each from a share; no bytes are no pieces.
fn place(chance: &mut Chance, share: &mut usize, len: usize, parts: usize) -> Vec<Piece> {
    if len == 0 {
        return Vec::new();
    }
    let mut pieces = Vec::new();
    for piece in chance.split(len, parts) {
        let at = *share + chance.below(GAP);
        *share = at + piece;
        pieces.push((at, piece));
    }
    pieces
}

#[cfg(test)]
#[expect(non_snake_case, reason = "tests are named subject__case")]
mod tests {
    use super::*;

    fn profile() -> Profile {
        use Kind::*;
        Profile {
            kinds: vec![Send, SendImm, Write, WriteImm, Read, CompareSwap, FetchAdd],
            sizes: vec![0, 1, 1023, 1024, 1025, 65536],
            qps: 1,
            rounds: 1,
            ops: 40,
            sges: 4,
            inline: 64,
            late: true,
            extended: true,
            both: true,
            budget: 200_000,
            mtus: None,
        }
    }

    #[test]
    fn script__is_the_same_for_both_ends_and_stays_in_its_share() {
        let profile = profile();
        for seed in 0..200 {
            let ops = profile.script(seed, |at| at as u64);
            assert_eq!(format!("{ops:?}"), format!("{:?}", profile.script(seed, |at| at as u64)));
            for op in &ops {
                let ends = op.local.iter().chain(&op.recv).map(|(at, len)| at + len);
                assert!(ends.max().unwrap_or(0) <= profile.share());
                assert!(op.remote + op.len <= profile.share());
                assert_eq!(op.local.iter().map(|p| p.1).sum::<usize>(), op.len);
            }
        }
    }

    #[test]
    fn script__writes_never_overlap() {
        // Two writes to one place in a round would leave the outcome to chance, and the check with it.
        let profile = profile();
        for seed in 0..200 {
            let ops = profile.script(seed, |at| at as u64);
            let mut ranges: Vec<_> =
                ops.iter().filter(|o| o.kind.is_write() && o.len > 0).map(|o| (o.remote, o.len)).collect();
            ranges.sort_unstable();
            assert!(ranges.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "seed {seed}");
        }
    }
}
