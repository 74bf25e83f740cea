//! Several planes: spread, loss of one, healing, without the application noticing.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::stats::PathStats;
use metaroce_proto::*;
use net::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// Writes of 64 KiB, always 16 outstanding, for `span`; gives how many completed.
fn stream(net: &mut Net, qa: Qpn, keys: (u32, u32), span: u64) -> usize {
    let until = net.now + span;
    let before = net.hosts[0].log.completions.len();
    let mut posted = before;
    while net.now < until {
        let done = net.hosts[0].log.completions.len();
        while posted < done + 16 {
            let w =
                SendWqe { remote_addr: MEM_BASE, rkey: keys.1, ..wr(posted as u64, Opcode::Write, 65536, 1) };
            net.send(0, qa, w, &[Sge { addr: MEM_BASE, len: 65536, lkey: keys.0 }]);
            posted += 1;
        }
        if !net.step(until) {
            break;
        }
    }
    let done = net.hosts[0].log.completions.len();
    // Let what is left drain, so that the next phase begins empty.
    net.run_until(10 * SECOND, "drain", |n| n.hosts[0].log.completions.len() == posted);
    assert!(net.hosts[0].log.completions.iter().all(|c| c.1.status == WcStatus::Success));
    done - before
}

fn per_plane(net: &Net) -> Vec<u64> {
    let mut paths: Vec<PathStats> = Vec::new();
    net.hosts[0].ep.path_stats(&mut paths);
    paths.chunks(4).map(|plane| plane.iter().map(|p| p.tx_data_packets).sum()).collect()
}

/// Proves MR-PATH-3.
#[test]
fn black_hole__is_left_and_comes_back() {
    let mut net = Net::with_planes(2, 4, 1);
    net.faults.delay_ns = 20_000;
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    let whole = stream(&mut net, qa, keys, 20 * MS);
    let even = per_plane(&net);
    assert!(even.iter().all(|n| *n * 5 >= even.iter().sum::<u64>()), "uneven: {even:?}");
    net.black_holes = vec![2];
    // The failure itself, then the time after it.
    stream(&mut net, qa, keys, 20 * MS);
    let before = per_plane(&net);
    let degraded = stream(&mut net, qa, keys, 20 * MS);
    let spent: Vec<u64> = per_plane(&net).iter().zip(&before).map(|(a, b)| a - b).collect();
    assert!(degraded * 100 >= whole * 60, "{degraded} of {whole} writes with one plane of four gone");
    assert!(spent[2] < 100, "{spent:?} packets sent while plane 2 was dead");
    net.black_holes.clear();
    net.run(SECOND);
    let before = per_plane(&net);
    let healed = stream(&mut net, qa, keys, 40 * MS) / 2;
    let spent: Vec<u64> = per_plane(&net).iter().zip(&before).map(|(a, b)| a - b).collect();
    assert!(healed * 100 >= whole * 90, "{healed} of {whole} after healing");
    assert!(spent[2] * 10 >= spent.iter().sum::<u64>(), "plane 2 is not used again: {spent:?}");
}

/// Proves MR-PATH-2.
#[test]
fn link_event__moves_at_once() {
    let mut net = Net::with_planes(2, 2, 2);
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    stream(&mut net, qa, keys, 5 * MS);
    net.black_holes = vec![1];
    let now = net.now;
    for h in 0..2 {
        let host = &mut net.hosts[h];
        host.ep.set_plane_state(now, 1, false, &mut host.log);
    }
    let before = per_plane(&net);
    stream(&mut net, qa, keys, 5 * MS);
    let spent = per_plane(&net)[1] - before[1];
    assert!(spent < 50, "{spent} packets sent into a plane known to be down");
}

/// Proves MR-PATH-1.
#[test]
fn all_planes_silent__no_plane_is_blamed_and_data_goes_on() {
    let mut net = Net::with_planes(2, 2, 3);
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    stream(&mut net, qa, keys, 5 * MS);
    let w = SendWqe { remote_addr: MEM_BASE, rkey: keys.1, ..wr(1_000_000, Opcode::Write, 1 << 20, 1) };
    net.send(0, qa, w, &[Sge { addr: MEM_BASE, len: 1 << 20, lkey: keys.0 }]);
    net.black_holes = vec![0, 1];
    net.run(100 * MS);
    assert_eq!(net.hosts[0].ep.stats().paths_left, 0);
    net.black_holes.clear();
    net.run_until(SECOND, "after silence", |n| {
        n.hosts[0].log.completions.iter().any(|c| c.1.wr_id == 1_000_000)
    });
    stream(&mut net, qa, keys, 5 * MS);
}

/// The forward direction of one plane is lossy (gray failure): data is right and throughput useful.
#[test]
fn gray_loss__is_repaired() {
    let mut net = Net::with_planes(2, 4, 4);
    let mut rng = 9;
    net.filter = Some(Box::new(move |_, _, bytes| bytes.len() > 1000 && random(&mut rng) % 100 < 5));
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    assert!(stream(&mut net, qa, keys, 20 * MS) > 100);
}

/// A plane that has only IPv6 carries its share for a peer that was named by an IPv4 address of another plane.
/// Proves MR-HELLO-8.
#[test]
fn planes_of_different_families__all_carry() {
    let mut net = Net::with_planes(2, 2, 5);
    net.make_ipv6(1);
    let (qa, _) = net.pair(0, 1);
    let (la, rb) = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    for id in 0..20 {
        let write = SendWqe { remote_addr: MEM_BASE, rkey: rb, ..wr(id, Opcode::Write, 1 << 20, 1) };
        net.send(0, qa, write, &[sge(0, 1 << 20, la)]);
    }
    net.run_until(SECOND, "writes", |n| statuses(n, 0, 1).len() == 20);
    assert!(statuses(&net, 0, 1).iter().all(|c| c.1 == WcStatus::Success));
    let shares = per_plane(&net);
    assert!(shares.iter().all(|n| n * 3 > shares.iter().sum::<u64>()), "{shares:?}");
}

/// A silent plane is left before long, also when it held half of the window and more. Proves MR-CC-10.
#[test]
fn black_hole__is_left_within_milliseconds() {
    for (planes, hole, delay_us, seed) in
        [(2, 0, 10, 44), (2, 1, 10, 45), (2, 0, 1000, 46), (4, 0, 10, 47), (4, 3, 1000, 48), (8, 2, 100, 49)]
    {
        let mut net = Net::with_planes(2, planes, seed);
        net.faults.delay_ns = delay_us * 1000;
        let (qa, _) = net.pair(0, 1);
        let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        stream(&mut net, qa, keys, 8 * MS + 8 * delay_us * 1000);
        net.black_holes = vec![hole];
        let budget = 20 * MS + 20 * delay_us * 1000;
        stream(&mut net, qa, keys, budget);
        let before = per_plane(&net)[hole];
        let done = stream(&mut net, qa, keys, 5 * MS + 5 * delay_us * 1000);
        let wasted = per_plane(&net)[hole] - before;
        assert!(
            wasted < 20 && done > 0,
            "{planes} planes, {delay_us} us, seed {seed}: {wasted} wasted, {done} done"
        );
    }
}

/// Tells host 1 that its plane's link is down, or up.
fn set_far_link(net: &mut Net, plane: u8, up: bool) {
    let (now, host) = (net.now, &mut net.hosts[1]);
    host.ep.set_plane_state(now, plane, up, &mut host.log);
}

/// The far end's link goes down: it says so, and its peer leaves the plane without waiting for silence. Proves MR-PATH-4
/// and MR-PATH-5.
#[test]
fn far_end_down__is_left_at_once_and_used_again() {
    let mut net = Net::with_planes(2, 4, 7);
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    stream(&mut net, qa, keys, 5 * MS);
    net.black_holes = vec![2];
    set_far_link(&mut net, 2, false);
    net.run(100_000);
    let before = per_plane(&net)[2];
    stream(&mut net, qa, keys, 5 * MS);
    let spent = per_plane(&net)[2] - before;
    assert!(spent < 20, "{spent} packets sent towards a plane that the peer said is down");
    net.black_holes.clear();
    set_far_link(&mut net, 2, true);
    net.run(MS);
    let before = per_plane(&net);
    stream(&mut net, qa, keys, 20 * MS);
    let spent: Vec<u64> = per_plane(&net).iter().zip(&before).map(|(a, b)| a - b).collect();
    assert!(spent[2] * 8 >= spent.iter().sum::<u64>(), "plane 2 is not used again: {spent:?}");
}

/// An operator at the far end wants a plane left whose link works: probes that are answered do not bring it back.
#[test]
fn far_end_unwanted__stays_left_though_it_answers() {
    let mut net = Net::with_planes(2, 2, 8);
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    stream(&mut net, qa, keys, 5 * MS);
    let (now, host) = (net.now, &mut net.hosts[1]);
    host.ep.set_plane_admin(now, 0, steering::Admin::Down, &mut host.log).unwrap();
    net.run(MS);
    let before = per_plane(&net)[0];
    stream(&mut net, qa, keys, 5 * MS);
    assert!(per_plane(&net)[0] - before < 20);
}

/// The far end takes a link for down that works: while the other plane serves it stays left, but when that one dies the
/// transfer goes on over it.
#[test]
fn far_end_mistaken__the_plane_serves_when_no_other_does() {
    let mut net = Net::with_planes(2, 2, 9);
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    stream(&mut net, qa, keys, 5 * MS);
    set_far_link(&mut net, 0, false);
    net.run(MS);
    let before = per_plane(&net)[0];
    stream(&mut net, qa, keys, 5 * MS);
    assert!(per_plane(&net)[0] - before < 20);
    net.black_holes = vec![1];
    assert!(stream(&mut net, qa, keys, 60 * MS) > 0);
}

/// A plane loses most of what is sent on it and goes on answering: what it has lost twice goes another way, so that messages
/// do not wait for its luck. Proves MR-LOSS-3.
#[test]
fn mostly_lossy_plane__repairs_go_elsewhere() {
    let mut net = Net::with_planes(2, 2, 10);
    net.faults.delay_ns = 50_000;
    let (mut rng, mut worst) = (11, std::collections::BTreeMap::new());
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    stream(&mut net, qa, keys, 5 * MS);
    let times = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
    let seen = times.clone();
    // Paths of the two planes take turns: odd ones are on plane 1. What follows the header tells parts of messages apart.
    net.filter = Some(Box::new(move |from, _, bytes| {
        let lossy = from == 0 && bytes.len() > 1000 && bytes[2] % 2 == 1;
        if lossy && random(&mut rng) % 10 < 9 {
            let lost = worst.entry(bytes[20..60].to_vec()).or_insert(0u32);
            *lost += 1;
            seen.borrow_mut().push(*lost);
            return true;
        }
        false
    }));
    stream(&mut net, qa, keys, 20 * MS);
    let most = times.borrow().iter().copied().max().unwrap_or(0);
    assert!(most <= 5, "a part of a message was lost {most} times on the lossy plane");
}
