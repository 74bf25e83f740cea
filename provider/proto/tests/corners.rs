//! Corner cases where a message could end with the wrong success, or never: refusals that overlap, streams that one
//! side forgot, two addresses of one peer, a dead path under a ping-pong, faults in shared packets.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::*;
use net::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

#[test]
fn responder_reset_alone__write_does_not_succeed() {
    let mut net = Net::new(2, 1);
    let (qa, qb) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.hosts[0].mem.0[..1000].fill(7);
    let mut w = wr(1, Opcode::Write, 1000, 1);
    (w.remote_addr, w.rkey) = (MEM_BASE, rb);
    net.send(0, qa, w, &[sge(0, 1000, la)]);
    net.run(20 * MS);
    net.hosts[1].mem.0[..1000].fill(0);
    net.modify(1, qb, QpModify { state: Some(QpState::Reset), ..Default::default() });
    net.make_rtr(1, qb, 0, qa);
    net.make_rts(1, qb, 14, 7, 7);
    w.wr_id = 2;
    net.send(0, qa, w, &[sge(0, 1000, la)]);
    net.run(2 * SECOND);
    let ok = statuses(&net, 0, 1).last() == Some(&(2, WcStatus::Success));
    assert!(!(ok && net.hosts[1].mem.0[0] != 7), "SUCCESS but not placed");
}

#[test]
fn two_refusals__the_earlier_message_is_not_lost() {
    let mut net = Net::new(2, 2);
    let (qa, qb) = (net.qp(0, None), net.qp(1, None));
    net.make_rtr(0, qa, 1, qb);
    net.make_rtr(1, qb, 0, qa);
    net.make_rts(0, qa, 14, 7, 7);
    net.make_rts(1, qb, 14, 7, 7);
    net.modify(1, qb, QpModify { access: Some(0), ..Default::default() });
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    // lose the first data packet (the Send) once
    let mut first = true;
    net.filter = Some(Box::new(move |from, _, b| {
        let hit = from == 0 && first && metaroce_proto::wire::is_data(b);
        if hit {
            first = false;
        }
        hit
    }));
    net.send(0, qa, wr(1, Opcode::Send, 3_000, 1), &[sge(0, 3_000, la)]);
    net.flush();
    let mut w = wr(2, Opcode::Write, 10_000, 1);
    (w.remote_addr, w.rkey) = (MEM_BASE, rb);
    net.send(0, qa, w, &[sge(0, 10_000, la)]);
    net.run(3 * SECOND);
    assert!(
        statuses(&net, 0, 1).first() != Some(&(1, WcStatus::Success)),
        "Send SUCCESS though no receive was posted"
    );
}

#[test]
fn refusal_and_error__lost_write_does_not_succeed() {
    let mut net = Net::new(2, 2);
    let (qa, qb) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    let on = std::rc::Rc::new(std::cell::Cell::new(true));
    let f = on.clone();
    // every packet carrying the write (big) is lost while `on`
    net.filter = Some(Box::new(move |from, _, b| f.get() && from == 0 && b.len() > 1000));
    net.hosts[0].mem.0[..2900].fill(7);
    let mut w = wr(1, Opcode::Write, 2900, 1);
    (w.remote_addr, w.rkey) = (MEM_BASE, rb);
    net.send(0, qa, w, &[sge(0, 2900, la)]);
    net.flush();
    net.send(0, qa, wr(2, Opcode::Send, 100, 1), &[sge(0, 100, la)]);
    net.run(100_000);
    net.modify(1, qb, QpModify { state: Some(QpState::Err), ..Default::default() });
    on.set(false);
    net.run(3 * SECOND);
    assert!(
        !(statuses(&net, 0, 1).first() == Some(&(1, WcStatus::Success)) && net.hosts[1].mem.0[0] != 7),
        "Write SUCCESS, not placed"
    );
}

#[test]
fn responder_destroyed_under_a_read__read_ends() {
    let mut net = Net::new(2, 3);
    let (qa, qb) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 4 << 20), net.mr(1, 0, 4 << 20));
    net.run(5 * MS);
    let on = std::rc::Rc::new(std::cell::Cell::new(true));
    let f = on.clone();
    net.filter = Some(Box::new(move |from, _, b| f.get() && from == 1 && b.len() > 1200));
    let mut r = wr(1, Opcode::Read, 1 << 20, 1);
    (r.remote_addr, r.rkey) = (MEM_BASE, rb);
    net.send(0, qa, r, &[sge(0, 1 << 20, la)]);
    net.send(0, qa, wr(2, Opcode::Send, 100, 1), &[sge(0, 100, la)]);
    net.run(10 * MS);
    net.recv(1, qb, 9, sge(0, 100, rb));
    net.run(10 * MS);
    let now = net.now;
    net.hosts[1].ep.destroy_qp(now, qb).unwrap();
    on.set(false);
    net.run(60 * SECOND);
    assert_eq!(statuses(&net, 0, 1).len(), 2, "Read hangs (60 s virtual)");
}

#[test]
fn many_streams_without_receives__others_go_on() {
    let mut net = Net::new(2, 4);
    let (qw, _) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 8 << 20), net.mr(1, 0, 8 << 20));
    for i in 0..40 {
        let (qa, qb) = net.pair(0, 1);
        net.modify(1, qb, QpModify { min_rnr_timer: Some(12), ..Default::default() });
        net.send(0, qa, wr(i, Opcode::Send, 100, 1), &[sge(0, 100, la)]);
    }
    let t = net.now;
    for i in 0..60 {
        let mut w = wr(100 + i, Opcode::Write, 4 << 20, 1);
        (w.remote_addr, w.rkey) = (MEM_BASE, rb);
        net.send(0, qw, w, &[sge(0, 4 << 20, la)]);
    }
    net.run_until(20 * SECOND, "writes", |n| {
        n.hosts[0].log.completions.iter().filter(|c| c.1.wr_id >= 100).count() == 60
            || n.now > t + 10 * SECOND
    });
    let done = net.hosts[0].log.completions.iter().filter(|c| c.1.wr_id >= 100).count();
    let mut p = Vec::new();
    net.hosts[0].ep.path_stats(&mut p);
    println!(
        "240 MiB: {done} of 60 writes in {} ms; retransmits {}; others {:?}",
        (net.now - t) / MS,
        p.iter().map(|x| x.retransmits).sum::<u64>(),
        statuses(&net, 0, 1).iter().filter(|c| c.0 < 100).map(|c| c.1).collect::<Vec<_>>()
    );
    assert_eq!(done, 60);
}

/// Proves MR-HELLO-1, MR-RESET-3.
#[test]
fn spoofed_hellos__no_amplification_and_forgotten() {
    let mut net = Net::new(1, 6);
    let h = stranger();
    let mut sent = 0;
    let mut got = 0;
    for i in 0..1000u64 {
        let mut b = Vec::new();
        wire::Header {
            kind: wire::PacketType::Hello,
            flags: 0,
            path: 0,
            generation: 0,
            dcid: 0,
            psn: 0,
            src_slot: 5,
            backlog: 0,
        }
        .write(&mut b);
        let mut h = h.clone();
        h.incarnation += i;
        h.scid += i << 24;
        h.write(0, &mut b);
        b.truncate(20 + 32 + 3 + 24 + 1);
        sent += b.len();
        let meta = RxMeta { src: "10.9.9.9:5000".parse().unwrap(), dst_ip: net.hosts[0].ip, ecn: 0 };
        let host = &mut net.hosts[0];
        host.ep.on_datagram(1_000_000, &meta, &b, &mut host.mem, &mut host.log);
        let mut burst = TxBurst::new();
        while host.ep.poll_burst(1_000_000, &mut burst, &mut host.log) {
            got += burst.total_bytes();
        }
    }
    net.run(60 * SECOND);
    assert_eq!(net.hosts[0].ep.stats().connections, 0, "strangers are forgotten");
    assert!(got as usize <= sent, "amplifier x{}", got as usize / sent);
}

#[test]
fn two_addresses_of_one_peer__one_connection() {
    let mut net = Net::new(2, 8);
    // host 1 has a second address 10.0.1.2; both are announced
    let alt: std::net::IpAddr = "10.0.1.2".parse().unwrap();
    let mut c = config(1, 1, 4711, 5);
    c.planes[0].addrs.push(alt);
    net.hosts[1].ep = Endpoint::new(c);
    net.alt = Some((alt, 1));
    let mut qs = Vec::new();
    for ip in [net.hosts[1].ip, alt] {
        let (qa, qb) = (net.qp(0, None), net.qp(1, None));
        net.make_rtr(1, qb, 0, qa);
        net.modify(0, qa, QpModify { state: Some(QpState::Init), access: Some(0xf), ..Default::default() });
        net.modify(
            0,
            qa,
            QpModify {
                state: Some(QpState::Rtr),
                dest_qpn: Some(qb),
                remote: Some(ip),
                max_dest_rd_atomic: Some(4),
                ..Default::default()
            },
        );
        net.make_rts(0, qa, 14, 7, 7);
        net.make_rts(1, qb, 14, 7, 7);
        qs.push(qa);
    }
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    for (i, q) in qs.iter().enumerate() {
        let mut w = wr(i as u64, Opcode::Write, 3000, 1);
        (w.remote_addr, w.rkey) = (MEM_BASE + 10_000 * i as u64, rb);
        net.hosts[0].mem.0[..3000].fill(7);
        net.send(0, *q, w, &[sge(0, 3000, la)]);
    }
    net.run(3 * SECOND);
    assert!(statuses(&net, 0, 1).iter().all(|c| c.1 == WcStatus::Success));
}

#[test]
fn fault_in_a_shared_packet__hits_the_right_request() {
    let mut net = Net::new(2, 11);
    let (q1, _) = net.pair(0, 1);
    let (q2, _) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    for (q, id) in [(q1, 1u64), (q2, 2)] {
        let mut w = wr(id, Opcode::Write, 100, 1);
        (w.remote_addr, w.rkey) = (MEM_BASE, rb);
        let mut b = SendBatch {
            wqes: vec![w],
            sges: vec![sge(if id == 2 { 500_000 } else { 0 }, 100, la)],
            inline: vec![],
        };
        let h = &mut net.hosts[0];
        h.ep.post_sends(net.now, q, &mut b, &mut h.log);
    }
    net.fault_at = Some(MEM_BASE + 500_000);
    net.run(2 * SECOND);
    assert!(statuses(&net, 0, 1).contains(&(1, WcStatus::Success)), "the innocent QP got LOC_PROT_ERR");
}

/// One of four paths is dead and only one message is under way at a time: no other traffic shows which path it is.
#[test]
fn dead_path__a_ping_pong_goes_on() {
    let mut net = Net::new(2, 6);
    let (qa, _) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    net.filter = Some(Box::new(move |from, _, b| from == 0 && wire::is_data(b) && b[2] == 1));
    let mut late = 0;
    for i in 0..3000 {
        let w = SendWqe { remote_addr: MEM_BASE, rkey: rb, ..wr(i, Opcode::Write, 3000, 1) };
        let begin = net.now;
        net.send(0, qa, w, &[sge(0, 3000, la)]);
        net.run_until(SECOND, "write", |n| n.hosts[0].log.completions.len() as u64 > i);
        assert_eq!(net.hosts[0].log.completions.last().map(|c| c.1.status), Some(WcStatus::Success));
        late += u32::from(net.now - begin > MS);
        net.run(10 * MS);
    }
    assert!(late <= 3, "{late} of 3000 writes waited for the dead path");
}

/// An answer never overtakes the completion of what it answers, whatever is lost: programs that wait on one completion
/// channel for both take them in this order.
/// Proves MR-FRAME-4, MR-SACK-9, MR-SACK-10.
#[test]
fn answer__comes_after_the_completion_of_its_question() {
    for (seed, loss, size) in [(7, 0.0, 4), (8, 0.0, 4096), (9, 0.0, 20_000), (10, 0.05, 4), (11, 0.05, 4096)]
    {
        let mut net = Net::new(2, seed);
        let (qa, qb) = net.pair(0, 1);
        let keys = [net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20)];
        net.run(5 * MS);
        net.faults.loss = loss;
        for round in 0..500_u64 {
            let seen = [0, 1].map(|host| net.hosts[host].log.completions.len());
            net.recv(0, qa, 2 * round, sge(500_000, size, keys[0]));
            net.recv(1, qb, 2 * round, sge(500_000, size, keys[1]));
            net.send(0, qa, wr(2 * round + 1, Opcode::Send, size, 1), &[sge(0, size, keys[0])]);
            net.run_until(SECOND, "question", |n| n.hosts[1].log.completions.len() > seen[1]);
            net.send(1, qb, wr(2 * round + 1, Opcode::Send, size, 1), &[sge(0, size, keys[1])]);
            let arrived = |n: &mut Net| n.hosts[0].log.completions.iter().any(|c| c.1.wr_id == 2 * round);
            net.run_until(SECOND, "answer", arrived);
            let order: Vec<u64> = net.hosts[0].log.completions[seen[0]..].iter().map(|c| c.1.wr_id).collect();
            assert_eq!(
                order,
                [2 * round + 1, 2 * round],
                "{size} B, {loss} lost, seed {seed}, round {round}"
            );
            // The answer's own completion, so that rounds do not mix.
            net.run_until(SECOND, "end", |n| n.hosts[1].log.completions.len() >= seen[1] + 2);
        }
    }
}

/// Proves MR-REFUSE-8, MR-ORDER-5.
#[test]
fn memory_that_is_not_there__ends_the_stream_in_its_turn() {
    // The harness' memory ends where the region goes on. A Write of several packets meets the edge in its held tail.
    let edge = 8 << 20;
    for (opcode, len, expected) in [
        (Opcode::Write, 64u32, WcStatus::RemAccessErr),
        (Opcode::Write, 20_000, WcStatus::RemAccessErr),
        (Opcode::Send, 20_000, WcStatus::RemOpErr),
        (Opcode::FetchAdd, 8, WcStatus::RemAccessErr),
    ] {
        for seed in 0..10 {
            let mut net = Net::new(2, seed);
            net.faults = Faults { loss: 0.05, dup: 0.02, reorder: 0.2, delay_ns: 20_000 };
            let (qa, qb) = net.pair(0, 1);
            let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, edge - 1_000_000, 2_000_000));
            // All but the last bytes are there; of an atomic nothing is.
            let at = edge - u64::from(len) + 8;
            let there = net.mr(1, 0, 64);
            net.recv(1, qb, 6, sge(0, 64, there));
            net.recv(1, qb, 7, sge(at, len, lb));
            let first = wr(1, Opcode::Send, 64, 1);
            net.send(0, qa, first, &[sge(0, 64, la)]);
            let w = SendWqe { remote_addr: MEM_BASE + at, rkey: lb, ..wr(2, opcode, len, 1) };
            net.send(0, qa, w, &[sge(0, len, la)]);
            net.run_until(60 * SECOND, "both", |n| statuses(n, 0, 1).len() == 2);
            let got = statuses(&net, 0, 1);
            assert_eq!(got, [(1, WcStatus::Success), (2, expected)], "seed {seed} {opcode:?}");
            let second = if opcode == Opcode::Send { WcStatus::LocProtErr } else { WcStatus::WrFlushErr };
            assert_eq!(statuses(&net, 1, 2), [(6, WcStatus::Success), (7, second)], "seed {seed} {opcode:?}");
            assert_eq!(net.hosts[1].ep.qp_state(qb), Some(QpState::Err));
        }
    }
}

/// A peer that ends while work is outstanding: what it took is complete, what it did not take ends when the QP's own
/// retries are over and not with the farewell.
/// Proves MR-CLOSE-2.
#[test]
fn farewell__ends_what_is_outstanding_only_after_the_retries() {
    for (timeout, expected) in [(14, 4096 << 14), (0, 0)] {
        let mut net = Net::new(2, 12);
        let (qa, qb) = net.pair(0, 1);
        net.make_rts(1, qb, timeout, 0, 7);
        let keys = [net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20)];
        net.recv(0, qa, 0, sge(0, 4096, keys[0]));
        for id in 1..=2 {
            net.send(1, qb, wr(id, Opcode::Send, 64, 1), &[sge(0, 64, keys[1])]);
        }
        net.run_until(SECOND, "first message", |n| !n.hosts[1].log.completions.is_empty());
        let (now, begun) = (net.now, net.now);
        net.hosts[0].ep.close(now);
        net.run_until(SECOND, "farewell", |n| n.hosts[0].ep.closed());
        let ends = |n: &mut Net| n.hosts[1].log.completions.len() == 2;
        net.run_until(SECOND, "end of the second message", ends);
        assert_eq!(statuses(&net, 1, 1), [(1, WcStatus::Success), (2, WcStatus::RetryExcErr)]);
        assert!(net.now - begun >= expected * 3 / 4, "after {} of {expected} ns", net.now - begun);
    }
}

/// What a message of several packets ends with asks for its acknowledgement: it does not wait out the ACK delay.
/// Proves MR-SACK-11.
#[test]
fn end_of_a_long_message__is_acknowledged_at_once() {
    let mut net = Net::new(2, 7);
    let (qa, _) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    let mut took = |len: u32| {
        net.run(50 * MS);
        let (from, done) = (net.now, net.hosts[0].log.completions.len());
        let mut w = wr(1, Opcode::Write, len, 1);
        (w.remote_addr, w.rkey) = (MEM_BASE, rb);
        net.send(0, qa, w, &[sge(0, len, la)]);
        net.run_until(MS, "the Write", |net| net.hosts[0].log.completions.len() > done);
        net.now - from
    };
    took(100);
    let (short, long) = (took(100), took(40_000));
    assert!(long + 20_000 < short, "{long} ns, a message of one packet {short} ns");
}
