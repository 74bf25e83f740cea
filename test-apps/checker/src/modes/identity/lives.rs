//! Lives of queue pairs and connections: resets, simultaneous opening, a queue pair that is its own peer, farewells.

use metaroce_test_verbs::constants::*;
use metaroce_test_verbs::{Attr, Opcode, RecvWr, SendWr, state, status_name};

use super::{Faults, Finding, memory, patient, pause};
use crate::Outcome;
use crate::expect::{collect, collect_good, describe, surplus};
use crate::link::{End, Setup};
use crate::pattern::{self, Chance};
use crate::session::Session;

/// Bytes of one message, and of the place for it.
const PLACE: usize = 60_000;
/// Messages of a former life.
const OLD: usize = 6;
/// Messages of the new one.
const NEW: usize = 3;

/// Both QPs go through RESET and come back while packets of their former life are delayed by milliseconds.
pub fn reset_to_rts(session: &mut Session, rounds: u64) -> Outcome {
    Faults { loss: 0.02, reorder: 0.3, dup: 0.1, delay_us: 2000 }.set(session.seed);
    let mut end = End::new(session, &Setup { attr: patient(), ..Setup::default() })?;
    let mr = memory(&end, 2 * OLD * PLACE)?;
    end.exchange(session)?;
    let mut finding = Finding::default();
    for round in 0..rounds {
        let mut chance = Chance::new(session.seed_for(&[round, session.role.index() as u64]));
        let base = session.seed;
        let seed = |number: usize| pattern::derive(base, &[round, 2, number as u64]);
        end.to_rts()?;
        let qp = &end.qps[0];
        let recv = |i: usize| RecvWr { wr_id: i as u64, sges: vec![mr.sge(i * PLACE, PLACE)] };
        let far = session.role == crate::session::Role::B;
        if far {
            qp.post_recv(&(0..OLD).map(recv).collect::<Vec<_>>())?;
        }
        session.barrier()?;
        if !far {
            mr.buffer().fill(OLD * PLACE, OLD * PLACE, 0xee);
            let send =
                |i: usize| SendWr::new(i as u64, Opcode::Send).sges([mr.sge((OLD + i) * PLACE, PLACE)]);
            qp.post_send(&(0..OLD).map(send).collect::<Vec<_>>())?;
        }
        pause(&mut chance, 8000);
        qp.to_state(state::RESET)?;
        session.barrier()?;
        mr.buffer().fill(0, OLD * PLACE, super::EMPTY);
        end.to_rts()?;
        let qp = &end.qps[0];
        if far {
            qp.post_recv(&(0..NEW).map(recv).collect::<Vec<_>>())?;
        }
        session.barrier()?;
        let len = |i: usize| 1000 + (round as usize * 977 + i * 13_001) % (PLACE - 1000);
        if far {
            let wcs = collect_good(&end.recv_cq, NEW, session.stall())?;
            for (i, wc) in wcs.iter().enumerate() {
                let right = wc.wr_id == i as u64 && wc.byte_len as usize == len(i);
                finding.expect(right, || format!("round {round}: {wc:?}, want {} bytes", len(i)));
                finding.expect_bytes(&mr, i * PLACE, seed(i), len(i), &format!("round {round}, message {i}"));
                finding.expect_empty(
                    &mr,
                    i * PLACE + len(i),
                    PLACE - len(i),
                    &format!("round {round}, behind {i}"),
                );
            }
            finding.expect_empty(
                &mr,
                NEW * PLACE,
                (OLD - NEW) * PLACE,
                &format!("round {round}, former places"),
            );
        } else {
            for i in 0..NEW {
                mr.buffer().write((OLD + i) * PLACE, &pattern::bytes(seed(i), len(i)));
                let sge = mr.sge((OLD + i) * PLACE, len(i));
                qp.post_send(&[SendWr::new(100 + i as u64, Opcode::Send).sges([sge])])?;
            }
            let wcs = collect_good(&end.send_cq, NEW, session.stall())?;
            let ids: Vec<u64> = wcs.iter().map(|wc| wc.wr_id).collect();
            finding.expect(ids == [100, 101, 102], || format!("round {round}: {}", describe(&wcs)));
        }
        session.barrier()?;
        let left = [surplus(&end.send_cq)?, surplus(&end.recv_cq)?].concat();
        finding.expect(left.is_empty(), || format!("round {round}: surplus {}", describe(&left)));
        end.qps[0].to_state(state::RESET)?;
        session.barrier()?;
    }
    finding.tell(session, "only the new life's messages", rounds);
    session.barrier()
}

/// Each round is a first meeting: both processes open a device anew and post at the same moment.
pub fn simultaneous_open(session: &mut Session, rounds: u64) -> Outcome {
    let mut finding = Finding::default();
    for round in 0..rounds {
        let mut chance = Chance::new(session.seed_for(&[round]));
        Faults::by_chance(&mut chance).set(session.seed_for(&[round, session.role.index() as u64]));
        let mut end = End::new(session, &Setup { attr: patient(), ..Setup::default() })?;
        let mr = memory(&end, 3 * PLACE)?;
        let len = 1 + chance.below(PLACE - 1);
        let base = session.seed;
        let seed = |role: usize| pattern::derive(base, &[round, 3, role as u64]);
        let (mine, theirs) = (seed(session.role.index()), seed(session.role.other().index()));
        mr.buffer().write(0, &pattern::bytes(mine, len));
        let remote: (u64, u32) = session.swap(&(mr.address(), mr.rkey()))?;
        end.exchange(session)?;
        end.to_rts()?;
        let qp = &end.qps[0];
        qp.post_recv(&[RecvWr { wr_id: 9, sges: vec![mr.sge(2 * PLACE, PLACE)] }])?;
        session.barrier()?;
        let write = SendWr::new(1, Opcode::Write).sges([mr.sge(0, len)]);
        qp.post_send(&[
            write.remote(remote.0 + PLACE as u64, remote.1),
            SendWr::new(2, Opcode::Send).sges([mr.sge(0, len)]),
        ])?;
        let sent = collect_good(&end.send_cq, 2, session.stall())?;
        let received = collect_good(&end.recv_cq, 1, session.stall())?;
        finding.expect(received[0].byte_len as usize == len, || format!("round {round}: {received:?}"));
        finding.expect((sent[0].wr_id, sent[1].wr_id) == (1, 2), || format!("round {round}: {sent:?}"));
        finding.expect_bytes(&mr, PLACE, theirs, len, &format!("round {round}, written"));
        finding.expect_bytes(&mr, 2 * PLACE, theirs, len, &format!("round {round}, received"));
        finding.expect_empty(&mr, PLACE + len, PLACE - len, &format!("round {round}, behind the Write"));
        // Nobody leaves before the other has what it waits for.
        session.barrier()?;
    }
    finding.tell(session, "both ends' data, each once", rounds);
    session.barrier()
}

/// A QP connected to itself: Send, Write, Read and an atomic come back to where they came from.
pub fn to_itself(session: &mut Session, rounds: u64) -> Outcome {
    let mut finding = Finding::default();
    for round in 0..rounds {
        let mut chance = Chance::new(session.seed_for(&[round, session.role.index() as u64]));
        Faults::by_chance(&mut chance).set(chance.next());
        let mut end = End::new(session, &Setup { attr: patient(), ..Setup::default() })?;
        end.remotes = vec![end.myself(0)];
        end.to_rts()?;
        let mr = memory(&end, 5 * PLACE)?;
        let (len, seed) = (1 + chance.below(PLACE - 1), chance.next());
        mr.buffer().write(0, &pattern::bytes(seed, len));
        let words = 4 * PLACE;
        mr.buffer().write(words, &7u64.to_ne_bytes());
        let qp = &end.qps[0];
        qp.post_recv(&[RecvWr { wr_id: 9, sges: vec![mr.sge(PLACE, PLACE)] }])?;
        let at = |place: usize| (mr.address() + place as u64, mr.rkey());
        let (written, word) = (at(2 * PLACE), at(words));
        qp.post_send(&[
            SendWr::new(1, Opcode::Send).sges([mr.sge(0, len)]),
            SendWr::new(2, Opcode::Write).sges([mr.sge(0, len)]).remote(written.0, written.1),
            SendWr::new(3, Opcode::Read).sges([mr.sge(3 * PLACE, len)]).remote(written.0, written.1),
            SendWr::new(4, Opcode::FetchAdd(5)).sges([mr.sge(words + 8, 8)]).remote(word.0, word.1),
        ])?;
        let sent = collect_good(&end.send_cq, 4, session.stall())?;
        let received = collect_good(&end.recv_cq, 1, session.stall())?;
        let ids: Vec<u64> = sent.iter().map(|wc| wc.wr_id).collect();
        finding.expect(ids == [1, 2, 3, 4], || format!("round {round}: {}", describe(&sent)));
        finding.expect(received[0].byte_len as usize == len, || format!("round {round}: {received:?}"));
        for (place, what) in [(1, "received"), (2, "written"), (3, "read")] {
            finding.expect_bytes(&mr, place * PLACE, seed, len, &format!("round {round}, {what}"));
        }
        let sums = (mr.buffer().load_word(words), mr.buffer().load_word(words + 8));
        finding.expect(sums == (12, 7), || format!("round {round}: word and fetched value {sums:?}"));
    }
    finding.tell(session, "a QP talks to itself", rounds);
    session.barrier()
}

/// A third of all packets is lost, those that open and end connections among them. What was promised arrives, and a
/// peer that has left answers no more.
pub fn lost_handshakes(session: &mut Session, rounds: u64) -> Outcome {
    let mut finding = Finding::default();
    for round in 0..rounds {
        let mut chance = Chance::new(session.seed_for(&[round]));
        Faults { loss: 0.3, ..Faults::default() }
            .set(session.seed_for(&[round, session.role.index() as u64]));
        let mut end = End::new(session, &Setup { attr: patient(), ..Setup::default() })?;
        let mr = memory(&end, 2 * PLACE)?;
        let (len, seed) = (1 + chance.below(PLACE - 1), chance.next());
        let remote: (u64, u32) = session.swap(&(mr.address(), mr.rkey()))?;
        end.exchange(session)?;
        // The requester gives up soon once the peer has gone; until then the timer runs only in silence.
        end.attr = Attr { timeout: 16, retry_cnt: 3, ..end.attr };
        end.to_rts()?;
        session.barrier()?;
        let write = |id| SendWr::new(id, Opcode::Write).sges([mr.sge(0, len)]).remote(remote.0, remote.1);
        if session.is_a() {
            mr.buffer().write(0, &pattern::bytes(seed, len));
            end.qps[0].post_send(&[write(1)])?;
            let wcs = collect_good(&end.send_cq, 1, session.stall())?;
            finding.expect(wcs[0].wr_id == 1, || format!("round {round}: {}", describe(&wcs)));
            session.barrier()?;
            session.barrier()?;
            // Its QP and its process's device are gone, whether the farewell came through or not.
            end.qps[0].post_send(&[write(2)])?;
            let wc = collect(&end.send_cq, 1, session.stall())?[0];
            let right = (wc.wr_id, wc.status) == (2, IBV_WC_RETRY_EXC_ERR);
            finding
                .expect(right, || format!("round {round}: after the peer left: {}", status_name(wc.status)));
        } else {
            session.barrier()?;
            finding.expect_bytes(&mr, 0, seed, len, &format!("round {round}, written"));
            finding.expect_empty(&mr, len, PLACE - len, &format!("round {round}, behind the Write"));
            drop((mr, end));
            session.barrier()?;
        }
        session.barrier()?;
    }
    finding.tell(session, "data while the peer is there, RETRY_EXC_ERR afterwards", rounds);
    session.barrier()
}
