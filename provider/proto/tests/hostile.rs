//! Broken, foreign and hostile packets: counted and dropped, never a panic, never a byte outside a region.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::*;
use net::*;
use std::cell::RefCell;
use std::rc::Rc;

/// Captured packets with the host they were for.
type Capture = Vec<(usize, Vec<u8>)>;

fn seed() -> u64 {
    std::env::var("METAROCE_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1)
}

/// Traffic is captured, then mutated copies of it are fed to both ends between real packets.
#[test]
fn mutated_packets__never_panic_and_never_write_outside() {
    let first = seed();
    println!("seeds {first}..{}", first + 20);
    for seed in first..first + 20 {
        let mut net = Net::new(2, seed);
        let (qa, qb) = net.pair(0, 1);
        // Regions in the middle of memory; everything around them is a guard.
        let (la, lb) = (net.mr(0, 1 << 20, 1 << 20), net.mr(1, 1 << 20, 1 << 20));
        for h in 0..2 {
            net.hosts[h].mem.0.fill(0xa5);
        }
        let seen: Rc<RefCell<Capture>> = Rc::default();
        let tap = seen.clone();
        net.filter = Some(Box::new(move |_, to, bytes| {
            let mut seen = tap.borrow_mut();
            if seen.len() < 4000 {
                seen.push((to, bytes.to_vec()));
            }
            false
        }));
        for i in 0..20u64 {
            let at = (1 << 20) + i * 50_000;
            let (op, len) =
                [(Opcode::Write, 30_000), (Opcode::Read, 9_000), (Opcode::Send, 700), (Opcode::FetchAdd, 8)]
                    [i as usize % 4];
            let mut w = wr(i, op, len, 1);
            (w.remote_addr, w.rkey) = (MEM_BASE + (1 << 20) + i * 40_000, lb);
            net.recv(
                1,
                qb,
                i,
                Sge { addr: MEM_BASE + at, len: 50_000.min(((2 << 20) - at) as u32), lkey: lb },
            );
            net.send(0, qa, w, &[Sge { addr: MEM_BASE + (1 << 20), len, lkey: la }]);
            net.run(50_000);
            for _ in 0..200 {
                let count = seen.borrow().len() as u64;
                let pick = net.below(count) as usize;
                let (to, mut bytes) = seen.borrow()[pick].clone();
                for _ in 0..1 + net.below(6) {
                    match net.below(4) {
                        0 => bytes.truncate(net.below(bytes.len() as u64 + 1) as usize),
                        1 => bytes.extend_from_slice(&[0x10; 48][..net.below(48) as usize]),
                        _ if !bytes.is_empty() => {
                            let head = net.below((bytes.len() as u64).min(120)) as usize;
                            bytes[head] = net.below(256) as u8;
                        }
                        _ => {}
                    }
                }
                let meta = RxMeta {
                    src: std::net::SocketAddr::new(net.hosts[1 - to].ip, 50_000),
                    dst_ip: net.hosts[to].ip,
                    ecn: net.below(4) as u8,
                };
                let now = net.now;
                let host = &mut net.hosts[to];
                host.ep.on_datagram(now, &meta, &bytes, &mut host.mem, &mut host.log);
            }
        }
        net.run(3_000_000_000);
        for h in 0..2 {
            let mem = &net.hosts[h].mem.0;
            let guards = mem[..1 << 20].iter().chain(&mem[2 << 20..]);
            assert!(guards.copied().all(|b| b == 0xa5), "seed {seed}: host {h} wrote outside its region");
        }
    }
}

/// Noise from strangers costs at most a bounded number of small answers.
/// Proves MR-RESET-1.
#[test]
fn noise__answers_are_bounded() {
    let mut net = Net::new(1, seed());
    let meta = RxMeta { src: "10.9.9.9:5000".parse().unwrap(), dst_ip: net.hosts[0].ip, ecn: 0 };
    let mut answered = 0;
    for i in 0..10_000u64 {
        let mut bytes: Vec<u8> = (0..net.below(200)).map(|_| net.below(256) as u8).collect();
        if i % 2 == 0 && bytes.len() > 20 {
            bytes[0] = 0x11;
            bytes[16] = 0;
        }
        let host = &mut net.hosts[0];
        host.ep.on_datagram(1_000_000, &meta, &bytes, &mut host.mem, &mut host.log);
        let mut burst = TxBurst::new();
        while host.ep.poll_burst(1_000_000, &mut burst, &mut host.log) {
            answered += burst.total_bytes();
        }
    }
    assert!(answered <= 200, "{answered} bytes answered to noise within a millisecond");
    assert_eq!(net.hosts[0].ep.stats().connections, 0);
}
