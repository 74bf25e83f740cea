//! Raw packet QPs of one endpoint: steering, spreading over work queues, errors.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::steer::{Flow, FlowKind, Rss, field, hashed};
use metaroce_proto::*;
use net::*;

/// An Ethernet frame with IPv4 and UDP at this place of the host's memory.
fn write_frame(net: &mut Net, at: usize, src: [u8; 4], dst_port: u16) -> u32 {
    let mut f = vec![1, 0, 94, 0, 0, 1, 2, 0, 0, 0, 0, 9, 8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 17, 0, 0];
    f.extend(src);
    f.extend([2, 2, 2, 2, 0, 7]);
    f.extend(dst_port.to_be_bytes());
    f.extend([0; 20]);
    net.hosts[0].mem.0[at..at + f.len()].copy_from_slice(&f);
    f.len() as u32
}

fn raw_qp(net: &mut Net) -> Qpn {
    let qpn = net.qp_of(0, QpType::Raw, None);
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        net.modify(0, qpn, QpModify { state: Some(state), ..Default::default() });
    }
    qpn
}

fn port_rule(qpn: Qpn, port: u16) -> Flow {
    let (mut value, mut mask) = ([0; 80], [0; 80]);
    value[field::DST_PORT].copy_from_slice(&port.to_be_bytes());
    mask[field::DST_PORT].fill(0xff);
    Flow { qpn, kind: FlowKind::Normal, priority: 0, drop: false, value, mask }
}

fn run(net: &mut Net) {
    let now = net.now;
    let h = &mut net.hosts[0];
    h.ep.run_local(now, &mut h.mem, &mut h.log);
}

#[test]
fn frames__reach_the_queue_pair_whose_rule_matches() {
    let mut net = Net::new(1, 1);
    let (sender, a, b) = (raw_qp(&mut net), raw_qp(&mut net), raw_qp(&mut net));
    let key = net.mr(0, 0, 1 << 20);
    net.hosts[0].ep.add_flow(port_rule(a, 1)).unwrap();
    let rule_b = net.hosts[0].ep.add_flow(port_rule(b, 2)).unwrap();
    for (id, qp) in [(10, a), (20, b)] {
        net.recv(0, qp, id, sge(id * 1000, 500, key));
    }
    let len = write_frame(&mut net, 0, [1, 1, 1, 1], 2);
    net.send(0, sender, wr(1, Opcode::Send, len, 1), &[sge(0, len, key)]);
    run(&mut net);
    assert_eq!(statuses(&net, 0, 1), [(1, WcStatus::Success)]);
    assert_eq!(statuses(&net, 0, 2), [(20, WcStatus::Success)]);
    let got = net.hosts[0].log.completions[0].1;
    assert_eq!((got.byte_len, got.qpn), (len, b));
    let mem = &net.hosts[0].mem.0;
    assert_eq!(mem[..len as usize], mem[20_000..20_000 + len as usize]);
    // Without its rule nothing reaches it, and nobody is told.
    net.hosts[0].ep.remove_flow(rule_b).unwrap();
    assert_eq!(net.hosts[0].ep.remove_flow(rule_b), Err(Refused::NotFound));
    net.recv(0, b, 21, sge(30_000, 500, key));
    net.send(0, sender, wr(2, Opcode::Send, len, 1), &[sge(0, len, key)]);
    run(&mut net);
    assert_eq!(statuses(&net, 0, 1).len(), 2);
    assert_eq!(statuses(&net, 0, 2).len(), 1);
}

#[test]
fn frames__that_do_not_fit_or_may_not_be_read() {
    let mut net = Net::new(1, 2);
    let (sender, a) = (raw_qp(&mut net), raw_qp(&mut net));
    let key = net.mr(0, 0, 1 << 20);
    net.hosts[0].ep.add_flow(port_rule(a, 1)).unwrap();
    net.recv(0, a, 10, sge(1000, 20, key));
    let len = write_frame(&mut net, 0, [1, 1, 1, 1], 1);
    net.send(0, sender, wr(1, Opcode::Send, len, 1), &[sge(0, len, key)]);
    run(&mut net);
    assert_eq!(statuses(&net, 0, 2), [(10, WcStatus::LocLenErr)]);
    net.send(0, sender, wr(2, Opcode::Send, len, 1), &[sge(0, len, key ^ 1)]);
    net.send(0, sender, wr(3, Opcode::Send, len, 1), &[sge(0, len, key)]);
    run(&mut net);
    let sends = statuses(&net, 0, 1);
    assert_eq!(sends[1..], [(2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)]);
    assert_eq!(net.hosts[0].ep.qp_state(sender), Some(QpState::Sqe));
}

#[test]
fn rss__spreads_flows_and_keeps_each_on_its_queue() {
    let mut net = Net::new(1, 3);
    let sender = raw_qp(&mut net);
    let spread = net.qp_of(0, QpType::Raw, None);
    let key = net.mr(0, 0, 1 << 20);
    let queues = [20, 21, 22, 23].map(|cq| net.hosts[0].ep.create_work_queue(1, 1000, cq).unwrap());
    let key40 = std::array::from_fn(|i| (i * 37 + 11) as u8);
    let rss = Rss { table: queues.to_vec(), key: key40, fields: hashed::SRC_V4 | hashed::DST_V4 };
    net.hosts[0].ep.set_rss(spread, rss).unwrap();
    net.hosts[0].ep.add_flow(port_rule(spread, 1)).unwrap();
    let now = net.now;
    for (i, queue) in queues.iter().enumerate() {
        let h = &mut net.hosts[0];
        assert_eq!(h.ep.destroy_srq(*queue), Err(Refused::Busy));
        h.ep.set_work_queue(*queue, true, false, &mut h.log).unwrap();
        let wqes = (0..100).map(|wr_id| RecvWqe { wr_id, num_sge: 1 }).collect();
        let mut batch = RecvBatch { wqes, sges: vec![sge(10_000 + i as u64 * 1000, 500, key); 100] };
        h.ep.post_srq_recvs(now, *queue, &mut batch, &mut h.log);
    }
    for round in 0..2 {
        for flow in 0..32u8 {
            let len = write_frame(&mut net, 0, [10, 0, flow, 1], 1);
            net.send(0, sender, wr(u64::from(flow), Opcode::Send, len, 1), &[sge(0, len, key)]);
            run(&mut net);
        }
        let _ = round;
    }
    let counts: Vec<usize> = (20..24).map(|cq| statuses(&net, 0, cq).len()).collect();
    assert_eq!(counts.iter().sum::<usize>(), 64);
    // The same flows twice: every queue has each of its flows both times.
    assert!(counts.iter().all(|count| count % 2 == 0 && *count > 0), "{counts:?}");
    // Ending a queue flushes what is posted there.
    let h = &mut net.hosts[0];
    h.ep.set_work_queue(queues[0], false, true, &mut h.log).unwrap();
    let flushed = statuses(&net, 0, 20).iter().filter(|s| s.1 == WcStatus::WrFlushErr).count();
    assert_eq!(flushed, 100 - counts[0]);
    net.hosts[0].ep.destroy_qp(now, spread).unwrap();
    net.hosts[0].ep.destroy_srq(queues[0]).unwrap();
}
