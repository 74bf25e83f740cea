//! START HERE: the step. One page: now, doorbells, receive, timers, bursts, publish. Parking is in `thread.rs`, who
//! runs steps and when in `drive.rs`.

use std::sync::atomic::Ordering;

use metaroce_proto::{Endpoint, Nanos, RecvBatch, SendBatch, TxBurst};

use crate::Errno;
use crate::doorbell::Queue;
use crate::drive::{Clock, Engine};
use crate::impair::Impair;
use crate::limits::*;
use crate::memory::HostMemory;
use crate::outbox::Outbox;
use crate::rates::Rates;
use crate::snapshot::Snapshot;
use crate::udp::groups::Groups;
use crate::udp::rx::Rx;
use crate::udp::tx::{Sent, Tx};
use crate::watch::Watchers;

/// Everything behind the engine's one lock.
#[derive(Default)]
pub(crate) struct Core {
    /// Where completions and events go.
    pub(crate) out: Outbox,
    /// The core and its sockets; made on the first use that needs them.
    pub(crate) io: Option<Box<Io>>,
    /// Full steps of pollers in a row that found nothing to do.
    pub(crate) idle_polls: u32,
    /// Steps run by the application's threads.
    pub(crate) app_steps: u64,
    /// Planes whose link is down, a bit each: what the core is told when it is made.
    pub(crate) links_down: u64,
    /// Who hears of planes and paths.
    pub(crate) watchers: Watchers,
}

/// The core, its sockets and scratch space.
pub(crate) struct Io {
    pub(crate) endpoint: Endpoint,
    pub(crate) rx: Rx,
    /// Receives for multicast groups, from the first attachment on.
    pub(crate) groups: Option<Box<Groups>>,
    pub(crate) tx: Tx,
    pub(crate) impair: Option<Impair>,
    pub(crate) snapshot: Snapshot,
    pub(crate) rates: Rates,
    memory: HostMemory,
    burst: TxBurst,
    sends: SendBatch,
    recvs: RecvBatch,
}

/// How much of a step to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Doorbells and bursts: what a poster wants.
    Send,
    /// All of it.
    All,
}

/// What a step did and what it wants.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Done {
    /// When it was.
    pub(crate) now: Nanos,
    /// Packets received.
    pub(crate) received: usize,
    /// Packets sent.
    pub(crate) sent: usize,
    /// Posted work was taken over.
    pub(crate) posted: bool,
    /// Steps the application has run so far.
    pub(crate) app_steps: u64,
    /// Completions were published.
    pub(crate) completed: bool,
    /// The receive socket was not emptied.
    pub(crate) more_rx: bool,
    /// When the next step is due even if nothing happens; 0: at once.
    pub(crate) next: Option<Nanos>,
}

impl Core {
    /// One bounded step. Whoever holds the lock runs it and then does what [`Engine`] says about unlocking.
    pub(crate) fn step(&mut self, engine: &Engine, work: Work) -> Done {
        let mut done = Done::default();
        let Core { out, io: Some(io), app_steps, watchers, .. } = self else { return done };
        let mut now = engine.clock.now();
        (done.now, out.now) = (now, now);
        done.app_steps = *app_steps;
        done.posted = io.take_doorbells(now, engine, out);
        if work == Work::All {
            io.receive(&engine.clock, out, &mut done);
            io.run_timers(now, out, &done);
            if done.received > 0 {
                now = engine.clock.now();
                out.now = now;
            }
        }
        // Acknowledgements of what is published now may wait for the application's answer to ride on: the core's
        // deadline, destruction of the QP and the end of the process see to it that they leave.
        let retry_at = io.send_bursts(now, out, &mut done);
        if out.overrun(0).is_some() {
            io.fail_overrun_cqs(now, out);
        }
        done.completed = out.publish(engine);
        out.report_overruns();
        watchers.tell(&io.endpoint.journal);
        engine.in_flight.store(io.endpoint.in_flight_bytes(), Ordering::SeqCst);
        let stats_at = io.publish_counters(now, out, &done);
        let impair_at = io.impair.as_ref().and_then(Impair::next_due);
        let held_at = out.next_held();
        done.next =
            [io.endpoint.next_timeout(), retry_at, stats_at, impair_at, held_at].into_iter().flatten().min();
        done
    }

    /// The core and its sockets, opened if need be.
    pub(crate) fn io(&mut self, engine: &Engine) -> Result<&mut Io, Errno> {
        if self.io.is_none() {
            let mut io = Box::new(engine.open_io()?);
            for plane in (0..64).filter(|plane| self.links_down >> plane & 1 == 1) {
                io.endpoint.set_plane_state(engine.clock.now(), plane, false, &mut self.out);
            }
            io.rates.apply(&mut io.endpoint, self.links_down);
            io.endpoint.journal.wanted = self.watchers.any();
            self.io = Some(io);
        }
        self.io.as_deref_mut().ok_or(libc::ENODEV)
    }
}

impl Io {
    pub(crate) fn new(
        endpoint: Endpoint,
        rates: Rates,
        (rx, tx): (Rx, Tx),
        impair: Option<Impair>,
        snapshot: Snapshot,
    ) -> Io {
        Io {
            endpoint,
            rates,
            rx,
            groups: None,
            tx,
            impair,
            snapshot,
            memory: HostMemory,
            burst: TxBurst::new(),
            sends: SendBatch::default(),
            recvs: RecvBatch::default(),
        }
    }

    /// Hands posted work to the core; gives whether there was any. Receives first: a send may be answered by a peer on
    /// the same endpoint.
    pub(crate) fn take_doorbells(&mut self, now: Nanos, engine: &Engine, out: &mut Outbox) -> bool {
        if !engine.bell.answer() {
            return false;
        }
        let Io { endpoint, sends, recvs, memory, .. } = self;
        engine.bell.take(Queue::Srq, |id| {
            if out.srq(id as u32).is_some_and(|srq| srq.take_recvs(recvs)) {
                endpoint.post_srq_recvs(now, id as u32, recvs, out);
            }
        });
        engine.bell.take(Queue::Recv, |index| {
            if let Some(qpn) = out.qp(index).filter(|qp| qp.take_recvs(recvs)).map(|qp| qp.qpn()) {
                endpoint.post_recvs(now, qpn, recvs, out);
            }
        });
        engine.bell.take(Queue::Send, |index| {
            if let Some(qpn) = out.qp(index).filter(|qp| qp.take_sends(sends)).map(|qp| qp.qpn()) {
                endpoint.post_sends(now, qpn, sends, out);
            }
        });
        endpoint.run_local(now, memory, out);
        true
    }

    /// A CQ that lost a completion takes its QPs with it: nothing is lost silently.
    #[cold]
    fn fail_overrun_cqs(&mut self, now: Nanos, out: &mut Outbox) {
        let mut at = 0;
        while let Some(cq) = out.overrun(at) {
            self.endpoint.fail_cq(now, cq, out);
            at += 1;
        }
    }

    /// Takes in what the sockets have. Packets are stamped when they have been read: a stamp from before, while some were
    /// still on their way, would make them seem to have waited here, and the peer take that off its round trips.
    fn receive(&mut self, clock: &Clock, out: &mut Outbox, done: &mut Done) {
        let Io { endpoint, rx, groups, impair, memory, .. } = self;
        let mut deliver = |now: Nanos, meta: &metaroce_proto::RxMeta, bytes: &[u8]| {
            endpoint.on_datagram(now, meta, bytes, memory, out);
        };
        if let Some(impair) = impair {
            let now = clock.now();
            impair.due(now, &mut |meta, bytes| deliver(now, meta, bytes));
        }
        // Takes a round from a socket; true if it may have more.
        let mut take = |rx: &mut Rx, done: &mut Done| {
            let messages = rx.receive();
            if messages == 0 {
                return false;
            }
            let now = clock.now();
            for i in 0..messages {
                let Some(message) = rx.message(i) else { continue };
                for datagram in message.datagrams() {
                    done.received += 1;
                    match impair {
                        None => deliver(now, &message.meta, datagram),
                        Some(impair) => impair.pass(
                            now,
                            &message.meta,
                            datagram,
                            metaroce_proto::wire::is_data,
                            &mut |meta, bytes| deliver(now, meta, bytes),
                        ),
                    }
                }
            }
            messages == RX_MESSAGES
        };
        // Groups have their round whatever else there is.
        done.more_rx = groups.as_mut().is_some_and(|groups| take(&mut groups.rx, done));
        while take(rx, done) {
            if done.received >= STEP_RX_PACKETS_MAX {
                done.more_rx = true;
                break;
            }
        }
    }

    /// Takes part in the IP groups that carry what QPs are attached to. Errors are the kernel's.
    pub(crate) fn follow_groups(&mut self, engine: &Engine) -> Result<(), Errno> {
        let wanted = self.endpoint.carriers();
        if self.groups.is_none() && wanted.is_empty() {
            return Ok(());
        }
        let groups = match &mut self.groups {
            Some(groups) => groups,
            none => none.insert(Box::new(engine.open_groups()?)),
        };
        groups.follow(&wanted).map_err(|error| {
            log::error!("cannot join a multicast group: {error}");
            error.raw_os_error().unwrap_or(libc::EIO)
        })
    }

    /// Timers wait for the socket to be empty, because what is in there may be what they wait for.
    fn run_timers(&mut self, now: Nanos, out: &mut Outbox, done: &Done) {
        let slack = if done.more_rx { TIMER_LATE_NS_MAX } else { 0 };
        if self.endpoint.next_timeout().is_some_and(|due| due + slack <= now) {
            self.endpoint.on_timeout(now, &mut self.memory, out);
        }
    }

    /// Sends what the core has, up to the step's bound. Gives when to go on if something is left.
    fn send_bursts(&mut self, now: Nanos, out: &mut Outbox, done: &mut Done) -> Option<Nanos> {
        // Bounded in bursts too, for those that send nothing (faults).
        for _ in 0..STEP_TX_PACKETS_MAX {
            if done.sent >= STEP_TX_PACKETS_MAX {
                break;
            }
            if !self.endpoint.poll_burst(now, &mut self.burst, out) {
                return None;
            }
            match self.tx.send(&self.burst) {
                Sent::All => done.sent += self.burst.packets.len(),
                Sent::Blocked(from) => {
                    done.sent += from;
                    self.endpoint.unsend(&self.burst, from);
                    return Some(now + TX_RETRY_NS);
                }
                Sent::Fault => self.endpoint.fault(now, &self.burst, out),
            }
        }
        Some(0)
    }
}
