//! Multicast: every QP attached to a group gets each of its datagrams once, and nobody else (MR-MC-1, MR-MC-5).
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::groups::MULTICAST_QPN;
use metaroce_proto::*;
use net::*;
use std::net::IpAddr;

const QKEY: u32 = 0x0123_4567;

fn ud(net: &mut Net, host: usize, qkey: u32) -> Qpn {
    let q = net.qp_of(host, QpType::Ud, None);
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        net.modify(host, q, QpModify { state: Some(state), qkey: Some(qkey), ..Default::default() });
    }
    q
}

fn group(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn to_group(id: u64, len: u32, ip: IpAddr) -> SendWqe {
    let dest = Some(Destination { ip, qpn: MULTICAST_QPN, qkey: QKEY });
    SendWqe { dest, ..wr(id, Opcode::Send, len, 1) }
}

/// What was received on a host: QP, receive, bytes, sender.
fn received(net: &Net, host: usize) -> Vec<(Qpn, u64, u32, Qpn)> {
    let of = |c: &(CqId, Completion)| (c.1.qpn, c.1.wr_id, c.1.byte_len, c.1.src_qp);
    net.hosts[host].log.completions.iter().filter(|c| c.0 == 2).map(of).collect()
}

/// Sends one datagram to each of two groups on three hosts; gives who got what.
fn members_get_one_copy(net: &mut Net, first: IpAddr, second: IpAddr) {
    // Host 0 sends and is a member, with two QPs of which one sends; host 1 has a member and a QP that was one; host
    // 2 belongs to the other group, and has a member of the first with another Q_Key.
    let sender = ud(net, 0, QKEY);
    let (beside, member, former) = (ud(net, 0, QKEY), ud(net, 1, QKEY), ud(net, 1, QKEY));
    let (other, stranger) = (ud(net, 2, QKEY), ud(net, 2, 1));
    let keys: Vec<u32> = (0..3).map(|h| net.mr(h, 0, 1 << 20)).collect();
    for (host, qpn, group) in [
        (0, sender, first),
        (0, beside, first),
        (1, member, first),
        (1, member, first),
        (1, former, first),
        (2, other, second),
        (2, stranger, first),
    ] {
        net.hosts[host].ep.attach_group(qpn, group).unwrap();
        assert!(net.hosts[host].ep.is_attached(qpn));
    }
    net.hosts[1].ep.detach_group(former, first).unwrap();
    assert_eq!(net.hosts[1].ep.detach_group(former, first), Err(Refused::Invalid));
    for (host, qpn, at) in
        [(0, sender, 0), (0, beside, 1), (1, member, 0), (1, former, 1), (2, other, 0), (2, stranger, 1)]
    {
        for i in 0..2 {
            net.recv(host, qpn, at * 2 + i, sge((at * 2 + i) * 8192, 4136, keys[host]));
        }
    }
    net.hosts[0].mem.0[1 << 19..(1 << 19) + 4096].fill(7);
    let from = |net: &mut Net, id, len, to| {
        net.send(0, sender, to_group(id, len, to), &[sge(1 << 19, len, keys[0])])
    };
    from(net, 1, 4096, first);
    from(net, 2, 100, second);
    net.run(10_000_000);

    assert_eq!(received(net, 0), [(sender, 0, 4136, sender), (beside, 2, 4136, sender)]);
    assert_eq!(received(net, 1), [(member, 0, 4136, sender)]);
    assert_eq!(received(net, 2), [(other, 0, 140, sender)]);
    assert!(net.hosts[1].mem.0[40..4136].iter().all(|b| *b == 7));
    // The Q_Key's.
    let dropped: Vec<u64> = net.hosts.iter().map(|h| h.ep.stats().datagrams_dropped).collect();
    assert_eq!(dropped, [0, 0, 1]);
    assert!(net.hosts.iter().all(|h| h.ep.stats().rx_malformed == 0));
    assert_eq!(statuses(net, 0, 1), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn group__each_member_gets_one_copy() {
    let mut net = Net::new(3, 1);
    members_get_one_copy(&mut net, group("224.1.2.3"), group("239.0.0.1"));
    // The header tells the group.
    assert_eq!((net.hosts[1].mem.0[20], &net.hosts[1].mem.0[36..40]), (0x45, &[224, 1, 2, 3][..]));
}

/// MR-MC-2 and MR-MC-3.
#[test]
fn group__of_the_family_that_is_not_there_goes_by_the_other() {
    // The two IPv6 groups go by the same IPv4 one, and are told apart all the same.
    let (one, two): (IpAddr, IpAddr) = (group("ff0e::1:2"), group("ff0e::2:1"));
    let mut net = Net::new(3, 2);
    members_get_one_copy(&mut net, one, two);
    assert_eq!(net.hosts[2].ep.carriers().len(), 1);
    let mem = &net.hosts[1].mem.0;
    assert_eq!((mem[0], &mem[24..28], &mem[36..40]), (0x60, &[0xff, 0xe, 0, 0][..], &[0, 1, 0, 2][..]));

    let mut net = Net::new(3, 3);
    net.make_ipv6(0);
    members_get_one_copy(&mut net, group("224.1.2.3"), group("ff01::9"));
    assert_eq!(net.hosts[2].ep.carriers(), [group("ff02::9"), group("ff12::e001:203")]);
}

/// MR-MC-6.
#[test]
fn group__takes_nothing_but_datagrams_to_it() {
    let mut net = Net::new(2, 4);
    let (qa, qb) = (ud(&mut net, 0, QKEY), ud(&mut net, 1, QKEY));
    let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.hosts[1].ep.attach_group(qb, group("224.1.2.3")).unwrap();
    net.recv(1, qb, 0, sge(0, 4136, lb));
    // To the QP itself by the group, and to the number of groups by the host's address.
    let wrong = Destination { ip: group("224.1.2.3"), qpn: qb, qkey: QKEY };
    net.send(0, qa, SendWqe { dest: Some(wrong), ..wr(1, Opcode::Send, 9, 1) }, &[sge(0, 9, la)]);
    let host = Destination { ip: net.hosts[1].ip, qpn: MULTICAST_QPN, qkey: QKEY };
    net.send(0, qa, SendWqe { dest: Some(host), ..wr(2, Opcode::Send, 9, 1) }, &[sge(0, 9, la)]);
    net.run(10_000_000);
    assert_eq!(received(&net, 1), []);
    // A HELLO by a group makes no connection, so nobody can be made to answer for many.
    let (rc, rc_peer) = net.pair(0, 1);
    assert_ne!(rc, rc_peer);
    let mut hello = None;
    net.send(0, rc, wr(3, Opcode::Send, 9, 1), &[sge(0, 9, la)]);
    let mut burst = TxBurst::new();
    let h = &mut net.hosts[0];
    if h.ep.poll_burst(net.now, &mut burst, &mut h.log) {
        hello = Some(burst.bytes.clone());
    }
    let meta = RxMeta { src: (net.hosts[0].ip, 50_000).into(), dst_ip: group("224.1.2.3"), ecn: 0 };
    let h = &mut net.hosts[1];
    let before = h.ep.stats();
    h.ep.on_datagram(net.now, &meta, &hello.expect("a HELLO"), &mut h.mem, &mut h.log);
    assert_eq!(h.ep.stats().rx_malformed, before.rx_malformed + 1);
    assert_eq!(h.ep.stats().connections, before.connections);
}

#[test]
fn attach__errors_and_the_end_of_a_qp() {
    let mut net = Net::new(1, 5);
    let (rc, qpn) = (net.qp(0, None), ud(&mut net, 0, QKEY));
    let ep = &mut net.hosts[0].ep;
    assert_eq!(ep.attach_group(rc, group("224.0.0.9")), Err(Refused::Invalid));
    assert_eq!(ep.attach_group(qpn, group("10.0.0.1")), Err(Refused::Invalid));
    assert_eq!(ep.detach_group(qpn, group("224.0.0.9")), Err(Refused::Invalid));
    for i in 0..1024u32 {
        ep.attach_group(qpn, IpAddr::from((0xe000_0000 + i).to_be_bytes())).unwrap();
    }
    assert_eq!(ep.attach_group(qpn, group("239.0.0.1")), Err(Refused::Full));
    assert_eq!(ep.carriers().len(), 1024);
    ep.destroy_qp(1, qpn).unwrap();
    assert!(ep.carriers().is_empty());
}
