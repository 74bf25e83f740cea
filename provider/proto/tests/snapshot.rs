//! A look at an endpoint agrees with its own counters, and changes nothing.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::snapshot::{CONNECTIONS_PER_PAGE, PathView};
use metaroce_proto::stats::{Cause, PathStats, PathTally};
use metaroce_proto::*;
use net::*;

const SECOND: u64 = 1_000_000_000;

/// Writes of 16 KiB, one after the other.
fn write(net: &mut Net, qa: Qpn, keys: (u32, u32), count: u64) {
    for n in 0..count {
        let done = net.hosts[0].log.completions.len();
        let w = SendWqe { remote_addr: MEM_BASE, rkey: keys.1, ..wr(n, Opcode::Write, 16384, 1) };
        net.send(0, qa, w, &[Sge { addr: MEM_BASE, len: 16384, lkey: keys.0 }]);
        net.run_until(10 * SECOND, "a write", |n| n.hosts[0].log.completions.len() > done);
    }
}

fn paths(net: &Net) -> Vec<PathView> {
    let page = net.hosts[0].ep.view_connections(net.now, 0);
    assert_eq!((page.items.len(), page.next), (1, None));
    page.items.into_iter().next().unwrap().paths
}

fn sum(paths: &[PathView], field: fn(&PathTally) -> u64) -> u64 {
    paths.iter().map(|path| field(&path.tally)).sum()
}

#[test]
fn view__tallies_add_up_to_the_counters() {
    let mut net = Net::with_planes(2, 2, 31);
    net.faults = Faults { loss: 0.05, delay_ns: 20_000, ..net.faults };
    let (qa, qb) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    write(&mut net, qa, keys, 200);
    net.run(SECOND);
    let paths = paths(&net);
    let mut counters: Vec<PathStats> = Vec::new();
    net.hosts[0].ep.path_stats(&mut counters);
    let counter = |field: fn(&PathStats) -> u64| counters.iter().map(field).sum::<u64>();
    assert_eq!(sum(&paths, |t| t.sent), counter(|s| s.tx_data_packets));
    assert_eq!(sum(&paths, |t| t.retransmitted), counter(|s| s.retransmits));
    assert_eq!(sum(&paths, |t| t.lost), counter(|s| s.lost));
    assert_eq!(sum(&paths, |t| t.spurious), net.hosts[0].ep.stats().spurious_retransmits);
    assert!(sum(&paths, |t| t.lost) > 20 && sum(&paths, |t| t.retransmitted) > 20);
    // Everything sent was delivered or lost for good; nothing is in flight any more.
    let ended = |t: &PathTally| t.delivered + t.lost - t.spurious;
    assert_eq!(paths.iter().map(|p| ended(&p.tally)).sum::<u64>(), sum(&paths, |t| t.sent));
    assert!(
        paths.iter().all(|p| p.in_flight == 0 && p.rtt_min_ns >= 40_000 && p.rtt_smoothed_ns >= p.rtt_min_ns)
    );
    let qps = net.hosts[0].ep.view_qps(0).items;
    assert_eq!((qps.len(), qps[0].qpn, qps[0].dest_qpn, qps[0].sends), (1, qa, qb, 0));
    assert_eq!(qps[0].connection, Some(0));
    let mrs = net.hosts[0].ep.view_mrs(0).items;
    assert_eq!(mrs.iter().map(|mr| (mr.key, mr.len)).collect::<Vec<_>>(), [(keys.0, 1 << 20)]);
}

#[test]
fn view__names_the_cause_of_a_change() {
    let mut net = Net::with_planes(2, 2, 32);
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    write(&mut net, qa, keys, 5);
    assert!(paths(&net).iter().all(|p| p.state == "active" && p.cause == Cause::Fresh));
    net.black_holes = vec![1];
    let (now, host) = (net.now, &mut net.hosts[0]);
    host.ep.set_plane_state(now, 1, false, &mut host.log);
    write(&mut net, qa, keys, 5);
    for path in paths(&net) {
        let (state, cause) = if path.plane == 1 { ("left", Cause::Link) } else { ("active", Cause::Fresh) };
        assert_eq!((path.state, path.cause), (state, cause), "{path:?}");
        assert!(path.plane == 0 || path.generation == 1 && path.since_ns == net.now - now);
    }
}

#[test]
fn view__a_link_that_went_down_is_the_cause_of_silence_noticed_before() {
    let mut net = Net::with_planes(2, 2, 35);
    let (qa, _) = net.pair(0, 1);
    let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
    net.black_holes = vec![1];
    write(&mut net, qa, keys, 5);
    let causes = |net: &Net| paths(net).iter().filter(|p| p.plane == 1).map(|p| p.cause).collect::<Vec<_>>();
    let silent = causes(&net);
    assert!(
        !silent.is_empty() && silent.iter().all(|x| matches!(x, Cause::Silence | Cause::Plane)),
        "{silent:?}"
    );
    let (now, host) = (net.now, &mut net.hosts[0]);
    host.ep.set_plane_state(now, 1, false, &mut host.log);
    assert!(causes(&net).iter().all(|x| *x == Cause::Link), "{:?}", paths(&net));
}

#[test]
fn view__goes_on_from_page_to_page() {
    const HOSTS: usize = CONNECTIONS_PER_PAGE + 4;
    let mut net = Net::with_planes(HOSTS, 1, 33);
    for peer in 1..HOSTS {
        let (qa, _) = net.pair(0, peer);
        let keys = (net.mr(0, 0, 1 << 20), net.mr(peer, 0, 1 << 20));
        write(&mut net, qa, keys, 1);
    }
    let first = net.hosts[0].ep.view_connections(net.now, 0);
    let second = net.hosts[0].ep.view_connections(net.now, first.next.unwrap());
    assert_eq!((first.items.len(), second.items.len(), second.next), (CONNECTIONS_PER_PAGE, 3, None));
    let mut peers: Vec<_> = first.items.iter().chain(&second.items).map(|c| c.peer.0).collect();
    peers.sort_unstable();
    peers.dedup();
    assert_eq!(peers.len(), HOSTS - 1);
}
