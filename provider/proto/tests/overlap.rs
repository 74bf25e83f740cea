//! Writes of one stream to the same memory under loss and reordering: the youngest bytes stay.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::*;
use net::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;
const AREA: usize = 100_000;

/// Random overlapping Writes, several under way at once, each of one byte value; the far memory is in the end what
/// doing them one after the other makes of it, and so is what the receiver of a Send behind them sees. (MR-ORDER-9)
#[test]
fn overlapping_writes__end_as_one_after_the_other() {
    let begin: u64 = std::env::var("METAROCE_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    for seed in begin..begin + 12 {
        let mut net = Net::with_planes(2, 2, seed);
        let (qa, qb) = net.pair(0, 1);
        let keys = [net.mr(0, 0, 8 << 20), net.mr(1, 0, AREA as u64)];
        // Another key to the same memory.
        let other = net.mr(1, 0, AREA as u64);
        let inbox = net.mr(1, 1 << 20, 4096);
        net.run(5 * MS);
        net.faults.loss = 0.02;
        net.faults.reorder = 0.1;
        let mut model = vec![0u8; AREA];
        for round in 0..30_u64 {
            net.recv(1, qb, round, sge(1 << 20, 64, inbox));
            for write in 0..12_usize {
                let len = [1, 8, 64, 65, 4096, 9000, 30_000][net.below(7) as usize];
                let at = net.below((AREA - len) as u64) as usize;
                let value = (round * 12 + write as u64 + 1) as u8;
                // Each Write has a source of its own, since sending it again reads it again.
                let source = write * 40_000;
                net.hosts[0].mem.0[source..source + len].fill(value);
                model[at..at + len].fill(value);
                let mut request = wr(1000, Opcode::Write, len as u32, 1);
                let rkey = if net.chance(0.3) { other } else { keys[1] };
                (request.remote_addr, request.rkey) = (MEM_BASE + at as u64, rkey);
                net.send(0, qa, request, &[sge(source as u64, len as u32, keys[0])]);
                if net.chance(0.3) {
                    net.run(20_000);
                }
            }
            net.send(0, qa, wr(2000, Opcode::Send, 8, 1), &[sge(0, 8, keys[0])]);
            let seen = |n: &mut Net| statuses(n, 1, 2).len() as u64 > round;
            net.run_until(SECOND, "Send", seen);
            assert!(net.hosts[1].mem.0[..AREA] == model[..], "seed {seed}, round {round}");
            let ended = |n: &mut Net| statuses(n, 0, 1).len() as u64 == 13 * (round + 1);
            net.run_until(SECOND, "completions", ended);
        }
        assert!(statuses(&net, 0, 1).iter().all(|c| c.1 == WcStatus::Success), "seed {seed}");
    }
}

/// Random Reads and atomics, several under way at once, into overlapping parts of the same local memory: it is in the end
/// what doing them one after the other makes of it. (MR-ORDER-10)
#[test]
fn overlapping_answers__end_as_one_after_the_other() {
    const SLOT: usize = 70_000;
    const COUNTERS: u64 = 7 << 20;
    let begin: u64 = std::env::var("METAROCE_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    for seed in begin..begin + 12 {
        let mut net = Net::with_planes(2, 2, seed);
        let (qa, qb) = net.pair(0, 1);
        net.modify(1, qb, QpModify { max_dest_rd_atomic: Some(16), ..Default::default() });
        net.modify(0, qa, QpModify { max_rd_atomic: Some(12), ..Default::default() });
        // Two keys to the same local memory.
        let keys = [net.mr(0, 0, AREA as u64), net.mr(0, 0, AREA as u64)];
        let rkey = net.mr(1, 0, 8 << 20);
        net.run(5 * MS);
        net.faults.loss = 0.02;
        net.faults.reorder = 0.1;
        let mut model = vec![0u8; AREA];
        for round in 0..30_u64 {
            for read in 0..12_u64 {
                let id = round * 12 + read;
                let key = keys[net.below(2) as usize];
                if net.chance(0.2) {
                    let at = net.below(AREA as u64 / 8 - 1) as usize * 8;
                    let counter = COUNTERS + read * 8;
                    let old = &net.hosts[1].mem.0[counter as usize..counter as usize + 8];
                    model[at..at + 8].copy_from_slice(old);
                    let add = SendWqe { compare_add: id << 32 | id, ..wr(id, Opcode::FetchAdd, 8, 1) };
                    let add = SendWqe { remote_addr: MEM_BASE + counter, rkey, ..add };
                    net.send(0, qa, add, &[sge(at as u64, 8, key)]);
                } else {
                    let len = [1, 8, 64, 4096, 9000, 60_000][net.below(6) as usize];
                    // In two pieces, of which the second begins anywhere.
                    let cut = 1 + net.below(len as u64 - 1).min(len as u64 / 2) as usize;
                    let (first, second) = (cut.min(len), len - cut.min(len));
                    let [at, then] = [first, second].map(|part| net.below((AREA - part) as u64) as usize);
                    // Each Read has a source of its own, which stays as it is until the round has ended.
                    let source = read as usize * SLOT;
                    let value = (id % 251) as u8 + 1;
                    net.hosts[1].mem.0[source..source + len].fill(value);
                    model[at..at + first].fill(value);
                    model[then..then + second].fill(value);
                    let request = SendWqe {
                        remote_addr: MEM_BASE + source as u64,
                        rkey,
                        ..wr(id, Opcode::Read, len as u32, 2)
                    };
                    let sges = [sge(at as u64, first as u32, key), sge(then as u64, second as u32, key)];
                    net.send(0, qa, request, &sges);
                }
                if net.chance(0.3) {
                    net.run(20_000);
                }
            }
            let ended = |n: &mut Net| statuses(n, 0, 1).len() as u64 == 12 * (round + 1);
            net.run_until(SECOND, "completions", ended);
            assert!(net.hosts[0].mem.0[..AREA] == model[..], "seed {seed}, round {round}");
        }
        assert!(statuses(&net, 0, 1).iter().all(|c| c.1 == WcStatus::Success), "seed {seed}");
    }
}
