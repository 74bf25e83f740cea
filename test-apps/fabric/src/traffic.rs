//! What hosts are asked to do: flows of messages, and collectives whose steps depend on each other.

use crate::host::Host;
use crate::scenario::{Op, Pattern, Scenario, Traffic};
use metaroce_proto::*;

/// Messages between one pair of QPs.
#[derive(Debug)]
pub struct Flow {
    /// Initiator.
    pub from: usize,
    /// Target.
    pub to: usize,
    /// Operation.
    pub op: Op,
    /// Bytes per message, or the sizes to choose from.
    pub sizes: Vec<u32>,
    /// Messages outstanding at most.
    pub depth: u64,
    /// Messages in all; `u64::MAX`: no end.
    pub count: u64,
    /// When posting begins and ends.
    pub start: Nanos,
    /// When posting ends.
    pub stop: Nanos,
    /// The initiator's QP.
    pub qpn: Qpn,
    /// Keys and addresses of the initiator's and the target's memory.
    pub keys: [u32; 2],
    /// Addresses of the same.
    pub addrs: [u64; 2],
    /// Messages posted, completed.
    pub posted: u64,
    /// Messages completed.
    pub done: u64,
    /// Bytes of completed messages.
    pub bytes: u64,
    /// Completions that were not successes.
    pub errors: u64,
    /// Completions out of posting order.
    pub disorder: u64,
    /// Messages whose bytes differed when they completed.
    pub different: u64,
    /// When each outstanding message was posted.
    pub posted_at: Vec<Nanos>,
    /// Times from posting to completion, within the measured span.
    pub latencies: Vec<Nanos>,
    /// When the last message completed.
    pub finished_at: Nanos,
    /// It belongs to this collective.
    pub collective: Option<usize>,
}

impl Flow {
    /// Where its data ends up.
    pub fn sink_host(&self) -> usize {
        if self.op == Op::Read { self.from } else { self.to }
    }
    /// Size of its n-th message.
    pub fn size_of(&self, n: u64) -> u32 {
        if self.sizes.len() == 1 {
            return self.sizes[0];
        }
        let mut state = n ^ (self.from as u64) << 40 ^ (self.to as u64) << 20;
        self.sizes[(random(&mut state) % self.sizes.len() as u64) as usize]
    }
    /// Bytes of one slot of its regions.
    pub fn slot_bytes(&self) -> u64 {
        u64::from(self.sizes.iter().copied().max().unwrap_or(1))
    }
    /// Everything it was asked to do is done.
    pub fn is_complete(&self) -> bool {
        self.count == u64::MAX || self.done >= self.count
    }
}

/// Steps among all hosts.
#[derive(Debug)]
pub struct Collective {
    /// Ring all-reduce with neighbours at this distance, else all-to-all.
    pub ring: Option<usize>,
    /// Flow from host i in step s: `flows[i][s]`; with a ring the same one for all steps.
    pub flows: Vec<Vec<usize>>,
    /// Steps each host has begun.
    pub begun: Vec<u64>,
    /// Steps per round, and in all.
    pub steps: u64,
    /// Bytes per step.
    pub size: u64,
    /// When each host finished its last step.
    pub finished_at: Vec<Nanos>,
}

/// The pairs of a pattern.
fn pairs(pattern: &Pattern, hosts: usize) -> Vec<(usize, usize)> {
    match *pattern {
        Pattern::Pair { from, to } => vec![(from, to)],
        Pattern::ManyToOne { first, count, to } => (first..first + count).map(|h| (h, to)).collect(),
        Pattern::OneToMany { from, first, count } => (first..first + count).map(|h| (from, h)).collect(),
        Pattern::Shift { shift } => (0..hosts).map(|h| (h, (h + shift) % hosts)).collect(),
        Pattern::AllReduce { stride } => (0..hosts).map(|h| (h, (h + stride) % hosts)).collect(),
        Pattern::AllPairs | Pattern::AllToAll => {
            (1..hosts).flat_map(|s| (0..hosts).map(move |h| (h, (h + s) % hosts))).collect()
        }
    }
}

/// Flows and collectives of a scenario, without QPs yet.
pub fn plan(scenario: &Scenario) -> (Vec<Flow>, Vec<Collective>) {
    let (mut flows, mut collectives) = (Vec::new(), Vec::new());
    for t in &scenario.traffic {
        let collective = match t.pattern {
            Pattern::AllReduce { .. } | Pattern::AllToAll => Some(collectives.len()),
            _ => None,
        };
        let first = flows.len();
        for (from, to) in pairs(&t.pattern, scenario.hosts) {
            for _ in 0..t.qps {
                flows.push(flow(t, from, to, collective));
            }
        }
        if collective.is_some() {
            collectives.push(collective_of(t, scenario.hosts, first));
        }
    }
    (flows, collectives)
}

fn flow(t: &Traffic, from: usize, to: usize, collective: Option<usize>) -> Flow {
    let us = |x: f64| (x * 1000.0) as Nanos;
    Flow {
        from,
        to,
        op: t.op,
        sizes: if t.sizes.is_empty() { vec![t.size] } else { t.sizes.clone() },
        depth: u64::from(t.depth),
        count: if t.count == 0 { u64::MAX } else { t.count },
        start: us(t.start_us),
        stop: if t.stop_us == 0.0 { Nanos::MAX } else { us(t.stop_us) },
        qpn: Qpn(0),
        keys: [0; 2],
        addrs: [0; 2],
        posted: 0,
        done: 0,
        bytes: 0,
        errors: 0,
        disorder: 0,
        different: 0,
        posted_at: vec![0; t.depth as usize],
        latencies: Vec::new(),
        finished_at: 0,
        collective,
    }
}

fn collective_of(t: &Traffic, hosts: usize, first: usize) -> Collective {
    let ring = match t.pattern {
        Pattern::AllReduce { stride } => Some(stride),
        _ => None,
    };
    let rounds = t.count.max(1);
    let flows = (0..hosts)
        .map(|h| {
            if ring.is_some() {
                vec![first + h]
            } else {
                (0..hosts - 1).map(|s| first + s * hosts + h).collect()
            }
        })
        .collect();
    let per_round = if ring.is_some() { 2 * (hosts as u64 - 1) } else { hosts as u64 - 1 };
    Collective {
        ring,
        flows,
        begun: vec![0; hosts],
        steps: rounds * per_round,
        size: u64::from(t.size),
        finished_at: vec![0; hosts],
    }
}

/// Makes QPs and memory of all flows.
pub fn set_up(now: Nanos, flows: &mut [Flow], hosts: &mut [Host], seed: u64) {
    for (i, f) in flows.iter_mut().enumerate() {
        let len = (f.slot_bytes() * f.depth).min(crate::memory::REGION - 1);
        let data_from = if f.op == Op::Read { f.to } else { f.from };
        for (side, host) in [f.from, f.to].into_iter().enumerate() {
            let mut state = seed ^ i as u64;
            let source = host == data_from;
            let fill = |_| if source { random(&mut state) as u8 } else { 0 };
            f.addrs[side] = hosts[host].memory.make(i, len as usize, fill);
            f.keys[side] =
                hosts[host].ep.register_mr(1, f.addrs[side], f.addrs[side], len, 0xf).expect("a free key");
        }
        let (a, b) = (hosts[f.from].make_qp(i as u32), hosts[f.to].make_qp(u32::MAX));
        f.qpn = a;
        hosts[f.from].connect(now, a, b, f.to);
        hosts[f.to].connect(now, b, a, f.from);
    }
}

/// Posts the flow's next message. With real memory its source gets new contents first.
pub fn post(now: Nanos, flow: &mut Flow, index: usize, hosts: &mut [Host], batch: &mut SendBatch) {
    let n = flow.posted;
    let (slot, len) = ((n % flow.depth), flow.size_of(n));
    let offset = slot * flow.slot_bytes();
    let source = if flow.op == Op::Read { flow.to } else { flow.from };
    if let Some(bytes) = hosts[source].memory.bytes_mut(index) {
        let mut state = n << 20 ^ index as u64;
        let part = &mut bytes[offset as usize..offset as usize + len as usize];
        for chunk in part.chunks_mut(8) {
            let word = random(&mut state).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
    let wqe = SendWqe {
        wr_id: n,
        opcode: if flow.op == Op::Read { Opcode::Read } else { Opcode::Write },
        flags: send_flags::SIGNALED,
        num_sge: 1,
        inline_len: 0,
        length: len,
        imm: 0,
        remote_addr: flow.addrs[1] + offset,
        rkey: flow.keys[1],
        compare_add: 0,
        swap: 0,
        dest: None,
        remote_srq: 0,
    };
    batch.wqes.push(wqe);
    batch.sges.push(Sge { addr: flow.addrs[0] + offset, len, lkey: flow.keys[0] });
    flow.posted_at[slot as usize] = now;
    flow.posted += 1;
    let host = &mut hosts[flow.from];
    host.ep.post_sends(now, flow.qpn, batch, &mut host.log);
}

/// Takes one completion of a flow in.
pub fn complete(
    now: Nanos,
    flow: &mut Flow,
    index: usize,
    hosts: &[Host],
    c: &Completion,
    measured_from: Nanos,
) {
    let n = flow.done;
    flow.disorder += u64::from(c.wr_id != n);
    if c.status != WcStatus::Success {
        flow.errors += 1;
    }
    let (slot, len) = (n % flow.depth, flow.size_of(n));
    let at = (slot * flow.slot_bytes()) as usize;
    let range = at..at + len as usize;
    let bytes = |h: usize| hosts[h].memory.bytes(index).map(|b| &b[range.clone()]);
    flow.different += u64::from(bytes(flow.from) != bytes(flow.to));
    if flow.posted_at[slot as usize] >= measured_from {
        flow.latencies.push(now - flow.posted_at[slot as usize]);
    }
    flow.done += 1;
    flow.bytes += u64::from(len);
    flow.finished_at = now;
}
