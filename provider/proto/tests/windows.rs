//! Memory windows between endpoints in virtual time: binding, use, and every way a window's key dies.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::*;
use net::*;

const SECOND: u64 = 1_000_000_000;
const ACCESS: u32 = access::LOCAL_WRITE | access::MW_BIND;

/// Two hosts with a connected pair; host 1 has a region that only windows open, and a window bound for the QP.
struct World {
    net: Net,
    qa: Qpn,
    qb: Qpn,
    la: u32,
    region: u32,
    window: u32,
}

impl World {
    fn new(seed: u64, type2: bool) -> World {
        let mut net = Net::new(2, seed);
        let (qa, qb) = net.pair(0, 1);
        let la = net.mr(0, 0, 4096);
        let region = net.hosts[1].ep.register_mr(1, MEM_BASE, MEM_BASE, 4096, ACCESS).unwrap();
        let window = net.hosts[1].ep.create_window(1, type2).unwrap();
        World { net, qa, qb, la, region, window }
    }
    /// Posts a binding of `offset..offset + len` and gives the new key.
    fn bind(&mut self, wr_id: u64, offset: u64, len: u64, access: u32) -> u32 {
        self.window = self.window & !0xff | self.window.wrapping_add(1) & 0xff;
        let mut w = wr(wr_id, Opcode::BindWindow, 0, 0);
        let (new_key, region, addr) = (self.window, self.region, MEM_BASE + offset);
        w.set_bind(&Bind { new_key, region, addr, len, access });
        self.net.send(1, self.qb, w, &[]);
        new_key
    }
    fn write(&mut self, wr_id: u64, key: u32, offset: u64, len: u32) {
        let mut w = wr(wr_id, Opcode::Write, len, 1);
        (w.remote_addr, w.rkey) = (MEM_BASE + offset, key);
        self.net.send(0, self.qa, w, &[sge(0, len, self.la)]);
    }
    /// Statuses of the sends of a host once it has `count` completions.
    fn sends(&mut self, host: usize, count: usize) -> Vec<(u64, WcStatus)> {
        self.net.run_until(60 * SECOND, "completions", |n| statuses(n, host, 1).len() >= count);
        statuses(&self.net, host, 1)
    }
}

#[test]
fn window1__is_bound_used_and_bound_to_nothing() {
    let mut w = World::new(11, false);
    w.net.hosts[0].mem.0[..8].copy_from_slice(b"in range");
    let key = w.bind(1, 64, 128, access::REMOTE_WRITE);
    assert_eq!(w.sends(1, 1), [(1, WcStatus::Success)]);
    assert_eq!(w.net.hosts[1].log.completions[0].1.opcode, WcOpcode::BindWindow);
    w.write(2, key, 64, 8);
    assert_eq!(w.sends(0, 1), [(2, WcStatus::Success)]);
    assert_eq!(&w.net.hosts[1].mem.0[64..72], b"in range");
    assert_eq!(w.net.hosts[1].ep.deregister_mr(w.region), Err(Refused::Busy));
    w.bind(3, 0, 0, 0);
    assert_eq!(w.sends(1, 2)[1], (3, WcStatus::Success));
    w.write(4, key, 64, 8);
    assert_eq!(w.sends(0, 2)[1], (4, WcStatus::RemAccessErr));
    w.net.hosts[1].ep.deregister_mr(w.region).unwrap();
}

#[test]
fn window2__outside_its_part_is_refused() {
    let mut w = World::new(12, true);
    let key = w.bind(1, 64, 128, access::REMOTE_WRITE);
    w.sends(1, 1);
    w.write(2, key, 185, 8);
    assert_eq!(w.sends(0, 1), [(2, WcStatus::RemAccessErr)]);
    assert_eq!(w.net.hosts[1].mem.0[185..193], [0; 8]);
}

#[test]
fn window2__local_invalidation_takes_effect_before_later_sends() {
    for seed in 0..20 {
        let mut w = World::new(seed, true);
        w.net.faults = Faults { loss: 0.1, dup: 0.05, reorder: 0.2, delay_ns: 20_000 };
        let key = w.bind(1, 0, 4096, access::REMOTE_WRITE);
        let mut inv = wr(2, Opcode::LocalInv, 0, 0);
        inv.imm = key;
        let qb = w.qb;
        w.net.send(1, qb, inv, &[]);
        w.sends(1, 2);
        w.write(3, key, 0, 8);
        assert_eq!(w.sends(0, 1), [(3, WcStatus::RemAccessErr)], "seed {seed}");
    }
}

/// Proves MR-ORDER-6.
#[test]
fn send_inv__kills_the_key_before_the_receive_completes() {
    for seed in 0..20 {
        let mut w = World::new(seed, true);
        w.net.faults = Faults { loss: 0.1, dup: 0.05, reorder: 0.2, delay_ns: 20_000 };
        let key = w.bind(1, 0, 4096, access::REMOTE_WRITE);
        w.sends(1, 1);
        let (qa, qb, la) = (w.qa, w.qb, w.la);
        let lb = w.net.mr(1, 0, 4096);
        w.net.recv(1, qb, 9, sge(2048, 64, lb));
        // The Write before it still has the key.
        w.write(2, key, 0, 8);
        let mut send = wr(3, Opcode::SendInv, 8, 1);
        send.imm = key;
        w.net.send(0, qa, send, &[sge(0, 8, la)]);
        assert_eq!(w.sends(0, 2), [(2, WcStatus::Success), (3, WcStatus::Success)], "seed {seed}");
        w.net.run_until(SECOND, "receive", |n| !statuses(n, 1, 2).is_empty());
        let got = w.net.hosts[1].log.completions.iter().find(|c| c.0 == 2).unwrap().1;
        assert_eq!((got.status, got.wc_flags, got.imm), (WcStatus::Success, WC_WITH_INV, key));
        w.write(4, key, 0, 8);
        assert_eq!(w.sends(0, 3)[2], (4, WcStatus::RemAccessErr), "seed {seed}");
    }
}

#[test]
fn errors__wrong_keys_and_regions() {
    // A local invalidation of a region's key, and of nothing.
    for key in [None, Some(0x1234_5678)] {
        let mut w = World::new(13, true);
        let mut inv = wr(1, Opcode::LocalInv, 0, 0);
        inv.imm = key.unwrap_or(w.region);
        let qb = w.qb;
        w.net.send(1, qb, inv, &[]);
        assert_eq!(w.sends(1, 1), [(1, WcStatus::LocQpOpErr)]);
        assert_eq!(w.net.hosts[1].ep.qp_state(w.qb), Some(QpState::Err));
    }
    // A binding beyond the region.
    let mut w = World::new(14, true);
    w.bind(1, 0, 4097, access::REMOTE_READ);
    assert_eq!(w.sends(1, 1), [(1, WcStatus::MwBindErr)]);
    // A Send that invalidates what is no window.
    let mut w = World::new(15, true);
    let (qa, qb, la) = (w.qa, w.qb, w.la);
    let lb = w.net.mr(1, 0, 4096);
    w.net.recv(1, qb, 9, sge(0, 64, lb));
    let mut send = wr(3, Opcode::SendInv, 8, 1);
    send.imm = w.region;
    w.net.send(0, qa, send, &[sge(0, 8, la)]);
    assert_eq!(w.sends(0, 1), [(3, WcStatus::RemAccessErr)]);
    assert_eq!(statuses(&w.net, 1, 2), [(9, WcStatus::LocAccessErr)]);
}

#[test]
fn window2__ends_with_its_qp() {
    let mut w = World::new(16, true);
    w.bind(1, 0, 4096, access::REMOTE_WRITE);
    w.sends(1, 1);
    assert_eq!(w.net.hosts[1].ep.deregister_mr(w.region), Err(Refused::Busy));
    let now = w.net.now;
    w.net.hosts[1].ep.destroy_qp(now, w.qb).unwrap();
    w.net.hosts[1].ep.deregister_mr(w.region).unwrap();
}

#[test]
fn null_region__reads_zeros_and_swallows() {
    let mut net = Net::new(2, 17);
    let (qa, qb) = net.pair(0, 1);
    let (null_a, null_b) =
        (net.hosts[0].ep.register_null_mr(1).unwrap(), net.hosts[1].ep.register_null_mr(1).unwrap());
    let lb = net.mr(1, 0, 1 << 20);
    net.hosts[1].mem.0[..20_000].fill(7);
    let zeros = |len, lkey| Sge { addr: 0, len, lkey };
    net.hosts[1].ep.local_memory(1, &zeros(8, null_b), access::LOCAL_WRITE).unwrap();
    net.recv(1, qb, 1, sge(0, 20_000, lb));
    net.recv(1, qb, 2, zeros(20_000, null_b));
    let mut w = wr(3, Opcode::Send, 10_000, 1);
    net.send(0, qa, w, &[zeros(10_000, null_a)]);
    w.wr_id = 4;
    net.send(0, qa, w, &[zeros(10_000, null_a)]);
    net.run_until(SECOND, "both", |n| statuses(n, 1, 2).len() == 2 && statuses(n, 0, 1).len() == 2);
    assert_eq!(statuses(&net, 1, 2), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert!(net.hosts[1].mem.0[..10_000].iter().all(|b| *b == 0));
    assert!(net.hosts[1].mem.0[10_000..20_000].iter().all(|b| *b == 7));
}
