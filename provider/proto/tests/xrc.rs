//! Extended reliable connections between endpoints in virtual time: messages name the SRQ they are for.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::*;
use net::*;

const SECOND: u64 = 1_000_000_000;
/// XRC domain of `Net`'s XrcRecv QPs.
const XRCD: u32 = 5;
const LEN: u32 = 6000;

/// A requester on host 0, a responder on host 1 and two SRQs of its domain, which complete on queues 10 and 11.
struct World {
    net: Net,
    qs: Qpn,
    qr: Qpn,
    la: u32,
    lb: u32,
    srqs: [SrqId; 2],
}

impl World {
    fn new(seed: u64, rnr_retry: u8) -> World {
        let mut net = Net::new(2, seed);
        let qs = net.qp_of(0, QpType::XrcSend, None);
        let qr = net.qp_of(1, QpType::XrcRecv, None);
        net.make_rtr(0, qs, 1, qr);
        net.make_rtr(1, qr, 0, qs);
        net.make_rts(0, qs, 14, 7, rnr_retry);
        let srqs = [10, 11].map(|cq| net.hosts[1].ep.create_xrc_srq(1, 1000, XRCD, cq).unwrap());
        let (la, lb) = (net.mr(0, 0, 8 << 20), net.mr(1, 0, 8 << 20));
        World { net, qs, qr, la, lb, srqs }
    }
    fn recv(&mut self, srq: usize, wr_id: u64, offset: u64) {
        let mut batch =
            RecvBatch { wqes: vec![RecvWqe { wr_id, num_sge: 1 }], sges: vec![sge(offset, LEN, self.lb)] };
        let (now, id) = (self.net.now, self.srqs[srq]);
        let h = &mut self.net.hosts[1];
        h.ep.post_srq_recvs(now, id, &mut batch, &mut h.log);
    }
    fn send(&mut self, wr_id: u64, srq: SrqId, offset: u64, len: u32) {
        let w = SendWqe { remote_srq: srq, ..wr(wr_id, Opcode::Send, len, 1) };
        let (qs, la) = (self.qs, self.la);
        self.net.send(0, qs, w, &[sge(offset, len, la)]);
    }
}

/// Proves MR-XRC-3.
#[test]
fn messages__reach_the_srq_they_name_in_order_under_faults() {
    for seed in 0..60 {
        let mut w = World::new(seed, 7);
        w.net.faults = Faults { loss: 0.05, dup: 0.05, reorder: 0.3, delay_ns: 50_000 };
        for i in 0..1 << 20 {
            w.net.hosts[0].mem.0[i] = (i * 13 + i / 251) as u8;
        }
        let targets: Vec<usize> = (0..40).map(|_| w.net.below(2) as usize).collect();
        // Exactly as many receives as messages, some posted late.
        let early = w.net.below(41) as usize;
        let mut posted = 0;
        for (i, target) in targets.iter().enumerate().take(early) {
            w.recv(*target, i as u64, (i as u64) * u64::from(LEN));
            posted += 1;
        }
        for (i, target) in targets.iter().enumerate() {
            let srq = w.srqs[*target];
            w.send(i as u64, srq, (i as u64) * u64::from(LEN), LEN);
        }
        w.net.run(2_000_000);
        for (i, target) in targets.iter().enumerate().skip(posted) {
            w.recv(*target, i as u64, (i as u64) * u64::from(LEN));
        }
        w.net.run_until(60 * SECOND, &format!("seed {seed}"), |n| {
            statuses(n, 0, 1).len() == 40 && statuses(n, 1, 10).len() + statuses(n, 1, 11).len() == 40
        });
        for (which, cq) in [(0, 10), (1, 11)] {
            // An SRQ's receives are taken in order of arrival, so contents are compared by message, not by receive.
            let got: Vec<_> =
                w.net.hosts[1].log.completions.iter().filter(|c| c.0 == cq).map(|c| c.1).collect();
            let sent = targets.iter().enumerate().filter(|t| *t.1 == which).map(|t| t.0 as u64);
            assert_eq!(got.len(), sent.clone().count(), "seed {seed}");
            for (completion, message) in got.iter().zip(sent) {
                assert_eq!(completion.status, WcStatus::Success);
                assert_eq!(completion.srq, Some(w.srqs[which]));
                let at = |i: u64| (i * u64::from(LEN)) as usize..((i + 1) * u64::from(LEN)) as usize;
                let landed = &w.net.hosts[1].mem.0[at(completion.wr_id)];
                assert!(landed == &w.net.hosts[0].mem.0[at(message)], "seed {seed} message {message}");
            }
        }
    }
}

/// Proves MR-XRC-2.
#[test]
fn rdma__acts_in_the_domain_of_the_srq() {
    let mut w = World::new(3, 7);
    let rkey = w.net.hosts[1].ep.register_mr(1, MEM_BASE, MEM_BASE, 4096, 0xf).unwrap();
    let other = w.net.hosts[1].ep.register_mr(2, MEM_BASE, MEM_BASE, 4096, 0xf).unwrap();
    let (qs, la) = (w.qs, w.la);
    for (id, opcode, key) in [(1, Opcode::Write, rkey), (2, Opcode::Read, rkey), (3, Opcode::Write, other)] {
        let request =
            SendWqe { remote_srq: w.srqs[0], remote_addr: MEM_BASE, rkey: key, ..wr(id, opcode, 100, 1) };
        w.net.send(0, qs, request, &[sge(0, 100, la)]);
    }
    w.net.run_until(SECOND, "three", |n| statuses(n, 0, 1).len() == 3);
    let expected = [(1, WcStatus::Success), (2, WcStatus::Success), (3, WcStatus::RemAccessErr)];
    assert_eq!(statuses(&w.net, 0, 1), expected);
}

/// Proves MR-XRC-1.
#[test]
fn errors__no_receive_and_no_such_srq() {
    let mut w = World::new(4, 1);
    let srq = w.srqs[1];
    w.send(1, srq, 0, 10);
    w.net.run_until(60 * SECOND, "rnr", |n| !statuses(n, 0, 1).is_empty());
    assert_eq!(statuses(&w.net, 0, 1), [(1, WcStatus::RnrRetryExcErr)]);
    // A basic SRQ, one of another domain, and none.
    for which in 0..3 {
        let mut w = World::new(5, 7);
        let wrong = match which {
            0 => w.net.hosts[1].ep.create_srq(1, 10).unwrap(),
            1 => w.net.hosts[1].ep.create_xrc_srq(1, 10, XRCD + 1, 10).unwrap(),
            _ => 99,
        };
        w.send(1, wrong, 0, 10);
        w.net.run_until(60 * SECOND, "refusal", |n| !statuses(n, 0, 1).is_empty());
        assert_eq!(statuses(&w.net, 0, 1), [(1, WcStatus::RemInvReqErr)]);
        assert_eq!(w.net.hosts[1].ep.qp_state(w.qr), Some(QpState::Err));
    }
}
