//! `data`: every opcode, sizes around the MTU, inline, several SGEs, many QPs, both directions, differing
//! path MTUs. Every byte is compared, those beside the messages too; completions are checked for order,
//! number and fields.

mod arena;
mod atomics;
mod round;
mod script;

use std::time::Instant;

use metaroce_test_verbs::{Attr, QpCaps};

use crate::Outcome;
use crate::link::{End, Setup};
use crate::modes::Case;
use crate::options::Options;
use crate::pattern::Chance;
use crate::session::Session;
use round::{Arenas, Findings, Round};
use script::{Kind, Profile};

/// Inline bytes asked for.
const INLINE: u32 = 128;

/// The cases.
pub fn cases(options: &Options) -> Vec<Case> {
    use Kind::{CompareSwap, FetchAdd, Read, Send, SendImm, Write, WriteImm};
    let all = [Send, SendImm, Write, WriteImm, Read, CompareSwap, FetchAdd];
    let sizes = boundary_sizes(options.mtu_a.min(options.mtu_b), options.mtu_a.max(options.mtu_b));
    let base = Profile {
        kinds: all.to_vec(),
        ops: sizes.len(),
        sizes,
        qps: 1,
        rounds: 2 * options.rounds,
        sges: 1,
        inline: 0,
        late: false,
        extended: false,
        both: false,
        budget: 8 << 20,
        mtus: None,
    };
    let one = |kinds: &[Kind]| Profile { kinds: kinds.to_vec(), ..base.clone() };
    let small = Profile { ops: 24, budget: 128 << 10, both: true, sges: 4, ..base.clone() };
    let mut list = vec![
        ("send", one(&[Send, SendImm])),
        ("write", one(&[Write])),
        ("write-imm", one(&[Write, WriteImm])),
        ("read", one(&[Read])),
        ("read-write", Profile { both: true, ..one(&[Read, Write]) }),
        (
            "atomic",
            Profile { ops: 64, rounds: 4 * options.rounds, both: true, ..one(&[CompareSwap, FetchAdd]) },
        ),
        (
            "inline",
            Profile {
                kinds: vec![Send, SendImm, Write, WriteImm],
                sizes: (0..=INLINE as usize).collect(),
                ops: 129,
                inline: INLINE as usize,
                rounds: 2 * options.rounds,
                ..small.clone()
            },
        ),
        ("sge", Profile { both: false, ops: 2 * base.ops, ..small.clone() }),
        ("sge-many", Profile { both: false, sges: 30, ..small.clone() }),
        ("late-receives", Profile { late: true, qps: 4, ..small.clone() }),
        ("extended", Profile { qps: 2, extended: true, inline: INLINE as usize, ..small.clone() }),
        (
            "mtus-differ",
            Profile { mtus: Some([256, 4096]), sizes: boundary_sizes(256, 4096), both: true, ..base.clone() },
        ),
        ("both-ways", Profile { both: true, sges: 2, ..base.clone() }),
        (
            "many-qps",
            Profile {
                qps: options.qps,
                rounds: 4 * options.rounds,
                extended: true,
                late: true,
                inline: INLINE as usize,
                ..small
            },
        ),
    ];
    if options.big {
        let huge =
            |kinds: &[Kind]| Profile { sizes: vec![64 << 20], ops: 2, budget: 128 << 20, ..one(kinds) };
        list.push(("big-write", huge(&[Write, WriteImm])));
        list.push(("big-read", huge(&[Read])));
        list.push(("big-send", huge(&[Send])));
    }
    let mut cases: Vec<Case> = list
        .into_iter()
        .map(|(name, profile)| {
            let limit = if profile.budget > 64 << 20 { 300 } else { 120 };
            Case::new(name, limit, move |session| exchange(session, &profile))
        })
        .collect();
    let qps = options.qps;
    cases.push(Case::new("atomic-contended", 60, move |session| atomics::contended(session, qps)));
    cases
}

/// 0, 1, and around multiples of both MTUs, up to 1 MiB.
fn boundary_sizes(small: u32, large: u32) -> Vec<usize> {
    let mut sizes = vec![0, 1, 2, 7, 64 << 10, (64 << 10) + 1, 1 << 20];
    for mtu in [small as usize, large as usize] {
        for k in [1, 2, 3, 15, 16] {
            sizes.extend([k * mtu - 1, k * mtu, k * mtu + 1]);
        }
    }
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Attributes that differ from seed to seed: first PSNs (close to their wrap, too) and how many Reads may be
/// in flight.
fn attributes(session: &Session) -> Attr {
    let psn = |role: usize| {
        let chance = session.seed_for(&[6, role as u64]);
        if chance.is_multiple_of(2) { 0xff_fff0 } else { (chance >> 32) as u32 & 0xff_ffff }
    };
    let max_rd_atomic = Chance::new(session.seed_for(&[7])).pick(&[1, 2, 4, 16]);
    Attr {
        sq_psn: psn(session.role.index()),
        rq_psn: psn(session.role.other().index()),
        min_rnr_timer: 1,
        max_rd_atomic,
        max_dest_rd_atomic: max_rd_atomic,
        ..Attr::default()
    }
}

/// Runs a profile between the two ends.
fn exchange(session: &mut Session, profile: &Profile) -> Outcome {
    let depth = u32::try_from(profile.ops)?;
    let setup = Setup {
        qps: profile.qps,
        caps: QpCaps {
            send_wr: depth,
            recv_wr: depth,
            send_sge: profile.sges as u32,
            recv_sge: profile.sges as u32,
            inline: profile.inline as u32,
        },
        cqe: profile.qps * profile.ops + 1,
        attr: attributes(session),
        extended: profile.extended,
        ..Setup::default()
    };
    let mut end = End::new(session, &setup)?;
    if let Some(mtus) = profile.mtus {
        end.attr.path_mtu = mtus[session.role.index()];
    }
    let mut arenas = Arenas::new(session, &end, profile)?;
    end.connect(session)?;
    let mut findings = Findings::default();
    let begin = Instant::now();
    for number in 0..profile.rounds {
        let round = Round { profile, number, end: &end, arenas: &mut arenas, findings: &mut findings };
        round.run(session)?;
    }
    let spent = begin.elapsed().as_secs_f64();
    let aspects = [
        ("completions in order, each once", findings.completions, "completions"),
        ("opcode, length, immediate", findings.fields, "completions"),
        ("bytes there at completion", findings.visible, "bytes"),
        ("every byte, guards included", findings.bytes, "bytes"),
    ];
    for (name, finding, unit) in aspects {
        let detail = finding.wrong.clone().unwrap_or_else(|| {
            format!("{} {unit}, {} QPs, {} rounds, {spent:.2} s", finding.count, profile.qps, profile.rounds)
        });
        session.check(name, finding.wrong.is_none(), detail);
    }
    debug_assert!(arenas.len() > 0, "arenas live until the last round is compared");
    session.barrier()
}
