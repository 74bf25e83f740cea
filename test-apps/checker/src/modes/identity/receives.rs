//! Receivers without receives: a stream that waits for one holds up no other, and the last receive of a shared queue
//! goes to the message that came first by number, not by arrival.

use metaroce_test_verbs::{Opcode, RecvWr, SendWr};

use super::{Faults, Finding, memory, patient, pause};
use crate::Outcome;
use crate::expect::{collect_good, describe, surplus};
use crate::link::{End, Setup};
use crate::pattern::{self, Chance};
use crate::session::Session;

/// Bytes of a place for one message.
const PLACE: usize = 20_000;
/// Sends that wait for receives.
const SENDS: usize = 6;
/// Writes beside them.
const WRITES: usize = 16;

/// Sends of one QP wait for receives while another QP writes.
pub fn rnr_beside_traffic(session: &mut Session, rounds: u64) -> Outcome {
    let mut finding = Finding::default();
    for round in 0..rounds {
        let mut chance = Chance::new(session.seed_for(&[round]));
        Faults::by_chance(&mut chance).set(session.seed_for(&[round, session.role.index() as u64]));
        let mut end = End::new(session, &Setup { qps: 2, attr: patient(), ..Setup::default() })?;
        let mr = memory(&end, (SENDS + WRITES) * PLACE)?;
        let remote: (u64, u32) = session.swap(&(mr.address(), mr.rkey()))?;
        end.connect(session)?;
        let base = session.seed;
        let seed = |i: usize| pattern::derive(base, &[round, 4, i as u64]);
        let len = |i: usize| 1 + (seed(i) % (PLACE as u64 - 1)) as usize;
        if session.is_a() {
            for i in 0..SENDS + WRITES {
                mr.buffer().write(i * PLACE, &pattern::bytes(seed(i), len(i)));
            }
            for i in 0..SENDS {
                let send = SendWr::new(i as u64, Opcode::Send).sges([mr.sge(i * PLACE, len(i))]);
                end.qps[0].post_send(&[send])?;
            }
            for i in SENDS..SENDS + WRITES {
                let write = SendWr::new(i as u64, Opcode::Write).sges([mr.sge(i * PLACE, len(i))]);
                end.qps[1].post_send(&[write.remote(remote.0 + (i * PLACE) as u64, remote.1)])?;
            }
            let writes = collect_good(&end.send_cq, WRITES, session.stall())?;
            let ordered = writes.iter().enumerate().all(|(i, wc)| wc.wr_id == (SENDS + i) as u64);
            finding.expect(ordered, || format!("round {round}: {}", describe(&writes)));
            session.barrier()?;
            let sends = collect_good(&end.send_cq, SENDS, session.stall())?;
            let ordered = sends.iter().enumerate().all(|(i, wc)| wc.wr_id == i as u64);
            finding.expect(ordered, || format!("round {round}: {}", describe(&sends)));
        } else {
            // Until all Writes have come through there is no receive.
            session.barrier()?;
            for i in SENDS..SENDS + WRITES {
                finding.expect_bytes(&mr, i * PLACE, seed(i), len(i), &format!("round {round}, Write {i}"));
            }
            for i in 0..SENDS {
                end.qps[0].post_recv(&[RecvWr { wr_id: i as u64, sges: vec![mr.sge(i * PLACE, PLACE)] }])?;
                pause(&mut chance, 3000);
            }
            let wcs = collect_good(&end.recv_cq, SENDS, session.stall())?;
            for (i, wc) in wcs.iter().enumerate() {
                let right = wc.wr_id == i as u64 && wc.byte_len as usize == len(i);
                finding.expect(right, || format!("round {round}: {wc:?}"));
                finding.expect_bytes(&mr, i * PLACE, seed(i), len(i), &format!("round {round}, Send {i}"));
                finding.expect_empty(
                    &mr,
                    i * PLACE + len(i),
                    PLACE - len(i),
                    &format!("round {round}, behind {i}"),
                );
            }
        }
        session.barrier()?;
    }
    finding.tell(session, "Writes pass Sends that wait, all data right", rounds);
    session.barrier()
}

/// One receive is left and two messages arrive, often the wrong way round; the second one waits. In every other round
/// they come by two QPs, and either may be first.
pub fn srq_last_receive(session: &mut Session, rounds: u64) -> Outcome {
    let mut finding = Finding::default();
    for round in 0..rounds {
        let mut chance = Chance::new(session.seed_for(&[round]));
        let faults = Faults { reorder: 0.5, ..Faults::by_chance(&mut chance) };
        faults.set(session.seed_for(&[round, session.role.index() as u64]));
        let setup = Setup { qps: 2, attr: patient(), srq: Some(16), ..Setup::default() };
        let mut end = End::new(session, &setup)?;
        let mr = memory(&end, 2 * PLACE)?;
        end.exchange(session)?;
        end.to_rts()?;
        let second = (round % 2) as usize;
        let base = session.seed;
        let seed = |i: u32| pattern::derive(base, &[round, 5, u64::from(i)]);
        let len = |i: u32| 1 + (seed(i) % (PLACE as u64 - 1)) as usize;
        let srq = end.srq.clone().ok_or("an SRQ was asked for")?;
        let recv = |i: usize| RecvWr { wr_id: i as u64, sges: vec![mr.sge(i * PLACE, PLACE)] };
        if !session.is_a() {
            srq.post_recv(&[recv(0)])?;
        }
        session.barrier()?;
        if session.is_a() {
            for i in [0, 1] {
                let at = i as usize * PLACE;
                mr.buffer().write(at, &pattern::bytes(seed(i), len(i)));
                let send = SendWr::new(u64::from(i), Opcode::SendImm(i)).sges([mr.sge(at, len(i))]);
                end.qps[i as usize * second].post_send(&[send])?;
            }
            collect_good(&end.send_cq, 2, session.stall())?;
        } else {
            let mut wcs = collect_good(&end.recv_cq, 1, session.stall())?;
            pause(&mut chance, 5000);
            let early = surplus(&end.recv_cq)?;
            finding.expect(early.is_empty(), || format!("round {round}: one receive, {}", describe(&early)));
            srq.post_recv(&[recv(1)])?;
            wcs.extend(collect_good(&end.recv_cq, 1, session.stall())?);
            let numbers: Vec<u32> = wcs.iter().filter_map(|wc| wc.imm).collect();
            let right = numbers == [0, 1] || second == 1 && numbers == [1, 0];
            finding.expect(right, || format!("round {round}: messages {numbers:?}"));
            for (i, wc) in wcs.iter().enumerate() {
                let (number, at) = (wc.imm.unwrap_or(2), i * PLACE);
                let right = wc.wr_id == i as u64 && wc.byte_len as usize == len(number);
                finding.expect(right, || format!("round {round}: {wc:?}"));
                finding.expect_bytes(&mr, at, seed(number), len(number), &format!("round {round}, {number}"));
                let behind = format!("round {round}, behind {number}");
                finding.expect_empty(&mr, at + len(number), PLACE - len(number), &behind);
            }
        }
        session.barrier()?;
    }
    finding.tell(session, "the last receive goes to the first message", rounds);
    session.barrier()
}
