//! Rules of docs/protocol.md that only show on the wire: packets are watched, held back and changed between two endpoints
//! in virtual time. Each test would fail if its rule were switched off.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

use metaroce_proto::wire::{Frame, HEADER_BYTES, Header, Hello, PacketType, RespKind};
use metaroce_proto::*;
use net::tap::*;
use net::*;

/// Proves MR-RESP-2.
#[test]
fn response__of_another_attempt_kind_or_total_is_dropped() {
    type Change = fn(&mut wire::Response<'_>);
    let changes: [(Change, bool); 4] = [
        (|_| (), true),
        (|r| r.attempt = r.attempt.wrapping_add(1), false),
        (|r| r.kind = RespKind::Atomic, false),
        (|r| r.total += 8, false),
    ];
    for (change, taken) in changes {
        let mut net = Net::new(2, 1);
        let (qa, _) = net.pair(0, 1);
        let (la, rb) = (net.mr(0, 0, 4096), net.mr(1, 0, 4096));
        net.hosts[1].mem.0[..4096].fill(7);
        net.run(5 * MS);
        let tap = Tap::on(&mut net);
        let is_response = |frame: &Frame<'_>| matches!(frame, Frame::Response(_));
        tap.drop_if(move |_, bytes| carries(bytes, is_response));
        net.send(0, qa, at_far(1, Opcode::Read, 8, rb), &[sge(0, 8, la)]);
        net.run(100 * US);
        let seen = tap.take();
        let bytes = first_of(&seen, is_response);
        let mut parts = frames(bytes);
        parts.retain(is_response);
        let Some(Frame::Response(response)) = parts.first_mut() else { unreachable!() };
        change(response);
        let forged = rewritten(header(bytes), &parts);
        inject(&mut net, 1, 0, &forged);
        net.run(100 * US);
        assert_eq!(statuses(&net, 0, 1).len(), usize::from(taken));
        assert_eq!(net.hosts[0].mem.0[..8] == [7; 8], taken);
    }
}

/// Proves MR-HDR-2.
#[test]
fn control_packet__with_a_message_is_malformed() {
    for kind in [PacketType::Control, PacketType::Data] {
        let mut net = Net::new(2, 2);
        let (qa, _) = net.pair(0, 1);
        let (la, rb) = (net.mr(0, 0, 4096), net.mr(1, 0, 4096));
        net.hosts[0].mem.0[..8].fill(7);
        net.run(5 * MS);
        let tap = Tap::on(&mut net);
        tap.drop_if(|from, bytes| from == 0 && carries(bytes, is_request));
        net.send(0, qa, at_far(1, Opcode::Write, 8, rb), &[sge(0, 8, la)]);
        net.run(100 * US);
        let seen = tap.take();
        let bytes = first_of(&seen, is_request);
        let before = net.hosts[1].ep.stats().rx_malformed;
        inject(&mut net, 0, 1, &rewritten(Header { kind, ..header(bytes) }, &frames(bytes)));
        let control = kind == PacketType::Control;
        assert_eq!(net.hosts[1].ep.stats().rx_malformed - before, u64::from(control));
        assert_eq!(net.hosts[1].mem.0[..8] == [7; 8], !control);
    }
}

/// Packets of a path of host 0 with the time they left.
fn on_path(net: &mut Net, tap: &Tap, path: u8, span: Nanos) -> Vec<(Nanos, u8, bool)> {
    let until = net.now + span;
    let mut all = Vec::new();
    while net.now < until {
        net.run(50 * US);
        let now = net.now;
        let ours = |p: &(usize, Vec<u8>)| p.0 == 0 && wire::is_data(&p.1) && header(&p.1).path == path;
        let packets = tap.take();
        all.extend(packets.iter().filter(|p| ours(p)).map(|(_, bytes)| {
            (
                now,
                header(bytes).generation,
                carries(bytes, |f| !matches!(f, Frame::Ping | Frame::Ack(_) | Frame::Hint { .. })),
            )
        }));
    }
    all
}

/// Proves MR-PATH-1.
#[test]
fn silent_path__is_shunned_then_left_and_comes_back_unharmed_if_it_answers_before() {
    for (silent_for, left) in [(8 * MS, false), (SECOND, true)] {
        let mut net = Net::new(2, 11);
        net.faults.delay_ns = 100_000;
        let (qa, _) = net.pair(0, 1);
        let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        net.run(5 * MS);
        let tap = Tap::on(&mut net);
        // Always more to send than fits into the windows.
        for id in 0..500 {
            net.send(0, qa, at_far(id, Opcode::Write, 1 << 20, rb), &[sge(0, 1 << 20, la)]);
        }
        assert!(on_path(&mut net, &tap, 1, MS).iter().all(|p| p.1 == 0 && p.2), "data, and only that");
        let since = net.now;
        let silent = Rc::new(Cell::new(true));
        let on = silent.clone();
        tap.drop_if(move |from, bytes| {
            on.get() && from == 0 && wire::is_data(bytes) && header(bytes).path == 1 && bytes[3] == 0
        });
        let mut seen = on_path(&mut net, &tap, 1, silent_for.min(60 * MS));
        silent.set(false);
        seen.extend(on_path(&mut net, &tap, 1, 4 * MS));
        let shunned =
            seen.iter().rposition(|p| p.0 < since + 8 * MS && p.1 == 0 && p.2).map_or(0, |at| at + 1);
        let pings = seen[shunned..].iter().take_while(|p| p.1 == 0 && !p.2).count();
        assert!(pings > 0, "a shunned path carries PINGs only: {seen:?}");
        assert_eq!(net.hosts[0].ep.stats().paths_left, u64::from(left));
        if left {
            let fresh = seen.iter().find(|p| p.1 == 1).expect("a new generation");
            assert!(!fresh.2, "it begins with a probe");
            assert!(fresh.0 - since >= 15 * MS, "left after {} ns", fresh.0 - since);
            assert!(seen.iter().any(|p| p.1 == 1 && p.2), "and carries data once that is answered");
        } else {
            assert!(seen.iter().all(|p| p.1 == 0), "the same generation");
            assert!(seen.last().is_some_and(|p| p.2), "carries data again: {seen:?}");
        }
    }
}

/// Proves MR-PATH-1.
#[test]
fn last_active_path__is_neither_shunned_nor_left() {
    let mut net = Net::new(2, 12);
    let (qa, _) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    let tap = Tap::on(&mut net);
    let all = Rc::new(Cell::new(false));
    let on = all.clone();
    // Three of four paths are silent, then all, so that the last one misses answers, too.
    tap.drop_if(move |from, bytes| {
        from == 0 && wire::is_data(bytes) && (on.get() || header(bytes).path != 2)
    });
    for id in 0..100 {
        net.send(0, qa, at_far(id, Opcode::Write, 1 << 20, rb), &[sge(0, 1 << 20, la)]);
    }
    net.run(100 * MS);
    assert_eq!(net.hosts[0].ep.stats().paths_left, 3);
    all.set(true);
    net.run(100 * MS);
    assert_eq!(net.hosts[0].ep.stats().paths_left, 3);
    tap.open();
    net.run_until(10 * SECOND, "all", |n| statuses(n, 0, 1).len() == 100);
    assert!(statuses(&net, 0, 1).iter().all(|c| c.1 == WcStatus::Success));
}

/// Proves MR-ORDER-7.
#[test]
fn binding__is_done_when_its_turn_comes_and_only_once() {
    const RIGHTS: u32 = access::LOCAL_WRITE | access::MW_BIND;
    let mut net = Net::new(2, 13);
    let (qa, qb) = net.pair(0, 1);
    // Looks through the window, each time with a pair of its own: an error ends it.
    let look = |net: &mut Net, key: u32, la: u32| {
        let (from, _) = net.pair(0, 1);
        let before = statuses(net, 0, 1).len();
        net.send(0, from, at_far(9, Opcode::Write, 8, key), &[sge(0, 8, la)]);
        net.run_until(SECOND, "look", |n| statuses(n, 0, 1).len() > before);
        statuses(net, 0, 1)[before].1
    };
    let la = net.mr(0, 0, 4096);
    let region = net.hosts[1].ep.register_mr(1, MEM_BASE, MEM_BASE, 4096, RIGHTS).unwrap();
    let bind = |id: u64, key: u32, rights: u32| {
        let mut w = wr(id, Opcode::BindWindow, 0, 0);
        w.set_bind(&Bind { new_key: key, region, addr: MEM_BASE, len: 4096, access: rights });
        w
    };
    let window = net.hosts[1].ep.create_window(1, false).unwrap();
    let key = window & !0xff | (window + 1) & 0xff;
    net.modify(1, qb, QpModify { state: Some(QpState::Sqd), ..Default::default() });
    net.send(1, qb, bind(1, key, access::REMOTE_WRITE), &[]);
    net.run(20 * MS);
    assert_eq!(look(&mut net, key, la), WcStatus::RemAccessErr, "posted, but its turn has not come");
    net.modify(1, qb, QpModify { state: Some(QpState::Rts), ..Default::default() });
    net.run(20 * MS);
    assert_eq!(look(&mut net, key, la), WcStatus::Success);
    // Sent in two attempts, because the peer has no receive for the message before. A window of type 2 is bound once.
    let window = net.hosts[1].ep.create_window(1, true).unwrap();
    let key = window & !0xff | (window + 1) & 0xff;
    net.send(1, qb, wr(2, Opcode::Send, 8, 1), &[sge(0, 8, region)]);
    net.send(1, qb, bind(3, key, access::REMOTE_WRITE), &[]);
    net.run(5 * MS);
    assert_eq!(statuses(&net, 1, 1), [(1, WcStatus::Success)], "the Send was refused");
    net.recv(0, qa, 5, sge(0, 8, la));
    net.run_until(SECOND, "all", |n| statuses(n, 1, 1).len() == 3);
    assert!(statuses(&net, 1, 1).iter().all(|c| c.1 == WcStatus::Success), "{:?}", statuses(&net, 1, 1));
}

/// Proves MR-ADDR-4.
#[test]
fn endpoint_to_itself__holds_two_connections_however_often_it_asks() {
    let mut net = Net::new(1, 14);
    let (qa, _) = net.pair(0, 0);
    let l = net.mr(0, 0, 1 << 20);
    let tap = Tap::on(&mut net);
    let mut hellos = 0;
    // The first answers are lost.
    tap.drop_if(move |_, bytes| {
        let answer = header(bytes).kind == PacketType::Hello && header(bytes).dcid != 0;
        hellos += u32::from(answer);
        answer && hellos <= 3
    });
    net.hosts[0].mem.0[..8].fill(7);
    net.send(
        0,
        qa,
        SendWqe { remote_addr: MEM_BASE + 64, ..at_far(1, Opcode::Write, 8, l) },
        &[sge(0, 8, l)],
    );
    net.run_until(SECOND, "write", |n| !statuses(n, 0, 1).is_empty());
    assert_eq!(statuses(&net, 0, 1), [(1, WcStatus::Success)]);
    assert_eq!(net.hosts[0].mem.0[64..72], [7; 8]);
    assert_eq!(net.hosts[0].ep.stats().connections, 2);
    // What was asked comes once more, late.
    let asked: Vec<_> = tap.take().into_iter().filter(|(_, b)| header(b).kind == PacketType::Hello).collect();
    asked.iter().for_each(|(_, bytes)| inject(&mut net, 0, 0, bytes));
    net.run(20 * MS);
    assert_eq!(net.hosts[0].ep.stats().connections, 2);
}

/// Proves MR-HELLO-4.
#[test]
fn hello_again__changes_nothing_and_of_another_life_is_ignored() {
    type Change = fn(&mut Hello);
    let changes: [Change; 4] = [
        |_| (),
        |h| h.first_cpn = [h.first_cpn[0].wrapping_add(1 << 30), h.first_cpn[1].wrapping_sub(1 << 30)],
        |h| (h.message_window, h.paths, h.budget, h.segment) = (1, 1, 1, 512),
        |h| (h.incarnation, h.scid) = (h.incarnation ^ 6, h.scid ^ 1 << 40),
    ];
    for (n, change) in changes.into_iter().enumerate() {
        let mut net = Net::new(2, 15);
        let tap = Tap::on(&mut net);
        let (qa, qb) = net.pair(0, 1);
        let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        for i in 0..100_000 {
            net.hosts[0].mem.0[i] = (i % 251) as u8;
        }
        net.send(0, qa, at_far(0, Opcode::Write, 8, rb), &[sge(0, 8, la)]);
        net.run(5 * MS);
        let hello = |p: &&(usize, Vec<u8>)| p.0 == 0 && header(&p.1).kind == PacketType::Hello;
        let packets = tap.take();
        let (_, bytes) = packets.iter().find(hello).expect("a HELLO");
        // It is addressed to the connection, as answers are.
        let data = packets.iter().find(|p| p.0 == 0 && wire::is_data(&p.1)).expect("data");
        let mut body = Hello::parse(&bytes[HEADER_BYTES..]).expect("HELLO");
        change(&mut body);
        let mut forged = Vec::new();
        Header { dcid: header(&data.1).dcid, ..header(bytes) }.write(&mut forged);
        body.write(usize::from(body.segment), &mut forged);
        // In the middle of both directions' traffic.
        for id in 1..20 {
            net.send(0, qa, at_far(id, Opcode::Write, 100_000, rb), &[sge(0, 100_000, la)]);
            let back =
                SendWqe { remote_addr: MEM_BASE + 200_000, rkey: la, ..wr(id, Opcode::Write, 5000, 1) };
            net.send(1, qb, back, &[sge(0, 5000, rb)]);
            net.run(30 * US);
            inject(&mut net, 0, 1, &forged);
        }
        net.run_until(SECOND, "all", |n| statuses(n, 0, 1).len() == 20 && statuses(n, 1, 1).len() == 19);
        assert!([0, 1].iter().all(|h| statuses(&net, *h, 1).iter().all(|c| c.1 == WcStatus::Success)), "{n}");
        assert!(net.hosts[1].mem.0[..100_000] == net.hosts[0].mem.0[..100_000], "{n}");
        assert_eq!(net.hosts.iter().map(|h| h.ep.stats().connections).collect::<Vec<_>>(), [1, 1], "{n}");
        let seen = tap.take();
        let told = seen.iter().filter(|p| p.0 == 1 && header(&p.1).kind == PacketType::Hello);
        let stranger = told.filter(|p| header(&p.1).dcid == body.scid).count();
        assert!(n < 3 || stranger == 0, "another life is not answered here");
        let small = seen.iter().filter(|p| p.0 == 1 && wire::is_data(&p.1)).map(|p| p.1.len()).max();
        assert!(small > Some(4000), "{n}: the segment is as agreed: {small:?}");
    }
}

/// One small Write of host 0 at a time, with a packet of it held back for `held`; how long it took, and packets sent.
fn held_back(net: &mut Net, tap: &Tap, qa: Qpn, keys: (u32, u32), held: Option<Nanos>) -> (Nanos, usize) {
    let first = Rc::new(RefCell::new(None));
    let keep = first.clone();
    tap.take();
    tap.drop_if(move |from, bytes| {
        let hit = from == 0 && carries(bytes, is_request) && keep.borrow().is_none();
        if hit {
            *keep.borrow_mut() = Some(bytes.to_vec());
        }
        hit
    });
    let begin = net.now;
    let before = statuses(net, 0, 1).len();
    // Enough for all four paths, so that others follow on the path of the first.
    net.send(0, qa, at_far(1, Opcode::Write, 600_000, keys.1), &[sge(0, 600_000, keys.0)]);
    if let Some(held) = held {
        net.run(held);
        let bytes = first.borrow().clone().expect("a request was sent");
        inject(net, 0, 1, &bytes);
    }
    net.run_until(SECOND, "write", |n| statuses(n, 0, 1).len() > before);
    let took = net.now - begin;
    // Acknowledgements of what came late are still under way.
    net.run(200 * US);
    let requests = tap.take().iter().filter(|p| p.0 == 0 && carries(&p.1, is_request)).count();
    (took, requests)
}

/// Proves MR-LOSS-1.
#[test]
fn gap__is_lost_at_once_until_the_path_has_reordered() {
    let mut net = Net::new(2, 16);
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    let tap = Tap::on(&mut net);
    net.send(0, qa, at_far(0, Opcode::Write, 600_000, keys.1), &[sge(0, 600_000, keys.0)]);
    net.run(5 * MS);
    let whole = tap.take().iter().filter(|p| p.0 == 0 && carries(&p.1, is_request)).count();
    // Repaired by the gap: long before silence would (3 ms at least).
    let (took, sent) = held_back(&mut net, &tap, qa, keys, None);
    assert!(took < MS && sent == whole + 1, "{took} ns, {sent} of {whole} packets");
    // Late, not lost: the repair was not needed, and the path is known to reorder from now on.
    let (_, sent) = held_back(&mut net, &tap, qa, keys, Some(200 * US));
    assert_eq!((sent, net.hosts[0].ep.stats().spurious_retransmits), (whole + 1, 1));
    // Each message begins on the next path: try until the path that reorders has its turn.
    let patient = (0..8).filter(|_| held_back(&mut net, &tap, qa, keys, Some(100 * US)).1 == whole).count();
    assert!(patient > 0, "no path has learned to wait");
    // A real loss on a path that has is repaired after the tolerance, and still before silence would be noticed.
    let repairs: Vec<_> = (0..8).map(|_| held_back(&mut net, &tap, qa, keys, None)).collect();
    assert!(repairs.iter().all(|r| r.0 < 3 * MS && r.1 == whole + 1), "{repairs:?}");
    assert!(repairs.iter().any(|r| r.0 > 100 * US), "{repairs:?}");
}

/// Proves MR-LOSS-1.
#[test]
fn last_packet__is_unknown_and_not_lost() {
    let mut net = Net::new(2, 17);
    let (qa, _) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.run(5 * MS);
    for id in 0..20 {
        net.send(0, qa, at_far(id, Opcode::Write, 8, rb), &[sge(0, 8, la)]);
        net.run(MS);
    }
    let tap = Tap::on(&mut net);
    tap.drop_if(|from, bytes| from == 0 && carries(bytes, is_request));
    net.send(0, qa, at_far(20, Opcode::Write, 8, rb), &[sge(0, 8, la)]);
    // No acknowledgement can tell of it: only silence, and not that of a few round trips.
    net.run(2 * MS);
    assert_eq!(tap.take().iter().filter(|p| carries(&p.1, is_request)).count(), 1);
    tap.open();
    net.run_until(SECOND, "probe", |n| statuses(n, 0, 1).len() == 21);
}

/// Proves MR-RESET-1.
#[test]
fn unknown_id__is_told_by_a_bare_header_and_four_times_per_millisecond() {
    let mut net = Net::new(2, 18);
    let tap = Tap::on(&mut net);
    for round in 0..3u64 {
        for i in 0..60u64 {
            let kind = [PacketType::Data, PacketType::Control, PacketType::Hello][i as usize % 3];
            let dcid = (77 + round) << 24;
            let mut bytes = Vec::new();
            let (path, generation, psn, flags, src_slot, backlog) = (0, 0, 5, 0, 2, 0);
            Header { kind, flags, path, generation, dcid, psn, src_slot, backlog }.write(&mut bytes);
            if kind == PacketType::Hello {
                stranger().write(512, &mut bytes);
            } else {
                bytes.extend([0; 40]);
            }
            inject(&mut net, 1, 0, &bytes);
            net.flush();
        }
        let answers: Vec<_> = tap.take().into_iter().filter(|p| p.0 == 0).map(|p| p.1).collect();
        assert_eq!(answers.len(), 4, "round {round}");
        for bytes in answers {
            assert_eq!((header(&bytes).kind, header(&bytes).dcid), (PacketType::Reset, (77 + round) << 24));
            assert_eq!(bytes.len(), HEADER_BYTES);
        }
        net.now += MS;
    }
}

/// Memory of the receiver's own that may not be written is its error, also where nobody else is told.
/// Proves MR-UC-3, MR-UD-4.
#[test]
fn unreliable_receive__into_memory_that_may_not_be_written_ends_the_receiver() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut net = Net::new(2, 19);
        let [qa, qb] = [0, 1].map(|host| net.qp_of(host, qp_type, None));
        net.make_rtr(0, qa, 1, qb);
        net.make_rtr(1, qb, 0, qa);
        net.make_rts(0, qa, 14, 1, 7);
        let (la, lb) = (net.mr(0, 0, 4096), net.mr(1, 0, 4096));
        net.recv(1, qb, 1, sge(0, 100, lb ^ 1));
        net.recv(1, qb, 2, sge(0, 100, lb));
        let dest = (qp_type == QpType::Ud).then(|| Destination { ip: net.hosts[1].ip, qpn: qb, qkey: 0 });
        net.send(0, qa, SendWqe { dest, ..wr(1, Opcode::Send, 10, 1) }, &[sge(0, 10, la)]);
        net.run(20 * MS);
        assert_eq!(statuses(&net, 0, 1), [(1, WcStatus::Success)]);
        assert_eq!(statuses(&net, 1, 2), [(1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr)]);
        assert_eq!(net.hosts[1].ep.qp_state(qb), Some(QpState::Err));
    }
}
