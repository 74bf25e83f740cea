//! Planes and source ports that an operator takes out of use: nothing more is sent there, nothing is lost.
#![expect(non_snake_case, reason = "tests are named subject__case")]

mod net;
use metaroce_proto::journal::{Happened, PlaneEvent};
use metaroce_proto::snapshot::PathView;
use metaroce_proto::stats::Cause;
use metaroce_proto::steering::Admin;
use metaroce_proto::*;
use net::*;

const MS: u64 = 1_000_000;
const SECOND: u64 = 1_000_000_000;

/// Two hosts with two planes of two paths, and a stream of writes between them.
struct Stream {
    net: Net,
    qp: Qpn,
    keys: (u32, u32),
    posted: usize,
}

impl Stream {
    fn new(seed: u64) -> Stream {
        let mut net = Net::with_planes(2, 2, seed);
        net.faults.delay_ns = 20_000;
        let (qp, _) = net.pair(0, 1);
        let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        let mut stream = Stream { net, qp, keys, posted: 0 };
        stream.flow(5 * MS);
        stream
    }
    /// Eight writes outstanding for a while; what is outstanding at the end stays so.
    fn flow(&mut self, span: u64) {
        let until = self.net.now + span;
        while self.net.now < until {
            while self.posted < self.net.hosts[0].log.completions.len() + 8 {
                let wr = wr(self.posted as u64, Opcode::Write, 65536, 1);
                let wr = SendWqe { remote_addr: MEM_BASE, rkey: self.keys.1, ..wr };
                self.net.send(0, self.qp, wr, &[Sge { addr: MEM_BASE, len: 65536, lkey: self.keys.0 }]);
                self.posted += 1;
            }
            self.net.step(until);
        }
    }
    /// All that was posted completes well.
    fn finish(&mut self) {
        let posted = self.posted;
        self.net.run_until(10 * SECOND, "the rest", |n| n.hosts[0].log.completions.len() == posted);
        assert!(self.net.hosts[0].log.completions.iter().all(|c| c.1.status == WcStatus::Success));
    }
    fn admin(&mut self, plane: u8, admin: Admin) -> Result<usize, Refused> {
        let (now, host) = (self.net.now, &mut self.net.hosts[0]);
        let kept = host.ep.set_plane_admin(now, plane, admin, &mut host.log);
        self.net.flush();
        kept
    }
    fn paths(&self) -> Vec<PathView> {
        self.net.hosts[0].ep.view_connections(self.net.now, 0).items.remove(0).paths
    }
    fn sent(&self, plane: u8) -> u64 {
        self.paths().iter().filter(|p| p.plane == plane).map(|p| p.tally.sent).sum()
    }
    fn all(&self, plane: u8, state: &str) -> bool {
        self.paths().iter().filter(|p| p.plane == plane).all(|p| p.state == state)
    }
}

/// What was heard of paths since `from`: plane, path, state and cause.
fn heard(s: &Stream, from: u64) -> Vec<(u8, u8, &'static str, Cause)> {
    let journal = &s.net.hosts[0].ep.journal;
    let events = (from..journal.next()).filter_map(|number| journal.read(number));
    let of_path = |(_, event): (u64, &PlaneEvent)| match event.what {
        Happened::Path(news) => Some((event.plane, news.path, news.state, news.cause)),
        _ => None,
    };
    events.filter_map(of_path).collect()
}

#[test]
fn journal__tells_who_listens_of_every_change_and_its_cause() {
    let mut s = Stream::new(47);
    s.admin(1, Admin::Down).unwrap();
    s.admin(1, Admin::Up).unwrap();
    s.flow(50 * MS);
    assert_eq!(s.net.hosts[0].ep.journal.next(), 0, "nobody listened");
    s.net.hosts[0].ep.journal.wanted = true;
    let (now, host) = (s.net.now, &mut s.net.hosts[0]);
    host.ep.set_plane_state(now, 1, false, &mut host.log);
    let all = |state, cause| [1, 3, 5, 7].map(|path| (1, path, state, cause)).to_vec();
    assert_eq!(heard(&s, 0), all("left", Cause::Link));
    let journal = &s.net.hosts[0].ep.journal;
    let first = journal.read(0).unwrap().1;
    assert_eq!((first.at, first.plane, first.what), (now, 1, Happened::Link(false)));
    let Happened::Path(news) = journal.read(1).unwrap().1.what else { panic!("no path") };
    assert_eq!((news.qpn, news.users), (Some(s.qp), 1));
    let next = s.net.hosts[0].ep.journal.next();
    let (now, host) = (s.net.now, &mut s.net.hosts[0]);
    host.ep.set_plane_state(now, 1, true, &mut host.log);
    s.flow(50 * MS);
    let mut back = heard(&s, next);
    back.sort_by_key(|event| event.1);
    assert_eq!(back, all("active", Cause::Answered));
    // A black hole is noticed by silence, on each of its paths.
    let next = s.net.hosts[0].ep.journal.next();
    s.net.black_holes = vec![1];
    s.flow(200 * MS);
    let silent = heard(&s, next);
    for path in [1, 3, 5, 7] {
        let causes =
            silent.iter().filter(|event| event.1 == path && event.2 != "active").map(|event| event.3);
        assert!(causes.clone().any(|c| matches!(c, Cause::Silence | Cause::Plane)), "{silent:?}");
    }
    assert!(silent.iter().all(|event| event.0 == 1), "{silent:?}");
    s.net.black_holes.clear();
    s.finish();
}

#[test]
fn down__moves_everything_at_once_and_up_brings_it_back() {
    let mut s = Stream::new(41);
    assert_eq!(s.admin(1, Admin::Down), Ok(0));
    assert!(s.all(1, "parked") && s.all(0, "active"), "{:?}", s.paths());
    let (before, other) = (s.sent(1), s.sent(0));
    s.flow(50 * MS);
    // Not even a probe.
    assert_eq!(s.sent(1), before);
    assert!(s.sent(0) > other + 1000);
    assert_eq!(s.admin(1, Admin::Up), Ok(0));
    s.flow(50 * MS);
    assert!(s.all(1, "active") && s.sent(1) > before + 500, "{:?}", s.paths());
    s.finish();
}

#[test]
fn drain__loses_nothing_and_sends_nothing_more() {
    let mut s = Stream::new(42);
    // In the middle of it: something is on its way there.
    while s.paths().iter().all(|p| p.plane == 0 || p.in_flight == 0) {
        s.flow(1_000);
    }
    assert_eq!(s.admin(1, Admin::Drain), Ok(0));
    let before = s.sent(1);
    s.flow(20 * MS);
    assert!(s.all(1, "draining"), "{:?}", s.paths());
    for path in s.paths() {
        assert_eq!((path.tally.lost, path.tally.retransmitted), (0, 0), "{path:?}");
        assert!(
            path.plane == 0 || path.in_flight == 0 && path.tally.delivered == path.tally.sent,
            "{path:?}"
        );
    }
    assert_eq!(s.sent(1), before);
    // From drained to down, and back.
    assert_eq!(s.admin(1, Admin::Down), Ok(0));
    assert!(s.all(1, "parked"), "{:?}", s.paths());
    assert_eq!(s.admin(1, Admin::Up), Ok(0));
    s.flow(20 * MS);
    assert!(s.sent(1) > before);
    s.finish();
}

#[test]
fn drain__undone_uses_the_paths_as_they_were() {
    let mut s = Stream::new(43);
    assert_eq!(s.admin(0, Admin::Drain), Ok(0));
    s.flow(5 * MS);
    let before = s.sent(0);
    assert_eq!(s.admin(0, Admin::Up), Ok(0));
    s.flow(MS);
    assert!(s.sent(0) > before && s.paths().iter().all(|p| p.generation == 0), "{:?}", s.paths());
    s.finish();
}

#[test]
fn last_plane__is_never_given_up() {
    let mut s = Stream::new(44);
    assert_eq!(s.admin(1, Admin::Down), Ok(0));
    assert_eq!(s.admin(0, Admin::Down), Err(Refused::Busy));
    assert_eq!(s.admin(0, Admin::Drain), Err(Refused::Busy));
    assert_eq!(s.admin(7, Admin::Down), Err(Refused::NotFound));
    assert_eq!(s.admin(1, Admin::Up), Ok(0));
    // Plane 0 does not answer: plane 1 is kept in use until it does.
    s.net.black_holes = vec![0];
    let now = s.net.now;
    for host in &mut s.net.hosts {
        host.ep.set_plane_state(now, 0, false, &mut host.log);
    }
    s.flow(20 * MS);
    assert!(s.paths().iter().all(|p| p.plane == 1 || p.state != "active"), "{:?}", s.paths());
    assert_eq!(s.admin(1, Admin::Down), Ok(1));
    let before = s.sent(1);
    s.flow(20 * MS);
    assert!(s.sent(1) > before + 100);
    s.net.black_holes.clear();
    let limit = s.net.now + SECOND;
    while !s.all(1, "parked") {
        assert!(s.net.now < limit, "{:?}", s.paths());
        s.flow(2 * MS);
    }
    s.finish();
}

#[test]
fn new_connections__begin_without_what_is_out_of_use() {
    for admin in [Admin::Down, Admin::Drain] {
        let mut net = Net::with_planes(2, 2, 45);
        let (now, host) = (net.now, &mut net.hosts[0]);
        host.ep.set_plane_admin(now, 0, admin, &mut host.log).unwrap();
        for entropy in 0..4 {
            host.ep.deny_entropy(now, 1, entropy, true, &mut host.log).unwrap();
        }
        let (qp, _) = net.pair(0, 1);
        let keys = (net.mr(0, 0, 1 << 20), net.mr(1, 0, 1 << 20));
        let mut s = Stream { net, qp, keys, posted: 0 };
        s.flow(20 * MS);
        assert_eq!(s.sent(0), 0);
        assert!(
            s.paths().iter().all(|p| p.plane == 0 || p.entropy >= 4 && p.tally.sent > 0),
            "{:?}",
            s.paths()
        );
        s.finish();
    }
}

#[test]
fn deny__moves_paths_to_ports_that_are_allowed() {
    let mut s = Stream::new(46);
    let used: Vec<u8> = s.paths().iter().filter(|p| p.plane == 1).map(|p| p.entropy).collect();
    let deny = |s: &mut Stream, entropy: u8, deny: bool| {
        let (now, host) = (s.net.now, &mut s.net.hosts[0]);
        host.ep.deny_entropy(now, 1, entropy, deny, &mut host.log)
    };
    for entropy in &used {
        assert_eq!(deny(&mut s, *entropy, true), Ok(()));
    }
    let paths = s.paths();
    assert!(paths.iter().all(|p| p.plane == 0 || !used.contains(&p.entropy)), "{paths:?}");
    assert!(paths.iter().all(|p| p.state == "active" && (p.generation > 0) == (p.plane == 1)), "{paths:?}");
    // The floor: a connection's paths have a port each.
    let offered = s.net.hosts[0].ep.plane_states().len() as u8 * 64;
    assert_eq!(deny(&mut s, offered, true), Err(Refused::NotFound));
    let refused = (0..64).filter(|e| deny(&mut s, *e, true) == Err(Refused::Busy)).count();
    assert!(refused > 0, "all ports denied");
    for entropy in 0..64 {
        let _ = deny(&mut s, entropy, false);
    }
    assert_eq!(s.net.hosts[0].ep.plane_states()[1].denied, 0);
    s.flow(20 * MS);
    s.finish();
}

#[test]
fn rehash__changes_the_port_and_loses_nothing() {
    let mut s = Stream::new(47);
    for turn in 1..=20 {
        let before = s.paths()[2].clone();
        let (now, host) = (s.net.now, &mut s.net.hosts[0]);
        assert_eq!(host.ep.rehash(now, 0, 2, &mut host.log), Ok(()));
        assert_eq!(host.ep.rehash(now, 9, 2, &mut host.log), Err(Refused::NotFound));
        assert_eq!(host.ep.rehash(now, 0, 99, &mut host.log), Err(Refused::NotFound));
        s.flow(2 * MS);
        let after = s.paths()[2].clone();
        assert_eq!(after.generation, turn);
        assert!(after.entropy != before.entropy && after.state == "active", "{after:?}");
        assert!(after.tally.delivered > before.tally.delivered, "{after:?}");
    }
    s.finish();
}

#[test]
fn rehash__of_an_idle_path_never_outruns_the_peers_count() {
    let mut s = Stream::new(48);
    s.finish();
    // More often than the generation on the wire counts (8 bits), with nothing on its way in between.
    for _ in 0..300 {
        let (now, host) = (s.net.now, &mut s.net.hosts[0]);
        assert_eq!(host.ep.rehash(now, 0, 2, &mut host.log), Ok(()));
    }
    let before = s.paths()[2].clone();
    assert_eq!(before.generation, 1);
    s.flow(20 * MS);
    let after = s.paths()[2].clone();
    assert!(after.tally.delivered > before.tally.delivered + 100 && after.tally.lost == 0, "{after:?}");
    s.finish();
}
