//! The event loop: one event after the other in order of time, then of creation. Nothing else decides anything, so two
//! runs are bit-identical.

use crate::faults::{self, Change};
use crate::host::{Host, located};
use crate::packet::{Part, Slab};
use crate::port::Verdict;
use crate::scenario::{FaultKind, Pattern, Scenario};
use crate::topology::{Topology, five_tuple};
use crate::traffic::{self, Collective, Flow};
use metaroce_proto::*;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::SocketAddr;

/// First source port of entropy values.
const ENTROPY_BASE: u16 = 0xC000;
/// What the hosts' handshakes get before anything is measured.
const SETUP_NS: Nanos = 50_000_000;

/// Something that happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    /// A packet reaches its next port, or its receiver.
    Packet(u32),
    /// A host's next time-out.
    Wake(u32),
    /// A flow begins.
    Begin(u32),
    /// A fault begins or ends.
    Fault(u32),
    /// A frozen host runs again.
    Thaw(u32),
    /// Flows are sampled.
    Sample,
    /// Measuring begins.
    Measure,
}

/// Where every packet went; the sum must come out even.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fate {
    /// Sent by hosts.
    pub sent: u64,
    /// Second copies made by the fabric.
    pub copied: u64,
    /// Handed to a host.
    pub delivered: u64,
    /// Dropped by a full queue.
    pub full: u64,
    /// Taken by a fault.
    pub lost: u64,
    /// Found damaged by the receiver.
    pub corrupt: u64,
    /// Dropped by a frozen host's full socket.
    pub overflow: u64,
}

/// One scenario at work.
pub struct World {
    /// What it is.
    pub scenario: Scenario,
    /// Virtual time.
    pub now: Nanos,
    /// Hosts.
    pub hosts: Vec<Host>,
    /// Ports.
    pub topology: Topology,
    /// Flows.
    pub flows: Vec<Flow>,
    /// Collectives.
    pub collectives: Vec<Collective>,
    /// Bytes placed per flow, per sample: (time since the beginning, bytes of each flow).
    pub samples: Vec<(Nanos, Vec<u64>)>,
    /// Bytes placed per flow when measuring began.
    pub measured_from: Vec<u64>,
    /// Bytes on the wire per port when measuring began.
    pub wire_from: Vec<u64>,
    /// Packets full queues had dropped when measuring began.
    pub full_from: u64,
    /// Where packets went.
    pub fate: Fate,
    /// Time zero of the scenario's own clock.
    pub zero: Nanos,
    /// Events handled.
    pub events: u64,
    measuring_from: Nanos,
    packets: Slab,
    queue: BinaryHeap<Reverse<(Nanos, u64, Happening)>>,
    serial: u64,
    rng: u64,
    changes: Vec<Change>,
    burst: TxBurst,
    batch: SendBatch,
    scratch: Vec<u8>,
    done: Vec<Completion>,
}

impl World {
    /// Builds a scenario and connects its hosts; the scenario's clock begins when all connections are up.
    pub fn new(scenario: &Scenario) -> World {
        let mut rng = scenario.seed;
        let (flows, collectives) = traffic::plan(scenario);
        let mut hosts: Vec<Host> =
            (0..scenario.hosts).map(|h| Host::new(scenario, h, flows.len(), &mut rng)).collect();
        let middle = scenario.middle.unwrap_or(scenario.link);
        let topology = Topology::new(
            scenario.shape,
            scenario.hosts,
            &scenario.links(),
            &middle,
            scenario.spread,
            random(&mut rng),
        );
        let mut flows = flows;
        let now = 1_000_000;
        traffic::set_up(now, &mut flows, &mut hosts, scenario.seed);
        let mut world = World {
            scenario: scenario.clone(),
            now,
            hosts,
            topology,
            measured_from: vec![0; flows.len()],
            wire_from: Vec::new(),
            full_from: 0,
            flows,
            collectives,
            samples: Vec::new(),
            fate: Fate::default(),
            zero: 0,
            events: 0,
            measuring_from: Nanos::MAX,
            packets: Slab::default(),
            queue: BinaryHeap::new(),
            serial: 0,
            rng,
            changes: faults::schedule(scenario),
            burst: TxBurst::new(),
            batch: SendBatch::default(),
            scratch: Vec::new(),
            done: Vec::new(),
        };
        world.handshake();
        world
    }

    /// Lets the hosts say HELLO without faults, then starts the scenario's clock.
    fn handshake(&mut self) {
        (0..self.hosts.len()).for_each(|h| self.settle(h));
        self.run_to(self.now + SETUP_NS);
        self.now += SETUP_NS;
        self.zero = self.now;
        let normal = faults::normal(&self.scenario);
        for plane in 0..self.topology.planes() {
            for host in 0..self.hosts.len() {
                let port = self.topology.host_down(plane, host);
                self.topology.ports[port].damage = normal;
            }
        }
        for port in &mut self.topology.ports {
            port.stats = Default::default();
        }
        self.fate = Fate::default();
        self.fate.sent = self.packets.alive as u64;
        for f in 0..self.flows.len() {
            if self.flows[f].collective.is_none() {
                self.at(self.zero + self.flows[f].start, Happening::Begin(f as u32));
            }
        }
        for i in 0..self.changes.len() {
            self.at(self.zero + self.changes[i].at, Happening::Fault(i as u32));
        }
        self.at(self.zero + (self.scenario.warmup_us * 1000.0) as Nanos, Happening::Measure);
        if self.scenario.sample_us > 0.0 {
            self.at(self.zero, Happening::Sample);
        }
    }

    /// Runs to the scenario's end; gives the time it ended on the scenario's clock.
    pub fn run(&mut self) -> Nanos {
        (0..self.collectives.len()).for_each(|c| {
            (0..self.hosts.len()).for_each(|h| self.step_collective(c, h));
        });
        (0..self.hosts.len()).for_each(|h| self.settle(h));
        let end = self.zero + (self.scenario.duration_us * 1000.0) as Nanos;
        self.run_to(end);
        self.now - self.zero
    }
    /// All finite traffic is complete and there is no other.
    fn is_over(&self) -> bool {
        let finite = |t: &crate::scenario::Traffic| {
            t.count > 0 || matches!(t.pattern, Pattern::AllReduce { .. } | Pattern::AllToAll)
        };
        self.scenario.traffic.iter().all(finite)
            && self.zero > 0
            && self.collectives.iter().all(|c| c.finished_at.iter().all(|t| *t > 0))
            && self.flows.iter().all(|f| f.collective.is_some() || f.is_complete())
    }

    fn at(&mut self, at: Nanos, what: Happening) {
        self.serial += 1;
        self.queue.push(Reverse((at, self.serial, what)));
    }

    fn run_to(&mut self, end: Nanos) {
        let mut look = 0;
        while let Some(Reverse((at, _, what))) = self.queue.peek().copied() {
            if at > end {
                self.now = end;
                return;
            }
            self.queue.pop();
            self.now = self.now.max(at);
            self.events += 1;
            match what {
                Happening::Packet(i) => self.on_packet(i),
                Happening::Wake(h) => self.on_wake(h as usize, at),
                Happening::Begin(f) => {
                    self.pump(f as usize);
                    self.settle(self.flows[f as usize].from);
                }
                Happening::Fault(i) => self.on_fault(i as usize),
                Happening::Thaw(h) => self.on_thaw(h as usize),
                Happening::Sample => self.sample(),
                Happening::Measure => self.measure(),
            }
            look += 1;
            if look % 1024 == 0 && self.is_over() {
                return;
            }
        }
    }

    fn on_packet(&mut self, i: u32) {
        let p = self.packets.get(i);
        if p.passed == p.hops {
            let to = p.to as usize;
            return self.deliver(to, i);
        }
        let port = p.route[usize::from(p.passed)] as usize;
        let len = p.len;
        match self.topology.ports[port].offer(self.now, len, &mut self.rng) {
            Verdict::Full => {
                self.fate.full += 1;
                self.packets.release(i);
            }
            Verdict::Lost => {
                self.fate.lost += 1;
                self.packets.release(i);
            }
            Verdict::Pass { at, mark, corrupt, again } => {
                let p = self.packets.get(i);
                p.passed += 1;
                p.ce |= mark;
                p.corrupt |= corrupt;
                if let Some(again) = again {
                    let copy = self.packets.copy(i);
                    self.fate.copied += 1;
                    self.at(again, Happening::Packet(copy));
                }
                self.at(at, Happening::Packet(i));
            }
        }
    }

    fn deliver(&mut self, to: usize, i: u32) {
        let p = self.packets.get(i);
        if p.corrupt {
            self.fate.corrupt += 1;
            return self.packets.release(i);
        }
        let len = u64::from(p.len);
        let host = &mut self.hosts[to];
        if host.frozen_until > self.now {
            if host.inbox_bytes + len > u64::from(self.scenario.host.socket_kib) << 10 {
                host.overflow += 1;
                self.fate.overflow += 1;
                return self.packets.release(i);
            }
            host.inbox_bytes += len;
            host.inbox.push(i);
            return;
        }
        self.receive(to, i);
        self.settle(to);
    }

    fn receive(&mut self, to: usize, i: u32) {
        let p = self.packets.get(i);
        let meta = RxMeta {
            src: p.src,
            dst_ip: crate::host::address(usize::from(p.plane), to),
            ecn: if p.ce { 3 } else { 2 },
        };
        let bytes = p.assemble(&mut self.scratch);
        let host = &mut self.hosts[to];
        host.ep.on_datagram(self.now, &meta, bytes, &mut host.memory, &mut host.log);
        self.fate.delivered += 1;
        self.packets.release(i);
    }

    fn on_wake(&mut self, h: usize, at: Nanos) {
        let host = &mut self.hosts[h];
        if host.armed != at || host.frozen_until > self.now {
            return;
        }
        host.armed = Nanos::MAX;
        host.ep.on_timeout(self.now, &mut host.memory, &mut host.log);
        self.settle(h);
    }

    fn on_thaw(&mut self, h: usize) {
        if self.hosts[h].frozen_until > self.now {
            return;
        }
        // As the engine does: first what waits in the socket, then what is due.
        let inbox = std::mem::take(&mut self.hosts[h].inbox);
        self.hosts[h].inbox_bytes = 0;
        inbox.into_iter().for_each(|i| self.receive(h, i));
        let host = &mut self.hosts[h];
        host.armed = Nanos::MAX;
        host.ep.on_timeout(self.now, &mut host.memory, &mut host.log);
        self.settle(h);
    }

    /// After any input of a host: sends what it has to send, lets the application go on, arms its next wake-up.
    fn settle(&mut self, h: usize) {
        if self.hosts[h].frozen_until > self.now {
            return;
        }
        loop {
            self.flush(h);
            if self.hosts[h].log.completions.is_empty() && !self.poll_memory(h) {
                break;
            }
            self.application(h);
        }
        let host = &mut self.hosts[h];
        let next = host.ep.next_timeout().unwrap_or(Nanos::MAX).max(self.now);
        if next < host.armed {
            host.armed = next;
            self.at(next, Happening::Wake(h as u32));
        }
    }

    fn flush(&mut self, h: usize) {
        let mut burst = std::mem::take(&mut self.burst);
        let mut rounds = 0;
        loop {
            let host = &mut self.hosts[h];
            if !host.ep.poll_burst(self.now, &mut burst, &mut host.log) {
                break;
            }
            self.transmit(h, &burst);
            rounds += 1;
            assert!(rounds < 1_000_000, "poll_burst never ends on host {h}");
        }
        self.burst = burst;
    }

    fn transmit(&mut self, from: usize, burst: &TxBurst) {
        let plane = usize::from(burst.plane);
        let (_, to) = located(burst.dst.ip());
        let sport = ENTROPY_BASE + u16::from(burst.entropy);
        let src = SocketAddr::new(crate::host::address(plane, from), sport);
        let real = self.scenario.real_memory;
        let mut piece = 0;
        for (end, len) in &burst.packets {
            let i = self.packets.take();
            let p = self.packets.get(i);
            (p.len, p.src, p.from, p.to, p.plane) = (*len, src, from as u32, to as u32, burst.plane);
            for part in &burst.pieces[piece..*end as usize] {
                match *part {
                    Piece::Bytes { start, len } => {
                        p.bytes.extend_from_slice(&burst.bytes[start as usize..(start + len) as usize]);
                        p.parts.push(Part::Kept(len));
                    }
                    Piece::Memory { va, len } if real => {
                        let at = p.bytes.len();
                        p.bytes.resize(at + len as usize, 0);
                        let gathered = self.hosts[from].memory.gather(va, &mut p.bytes[at..]);
                        gathered.expect("the core checked this address");
                        p.parts.push(Part::Kept(len));
                    }
                    Piece::Zeros { len } if real => {
                        p.bytes.resize(p.bytes.len() + len as usize, 0);
                        p.parts.push(Part::Kept(len));
                    }
                    Piece::Memory { len, .. } | Piece::Zeros { len } => p.parts.push(Part::Blank(len)),
                }
            }
            piece = *end as usize;
            let mut hash = five_tuple(from, to, sport, burst.dst.port());
            if self.scenario.spread {
                hash = u64::from(burst.entropy);
            }
            if self.scenario.spray {
                hash ^= random(&mut self.rng);
            }
            let mut route = [0; crate::packet::HOPS_MAX];
            let hops = self.topology.route(plane, from, to, hash, &mut route);
            let p = self.packets.get(i);
            (p.route, p.hops) = (route, hops);
            self.fate.sent += 1;
            self.on_packet(i);
        }
    }

    /// The application of a host sees its completions and posts what comes next.
    fn application(&mut self, h: usize) {
        let mut done = std::mem::take(&mut self.done);
        std::mem::swap(&mut done, &mut self.hosts[h].log.completions);
        for c in done.drain(..) {
            let Some(&f) = self.hosts[h].flow_of.get(c.qpn.index()).filter(|f| **f != u32::MAX) else {
                continue;
            };
            let f = f as usize;
            traffic::complete(self.now, &mut self.flows[f], f, &self.hosts, &c, self.measuring_from);
            match self.flows[f].collective {
                Some(c) => self.step_collective(c, h),
                None => self.pump(f),
            }
        }
        self.done = done;
    }

    /// Posts messages of a flow up to its depth.
    fn pump(&mut self, f: usize) {
        let flow = &mut self.flows[f];
        let clock = self.now - self.zero;
        let open = clock >= flow.start && clock < flow.stop;
        while open && flow.posted < flow.count && flow.posted - flow.done < flow.depth && flow.errors == 0 {
            traffic::post(self.now, flow, f, &mut self.hosts, &mut self.batch);
        }
    }

    /// A host of a collective begins its next step if the last one is over for it: what it sent is complete, what it
    /// waits for has been placed.
    fn step_collective(&mut self, c: usize, h: usize) {
        loop {
            let co = &self.collectives[c];
            let (begun, n) = (co.begun[h], self.hosts.len());
            if begun > 0 {
                let sent = self.collective_flow(c, h, begun - 1);
                let before = (h + n - self.shift(c, begun - 1)) % n;
                let received = self.collective_flow(c, before, begun - 1);
                let placed = self.hosts[h].memory.placed[received];
                let per = co.flows[h].len() as u64;
                let due = co.size * ((begun - 1) / per + 1);
                if self.flows[sent].done < (begun - 1) / per + 1 || placed < due {
                    return;
                }
            }
            let co = &mut self.collectives[c];
            if begun == co.steps {
                if co.finished_at[h] == 0 {
                    co.finished_at[h] = self.now - self.zero;
                }
                return;
            }
            co.begun[h] += 1;
            let f = self.collective_flow(c, h, begun);
            let flow = &mut self.flows[f];
            traffic::post(self.now, flow, f, &mut self.hosts, &mut self.batch);
        }
    }
    /// Hosts of a collective look at their memory for what the last step should bring; true if that let one go on.
    fn poll_memory(&mut self, h: usize) -> bool {
        let begun = |w: &World| w.collectives.iter().map(|c| c.begun[h]).sum::<u64>();
        let before = begun(self);
        if self.zero > 0 && before > 0 {
            (0..self.collectives.len()).for_each(|c| self.step_collective(c, h));
        }
        begun(self) > before
    }
    fn shift(&self, c: usize, step: u64) -> usize {
        let co = &self.collectives[c];
        co.ring.unwrap_or((step % co.flows[0].len() as u64) as usize + 1)
    }
    fn collective_flow(&self, c: usize, host: usize, step: u64) -> usize {
        let flows = &self.collectives[c].flows[host];
        flows[(step % flows.len() as u64) as usize]
    }

    fn on_fault(&mut self, i: usize) {
        let change = self.changes[i];
        let spec = self.scenario.faults[change.fault].clone();
        if spec.what == FaultKind::Freeze {
            let until = self.zero.saturating_add(change.until);
            let hosts = spec.host.map_or(0..self.hosts.len(), |h| h..h + 1);
            if change.begins {
                for h in hosts {
                    self.hosts[h].frozen_until = until;
                    self.at(until, Happening::Thaw(h as u32));
                }
            }
            return;
        }
        let normal = faults::normal(&self.scenario);
        faults::apply(&spec, change.begins, &mut self.topology, normal);
        if spec.what == FaultKind::LinkDown {
            for h in 0..self.hosts.len() {
                let planes = spec.plane.map_or(0..self.scenario.planes, |p| p..p + 1);
                if spec.host.is_none_or(|x| x == h) {
                    for plane in planes {
                        let host = &mut self.hosts[h];
                        host.ep.set_plane_state(self.now, plane as u8, !change.begins, &mut host.log);
                    }
                    self.settle(h);
                }
            }
        }
    }

    /// Bytes placed of every flow so far.
    pub fn placed(&self) -> Vec<u64> {
        let one = |(i, f): (usize, &Flow)| self.hosts[f.sink_host()].memory.placed[i];
        self.flows.iter().enumerate().map(one).collect()
    }
    /// Packets still on their way.
    pub fn on_the_way(&self) -> u64 {
        self.packets.alive as u64
    }

    fn sample(&mut self) {
        let placed = self.placed();
        self.samples.push((self.now - self.zero, placed));
        self.at(self.now + (self.scenario.sample_us * 1000.0) as Nanos, Happening::Sample);
    }
    fn measure(&mut self) {
        self.measuring_from = self.now;
        self.full_from = self.fate.full;
        self.measured_from = self.placed();
        self.wire_from = self.topology.ports.iter().map(|p| p.departed(self.now)).collect();
        for port in &mut self.topology.ports {
            port.stats.peak = 0;
        }
    }
}
