//! Refusals and the binding of streams, seen on the wire between two endpoints in virtual time. Each test would fail if its
//! rule of docs/protocol.md were switched off.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::wire::{Frame, Header, RefuseCode};
use metaroce_proto::*;
use net::tap::*;
use net::*;

/// Proves MR-REFUSE-2.
#[test]
fn refusals_of_a_stream__stand_beside_each_other_and_are_told_until_confirmed() {
    let mut net = Net::new(2, 3);
    let (qa, qb) = net.pair(0, 1);
    net.modify(1, qb, QpModify { access: Some(0), ..Default::default() });
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    // The Send, for which there is no receive, comes after the Write behind it, which is not allowed.
    let tap = Tap::on(&mut net);
    let mut sends = 0;
    tap.drop_if(move |from, bytes| {
        let send = |frame: &Frame<'_>| matches!(frame, Frame::Request(r) if r.opcode == Opcode::Send);
        let first = from == 0 && carries(bytes, send) && sends == 0;
        sends += u32::from(first);
        first || from == 0 && carries(bytes, is_void)
    });
    net.send(0, qa, wr(1, Opcode::Send, 3000, 1), &[sge(0, 3000, la)]);
    net.flush();
    net.send(0, qa, at_far(2, Opcode::Write, 10_000, rb), &[sge(0, 10_000, la)]);
    net.run(20 * MS);
    let seen = tap.take();
    let told: Vec<_> = seen.iter().filter(|p| p.0 == 1).filter_map(|(_, bytes)| refusals(bytes)).collect();
    let both = [(RefuseCode::InvalidRequest, qa, 1), (RefuseCode::Rnr, qa, 0)];
    let since = told.iter().position(|r| r.len() == 2).expect("both are in force at once");
    assert!(told[since..].iter().all(|r| *r == both), "{told:?}");
    assert!(told.len() - since >= 3, "repeated while not confirmed");
    tap.open();
    net.run(20 * MS);
    tap.take();
    net.recv(1, qb, 5, sge(0, 4000, rb));
    net.run(20 * MS);
    let seen = tap.take();
    let last = seen.iter().filter(|p| p.0 == 1).filter_map(|(_, bytes)| refusals(bytes)).next_back();
    assert_eq!(last, Some(vec![]), "all are confirmed");
    assert_eq!(statuses(&net, 0, 1), [(1, WcStatus::Success), (2, WcStatus::RemInvReqErr)]);
}

/// Proves MR-REFUSE-2.
#[test]
fn refusals_of_one_kind__the_lowest_number_stands() {
    let mut net = Net::new(2, 4);
    let (qa, qb) = (net.qp(0, None), net.qp(1, None));
    net.make_rtr(0, qa, 1, qb);
    net.make_rts(0, qa, 14, 7, 7);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    let tap = Tap::on(&mut net);
    tap.drop_if(|from, bytes| from == 0 && (carries(bytes, is_void) || carries(bytes, is_request)));
    // The peer's QP is in RESET: of two messages in one attempt the second arrives first.
    net.run(5 * MS);
    for id in 0..2 {
        net.send(0, qa, at_far(id, Opcode::Write, 4096, rb), &[sge(0, 4096, la)]);
        net.flush();
    }
    net.run(5 * MS);
    let seen = tap.take();
    let of_message = |msn: u32| {
        let wanted = move |frame: &Frame<'_>| matches!(frame, Frame::Request(r) if r.msn == msn);
        seen.iter().find(|p| p.0 == 0 && carries(&p.1, wanted)).map(|p| p.1.clone()).expect("a request")
    };
    for msn in [1, 0] {
        inject(&mut net, 0, 1, &of_message(msn));
        net.run(100 * US);
        let answers = tap.take();
        let told = answers.iter().filter(|p| p.0 == 1).filter_map(|(_, b)| refusals(b)).next_back();
        assert_eq!(told, Some(vec![(RefuseCode::NotReady, qa, msn)]));
    }
}

/// Proves MR-REFUSE-6.
#[test]
fn rnr__a_credit_ends_the_pause_and_a_completion_the_count() {
    let mut net = Net::new(2, 5);
    let (qa, qb) = net.pair(0, 1);
    // 491 ms, and one retry.
    net.modify(1, qb, QpModify { min_rnr_timer: Some(31), ..Default::default() });
    net.modify(0, qa, QpModify { rnr_retry: Some(1), ..Default::default() });
    let (la, lb) = (net.mr(0, 0, 4096), net.mr(1, 0, 4096));
    net.run(5 * MS);
    for round in 0..5 {
        net.send(0, qa, wr(round, Opcode::Send, 100, 1), &[sge(0, 100, la)]);
        net.run(20 * MS);
        assert_eq!(statuses(&net, 0, 1).len() as u64, round, "not yet");
        net.recv(1, qb, round, sge(0, 100, lb));
        net.run(5 * MS);
        assert_eq!(statuses(&net, 0, 1).last(), Some(&(round, WcStatus::Success)));
        assert_eq!(net.hosts[1].ep.stats().rnr_sent, round + 1);
    }
}

/// Proves MR-REFUSE-10.
#[test]
fn refusals__are_at_most_24_and_nothing_is_lost_by_that() {
    const STREAMS: u64 = 40;
    let mut net = Net::new(2, 6);
    let pairs: Vec<_> = (0..STREAMS).map(|_| net.pair(0, 1)).collect();
    let (la, lb) = (net.mr(0, 0, 4096), net.mr(1, 0, 4096));
    net.run(5 * MS);
    let tap = Tap::on(&mut net);
    tap.drop_if(|from, bytes| from == 0 && carries(bytes, is_void));
    for (id, (qa, _)) in pairs.iter().enumerate() {
        net.send(0, *qa, wr(id as u64, Opcode::Send, 100, 1), &[sge(0, 100, la)]);
    }
    net.run(20 * MS);
    let told = |tap: &Tap| tap.take().iter().filter_map(|(_, b)| refusals(b)).map(|r| r.len()).max();
    assert_eq!(told(&tap), Some(24));
    tap.open();
    for (id, (_, qb)) in pairs.iter().enumerate() {
        net.recv(1, *qb, id as u64, sge(0, 100, lb));
    }
    net.run_until(SECOND, "all", |n| statuses(n, 0, 1).len() as u64 == STREAMS);
    assert!(statuses(&net, 0, 1).iter().all(|c| c.1 == WcStatus::Success));
    assert_eq!(statuses(&net, 1, 2).len() as u64, STREAMS);
}

/// Proves MR-REFUSE-11.
#[test]
fn reset__refuses_the_oldest_read_that_is_owed() {
    let mut net = Net::new(2, 7);
    let (qa, qb) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    net.send(0, qa, at_far(0, Opcode::Write, 8, rb), &[sge(0, 8, la)]);
    net.run(MS);
    let tap = Tap::on(&mut net);
    tap.drop_if(|_, bytes| carries(bytes, |frame| matches!(frame, Frame::Response(_))));
    for id in 1..3 {
        net.send(0, qa, at_far(id, Opcode::Read, 8, rb), &[sge(8 * id, 8, la)]);
    }
    net.run(100 * US);
    tap.take();
    net.modify(1, qb, QpModify { state: Some(QpState::Reset), ..Default::default() });
    net.run(100 * US);
    let told: Vec<_> = tap.take().iter().filter_map(|(_, b)| refusals(b)).flatten().collect();
    assert!(told.contains(&(RefuseCode::NotReady, qa, 1)), "{told:?}");
    // They end by the QP's own patience, not by that of one that hears signs of life.
    tap.open();
    let begin = net.now;
    net.run_until(10 * SECOND, "both end", |n| statuses(n, 0, 1).len() == 3);
    assert_eq!(statuses(&net, 0, 1)[1..], [(1, WcStatus::RetryExcErr), (2, WcStatus::WrFlushErr)]);
    assert!(net.now - begin < 2 * 8 * (4096 << 14), "after {} ns", net.now - begin);
}

/// Proves MR-REQ-5.
#[test]
fn newer_life__replaces_one_that_has_achieved_nothing_and_no_other() {
    // What the former life achieves before it ends: nothing, or one message.
    for achieves in [false, true] {
        let mut net = Net::new(2, 8);
        let (qa, qb) = net.pair(0, 1);
        let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        net.hosts[0].mem.0[..100_000].fill(7);
        net.run(5 * MS);
        let tap = Tap::on(&mut net);
        let mut passed = 0;
        if !achieves {
            // One packet of many: the stream is bound, and no message complete.
            tap.drop_if(move |from, bytes| {
                passed += u32::from(from == 0 && carries(bytes, is_request));
                from == 0 && passed > 1
            });
        }
        net.send(0, qa, at_far(1, Opcode::Write, 100_000, rb), &[sge(0, 100_000, la)]);
        net.run(MS);
        tap.open();
        let ended = statuses(&net, 0, 1).len();
        assert_eq!(ended, usize::from(achieves));
        reset_and_reconnect(&mut net, 0, qa, 1, qb);
        net.hosts[1].mem.0[..100_000].fill(0);
        net.send(0, qa, at_far(2, Opcode::Write, 100_000, rb), &[sge(0, 100_000, la)]);
        net.run_until(10 * SECOND, "end", |n| statuses(n, 0, 1).len() > ended);
        let (status, byte) = if achieves { (WcStatus::RetryExcErr, 0) } else { (WcStatus::Success, 7) };
        assert_eq!(statuses(&net, 0, 1).last(), Some(&(2, status)));
        assert!(net.hosts[1].mem.0[..100_000].iter().all(|b| *b == byte), "{achieves}");
    }
}

/// Proves MR-REQ-5.
#[test]
fn former_life__does_nothing_once_a_newer_one_is_bound() {
    let mut net = Net::new(2, 9);
    let (qa, qb) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    let tap = Tap::on(&mut net);
    let mut lives = Vec::new();
    for id in 0..2 {
        net.send(0, qa, at_far(id, Opcode::Write, 64, rb), &[sge(0, 64, la)]);
        net.run(MS);
        let seen = tap.take();
        let (_, bytes) = seen.iter().rfind(|p| p.0 == 0 && carries(&p.1, is_request)).expect("a request");
        lives.push(bytes.clone());
        if id == 0 {
            reset_and_reconnect(&mut net, 1, qb, 0, qa);
            reset_and_reconnect(&mut net, 0, qa, 1, qb);
        }
    }
    net.run_until(SECOND, "second life", |n| statuses(n, 0, 1).len() == 2);
    // A message behind the last one of either life, in numbers that were not used.
    for (life, byte) in [(0, 1), (1, 2)] {
        let mut parts = frames(&lives[life]);
        parts.retain(is_request);
        let Some(Frame::Request(request)) = parts.first_mut() else { unreachable!() };
        let payload = [byte; 64];
        (request.msn, request.payload) = (request.msn + 1, &payload);
        request.cpn = request.cpn.wrapping_add(5000);
        let header =
            Header { psn: header(&lives[1]).psn.wrapping_add(100 + life as u32), ..header(&lives[1]) };
        inject(&mut net, 0, 1, &rewritten(header, &parts));
        let placed = net.hosts[1].mem.0[..64] == payload;
        assert_eq!(placed, life == 1, "a packet of life {life}");
    }
}

/// Proves MR-REQ-5.
#[test]
fn life_that_nobody_saw__does_nothing_once_a_newer_one_is_bound() {
    let mut net = Net::new(2, 20);
    let (qa, qb) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    let tap = Tap::on(&mut net);
    tap.drop_if(|from, bytes| from == 0 && carries(bytes, is_request));
    net.hosts[0].mem.0[..64].fill(1);
    net.send(0, qa, at_far(0, Opcode::Write, 64, rb), &[sge(0, 64, la)]);
    net.run(MS);
    let seen = tap.take();
    let late = first_of(&seen, is_request);
    // The newer one is bound and has no message complete yet; what fills the former's numbers is lost.
    reset_and_reconnect(&mut net, 0, qa, 1, qb);
    let mut passed = 0;
    tap.drop_if(move |from, bytes| {
        passed += u32::from(from == 0 && carries(bytes, is_request));
        from == 0 && (passed > 1 || carries(bytes, is_void))
    });
    let write = SendWqe { remote_addr: MEM_BASE + 4096, ..at_far(1, Opcode::Write, 100_000, rb) };
    net.send(0, qa, write, &[sge(4096, 100_000, la)]);
    net.run(MS);
    inject(&mut net, 0, 1, late);
    assert_eq!(net.hosts[1].mem.0[..64], [0; 64]);
    tap.open();
    net.run_until(SECOND, "write", |n| !statuses(n, 0, 1).is_empty());
    assert_eq!(statuses(&net, 0, 1), [(1, WcStatus::Success)]);
}

/// Proves MR-REQ-5.
#[test]
fn newer_life__of_an_unreliable_stream_always_replaces() {
    let mut net = Net::new(2, 10);
    let [qa, qb] = [0, 1].map(|host| net.qp_of(host, QpType::Uc, None));
    net.make_rtr(1, qb, 0, qa);
    let (la, rb) = (net.mr(0, 0, 4096), net.mr(1, 0, 4096));
    for life in 1..4u8 {
        reset_and_reconnect(&mut net, 0, qa, 1, qb);
        net.hosts[0].mem.0[..64].fill(life);
        net.send(0, qa, at_far(life.into(), Opcode::Write, 64, rb), &[sge(0, 64, la)]);
        net.run(20 * MS);
        assert_eq!(net.hosts[1].mem.0[..64], [life; 64]);
    }
}
