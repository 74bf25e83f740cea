//! A peer process is killed in the middle of traffic and another one takes its very place (the same slot, which is the
//! same UDP port) while the old requests are still being repeated.

use std::net::{Ipv6Addr, UdpSocket};

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{Attr, Context, Opcode, SendWr, status_name};
use serde::{Deserialize, Serialize};

use super::{Faults, Finding, memory, pause};
use crate::Outcome;
use crate::expect::{collect, collect_good, describe};
use crate::link::{End, Setup};
use crate::pattern::{self, Chance};
use crate::session::Session;

/// Bytes of a Write.
const WRITE: usize = 64 << 10;
/// Writes under way when the peer dies.
const DEPTH: u64 = 24;
/// Slots of a host; bits of a QP number below the slot.
const SLOTS: u16 = 1024;
const INDEX_BITS: u32 = 14;

/// What a process of the far end is there for.
#[derive(Serialize, Deserialize, Debug, Clone, Copy)]
enum Part {
    /// Nothing: it waits until the case is over.
    Spectator,
    /// To be written to, and killed.
    Victim { base_port: u16, fault_seed: u64 },
    /// To take the victim's slot, and be written to.
    Successor { base_port: u16, fault_seed: u64, slot: u16 },
}

/// The near end lives through all rounds; each round has a victim and a successor.
pub fn same_slot(session: &mut Session, rounds: u64) -> Outcome {
    if !session.is_a() {
        return match session.hear::<Part>()? {
            Part::Spectator => session.barrier(),
            Part::Victim { base_port, fault_seed } => victim(session, base_port, fault_seed),
            Part::Successor { base_port, fault_seed, slot } => {
                successor(session, base_port, fault_seed, slot)
            }
        };
    }
    session.tell(&Part::Spectator)?;
    // A range of ports of its own: while a slot is taken on purpose, all others of the range are blocked.
    let base_port = 10_240 + SLOTS * (session.seed % 10) as u16;
    environment(base_port, session.seed);
    let keeper = Context::open(session.options.device.as_deref())?;
    let mut finding = Finding::default();
    for number in 0..rounds {
        round(session, base_port, number, &mut finding).map_err(|e| format!("round {number}: {e}"))?;
    }
    drop(keeper);
    finding.tell(session, "old stream ends in error, new one's data only", rounds);
    session.barrier()
}

/// Some loss, so that old packets are repeated, and a delay, so that some are still on their way.
fn environment(base_port: u16, seed: u64) {
    crate::process::set_variable("METAROCE_BASE_PORT", &base_port.to_string());
    Faults { loss: 0.02, delay_us: 300, ..Faults::default() }.set(seed);
}

fn setup() -> Setup {
    let attr = Attr { timeout: 15, retry_cnt: 3, ..Attr::default() };
    Setup { attr, ..Setup::default() }
}

fn round(session: &mut Session, base_port: u16, number: u64, finding: &mut Finding) -> Outcome {
    let mut chance = Chance::new(session.seed_for(&[number]));
    let mut old_peer = session.another()?;
    old_peer.tell(&Part::Victim { base_port, fault_seed: chance.next() })?;
    let mut old = End::new(session, &setup())?;
    let source = memory(&old, WRITE)?;
    let remote: (u64, u32) = old_peer.swap(&(0u64, 0u32))?;
    old.connect(&mut old_peer)?;
    let slot = (old.remotes[0].qpn >> INDEX_BITS) as u16;
    source.buffer().fill(0, WRITE, 0xee);
    let write = |id| SendWr::new(id, Opcode::Write).sges([source.sge(0, WRITE)]).remote(remote.0, remote.1);
    for id in 0..DEPTH {
        old.qps[0].post_send(&[write(id)])?;
    }
    pause(&mut chance, 4000);
    old_peer.tell(&())?;
    old_peer.wait_peer_gone()?;

    let mut new_peer = session.another()?;
    new_peer.tell(&Part::Successor { base_port, fault_seed: chance.next(), slot })?;
    let mut new = End::new(session, &setup())?;
    let remote: (u64, u32) = new_peer.swap(&(0u64, 0u32))?;
    new.connect(&mut new_peer)?;
    let taken = (new.remotes[0].qpn >> INDEX_BITS) as u16;
    finding.expect(taken == slot, || format!("round {number}: slot {taken}, want {slot}"));
    let data = memory(&new, WRITE)?;
    let (seed, len) = (chance.next(), 1 + chance.below(WRITE - 1));
    data.buffer().write(0, &pattern::bytes(seed, len));
    let write = SendWr::new(500, Opcode::Write).sges([data.sge(0, len)]).remote(remote.0, remote.1);
    new.qps[0].post_send(&[write])?;
    let wc = collect_good(&new.send_cq, 1, session.stall())?[0];
    finding.expect(wc.wr_id == 500, || format!("round {number}: {wc:?}"));
    // The old stream: some Writes had been accepted, then the error, the rest flushed, all in order.
    let wcs = collect(&old.send_cq, DEPTH as usize, session.stall())?;
    let good = wcs.iter().take_while(|wc| wc.status == IBV_WC_SUCCESS).count();
    for (i, wc) in wcs.iter().enumerate() {
        let want = match i {
            _ if i < good => IBV_WC_SUCCESS,
            _ if i == good => IBV_WC_RETRY_EXC_ERR,
            _ => IBV_WC_WR_FLUSH_ERR,
        };
        let right = wc.wr_id == i as u64 && wc.status == want;
        finding
            .expect(right, || format!("round {number}: {} want {}", describe(&wcs[i..]), status_name(want)));
    }
    new_peer.tell(&(seed, len))?;
    let theirs: Option<String> = new_peer.hear()?;
    finding.expect(theirs.is_none(), || format!("round {number}: {}", theirs.unwrap_or_default()));
    new_peer.dismiss()
}

/// Is written to until it is told to die.
fn victim(session: &mut Session, base_port: u16, fault_seed: u64) -> Outcome {
    environment(base_port, fault_seed);
    let mut end = End::new(session, &setup())?;
    let mr = memory(&end, WRITE)?;
    let _: (u64, u32) = session.swap(&(mr.address(), mr.rkey()))?;
    end.connect(session)?;
    session.hear::<()>()?;
    crate::process::kill_self()
}

/// Takes the slot by leaving the device no other.
fn successor(session: &mut Session, base_port: u16, fault_seed: u64, slot: u16) -> Outcome {
    environment(base_port, fault_seed);
    crate::process::allow_descriptors(2 * u64::from(SLOTS))?;
    let bind = |number: u16| UdpSocket::bind((Ipv6Addr::UNSPECIFIED, base_port + number)).ok();
    // What cannot be bound is somebody else's already.
    let blocked: Vec<UdpSocket> = (0..SLOTS).filter(|number| *number != slot).filter_map(bind).collect();
    let mut end = End::new(session, &setup())?;
    let mr = memory(&end, 2 * WRITE)?;
    drop(blocked);
    let _: (u64, u32) = session.swap(&(mr.address(), mr.rkey()))?;
    end.connect(session)?;
    let (seed, len): (u64, usize) = session.hear()?;
    let mut finding = Finding::default();
    finding.expect_bytes(&mr, 0, seed, len, "written");
    finding.expect_empty(&mr, len, 2 * WRITE - len, "beside it");
    session.tell(&finding.0)
}
