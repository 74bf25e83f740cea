//! Limits of Reads and atomics: a requester that keeps to `max_rd_atomic` is never accused, whatever the network does;
//! one that exceeds the responder's `max_dest_rd_atomic` ends with REM_INV_REQ_ERR at the message that is one too many.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::*;
use net::*;

const SECOND: u64 = 1_000_000_000;
const BYTES: u32 = 3000;

/// Two QPs in RTS; `a` may have `requester` Reads outstanding, `b` serves `responder`.
fn pair(net: &mut Net, requester: u8, responder: u8) -> (Qpn, Qpn) {
    let (qa, qb) = (net.qp(0, None), net.qp(1, None));
    net.make_rtr(0, qa, 1, qb);
    net.make_rtr(1, qb, 0, qa);
    net.make_rts(0, qa, 14, 7, 7);
    net.make_rts(1, qb, 14, 7, 7);
    net.modify(0, qa, QpModify { max_rd_atomic: Some(requester), ..Default::default() });
    net.modify(1, qb, QpModify { max_dest_rd_atomic: Some(responder), ..Default::default() });
    (qa, qb)
}

fn request(id: u64, opcode: Opcode, length: u32, rkey: u32) -> SendWqe {
    SendWqe { remote_addr: MEM_BASE, rkey, ..wr(id, opcode, length, 1) }
}

/// Proves MR-REQ-4.
#[test]
fn excess__ends_at_the_message_that_is_one_too_many() {
    for (opcode, length) in [(Opcode::Read, BYTES), (Opcode::FetchAdd, 8), (Opcode::CompareSwap, 8)] {
        for most in 1..4u64 {
            let mut net = Net::new(2, most);
            let (qa, qb) = pair(&mut net, 8, most as u8);
            let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
            for id in 0..8 {
                net.send(0, qa, request(id, opcode, length, rb), &[sge(id * 4096, length, la)]);
            }
            net.run_until(SECOND, "all complete", |n| statuses(n, 0, 1).len() == 8);
            let want: Vec<(u64, WcStatus)> = (0..8)
                .map(|id| match id {
                    id if id < most => (id, WcStatus::Success),
                    id if id == most => (id, WcStatus::RemInvReqErr),
                    _ => (id, WcStatus::WrFlushErr),
                })
                .collect();
            assert_eq!(statuses(&net, 0, 1), want, "{opcode:?}, {most} served");
            assert!(net.hosts[1].log.events.contains(&Event::QpReqErr(qb)), "{opcode:?}");
        }
    }
}

/// Whatever arrives first, everything before the error is right, and the error is the right one.
#[test]
fn excess__under_faults_right_data_or_the_right_error() {
    for seed in 1..200 {
        let mut net = Net::new(2, seed);
        net.faults = Faults { loss: 0.05, dup: 0.05, reorder: 0.5, delay_ns: 50_000 };
        let (qa, _) = pair(&mut net, 8, 2);
        let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        net.hosts[1].mem.0[..BYTES as usize].fill(9);
        for id in 0..8 {
            net.send(0, qa, request(id, Opcode::Read, BYTES, rb), &[sge(id * 4096, BYTES, la)]);
        }
        net.run_until(5 * SECOND, &format!("seed {seed}"), |n| statuses(n, 0, 1).len() == 8);
        let got = statuses(&net, 0, 1);
        let good = got.iter().take_while(|c| c.1 == WcStatus::Success).count();
        for (id, (_, status)) in got.iter().enumerate() {
            let at = id * 4096;
            let want = match id {
                _ if id < good => WcStatus::Success,
                _ if id == good => WcStatus::RemInvReqErr,
                _ => WcStatus::WrFlushErr,
            };
            assert_eq!(*status, want, "seed {seed}: {got:?}");
            let whole = net.hosts[0].mem.0[at..at + BYTES as usize].iter().all(|b| *b == 9);
            assert!(whole || id >= good, "seed {seed}: Read {id}");
        }
        assert!(good >= 2, "seed {seed}: {got:?}");
    }
}

/// Proves MR-RESP-3.
#[test]
fn honest_requester__is_never_accused() {
    for seed in 1..400 {
        let mut net = Net::new(2, seed);
        net.faults = Faults {
            loss: [0.0, 0.02, 0.1][net.below(3) as usize],
            dup: [0.0, 0.1][net.below(2) as usize],
            reorder: [0.0, 0.1, 0.5][net.below(3) as usize],
            delay_ns: 1_000 + net.below(200_000),
        };
        let most = 1 + net.below(4) as u8;
        let (qa, qb) = pair(&mut net, most, most);
        let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        let mut sends = 0;
        for id in 0..60 {
            // Sends between, some of them refused for lack of a receive: what follows them is sent again.
            let (opcode, length) = match net.below(5) {
                0 => (Opcode::FetchAdd, 8),
                1 => (Opcode::Send, 500),
                2 => (Opcode::Read, 0),
                _ => (Opcode::Read, 1 + net.below(20_000) as u32),
            };
            sends += u64::from(opcode == Opcode::Send);
            net.send(0, qa, request(id, opcode, length, rb), &[sge(0, length, la)]);
            if net.below(4) == 0 {
                let pause = net.below(100_000);
                net.run(pause);
            }
        }
        for id in 0..sends {
            net.recv(1, qb, id, sge(1 << 19, 500, rb));
            let pause = net.below(1_000_000);
            net.run(pause);
        }
        net.run_until(10 * SECOND, &format!("seed {seed}"), |n| statuses(n, 0, 1).len() == 60);
        let got = statuses(&net, 0, 1);
        assert!(got.iter().all(|c| c.1 == WcStatus::Success), "seed {seed}, limit {most}: {got:?}");
    }
}
