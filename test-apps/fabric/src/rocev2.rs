//! A packet-level model of RoCEv2 to compare with: a peer of its own that shares no code with our transport, only links,
//! topology and traffic. One path per flow, go-back-N or selective repeat with a window of one bandwidth-delay product
//! (as IRN, SIGCOMM 2018), and DCQCN (SIGCOMM 2015) with its published constants.
//!
//! Where a choice had to be made it is in the comparator's favour: NICs repair without delay, time-outs are IRN's 100 and
//! 320 us instead of the 67 ms that drivers set, and a lossless fabric (PFC) is one whose queues never fill, so that
//! nobody is paused for others.

use crate::faults;
use crate::packet::HOPS_MAX;
use crate::port::Verdict;
use crate::scenario::Scenario;
use crate::topology::{Topology, five_tuple};
use crate::traffic::{self, Collective};
use metaroce_proto::{Nanos, random};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

/// Payload of a packet: the largest MTU of InfiniBand.
const MTU: u64 = 4096;
/// UDP payload of a full packet: BTH, RETH, ICRC and data.
const DATA_BYTES: u32 = 4096 + 12 + 16 + 4;
/// UDP payload of an acknowledgement or CNP.
const ACK_BYTES: u32 = 12 + 4 + 4;
/// Packets per acknowledgement.
const ACK_EVERY: u64 = 4;
/// Silence after which what is in flight goes again: few packets, and many (IRN).
const RTO_NS: [Nanos; 2] = [100_000, 320_000];
/// At most one CNP per flow in this time (DCQCN).
const CNP_EVERY_NS: Nanos = 50_000;
/// DCQCN: timer of alpha and of the rate, weight, bytes per increase, fast recovery, additive and hyper increase in bit/s.
const TIMER_NS: Nanos = 55_000;
const WEIGHT: f64 = 1.0 / 256.0;
const BYTE_COUNTER: u64 = 10_000_000;
const FAST: u32 = 5;
const ADDITIVE_BPS: f64 = 40e6;
const HYPER_BPS: f64 = 400e6;

/// How losses are repaired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repeat {
    /// Everything from the lost packet on goes again.
    GoBackN,
    /// What is missing goes again.
    Selective,
}

/// What a run of the comparator showed.
#[derive(Debug, Clone, Copy)]
pub struct Shown {
    /// Bytes placed in order per second in the measured span, Gb/s.
    pub goodput_gbps: f64,
    /// When the collectives finished, us; 0: not.
    pub collective_us: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    Packet(u32),
    Send(u32),
    Timeout(u32, u32),
    Timer(u32, u32),
    Measure,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Data,
    /// Everything below `ack` arrived; `psn` too.
    Ack,
    /// The packet `ack` is missing.
    Nak,
    Cnp,
}

#[derive(Debug, Clone, Copy)]
struct Packet {
    flow: u32,
    kind: Kind,
    psn: u64,
    ack: u64,
    ce: bool,
    route: [u32; HOPS_MAX],
    hops: u8,
    passed: u8,
}

/// Both ends of a flow.
#[derive(Debug)]
struct Flow {
    ends: [usize; 2],
    hashes: [u64; 2],
    per_message: u64,
    collective: bool,
    // Sender.
    due: u64,
    next: u64,
    acked: u64,
    sacked: BTreeSet<u64>,
    again: VecDeque<u64>,
    recovered: u64,
    scheduled: bool,
    ready_at: Nanos,
    epoch: u32,
    // DCQCN.
    rate: f64,
    target: f64,
    alpha: f64,
    timers: u32,
    counters: u32,
    bytes: u64,
    timer_epoch: u32,
    // Receiver.
    expected: u64,
    got: BTreeSet<u64>,
    nak_sent: bool,
    cnp_at: Nanos,
}

struct Model<'a> {
    scenario: &'a Scenario,
    repeat: Repeat,
    topology: Topology,
    flows: Vec<Flow>,
    collectives: Vec<Collective>,
    queue: BinaryHeap<Reverse<(Nanos, u64, Happening)>>,
    packets: Vec<Packet>,
    free: Vec<u32>,
    now: Nanos,
    serial: u64,
    rng: u64,
    line_bps: f64,
    window: u64,
    measured_from: u64,
}

/// Runs a scenario's traffic (Writes) with the comparator on its first plane. `lossless`: queues never fill.
pub fn run(scenario: &Scenario, repeat: Repeat, lossless: bool) -> Shown {
    let mut model = Model::new(scenario, repeat, lossless);
    model.run();
    let span = (model.now as f64 - scenario.warmup_us * 1000.0).max(1.0);
    let placed: u64 = model.flows.iter().map(|f| f.expected).sum();
    let finished = model.collectives.iter().flat_map(|c| &c.finished_at);
    let over = model.collectives.iter().all(|c| c.finished_at.iter().all(|t| *t > 0));
    Shown {
        goodput_gbps: (placed - model.measured_from) as f64 * MTU as f64 * 8.0 / span,
        collective_us: if over { finished.max().map_or(0.0, |t| *t as f64 / 1000.0) } else { 0.0 },
    }
}

impl<'a> Model<'a> {
    fn new(scenario: &'a Scenario, repeat: Repeat, lossless: bool) -> Self {
        let mut rng = scenario.seed;
        let (planned, collectives) = traffic::plan(scenario);
        let middle = scenario.middle.unwrap_or(scenario.link);
        let salt = random(&mut rng);
        let links = &scenario.links()[..1];
        let mut topology =
            Topology::new(scenario.shape, scenario.hosts, links, &middle, scenario.spread, salt);
        for host in 0..scenario.hosts {
            let port = topology.host_down(0, host);
            topology.ports[port].damage = faults::normal(scenario);
        }
        if lossless {
            topology.ports.iter_mut().for_each(|p| p.buffer = u64::MAX / 2);
        }
        let line_bps = scenario.link.bps() as f64;
        let rtt_ns = scenario.base_rtt_us() * 1000.0 + 4.0 * f64::from(DATA_BYTES + 66) * 8e9 / line_bps;
        let mut flow = |f: &traffic::Flow| {
            // A queue pair keeps its source port for life.
            let sport = 0xC000 + (random(&mut rng) % 0x4000) as u16;
            Flow {
                ends: [f.from, f.to],
                hashes: [five_tuple(f.from, f.to, sport, 4791), five_tuple(f.to, f.from, sport, 4791)],
                per_message: u64::from(f.size_of(0)).div_ceil(MTU),
                collective: f.collective.is_some(),
                due: if f.collective.is_some() { 0 } else { u64::MAX },
                next: 0,
                acked: 0,
                sacked: BTreeSet::new(),
                again: VecDeque::new(),
                recovered: 0,
                scheduled: false,
                ready_at: 0,
                epoch: 0,
                rate: line_bps,
                target: line_bps,
                alpha: 1.0,
                timers: 0,
                counters: 0,
                bytes: 0,
                timer_epoch: 0,
                expected: 0,
                got: BTreeSet::new(),
                nak_sent: false,
                cnp_at: 0,
            }
        };
        Model {
            scenario,
            repeat,
            topology,
            flows: planned.iter().map(&mut flow).collect(),
            collectives,
            queue: BinaryHeap::new(),
            packets: Vec::new(),
            free: Vec::new(),
            now: 0,
            serial: 0,
            rng,
            line_bps,
            window: (line_bps * rtt_ns / 8e9 / MTU as f64).ceil() as u64,
            measured_from: 0,
        }
    }

    fn at(&mut self, at: Nanos, what: Happening) {
        self.serial += 1;
        self.queue.push(Reverse((at, self.serial, what)));
    }

    fn run(&mut self) {
        self.at((self.scenario.warmup_us * 1000.0) as Nanos, Happening::Measure);
        for c in 0..self.collectives.len() {
            (0..self.scenario.hosts).for_each(|h| self.step(c, h));
        }
        (0..self.flows.len()).for_each(|f| self.schedule(f));
        let end = (self.scenario.duration_us * 1000.0) as Nanos;
        while let Some(Reverse((at, _, what))) = self.queue.pop() {
            let left = |c: &Collective| c.finished_at.contains(&0);
            if at > end || !self.collectives.is_empty() && !self.collectives.iter().any(left) {
                break;
            }
            self.now = at;
            match what {
                Happening::Packet(i) => self.on_packet(i),
                Happening::Send(f) => self.on_send(f as usize),
                Happening::Timeout(f, epoch) => self.on_timeout(f as usize, epoch),
                Happening::Timer(f, epoch) => self.on_timer(f as usize, epoch),
                Happening::Measure => self.measured_from = self.flows.iter().map(|f| f.expected).sum(),
            }
        }
        if self.collectives.is_empty() {
            self.now = end;
        }
    }

    /// A host of a collective goes on when what it sent is acknowledged and what it waits for is there.
    fn step(&mut self, c: usize, h: usize) {
        loop {
            let co = &self.collectives[c];
            let (begun, n) = (co.begun[h], co.flows.len());
            let per = co.flows[h].len() as u64;
            let flow_of = |host: usize, step: u64| co.flows[host][(step % per) as usize];
            if let Some(last) = begun.checked_sub(1) {
                let shift = co.ring.unwrap_or((last % per) as usize + 1);
                let (sent, received) =
                    (&self.flows[flow_of(h, last)], &self.flows[flow_of((h + n - shift) % n, last)]);
                let due = sent.per_message * (last / per + 1);
                if sent.acked < due || received.expected < due {
                    return;
                }
            }
            if begun == co.steps {
                let now = self.now;
                let at = &mut self.collectives[c].finished_at[h];
                *at = if *at == 0 { now } else { *at };
                return;
            }
            let f = flow_of(h, begun);
            self.collectives[c].begun[h] += 1;
            self.flows[f].due += self.flows[f].per_message;
            self.schedule(f);
        }
    }
    fn progressed(&mut self, f: usize, host: usize) {
        if self.flows[f].collective {
            (0..self.collectives.len()).for_each(|c| self.step(c, host));
        }
    }

    fn may_send(&self, f: &Flow) -> bool {
        let room = self.repeat == Repeat::GoBackN || f.next - f.acked < self.window;
        !f.again.is_empty() || f.next < f.due && room
    }
    fn schedule(&mut self, f: usize) {
        if !self.flows[f].scheduled && self.may_send(&self.flows[f]) {
            self.flows[f].scheduled = true;
            self.at(self.now.max(self.flows[f].ready_at), Happening::Send(f as u32));
        }
    }
    fn on_send(&mut self, f: usize) {
        self.flows[f].scheduled = false;
        if !self.may_send(&self.flows[f]) {
            return;
        }
        // The NIC takes turns among its flows: none fills its link's queue alone.
        let up = &self.topology.ports[self.topology.host_up(0, self.flows[f].ends[0])];
        let wait = (up.backlog(self.now) as f64 * 8e9 / self.line_bps) as Nanos;
        if wait > 700 {
            self.flows[f].ready_at = self.now + wait - 600;
            return self.schedule(f);
        }
        let flow = &mut self.flows[f];
        let psn = flow.again.pop_front().unwrap_or_else(|| {
            flow.next += 1;
            flow.next - 1
        });
        flow.ready_at = self.now + (f64::from(DATA_BYTES + 66) * 8e9 / flow.rate) as Nanos;
        flow.bytes += MTU;
        if flow.bytes >= BYTE_COUNTER {
            (flow.bytes, flow.counters) = (0, flow.counters + 1);
            increase(flow, self.line_bps);
        }
        if flow.acked + 1 == flow.next {
            self.arm(f);
        }
        self.emit(f, 0, Kind::Data, psn, 0);
        self.schedule(f);
    }
    /// The timer of what is in flight begins anew.
    fn arm(&mut self, f: usize) {
        let flow = &mut self.flows[f];
        flow.epoch += 1;
        let many = self.repeat == Repeat::GoBackN || flow.next - flow.acked > 3;
        let (after, epoch) = (RTO_NS[usize::from(many)], flow.epoch);
        self.at(self.now + after, Happening::Timeout(f as u32, epoch));
    }
    fn on_timeout(&mut self, f: usize, epoch: u32) {
        let flow = &mut self.flows[f];
        if flow.epoch != epoch || flow.acked >= flow.next {
            return;
        }
        match self.repeat {
            Repeat::GoBackN => flow.next = flow.acked,
            Repeat::Selective => {
                flow.again = (flow.acked..flow.next).filter(|p| !flow.sacked.contains(p)).collect();
                flow.recovered = flow.next;
            }
        }
        self.arm(f);
        self.schedule(f);
    }

    fn emit(&mut self, f: usize, way: usize, kind: Kind, psn: u64, ack: u64) {
        let flow = &self.flows[f];
        let mut route = [0; HOPS_MAX];
        let (from, to) = (flow.ends[way], flow.ends[1 - way]);
        let hops = self.topology.route(0, from, to, flow.hashes[way], &mut route);
        let p = Packet { flow: f as u32, kind, psn, ack, ce: false, route, hops, passed: 0 };
        let i = self.free.pop().unwrap_or_else(|| {
            self.packets.push(p);
            self.packets.len() as u32 - 1
        });
        self.packets[i as usize] = p;
        self.on_packet(i);
    }
    fn on_packet(&mut self, i: u32) {
        let p = &mut self.packets[i as usize];
        if p.passed == p.hops {
            let p = *p;
            self.free.push(i);
            return self.receive(p);
        }
        let port = p.route[usize::from(p.passed)] as usize;
        let len = if p.kind == Kind::Data { DATA_BYTES } else { ACK_BYTES };
        match self.topology.ports[port].offer(self.now, len, &mut self.rng) {
            Verdict::Pass { at, mark, corrupt: false, .. } => {
                p.passed += 1;
                p.ce |= mark && p.kind == Kind::Data;
                self.at(at, Happening::Packet(i));
            }
            _ => self.free.push(i),
        }
    }
    fn receive(&mut self, p: Packet) {
        let f = p.flow as usize;
        match p.kind {
            Kind::Data => self.on_data(f, p),
            Kind::Ack | Kind::Nak => self.on_ack(f, p),
            Kind::Cnp => self.on_cnp(f),
        }
    }
    fn on_data(&mut self, f: usize, p: Packet) {
        let now = self.now;
        let flow = &mut self.flows[f];
        if p.ce && now >= flow.cnp_at + CNP_EVERY_NS {
            flow.cnp_at = now;
            self.emit(f, 1, Kind::Cnp, 0, 0);
        }
        let flow = &mut self.flows[f];
        let before = flow.expected;
        let mut answer = Some(Kind::Ack);
        if p.psn == flow.expected {
            flow.expected += 1;
            flow.nak_sent = false;
            while flow.got.remove(&flow.expected) {
                flow.expected += 1;
            }
            let boundary =
                flow.expected.is_multiple_of(ACK_EVERY) || flow.expected.is_multiple_of(flow.per_message);
            answer = (boundary || flow.expected > before + 1).then_some(Kind::Ack);
        } else if p.psn > flow.expected {
            match self.repeat {
                Repeat::GoBackN => {
                    answer = (!std::mem::replace(&mut flow.nak_sent, true)).then_some(Kind::Nak);
                }
                Repeat::Selective => _ = flow.got.insert(p.psn),
            }
        }
        let expected = flow.expected;
        if let Some(kind) = answer {
            self.emit(f, 1, kind, p.psn, expected);
        }
        if expected > before {
            self.progressed(f, self.flows[f].ends[1]);
        }
    }
    fn on_ack(&mut self, f: usize, p: Packet) {
        let repeat = self.repeat;
        let flow = &mut self.flows[f];
        let news = p.ack > flow.acked;
        flow.acked = flow.acked.max(p.ack);
        flow.next = flow.next.max(flow.acked);
        match repeat {
            Repeat::GoBackN if p.kind == Kind::Nak && p.ack == flow.acked => flow.next = flow.acked,
            Repeat::Selective if p.psn >= p.ack => {
                flow.sacked.insert(p.psn);
                // Each gap is repaired once; the repair's own loss is found by the timer.
                let gap = flow.recovered.max(flow.acked)..p.psn;
                let lost: Vec<u64> = gap.filter(|q| !flow.sacked.contains(q)).collect();
                flow.again.extend(lost);
                flow.recovered = flow.recovered.max(p.psn);
            }
            _ => {}
        }
        flow.sacked = flow.sacked.split_off(&flow.acked);
        let acked = flow.acked;
        flow.again.retain(|q| *q >= acked);
        if news {
            self.arm(f);
            self.progressed(f, self.flows[f].ends[0]);
        }
        self.schedule(f);
    }

    fn on_cnp(&mut self, f: usize) {
        let flow = &mut self.flows[f];
        flow.target = flow.rate;
        flow.rate = (flow.rate * (1.0 - flow.alpha / 2.0)).max(self.line_bps / 1000.0);
        flow.alpha = (1.0 - WEIGHT) * flow.alpha + WEIGHT;
        (flow.timers, flow.counters, flow.bytes) = (0, 0, 0);
        flow.timer_epoch += 1;
        self.at(self.now + TIMER_NS, Happening::Timer(f as u32, self.flows[f].timer_epoch));
    }
    fn on_timer(&mut self, f: usize, epoch: u32) {
        let line = self.line_bps;
        let flow = &mut self.flows[f];
        if flow.timer_epoch != epoch {
            return;
        }
        flow.alpha *= 1.0 - WEIGHT;
        flow.timers += 1;
        increase(flow, line);
        if flow.rate < 0.999 * line {
            self.at(self.now + TIMER_NS, Happening::Timer(f as u32, epoch));
        }
    }
}

/// DCQCN's increase: half way back at first, then with a rising target.
fn increase(flow: &mut Flow, line: f64) {
    if flow.timers.min(flow.counters) > FAST {
        flow.target += HYPER_BPS;
    } else if flow.timers.max(flow.counters) > FAST {
        flow.target += ADDITIVE_BPS;
    }
    flow.target = flow.target.min(line);
    flow.rate = (flow.rate + flow.target) / 2.0;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(repeat: Repeat, loss: f64) -> f64 {
        let text = include_str!("../scenarios/stream.toml");
        let run_with = |loss: f64| {
            let set = [format!("damage.loss={loss}"), "duration_us=40000".to_owned()];
            run(&Scenario::parse_with(text, &set).unwrap(), repeat, false).goodput_gbps
        };
        run_with(loss) / run_with(0.0)
    }

    /// Each loss costs go-back-N what was in flight: (1 - p) / (1 - p + p * N), the textbook's curve; a NAK that is lost
    /// costs a time-out beside it.
    #[test]
    fn go_back_n_follows_its_curve() {
        for p in [0.001, 0.01] {
            let (n, got) = (32.5, share(Repeat::GoBackN, p));
            // Per packet: a second loss of the same packet waits for the timer.
            let timeouts = p * 2.0 * p * 320_000.0 / 343.0;
            let ideal = (1.0 - p) / (1.0 - p + p * n + timeouts);
            assert!((got - ideal).abs() < 0.06, "{p}: {got}, the curve says {ideal}");
        }
    }

    #[test]
    fn selective_repeat_beats_go_back_n() {
        for p in [0.001, 0.01] {
            let (one, all) = (share(Repeat::Selective, p), share(Repeat::GoBackN, p));
            assert!(one > all, "{p}: {one} and {all}");
        }
    }
}
