//! Tag matching between endpoints in virtual time: eager, rendezvous, unexpected and untagged messages.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::*;
use net::*;

const SECOND: u64 = 1_000_000_000;
/// Where receives and matched messages complete on host 1.
const CQ: CqId = 10;

struct World {
    net: Net,
    qa: Qpn,
    la: u32,
    lb: u32,
    srq: SrqId,
}

impl World {
    fn new(seed: u64) -> World {
        let mut net = Net::new(2, seed);
        let srq = net.hosts[1].ep.create_tag_srq(1, 1000, 100, CQ).unwrap();
        let (qa, qb) = (net.qp(0, None), net.qp(1, Some(srq)));
        net.make_rtr(0, qa, 1, qb);
        net.make_rtr(1, qb, 0, qa);
        net.make_rts(0, qa, 14, 7, 7);
        net.make_rts(1, qb, 14, 7, 7);
        let (la, lb) = (net.mr(0, 0, 8 << 20), net.mr(1, 0, 8 << 20));
        World { net, qa, la, lb, srq }
    }
    fn op(&mut self, wr_id: u64, change: TagChange, heard: u32) -> u32 {
        let op = TagOp { wr_id, change, heard, sync: matches!(change, TagChange::Sync), signaled: true };
        let (srq, h) = (self.srq, &mut self.net.hosts[1]);
        h.ep.post_tag_op(srq, &op, &mut h.log).unwrap()
    }
    fn expect(&mut self, wr_id: u64, tag: u64, offset: u64, len: u32, heard: u32) -> u32 {
        let sge = sge(offset, len, self.lb);
        self.op(wr_id + 1000, TagChange::Add(Expected { wr_id, tag, mask: u64::MAX, sge }), heard)
    }
    fn recv(&mut self, wr_id: u64, offset: u64) {
        let mut batch =
            RecvBatch { wqes: vec![RecvWqe { wr_id, num_sge: 1 }], sges: vec![sge(offset, 8192, self.lb)] };
        let (now, srq, h) = (self.net.now, self.srq, &mut self.net.hosts[1]);
        h.ep.post_srq_recvs(now, srq, &mut batch, &mut h.log);
    }
    /// Writes a header at the offset and sends `len` bytes from there.
    fn send(&mut self, wr_id: u64, op: u8, tag: u64, offset: u64, len: u32) {
        let at = offset as usize;
        let mem = &mut self.net.hosts[0].mem.0;
        mem[at..at + 8].copy_from_slice(&[op, 0, 0, 0, 0, 0, 0, 77]);
        mem[at + 8..at + 16].copy_from_slice(&tag.to_be_bytes());
        let (qa, la) = (self.qa, self.la);
        self.net.send(0, qa, wr(wr_id, Opcode::Send, len, 1), &[sge(offset, len, la)]);
    }
    /// What completed on the SRQ's queue, without the changes of the list.
    fn got(&self) -> Vec<Completion> {
        let all = self.net.hosts[1].log.completions.iter().filter(|c| c.0 == CQ).map(|c| c.1);
        all.filter(|c| !matches!(c.opcode, WcOpcode::TmAdd | WcOpcode::TmDel | WcOpcode::TmSync)).collect()
    }
    fn wait(&mut self, count: usize) -> Vec<Completion> {
        let is_op = |c: &Completion| matches!(c.opcode, WcOpcode::TmAdd | WcOpcode::TmDel | WcOpcode::TmSync);
        self.net.run_until(60 * SECOND, "messages", |n| {
            n.hosts[1].log.completions.iter().filter(|c| c.0 == CQ && !is_op(&c.1)).count() >= count
        });
        self.got()
    }
}

#[test]
fn eager__goes_to_the_buffer_its_tag_names_under_faults() {
    for seed in 0..40 {
        let mut w = World::new(seed);
        w.net.faults = Faults { loss: 0.05, dup: 0.05, reorder: 0.3, delay_ns: 30_000 };
        for i in 0..1 << 20 {
            w.net.hosts[0].mem.0[i] = (i * 11 + i / 251) as u8;
        }
        for tag in 0..20u64 {
            w.expect(tag, tag, tag * 16_384, 16_384, 0);
        }
        for i in 0..20u64 {
            w.send(i, 3, 19 - i, i * 16_384, 16_000);
        }
        let got = w.wait(20);
        for (i, completion) in got.iter().enumerate() {
            let tag = 19 - i as u64;
            assert_eq!((completion.wr_id, completion.status), (tag, WcStatus::Success), "seed {seed}");
            assert_eq!((completion.opcode, completion.byte_len), (WcOpcode::TmRecv, 15_984));
            assert_eq!(completion.wc_flags, WC_TM_MATCH | WC_TM_DATA_VALID);
            assert_eq!(completion.tags, TagInfo { tag, app_ctx: 77 });
            assert_eq!(completion.rq_release, 0);
            let (from, to) = (i * 16_384, tag as usize * 16_384);
            let landed = &w.net.hosts[1].mem.0[to..to + 15_984];
            assert!(landed == &w.net.hosts[0].mem.0[from + 16..from + 16_000], "seed {seed} message {i}");
        }
    }
}

#[test]
fn rendezvous__is_fetched_and_the_sender_is_told() {
    for seed in 0..20 {
        let mut w = World::new(seed);
        w.net.faults = Faults { loss: 0.05, dup: 0.05, reorder: 0.2, delay_ns: 20_000 };
        let data: Vec<u8> = (0..100_000).map(|i| (i * 7 + i / 300) as u8).collect();
        w.net.hosts[0].mem.0[1 << 20..(1 << 20) + data.len()].copy_from_slice(&data);
        w.expect(5, 42, 0, 200_000, 0);
        let (qa, la) = (w.qa, w.la);
        w.net.recv(0, qa, 9, sge(2 << 20, 64, la));
        let mem = &mut w.net.hosts[0].mem.0;
        mem[16..24].copy_from_slice(&(MEM_BASE + (1 << 20)).to_be_bytes());
        mem[24..28].copy_from_slice(&la.to_be_bytes());
        mem[28..32].copy_from_slice(&100_000u32.to_be_bytes());
        w.send(1, 1, 42, 0, 32);
        let got = w.wait(2);
        let flags: Vec<_> = got.iter().map(|c| (c.wr_id, c.status, c.wc_flags)).collect();
        let success = WcStatus::Success;
        assert_eq!(flags, [(5, success, WC_TM_MATCH), (5, success, WC_TM_DATA_VALID)], "seed {seed}");
        assert_eq!(got[1].byte_len, 100_000);
        assert!(w.net.hosts[1].mem.0[..100_000] == data[..]);
        w.net.run_until(SECOND, "end of the rendezvous", |n| !statuses(n, 0, 2).is_empty());
        assert_eq!(statuses(&w.net, 0, 2), [(9, success)]);
        let fin = &w.net.hosts[0].mem.0[2 << 20..(2 << 20) + 16];
        assert_eq!((fin[0], fin[7], fin[15]), (2, 77, 42));
        // Nothing of the fetch shows in the queue pair's own completions.
        assert!(statuses(&w.net, 1, 1).is_empty());
    }
}

#[test]
fn unexpected__takes_a_receive_and_stops_what_is_added_until_synchronised() {
    let mut w = World::new(3);
    w.recv(100, 0);
    w.recv(101, 16_384);
    w.send(1, 3, 7, 0, 100);
    let got = w.wait(1);
    assert_eq!((got[0].opcode, got[0].wc_flags, got[0].wr_id), (WcOpcode::TmRecv, 0, 100));
    assert_eq!((got[0].byte_len, got[0].srq), (100, Some(w.srq)));
    // Added without having heard of the one before: it takes no part yet.
    w.expect(5, 8, 32_768, 4096, 0);
    let added = w.net.hosts[1].log.completions.last().unwrap().1;
    assert_eq!((added.opcode, added.wc_flags), (WcOpcode::TmAdd, WC_TM_SYNC_REQ));
    w.send(2, 3, 8, 4096, 100);
    assert_eq!(w.wait(2)[1].wr_id, 101);
    w.op(50, TagChange::Sync, 2);
    w.send(3, 3, 8, 4096, 100);
    let got = w.wait(3);
    assert_eq!((got[2].wr_id, got[2].wc_flags), (5, WC_TM_MATCH | WC_TM_DATA_VALID));
    // One that is not to be matched.
    w.recv(102, 65_536);
    w.expect(6, 9, 32_768, 4096, 2);
    w.send(4, 0, 9, 4096, 100);
    let got = w.wait(4);
    assert_eq!((got[3].opcode, got[3].wr_id), (WcOpcode::TmNoTag, 102));
}

#[test]
fn errors__too_long_deleted_and_flushed() {
    let mut w = World::new(4);
    let number = w.expect(1, 1, 0, 64, 0);
    w.op(20, TagChange::Delete(number), 0);
    w.op(21, TagChange::Delete(number), 0);
    let ops: Vec<_> = w.net.hosts[1].log.completions.iter().map(|c| (c.1.wr_id, c.1.status)).collect();
    assert_eq!(ops[1..], [(20, WcStatus::Success), (21, WcStatus::TmErr)]);
    w.expect(2, 2, 0, 64, 0);
    w.send(1, 3, 2, 0, 81);
    w.net.run_until(60 * SECOND, "refusal", |n| !statuses(n, 0, 1).is_empty());
    assert_eq!(statuses(&w.net, 0, 1), [(1, WcStatus::RemInvReqErr)]);
    let got = w.got();
    assert_eq!((got[0].wr_id, got[0].status, got[0].rq_release), (2, WcStatus::LocLenErr, 0));
}
