//! Who is who: restarts, reset QPs, simultaneous opens, lost handshakes. Right data or the right error, never a byte
//! or a completion of a former life. Rounds and first seed: METAROCE_ROUNDS (100 here, 1,000 in the soak) and
//! METAROCE_SEED.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::*;
use net::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|s| s.parse().ok()).unwrap_or(default)
}

/// Runs `round` with many seeds.
fn rounds(round: impl Fn(u64)) {
    let (first, count) = (number("METAROCE_SEED", 1), number("METAROCE_ROUNDS", 100));
    println!("seeds {first}..{}", first + count);
    (first..first + count).for_each(round);
}

fn write(id: u64, len: u32, offset: u64, rkey: u32) -> SendWqe {
    SendWqe { remote_addr: MEM_BASE + offset, rkey, ..wr(id, Opcode::Write, len, 1) }
}

fn sent(net: &Net, host: usize) -> Vec<(u64, WcStatus)> {
    net.hosts[host].log.completions.iter().filter(|c| c.0 == 1).map(|c| (c.1.wr_id, c.1.status)).collect()
}

/// Delays packets of one direction by up to `span`.
fn faults(net: &mut Net) {
    net.faults = Faults {
        loss: [0.0, 0.02, 0.1][net.below(3) as usize],
        dup: [0.0, 0.1][net.below(2) as usize],
        reorder: [0.0, 0.1, 0.5][net.below(3) as usize],
        delay_ns: 1_000 + net.below(200_000),
    };
}

/// Proves MR-RESET-2.
#[test]
fn peer_restarts_under_load__old_streams_fail_new_ones_work() {
    rounds(|seed| {
        let mut net = Net::new(2, seed);
        faults(&mut net);
        let (qa, _) = net.pair(0, 1);
        let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        for i in 0..4 {
            net.send(0, qa, write(i, 200_000, 0, rb), &[sge(0, 200_000, la)]);
        }
        let under_way = net.below(3 * MS);
        net.run(under_way);
        net.restart(1);
        net.hosts[1].mem.0.fill(0x55);
        // The new process offers a region of its own at once; nothing of the old stream may land in it.
        let rb2 = net.mr(1, 0, 1 << 20);
        net.run(2 * SECOND);
        let log = sent(&net, 0);
        assert_eq!(log.len(), 4, "seed {seed}");
        let good = log.iter().take_while(|c| c.1 == WcStatus::Success).count();
        for (i, c) in log.iter().enumerate().skip(good) {
            let want = if i == good { WcStatus::RetryExcErr } else { WcStatus::WrFlushErr };
            assert_eq!(c.1, want, "seed {seed}: {log:?}");
        }
        if rb2 != rb {
            assert!(net.hosts[1].mem.0.iter().all(|b| *b == 0x55), "seed {seed}: a former life wrote");
        }
        let (qa, _) = net.pair(0, 1);
        net.hosts[0].mem.0[..1000].fill(7);
        net.send(0, qa, write(9, 1000, 0, rb2), &[sge(0, 1000, la)]);
        net.run_until(5 * SECOND, &format!("seed {seed}: new stream"), |n| sent(n, 0).len() == 5);
        assert_eq!(sent(&net, 0)[4], (9, WcStatus::Success), "seed {seed}");
        assert!(net.hosts[1].mem.0[..1000].iter().all(|b| *b == 7), "seed {seed}");
    });
}

/// Both QPs go through RESET and come back while packets of the former stream are still under way.
/// Proves MR-ADDR-5.
#[test]
fn reset_to_rts__packets_of_the_former_life_do_nothing() {
    rounds(|seed| {
        let mut net = Net::new(2, seed);
        faults(&mut net);
        net.faults.reorder = 0.5;
        let (qa, qb) = net.pair(0, 1);
        let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        net.hosts[0].mem.0[..100_000].fill(1);
        for i in 0..5 {
            net.recv(1, qb, i, sge(0, 100_000, lb));
            net.send(0, qa, wr(i, Opcode::Send, 100_000, 1), &[sge(0, 100_000, la)]);
        }
        let under_way = net.below(40 * net.faults.delay_ns);
        net.run(under_way);
        let (first, second) = if seed % 2 == 0 { ((0, qa), (1, qb)) } else { ((1, qb), (0, qa)) };
        for (host, qp) in [first, second] {
            net.modify(host, qp, QpModify { state: Some(QpState::Reset), ..Default::default() });
        }
        for h in 0..2 {
            net.hosts[h].log.completions.clear();
        }
        net.hosts[1].mem.0[..1 << 20].fill(0);
        net.make_rtr(0, qa, 1, qb);
        net.make_rtr(1, qb, 0, qa);
        net.make_rts(0, qa, 14, 7, 7);
        net.make_rts(1, qb, 14, 7, 7);
        net.hosts[0].mem.0[..100_000].fill(2);
        for i in 10..13u64 {
            net.recv(1, qb, i, sge((i - 10) * 100_000, 100_000, lb));
            net.send(0, qa, wr(i, Opcode::Send, 50_000 + i as u32, 1), &[sge(0, 50_000 + i as u32, la)]);
        }
        net.run_until(10 * SECOND, &format!("seed {seed}"), |n| sent(n, 0).len() == 3);
        let got: Vec<(u64, u32, WcStatus)> = net.hosts[1]
            .log
            .completions
            .iter()
            .filter(|c| c.0 == 2)
            .map(|c| (c.1.wr_id, c.1.byte_len, c.1.status))
            .collect();
        let want: Vec<_> = (10..13).map(|i| (i, 50_000 + i as u32, WcStatus::Success)).collect();
        assert_eq!(got, want, "seed {seed}");
        for i in 0..3usize {
            let bytes = &net.hosts[1].mem.0[i * 100_000..i * 100_000 + 50_010 + i];
            assert!(bytes.iter().all(|b| *b == 2), "seed {seed}: receive {i}");
        }
    });
}

/// The same QPs through life after life, each cut off in the middle, with packets delayed for longer than it takes.
#[test]
fn many_lives__each_begins_well() {
    rounds(|seed| {
        let mut net = Net::new(2, seed);
        net.faults = Faults { loss: 0.02, dup: 0.1, reorder: 0.3, delay_ns: 2 * MS };
        let (qa, qb) = (net.qp(0, None), net.qp(1, None));
        let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        for life in 0..12u64 {
            for (host, qp, peer_host, peer) in [(0, qa, 1, qb), (1, qb, 0, qa)] {
                net.make_rtr(host, qp, peer_host, peer);
                net.make_rts(host, qp, 19, 7, 7);
            }
            // Every other life is cut off in the middle of six messages; the others must get three through.
            let count = if life % 2 == 0 { 6 } else { 3 };
            for i in 0..count {
                net.recv(1, qb, i, sge(i * 60_000, 60_000, lb));
            }
            for i in 0..count {
                net.send(0, qa, wr(life * 10 + i, Opcode::Send, 50_000, 1), &[sge(0, 50_000, la)]);
            }
            if life % 2 == 0 {
                let under_way = net.below(8 * MS);
                net.run(under_way);
            } else {
                net.run_until(2 * SECOND, &format!("seed {seed}, life {life}"), |n| sent(n, 0).len() == 3);
                assert!(sent(&net, 0).iter().all(|c| c.1 == WcStatus::Success), "seed {seed}, life {life}");
            }
            let hosts = if net.below(2) == 0 { [(0, qa), (1, qb)] } else { [(1, qb), (0, qa)] };
            for (host, qp) in hosts {
                net.modify(host, qp, QpModify { state: Some(QpState::Reset), ..Default::default() });
                let pause = net.below(MS);
                net.run(pause);
            }
            net.hosts.iter_mut().for_each(|h| h.log.completions.clear());
        }
    });
}

/// Packets of a former life reach a QP that has not seen that life before and is ready again: they look like a new
/// stream, and must not be taken for one.
/// Proves MR-REQ-7.
#[test]
fn former_life_that_nobody_saw__is_not_bound() {
    for (qp_type, rest) in [(QpType::Rc, 0), (QpType::Rc, MS), (QpType::Rc, 3 * MS)] {
        let mut net = Net::new(2, 7);
        let (qa, qb) = (net.qp_of(0, qp_type, None), net.qp_of(1, qp_type, None));
        let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        let begin = |net: &mut Net| {
            for (host, qp, peer_host, peer) in [(0, qa, 1, qb), (1, qb, 0, qa)] {
                net.make_rtr(host, qp, peer_host, peer);
                net.make_rts(host, qp, 19, 7, 7);
            }
        };
        let end = |net: &mut Net| {
            for (host, qp) in [(0, qa), (1, qb)] {
                net.modify(host, qp, QpModify { state: Some(QpState::Reset), ..Default::default() });
            }
        };
        // The connection is up, and the QPs have had a life each.
        begin(&mut net);
        net.send(0, qa, write(1, 100, 0, lb), &[sge(0, 100, la)]);
        net.run_until(SECOND, "warm", |n| sent(n, 0).len() == 1);
        end(&mut net);
        net.faults.delay_ns = 2 * MS;
        begin(&mut net);
        net.hosts[0].mem.0[..50_000].fill(1);
        net.send(0, qa, wr(2, Opcode::Send, 50_000, 1), &[sge(0, 50_000, la)]);
        net.run(MS / 2);
        end(&mut net);
        begin(&mut net);
        net.recv(1, qb, 70, sge(500_000, 100_000, lb));
        net.recv(1, qb, 71, sge(600_000, 100_000, lb));
        net.run(rest);
        net.hosts[0].mem.0[..50_000].fill(2);
        net.send(0, qa, wr(3, Opcode::Send, 40_000, 1), &[sge(0, 40_000, la)]);
        net.run_until(5 * SECOND, &format!("rest {rest}"), |n| sent(n, 0).len() == 2);
        assert_eq!(sent(&net, 0)[1], (3, WcStatus::Success));
        let got: Vec<_> = net.hosts[1].log.completions.iter().map(|c| (c.1.wr_id, c.1.byte_len)).collect();
        assert_eq!(got, [(70, 40_000)], "rest {rest}");
        assert!(net.hosts[1].mem.0[500_000..540_000].iter().all(|b| *b == 2), "rest {rest}");
    }
}

#[test]
fn simultaneous_open__one_connection_each() {
    rounds(|seed| {
        let mut net = Net::new(2, seed);
        faults(&mut net);
        let (qa, qb) = net.pair(0, 1);
        let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        net.send(0, qa, write(1, 30_000, 0, lb), &[sge(0, 30_000, la)]);
        net.send(1, qb, write(2, 30_000, 0, la), &[sge(100_000, 30_000, lb)]);
        net.run_until(5 * SECOND, &format!("seed {seed}"), |n| sent(n, 0).len() + sent(n, 1).len() == 2);
        for h in 0..2 {
            assert_eq!(sent(&net, h)[0].1, WcStatus::Success, "seed {seed}");
            assert_eq!(net.hosts[h].ep.stats().connections, 1, "seed {seed}");
        }
    });
}

/// Handshake, RESET and CLOSE packets are lost at will; what matters comes through.
/// Proves MR-HELLO-2, MR-CLOSE-1.
#[test]
fn lost_handshakes__are_repeated() {
    rounds(|seed| {
        let mut net = Net::new(2, seed);
        let mut rng = seed;
        // Types 3 (HELLO) and 4 (RESET), and Control packets (CLOSE among them), are lost half the time.
        net.filter = Some(Box::new(move |_, _, bytes| {
            matches!(bytes[0] & 15, 2..=4) && random(&mut rng).is_multiple_of(2)
        }));
        let (qa, _) = net.pair(0, 1);
        let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        net.send(0, qa, write(1, 30_000, 0, rb), &[sge(0, 30_000, la)]);
        net.run_until(5 * SECOND, &format!("seed {seed}: open"), |n| sent(n, 0).len() == 1);
        assert_eq!(sent(&net, 0), [(1, WcStatus::Success)], "seed {seed}");
        if seed % 2 == 0 {
            let now = net.now;
            net.hosts[1].ep.close(now);
            net.run_until(50 * MS, &format!("seed {seed}: close"), |n| n.hosts[1].ep.closed());
        } else {
            net.restart(1);
            net.send(0, qa, write(2, 30_000, 0, rb), &[sge(0, 30_000, la)]);
            net.run_until(5 * SECOND, &format!("seed {seed}: reset"), |n| sent(n, 0).len() == 2);
            assert_eq!(sent(&net, 0)[1], (2, WcStatus::RetryExcErr), "seed {seed}");
        }
    });
}

#[test]
fn rnr_on_one_stream__does_not_delay_another() {
    rounds(|seed| {
        let mut net = Net::new(2, seed);
        faults(&mut net);
        let (qa, qb) = net.pair(0, 1);
        let (qc, _) = net.pair(0, 1);
        let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        for i in 0..8 {
            net.send(0, qa, wr(i, Opcode::Send, 20_000, 1), &[sge(0, 20_000, la)]);
        }
        for i in 100..120 {
            net.send(0, qc, write(i, 20_000, 0, lb), &[sge(0, 20_000, la)]);
        }
        net.run_until(5 * SECOND, &format!("seed {seed}: writes"), |n| sent(n, 0).len() == 20);
        assert!(sent(&net, 0).iter().all(|c| c.0 >= 100), "seed {seed}");
        for i in 0..8 {
            net.recv(1, qb, i, sge(i * 20_000, 20_000, lb));
            let pause = net.below(4 * MS);
            net.run(pause);
        }
        net.run_until(5 * SECOND, &format!("seed {seed}: sends"), |n| sent(n, 0).len() == 28);
        let order: Vec<u64> = sent(&net, 0)[20..].iter().map(|c| c.0).collect();
        assert_eq!(order, (0..8).collect::<Vec<_>>(), "seed {seed}");
    });
}

/// One receive is left on an SRQ and two messages of a stream arrive the wrong way round.
#[test]
fn srq_with_one_receive__goes_to_the_first_message() {
    rounds(|seed| {
        let mut net = Net::new(2, seed);
        faults(&mut net);
        net.faults.reorder = 0.5;
        let srq = net.hosts[1].ep.create_srq(1, 64).unwrap();
        let (qa, qb) = (net.qp(0, None), net.qp(1, Some(srq)));
        net.make_rtr(0, qa, 1, qb);
        net.make_rtr(1, qb, 0, qa);
        net.make_rts(0, qa, 14, 7, 7);
        net.make_rts(1, qb, 14, 7, 7);
        let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        let post = |net: &mut Net, id: u64| {
            let mut batch = RecvBatch {
                wqes: vec![RecvWqe { wr_id: id, num_sge: 1 }],
                sges: vec![sge(id * 1000, 1000, lb)],
            };
            let now = net.now;
            let h = &mut net.hosts[1];
            h.ep.post_srq_recvs(now, srq, &mut batch, &mut h.log);
        };
        post(&mut net, 0);
        net.hosts[0].mem.0[..1000].fill(1);
        net.hosts[0].mem.0[1000..2000].fill(2);
        net.send(0, qa, wr(1, Opcode::Send, 900, 1), &[sge(0, 900, la)]);
        net.send(0, qa, wr(2, Opcode::Send, 800, 1), &[sge(1000, 800, la)]);
        net.run(20 * MS);
        post(&mut net, 1);
        net.run_until(5 * SECOND, &format!("seed {seed}"), |n| sent(n, 0).len() == 2);
        let got: Vec<(u64, u32)> =
            net.hosts[1].log.completions.iter().map(|c| (c.1.wr_id, c.1.byte_len)).collect();
        assert_eq!(got, [(0, 900), (1, 800)], "seed {seed}");
        let mem = &net.hosts[1].mem.0;
        assert!(mem[..900].iter().all(|b| *b == 1) && mem[1000..1800].iter().all(|b| *b == 2), "seed {seed}");
    });
}

#[test]
fn qp_to_itself__under_faults() {
    rounds(|seed| {
        let mut net = Net::new(1, seed);
        faults(&mut net);
        let q = net.qp(0, None);
        net.make_rtr(0, q, 0, q);
        net.make_rts(0, q, 14, 7, 7);
        let l = net.mr(0, 0, 1 << 20);
        net.hosts[0].mem.0[..50_000].fill(4);
        net.recv(0, q, 50, sge(200_000, 100_000, l));
        net.send(0, q, wr(1, Opcode::Send, 50_000, 1), &[sge(0, 50_000, l)]);
        net.send(
            0,
            q,
            SendWqe { opcode: Opcode::Read, ..write(2, 50_000, 200_000, l) },
            &[sge(400_000, 50_000, l)],
        );
        net.run_until(5 * SECOND, &format!("seed {seed}"), |n| sent(n, 0).len() == 2);
        assert!(sent(&net, 0).iter().all(|c| c.1 == WcStatus::Success), "seed {seed}");
        assert!(net.hosts[0].mem.0[400_000..450_000].iter().all(|b| *b == 4), "seed {seed}");
    });
}
