//! Unreliable connections and datagrams: whole or not at all.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::*;
use net::*;

fn uc_pair(net: &mut Net) -> (Qpn, Qpn) {
    let (qa, qb) = (net.qp_of(0, QpType::Uc, None), net.qp_of(1, QpType::Uc, None));
    net.make_rtr(0, qa, 1, qb);
    net.make_rtr(1, qb, 0, qa);
    net.make_rts(0, qa, 0, 0, 0);
    net.make_rts(1, qb, 0, 0, 0);
    (qa, qb)
}

/// Proves MR-UC-3.
#[test]
fn uc_send__messages_arrive_whole_in_order_or_not_at_all() {
    for (seed, faults) in [
        (1, Faults::default()),
        (2, Faults { loss: 0.03, ..Faults::default() }),
        (3, Faults { loss: 0.03, dup: 0.2, reorder: 0.1, ..Faults::default() }),
    ] {
        let mut net = Net::new(2, seed);
        net.faults = faults;
        let (qa, qb) = uc_pair(&mut net);
        let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 8 << 20));
        for i in 0..100u64 {
            net.recv(1, qb, i, sge(i * 20_000, 20_000, lb));
        }
        for i in 0..100u64 {
            // Every byte of message i is i; its length tells it too.
            net.hosts[0].mem.0[..20_000].fill(i as u8);
            net.send(0, qa, wr(i, Opcode::Send, 10_000 + i as u32, 1), &[sge(0, 10_000 + i as u32, la)]);
            net.run(1_000_000);
        }
        net.run(1_000_000_000);
        let sent = net.hosts[0].log.completions.iter().filter(|c| c.1.status == WcStatus::Success).count();
        assert_eq!(sent, 100);
        let got: Vec<Completion> = net.hosts[1].log.completions.iter().map(|c| c.1).collect();
        if faults.loss == 0.0 {
            assert_eq!(got.len(), 100);
        }
        assert!(got.len() >= 50, "only {} of 100 arrived", got.len());
        let mut last = None;
        for (slot, c) in got.iter().enumerate() {
            assert_eq!(c.wr_id, slot as u64, "receives are used in order");
            let message = c.byte_len - 10_000;
            assert!(last.is_none_or(|l| l < message), "in order and once");
            last = Some(message);
            let at = slot * 20_000;
            let bytes = &net.hosts[1].mem.0[at..at + c.byte_len as usize];
            assert!(bytes.iter().all(|b| *b == message as u8), "message {message} is not whole");
        }
    }
}

/// Lost messages take no receive, so the receiver's count falls behind the sender's: that must not hold the sender back.
/// Proves MR-UC-4.
#[test]
fn uc_send__losses_never_stall_the_sender() {
    for seed in 1..10 {
        let mut net = Net::new(2, seed);
        net.faults = Faults { loss: 0.1, ..Faults::default() };
        let (qa, qb) = uc_pair(&mut net);
        let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 8 << 20));
        for i in 0..16 {
            net.recv(1, qb, i, sge(0, 20_000, lb));
        }
        let mut taken = 0;
        for i in 0..300u64 {
            net.send(0, qa, wr(i, Opcode::Send, 9_000, 1), &[sge(0, 9_000, la)]);
            net.run(200_000);
            while taken < net.hosts[1].log.completions.len() {
                net.recv(1, qb, 0, sge(0, 20_000, lb));
                taken += 1;
            }
        }
        net.run_until(1_000_000_000, &format!("seed {seed}: all leave"), |n| statuses(n, 0, 1).len() == 300);
        assert!(taken > 100, "seed {seed}: only {taken} arrived");
    }
}

/// Proves MR-UC-2.
#[test]
fn uc_write__without_a_peer_completes_into_the_void() {
    let mut net = Net::new(2, 4);
    let (qa, _) = uc_pair(&mut net);
    net.hosts[1].alive = false;
    let la = net.mr(0, 0, 1 << 20);
    net.send(0, qa, wr(1, Opcode::Write, 10_000, 1), &[sge(0, 10_000, la)]);
    net.run(2_000_000_000);
    assert_eq!(net.hosts[0].log.completions.len(), 1);
    assert_eq!(net.hosts[0].log.completions[0].1.status, WcStatus::Success);
}

fn ud(net: &mut Net, host: usize, qkey: u32) -> Qpn {
    let q = net.qp_of(host, QpType::Ud, None);
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        net.modify(host, q, QpModify { state: Some(state), qkey: Some(qkey), ..Default::default() });
    }
    q
}

fn datagram(id: u64, len: u32, ip: std::net::IpAddr, qpn: Qpn, qkey: u32) -> SendWqe {
    SendWqe { dest: Some(Destination { ip, qpn, qkey }), ..wr(id, Opcode::SendImm, len, 1) }
}

/// Proves MR-UD-1, MR-UD-4, MR-UD-5.
#[test]
fn ud__grh_qkey_source_and_sizes() {
    let mut net = Net::new(2, 5);
    let (qa, qb) = (ud(&mut net, 0, 0x1111), ud(&mut net, 1, 0x2222));
    let (la, lb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.hosts[0].mem.0[..4096].fill(7);
    let ip = net.hosts[1].ip;
    for i in 0..6u64 {
        net.recv(1, qb, i, sge(i * 8192, if i == 1 { 1000 } else { 4096 + 40 }, lb));
    }
    // Wrong Q_Key, fits, too long for the next receive, longer than the MTU, empty, own Q_Key (which is wrong here).
    for (id, len, qkey) in [
        (1, 9, 0x3333),
        (2, 4096, 0x2222),
        (3, 2000, 0x2222),
        (4, 5000, 0x2222),
        (5, 0, 0x2222),
        (6, 1, 1 << 31),
    ] {
        net.send(0, qa, datagram(id, len, ip, qb, qkey), &[sge(0, len, la)]);
    }
    net.run(10_000_000);
    let sent: Vec<(u64, WcStatus)> =
        net.hosts[0].log.completions.iter().map(|c| (c.1.wr_id, c.1.status)).collect();
    assert_eq!(sent, (1..=6).map(|i| (i, WcStatus::Success)).collect::<Vec<_>>());
    let got: Vec<(u64, u32, Qpn, u8)> = net.hosts[1]
        .log
        .completions
        .iter()
        .map(|c| (c.1.wr_id, c.1.byte_len, c.1.src_qp, c.1.wc_flags))
        .collect();
    assert_eq!(
        got,
        [(0, 4136, qa, WC_GRH | WC_WITH_IMM | WC_IPV4), (1, 40, qa, WC_GRH | WC_WITH_IMM | WC_IPV4)]
    );
    let mem = &net.hosts[1].mem.0;
    assert_eq!((mem[20], mem[29]), (0x45, 17));
    assert_eq!(mem[32..36], [10, 0, 0, 1]);
    assert_eq!(mem[36..40], [10, 0, 0, 2]);
    assert!(mem[40..4136].iter().all(|b| *b == 7));
    assert_eq!(net.hosts[1].ep.stats().datagrams_dropped, 3);
    assert_eq!(net.hosts[0].ep.stats().connections, 0);
}

#[test]
fn ud__local_error_stops_the_send_queue_only() {
    let mut net = Net::new(2, 6);
    let (qa, qb) = (ud(&mut net, 0, 1), ud(&mut net, 1, 1));
    let la = net.mr(0, 0, 4096);
    let ip = net.hosts[1].ip;
    net.send(0, qa, datagram(1, 100, ip, qb, 1), &[sge(0, 100, la ^ 1)]);
    net.send(0, qa, datagram(2, 100, ip, qb, 1), &[sge(0, 100, la)]);
    net.run(1_000_000);
    let sent: Vec<(u64, WcStatus)> =
        net.hosts[0].log.completions.iter().map(|c| (c.1.wr_id, c.1.status)).collect();
    assert_eq!(sent, [(1, WcStatus::LocProtErr), (2, WcStatus::WrFlushErr)]);
    assert_eq!(net.hosts[0].ep.qp_state(qa), Some(QpState::Sqe));
    net.modify(0, qa, QpModify { state: Some(QpState::Rts), ..Default::default() });
    net.send(0, qa, datagram(3, 100, ip, qb, 1), &[sge(0, 100, la)]);
    net.run(1_000_000);
    assert_eq!(net.hosts[0].log.completions[2].1.status, WcStatus::Success);
}
