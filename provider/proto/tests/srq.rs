//! Shared receive queues, and states of queue pairs beside the straight way to RTS.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::*;
use net::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
const LEN: u32 = 64;

fn srq(net: &mut Net, host: usize, max_wr: u32) -> SrqId {
    net.hosts[host].ep.create_srq(1, max_wr).unwrap()
}

fn post(net: &mut Net, host: usize, srq: SrqId, ids: impl IntoIterator<Item = u64>, key: u32) {
    let mut batch = RecvBatch::default();
    for wr_id in ids {
        batch.wqes.push(RecvWqe { wr_id, num_sge: 1 });
        batch.sges.push(sge(wr_id % 1024 * 4096, 4096, key));
    }
    let h = &mut net.hosts[host];
    h.ep.post_srq_recvs(net.now, srq, &mut batch, &mut h.log);
}

/// A connected pair whose second QP takes its receives from the SRQ of host 1.
fn pair_on(net: &mut Net, srq: SrqId, qp_type: QpType) -> (Qpn, Qpn) {
    let (a, b) = (net.qp_of(0, qp_type, None), net.qp_of(1, qp_type, Some(srq)));
    net.make_rtr(0, a, 1, b);
    net.make_rtr(1, b, 0, a);
    net.make_rts(0, a, 14, 7, 7);
    net.make_rts(1, b, 14, 7, 7);
    (a, b)
}

fn received(net: &Net) -> Vec<(u64, WcStatus)> {
    net.hosts[1].log.completions.iter().filter(|c| c.0 == 2).map(|c| (c.1.wr_id, c.1.status)).collect()
}

fn count(net: &Net, host: usize, event: Event) -> usize {
    net.hosts[host].log.events.iter().filter(|e| **e == event).count()
}

/// Lets message 0 of a fresh stream vanish, so that message 1 binds two receives and completes none.
fn bind_two(net: &mut Net, from: Qpn, key: u32) {
    // Make the connection first, with a Write that touches no receive.
    let mut first = wr(99, Opcode::Write, 0, 0);
    first.flags = send_flags::SIGNALED;
    net.send(0, from, first, &[]);
    net.run_until(SECOND, "connected", |n| !n.hosts[0].log.completions.is_empty());
    let mut data = 0;
    net.filter = Some(Box::new(move |from, _, bytes| {
        let dropped = from == 0 && wire::is_data(bytes);
        data += u32::from(dropped);
        // All but the second data packet are lost.
        dropped && data != 2
    }));
    net.send(0, from, wr(1, Opcode::Send, LEN, 1), &[sge(0, LEN, key)]);
    net.flush();
    net.send(0, from, wr(2, Opcode::Send, LEN, 1), &[sge(0, LEN, key)]);
    net.run(MS / 2);
    assert_eq!(received(net), []);
}

/// Proves MR-CREDIT-4.
#[test]
fn reset__bound_receives_go_back_in_order() {
    let mut net = Net::new(2, 5);
    let (ka, kb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 8 << 20));
    let s = srq(&mut net, 1, 16);
    post(&mut net, 1, s, 10..14, kb);
    let (a, b) = pair_on(&mut net, s, QpType::Rc);
    bind_two(&mut net, a, ka);
    net.hosts[1].ep.destroy_qp(net.now, b).unwrap();
    net.filter = None;
    let (a, _) = pair_on(&mut net, s, QpType::Rc);
    for i in 0..4 {
        net.send(0, a, wr(i, Opcode::Send, LEN, 1), &[sge(0, LEN, ka)]);
    }
    net.run(100 * MS);
    let ids: Vec<u64> = received(&net).iter().map(|c| c.0).collect();
    assert_eq!(ids, [10, 11, 12, 13]);
}

/// Proves MR-CREDIT-4.
#[test]
fn error__untouched_receives_go_back_and_touched_ones_are_flushed() {
    let mut net = Net::new(2, 6);
    let (ka, kb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 8 << 20));
    let s = srq(&mut net, 1, 16);
    post(&mut net, 1, s, 10..13, kb);
    let (a, b) = pair_on(&mut net, s, QpType::Rc);
    bind_two(&mut net, a, ka);
    net.modify(1, b, QpModify { state: Some(QpState::Err), ..Default::default() });
    net.modify(1, b, QpModify { state: Some(QpState::Err), ..Default::default() });
    // Message 1 was placed into receive 11; receive 10 was only bound.
    assert_eq!(received(&net), [(11, WcStatus::WrFlushErr)]);
    assert_eq!(count(&net, 1, Event::LastWqeReached(b)), 1);
    net.filter = None;
    let (a, _) = pair_on(&mut net, s, QpType::Rc);
    for i in 0..2 {
        net.send(0, a, wr(i, Opcode::Send, LEN, 1), &[sge(0, LEN, ka)]);
    }
    net.run(100 * MS);
    let ok = WcStatus::Success;
    assert_eq!(received(&net)[1..], [(10, ok), (12, ok)]);
}

#[test]
fn limit__once_per_arm_for_every_transport() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut net = Net::new(2, 7);
        let (ka, kb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 8 << 20));
        let s = srq(&mut net, 1, 16);
        post(&mut net, 1, s, 0..8, kb);
        net.hosts[1].ep.modify_srq(s, None, Some(6)).unwrap();
        let (a, _) = pair_on(&mut net, s, qp_type);
        let send = |net: &mut Net, id: u64| {
            let before = received(net).len();
            net.send(0, a, wr(id, Opcode::Send, LEN, 1), &[sge(0, LEN, ka)]);
            net.run_until(SECOND, "received", |n| received(n).len() > before);
        };
        send(&mut net, 0);
        send(&mut net, 1);
        assert_eq!(count(&net, 1, Event::SrqLimit(s)), 0, "{qp_type:?}: 6 left is not below 6");
        send(&mut net, 2);
        send(&mut net, 3);
        assert_eq!(count(&net, 1, Event::SrqLimit(s)), 1, "{qp_type:?}");
        assert_eq!(net.hosts[1].ep.srq_limit(s), Ok(0), "disarmed");
        net.hosts[1].ep.modify_srq(s, None, Some(4)).unwrap();
        send(&mut net, 4);
        send(&mut net, 5);
        assert_eq!(count(&net, 1, Event::SrqLimit(s)), 2, "{qp_type:?}");
    }
}

#[test]
fn limit__armed_on_an_empty_queue_is_told_when_a_message_comes() {
    let mut net = Net::new(2, 8);
    let (ka, kb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 8 << 20));
    let s = srq(&mut net, 1, 16);
    net.hosts[1].ep.modify_srq(s, None, Some(1)).unwrap();
    let (a, _) = pair_on(&mut net, s, QpType::Rc);
    net.send(0, a, wr(1, Opcode::Send, LEN, 1), &[sge(0, LEN, ka)]);
    net.run(10 * MS);
    assert_eq!(count(&net, 1, Event::SrqLimit(s)), 1);
    post(&mut net, 1, s, 0..1, kb);
    net.run_until(SECOND, "received", |n| received(n).len() == 1);
}

#[test]
fn modify__below_what_is_posted_is_refused() {
    let mut net = Net::new(2, 9);
    let kb = net.mr(1, 0, 8 << 20);
    let s = srq(&mut net, 1, 16);
    post(&mut net, 1, s, 0..8, kb);
    let ep = &mut net.hosts[1].ep;
    assert_eq!(ep.modify_srq(s, Some(7), None), Err(Refused::Invalid));
    assert_eq!(ep.modify_srq(s, Some(8), Some(9)), Err(Refused::Invalid));
    assert_eq!(ep.srq_limit(s), Ok(0), "nothing has changed");
    assert_eq!(ep.modify_srq(s, Some(8), Some(8)), Ok(()));
    assert_eq!(ep.modify_srq(s, Some(64), None), Ok(()));
}

#[test]
fn refused_once__the_stream_runs_at_full_speed_again() {
    let mut net = Net::new(2, 10);
    let (ka, kb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 8 << 20));
    let s = srq(&mut net, 1, 256);
    let (a, _) = pair_on(&mut net, s, QpType::Rc);
    for i in 0..101 {
        net.send(0, a, wr(i, Opcode::Send, LEN, 1), &[sge(0, LEN, ka)]);
    }
    net.run(5 * MS);
    assert!(received(&net).is_empty());
    post(&mut net, 1, s, 0..200, kb);
    net.run_until(SECOND, "the first", |n| !received(n).is_empty());
    let begin = net.now;
    net.run_until(SECOND, "all", |n| received(n).len() == 101);
    // One at a time they would take 100 round trips of 20 us.
    assert!(net.now - begin < MS, "{} us", (net.now - begin) / 1000);
}

#[test]
fn few_receives__all_streams_get_their_share() {
    let mut net = Net::new(2, 11);
    let (ka, kb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 8 << 20));
    let s = srq(&mut net, 1, 4);
    let senders: Vec<Qpn> = (0..8).map(|_| pair_on(&mut net, s, QpType::Rc).0).collect();
    for i in 0..20 {
        for (q, a) in senders.iter().enumerate() {
            net.send(0, *a, wr(q as u64 * 100 + i, Opcode::Send, LEN, 1), &[sge(0, LEN, ka)]);
        }
    }
    // Two receives at a time, reposted as they complete.
    post(&mut net, 1, s, 0..2, kb);
    let mut seen = 0;
    net.run_until(60 * SECOND, "all received", |n| {
        let got = received(n).len();
        post(n, 1, s, (seen..got).map(|i| i as u64), kb);
        seen = got;
        got == 160
    });
    assert!(received(&net).iter().all(|c| c.1 == WcStatus::Success));
}

#[test]
fn sqd__datagrams_wait_and_leave_after_rts() {
    let mut net = Net::new(2, 12);
    let (ka, kb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 8 << 20));
    let (a, b) = (net.qp_of(0, QpType::Ud, None), net.qp_of(1, QpType::Ud, None));
    for (host, qp) in [(0, a), (1, b)] {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            net.modify(host, qp, QpModify { state: Some(state), qkey: Some(7), ..Default::default() });
        }
    }
    net.recv(1, b, 5, sge(0, 4096, kb));
    net.modify(0, a, QpModify { state: Some(QpState::Sqd), ..Default::default() });
    assert_eq!(count(&net, 0, Event::SqDrained(a)), 1);
    let mut send = wr(1, Opcode::Send, LEN, 1);
    send.dest = Some(Destination { ip: net.hosts[1].ip, qpn: b, qkey: 7 });
    net.send(0, a, send, &[sge(0, LEN, ka)]);
    net.run(10 * MS);
    assert!(received(&net).is_empty() && net.hosts[0].log.completions.is_empty());
    net.modify(0, a, QpModify { state: Some(QpState::Rts), ..Default::default() });
    net.run(10 * MS);
    assert_eq!(received(&net), [(5, WcStatus::Success)]);
}

#[test]
fn sqe__comes_back_with_rts() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut net = Net::new(2, 13);
        let (ka, kb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 8 << 20));
        let (a, b) = (net.qp_of(0, qp_type, None), net.qp_of(1, qp_type, None));
        net.make_rtr(0, a, 1, b);
        net.make_rtr(1, b, 0, a);
        net.make_rts(0, a, 14, 7, 7);
        net.make_rts(1, b, 14, 7, 7);
        net.recv(1, b, 5, sge(0, 4096, kb));
        let dest = (qp_type == QpType::Ud).then_some(Destination { ip: net.hosts[1].ip, qpn: b, qkey: 0 });
        let send = |net: &mut Net, id: u64, key: u32| {
            let request = SendWqe { dest, ..wr(id, Opcode::Send, LEN, 1) };
            net.send(0, a, request, &[sge(0, LEN, key)]);
            net.run(10 * MS);
        };
        let bad_key = ka ^ 1;
        send(&mut net, 1, bad_key);
        assert_eq!(net.hosts[0].ep.qp_state(a), Some(QpState::Sqe), "{qp_type:?}");
        send(&mut net, 2, ka);
        net.modify(0, a, QpModify { state: Some(QpState::Rts), ..Default::default() });
        send(&mut net, 3, ka);
        let sent: Vec<_> = net.hosts[0].log.completions.iter().map(|c| (c.1.wr_id, c.1.status)).collect();
        let expected = [(1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr), (3, WcStatus::Success)];
        assert_eq!(sent, expected, "{qp_type:?}");
        assert_eq!(received(&net), [(5, WcStatus::Success)], "{qp_type:?}");
    }
}

#[test]
fn fail_cq__ends_the_queue_pairs_on_it_and_no_others() {
    let mut net = Net::new(2, 14);
    let kb = net.mr(0, 0, 8 << 20);
    let (a, _) = net.pair(0, 1);
    let fresh = net.qp(0, None);
    net.recv(0, a, 5, sge(0, 64, kb));
    let h = &mut net.hosts[0];
    h.ep.fail_cq(net.now, 3, &mut h.log);
    assert_eq!(h.ep.qp_state(a), Some(QpState::Rts), "another CQ");
    h.ep.fail_cq(net.now, 2, &mut h.log);
    assert_eq!(h.ep.qp_state(a), Some(QpState::Err));
    assert_eq!(h.ep.qp_state(fresh), Some(QpState::Reset));
    assert_eq!(h.log.completions.len(), 1, "the receive is flushed");
}
