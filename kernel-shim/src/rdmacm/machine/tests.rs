//! Two state machines on a lossy, duplicating, reordering channel in virtual time: every seed ends in a state that both
//! understand, with events in an order that an application can follow.

use std::collections::BTreeMap;

use super::*;

const PORT: u16 = 7471;
const LISTENER: u32 = 1000;

fn address(host: usize, port: u16) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, host as u8], port))
}

/// Two hosts and the network between them.
struct World {
    machines: [Machine; 2],
    /// Packets under way: (arrival, order, to, from, bytes).
    network: BTreeMap<(u64, u64), (usize, SocketAddr, Vec<u8>)>,
    now: u64,
    random: u64,
    order: u64,
    loss: u64,
    dup: u64,
    /// Events of each host, by owner.
    events: [Vec<(u32, Event)>; 2],
    requests: Vec<Key>,
}

impl World {
    fn new(seed: u64, loss_percent: u64) -> World {
        World {
            machines: [Machine::new(seed * 2 + 1), Machine::new(seed * 2 + 2)],
            network: BTreeMap::new(),
            now: 1_000_000,
            random: seed ^ 0x5eed,
            order: 0,
            loss: loss_percent,
            dup: loss_percent,
            events: [Vec::new(), Vec::new()],
            requests: Vec::new(),
        }
    }

    /// A world that loses a fifth of all packets, and the request of id 7 of host 0 that waits for its answer on host 1.
    fn with_request(seed: u64) -> (World, Key) {
        let mut world = World::new(seed, 20);
        world.machines[1].listen(LISTENER, 0x106, PORT, 8);
        world.connect(7, false);
        while world.requests.is_empty() {
            world.run_for(1);
        }
        let passive = world.requests[0];
        (world, passive)
    }

    fn chance(&mut self, below: u64) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) % below
    }

    fn connect(&mut self, owner: u32, datagram: bool) -> Key {
        let terms =
            Terms { qpn: owner, mtu: 3, responder_resources: 4, initiator_depth: 2, ..Terms::default() };
        let connect = Connect {
            owner,
            local: address(1, 40000),
            remote: address(2, PORT),
            port_space: if datagram { 0x111 } else { 0x106 },
            qp_type: 2,
            is_datagram: datagram,
            local_gid: [1; 16],
            terms,
            data: b"hello",
        };
        let key = self.machines[0].connect(self.now, &connect).unwrap();
        self.collect();
        key
    }

    /// Takes what the machines want done.
    fn collect(&mut self) {
        for host in 0..2 {
            while let Some(output) = self.machines[host].pop_output() {
                match output {
                    Output::Event { owner, event } => self.events[host].push((owner, event)),
                    Output::Request { listener, key } => {
                        assert_eq!(listener, LISTENER);
                        let owner = 2000 + key;
                        self.machines[host].adopt(key, owner);
                        self.machines[host].request_taken(listener);
                        self.requests.push(key);
                    }
                    Output::Send { to, packet, .. } => self.transmit(host, to, &packet),
                }
            }
        }
    }

    fn transmit(&mut self, from: usize, to: SocketAddr, packet: &[u8]) {
        let to = usize::from(to.ip() == address(2, 0).ip());
        let copies =
            if self.chance(100) < self.loss { 0 } else { 1 + u64::from(self.chance(100) < self.dup) };
        for _ in 0..copies {
            let arrival = self.now + 50 + self.chance(if self.loss > 0 { 300_000 } else { 1 });
            self.order += 1;
            let from = address(from + 1, 50000 + from as u16);
            self.network.insert((arrival, self.order), (to, from, packet.to_vec()));
        }
    }

    /// Lets time pass until `end`, or until nothing is left to happen.
    fn run_until(&mut self, end: u64) {
        loop {
            let packet = self.network.keys().next().map(|(at, _)| *at);
            let timers = self.machines.iter().filter_map(Machine::next_timeout).min();
            let Some(next) = packet.into_iter().chain(timers).min().filter(|next| *next <= end) else {
                break;
            };
            self.now = self.now.max(next);
            while let Some(entry) = self.network.first_entry()
                && entry.key().0 <= self.now
            {
                let (to, from, bytes) = entry.remove();
                let arrival = Arrival {
                    local: address(to + 1, 0),
                    from,
                    listener: (to == 1).then_some(LISTENER),
                    local_gid: Some([2; 16]),
                    mtu: 5,
                };
                self.machines[to].on_packet(self.now, &arrival, &bytes);
                self.collect();
            }
            for host in 0..2 {
                self.machines[host].on_timeout(self.now);
            }
            self.collect();
        }
        self.now = self.now.max(end);
    }

    fn run_for(&mut self, seconds: u64) {
        self.run_until(self.now + seconds * 1_000_000);
    }

    fn state(&self, host: usize, key: Key) -> Option<State> {
        self.machines[host].conn(key).map(|conn| conn.state)
    }
}

/// Whether a connection's events came in an order that makes sense.
fn assert_order(events: &[Event], seed: u64) {
    let rank = |event: &Event| match event {
        Event::Response => 0,
        Event::Established => 1,
        Event::Rejected { .. } | Event::Unreachable { .. } | Event::Disconnected { .. } => 2,
        Event::TimewaitExit => 3,
    };
    let ranks: Vec<u32> = events.iter().map(rank).collect();
    assert!(ranks.windows(2).all(|pair| pair[0] < pair[1]), "seed {seed}: {events:?}");
}

fn of(world: &World, host: usize, owner: u32) -> Vec<Event> {
    world.events[host].iter().filter(|(who, _)| *who == owner).map(|(_, event)| event.clone()).collect()
}

#[test]
fn connection__lives_from_request_to_time_wait() {
    let mut world = World::new(1, 0);
    world.machines[1].listen(LISTENER, 0x106, PORT, 8);
    let active = world.connect(7, false);
    world.run_for(1);
    let passive = world.requests[0];
    let conn = world.machines[1].conn(passive).unwrap();
    assert_eq!((conn.data.as_slice(), conn.theirs.qpn, conn.remote.port()), (&b"hello"[..], 7, 40000));
    world.machines[1]
        .accept(world.now, passive, &Terms { qpn: 9, mtu: 5, ..Terms::default() }, b"welcome")
        .unwrap();
    world.collect();
    world.run_for(1);
    assert_eq!(world.state(0, active), Some(State::RepRcvd));
    let conn = world.machines[0].conn(active).unwrap();
    assert_eq!((conn.data.as_slice(), conn.theirs.qpn, conn.ours.mtu), (&b"welcome"[..], 9, 3));
    world.machines[0].accept(world.now, active, &Terms::default(), &[]).unwrap();
    world.collect();
    world.run_for(10);
    assert_eq!(world.state(0, active), Some(State::Established));
    assert_eq!(world.state(1, passive), Some(State::Established));
    world.machines[1].disconnect(world.now, passive);
    world.collect();
    world.run_for(5);
    let end = [Event::Disconnected { status: 0 }, Event::TimewaitExit];
    assert_eq!(of(&world, 0, 7), [&[Event::Response], &end[..]].concat());
    assert_eq!(of(&world, 1, 2000 + passive), [&[Event::Established], &end[..]].concat());
    for host in 0..2 {
        assert_eq!(world.machines[host].next_timeout(), None, "nothing left to do");
        let keys: Vec<Key> = world.machines[host].conns.keys().copied().collect();
        for key in keys {
            world.machines[host].destroy(world.now, key);
        }
        assert!(world.machines[host].conns.is_empty() && world.machines[host].by_remote.is_empty());
        assert!(world.machines[host].peers.is_empty());
    }
}

#[test]
fn nobody_listening__is_rejected_and_silence_is_unreachable() {
    let mut world = World::new(2, 0);
    world.connect(7, false);
    world.connect(8, true);
    world.run_for(1);
    assert_eq!(of(&world, 0, 7), [Event::Rejected { reason: 8, data: Vec::new() }]);
    assert_eq!(of(&world, 0, 8), [Event::Unreachable { status: 1 }]);
    world.loss = 100;
    world.connect(9, false);
    world.run_for(8);
    assert_eq!(of(&world, 0, 9), [Event::Unreachable { status: -libc::ETIMEDOUT }]);
}

#[test]
fn reject__carries_reason_and_data_although_the_id_is_destroyed_at_once() {
    for seed in 0..50 {
        let (mut world, passive) = World::with_request(seed);
        world.machines[1].reject(world.now, passive, 28, &[9; 148]).unwrap();
        world.machines[1].destroy(world.now, passive);
        world.collect();
        world.run_for(20);
        assert_eq!(of(&world, 0, 7), [Event::Rejected { reason: 28, data: vec![9; 148] }], "seed {seed}");
        assert!(world.machines[1].conns.is_empty());
    }
}

#[test]
fn farewell__tells_every_peer_what_it_waits_for() {
    let mut told = 0;
    for seed in 0..100 {
        let (mut world, passive) = World::with_request(seed);
        world.machines[1].reject(world.now, passive, 28, b"no").unwrap();
        world.machines[1].farewell();
        world.collect();
        world.machines[1] = Machine::new(seed + 1000);
        world.run_for(20);
        let events = of(&world, 0, 7);
        told += u32::from(events == [Event::Rejected { reason: 28, data: b"no".to_vec() }]);
        assert!(
            matches!(events[..], [Event::Rejected { .. } | Event::Unreachable { .. }]),
            "{seed}: {events:?}"
        );
    }
    assert!(told > 95, "{told}");
}

#[test]
fn undecided_application__keeps_the_peer_waiting_but_not_for_ever() {
    let mut world = World::new(3, 0);
    world.machines[1].listen(LISTENER, 0x106, PORT, 8);
    let active = world.connect(7, false);
    world.run_for(50);
    assert_eq!(world.state(0, active), Some(State::ReqSent));
    assert_eq!(world.requests.len(), 1);
    world.run_for(15);
    assert_eq!(of(&world, 0, 7), [Event::Unreachable { status: -libc::ETIMEDOUT }]);
}

#[test]
fn backlog__drops_what_has_no_room_until_there_is() {
    let mut world = World::new(4, 0);
    world.machines[1].listen(LISTENER, 0x106, PORT, 1);
    world.machines[1].listeners.get_mut(&LISTENER).unwrap().backlog = 1;
    world.connect(7, false);
    world.run_for(1);
    assert!(world.requests.is_empty() && world.machines[1].dropped.excess > 1);
    world.machines[1].request_taken(LISTENER);
    world.run_for(2);
    assert_eq!(world.requests.len(), 1);
}

#[test]
fn dead_peer__is_noticed() {
    let mut world = World::new(5, 0);
    let (active, passive) = established(&mut world);
    world.run_for(100);
    assert_eq!(world.state(0, active), Some(State::Established), "an idle connection stays");
    // Killed, and started again at the same address.
    world.machines[1] = Machine::new(99);
    world.run_for(3);
    assert_eq!(of(&world, 0, 7).last(), Some(&Event::TimewaitExit));
    let mut world = World::new(6, 0);
    let (_, other) = established(&mut world);
    assert_eq!(passive, other);
    world.loss = 100;
    world.run_for(40);
    assert!(of(&world, 0, 7).contains(&Event::Disconnected { status: -libc::ETIMEDOUT }));
    assert!(of(&world, 1, 2000 + other).contains(&Event::Disconnected { status: -libc::ETIMEDOUT }));
}

#[test]
fn forgotten_connection__is_noticed_among_many() {
    let mut world = World::new(7, 0);
    world.machines[1].listen(LISTENER, 0x106, PORT, 1000);
    let actives: Vec<Key> = (0..200).map(|owner| establish_one(&mut world, owner)).collect();
    let forgotten = world.requests[150];
    world.machines[1].remove(forgotten);
    world.run_for(6);
    let ended: Vec<u32> = world.events[0]
        .iter()
        .filter(|(_, event)| matches!(event, Event::Disconnected { .. }))
        .map(|(owner, _)| *owner)
        .collect();
    assert_eq!((ended, actives.len()), (vec![150], 200));
}

#[test]
fn refusal_by_the_network__counts_only_with_our_own_names() {
    let mut world = World::new(8, 100);
    let active = world.connect(7, false);
    let packet = world.machines[0].conn(active).unwrap().last_packet.clone();
    let mut forged = packet.clone();
    forged[8] ^= 1;
    let to = address(2, PORT);
    world.machines[0].on_undeliverable(world.now, to, &forged, libc::ECONNREFUSED);
    assert_eq!(world.state(0, active), Some(State::ReqSent));
    // Not final at once: the listener may be about to come.
    world.machines[0].on_undeliverable(world.now, to, &packet, libc::ECONNREFUSED);
    world.collect();
    assert!(of(&world, 0, 7).is_empty());
    world.run_for(1);
    world.machines[0].on_undeliverable(world.now, to, &packet, libc::ECONNREFUSED);
    world.collect();
    assert_eq!(of(&world, 0, 7), [Event::Rejected { reason: 8, data: Vec::new() }]);
    world.connect(8, false);
    let packet = world.machines[0].conns.values().last().unwrap().last_packet.clone();
    world.machines[0].on_undeliverable(world.now, to, &packet, libc::EHOSTUNREACH);
    world.collect();
    assert_eq!(of(&world, 0, 8), [Event::Unreachable { status: -libc::EHOSTUNREACH }]);
}

fn establish_one(world: &mut World, owner: u32) -> Key {
    let (active, before) = (world.connect(owner, false), world.requests.len());
    world.run_until(world.now + 1000);
    let passive = world.requests[before];
    world.machines[1].accept(world.now, passive, &Terms { qpn: 9, mtu: 5, ..Terms::default() }, &[]).unwrap();
    world.collect();
    world.run_until(world.now + 1000);
    world.machines[0].accept(world.now, active, &Terms::default(), &[]).unwrap();
    world.collect();
    world.run_until(world.now + 1000);
    active
}

fn established(world: &mut World) -> (Key, Key) {
    world.machines[1].listen(LISTENER, 0x106, PORT, 8);
    let active = establish_one(world, 7);
    (active, world.requests[0])
}

/// One life of one connection in which both applications do as they like; both must end up knowing that it ended.
fn random_life(seed: u64) {
    let mut world = World::new(seed, [0, 5, 20, 40][seed as usize % 4]);
    world.machines[1].listen(LISTENER, 0x106, PORT, 8);
    let active = world.connect(7, seed % 7 == 6);
    let mut active_alive = true;
    let mut passive_alive = BTreeMap::new();
    for _ in 0..60 {
        let step = world.chance(400_000);
        world.run_until(world.now + step);
        let now = world.now;
        for key in world.requests.clone() {
            passive_alive.entry(key).or_insert(true);
        }
        let passive = world.requests.first().copied();
        let terms = Terms { qpn: 9, mtu: 5, ..Terms::default() };
        match (world.chance(12), passive) {
            (0..=2, Some(key)) => drop(world.machines[1].accept(now, key, &terms, &[])),
            (3..=5, _) => drop(world.machines[0].accept(now, active, &terms, &[])),
            (6, Some(key)) => world.machines[1].disconnect(now, key),
            (7, _) => world.machines[0].disconnect(now, active),
            (8, Some(key)) if world.chance(4) == 0 => drop(world.machines[1].reject(now, key, 28, b"no")),
            (9, _) if world.chance(8) == 0 => {
                world.machines[0].destroy(now, active);
                active_alive = false;
            }
            (10, Some(key)) if world.chance(8) == 0 => {
                world.machines[1].destroy(now, key);
                passive_alive.insert(key, false);
            }
            _ => {}
        }
        world.collect();
    }
    assert!(world.requests.len() <= 1, "seed {seed}: one request, seen once");
    // The applications have had their say: what is left is disconnected, on a network that still loses packets.
    if active_alive {
        let _ = world.machines[0].accept(world.now, active, &Terms::default(), &[]);
        world.machines[0].disconnect(world.now, active);
    }
    world.collect();
    world.run_for(100);
    assert_order(&of(&world, 0, 7), seed);
    let (mine, states) = (
        of(&world, 0, 7),
        [world.state(0, active), world.requests.first().and_then(|key| world.state(1, *key))],
    );
    if active_alive {
        assert!(matches!(states[0], Some(State::Closed)), "seed {seed}: {states:?} {mine:?}");
    }
    for key in world.requests.clone() {
        let events = of(&world, 1, 2000 + key);
        assert_order(&events, seed);
        // Waiting for its own application is all that a connection may still do.
        let done = matches!(world.state(1, key), None | Some(State::Closed | State::ReqRcvd));
        assert!(done, "seed {seed}: {states:?} {mine:?} {events:?}");
        world.machines[1].destroy(world.now, key);
    }
    world.machines[0].destroy(world.now, active);
    world.collect();
    world.run_for(20);
    for machine in &world.machines {
        assert!(
            machine.conns.is_empty() && machine.by_remote.is_empty() && machine.peers.is_empty(),
            "seed {seed}"
        );
        assert_eq!(machine.next_timeout(), None, "seed {seed}: idle machines sleep for ever");
    }
}

#[test]
fn random_lives__end_in_agreement() {
    // Every seed names itself when it fails; run one alone with METAROCE_TEST_SEED.
    match std::env::var("METAROCE_TEST_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => random_life(seed),
        None => (0..4000).for_each(random_life),
    }
}

#[test]
fn hostile_packets__are_counted_and_change_nothing() {
    let mut world = World::new(11, 0);
    let (active, passive) = established(&mut world);
    let captured: Vec<Vec<u8>> = [
        Message::Mra,
        Message::Rtu,
        Message::Dreq,
        Message::Drep,
        Message::Rej { reason: 28, data: &[] },
        Message::Rep { gid: [0; 16], terms: Terms::default(), data: &[] },
    ]
    .iter()
    .map(|message| world.machines[0].packet(world.machines[0].conn(active).unwrap(), message))
    .collect();
    let arrival = Arrival {
        local: address(2, 0),
        from: address(66, 6),
        listener: Some(LISTENER),
        local_gid: Some([2; 16]),
        mtu: 5,
    };
    for packet in &captured {
        // Without one of the two names or the incarnation a packet is for nobody.
        for byte in (8..32).step_by(4) {
            let mut forged = packet.clone();
            forged[byte] ^= 0x80;
            world.machines[1].on_packet(world.now, &arrival, &forged);
        }
        for length in 0..packet.len() {
            world.machines[1].on_packet(world.now, &arrival, &packet[..length]);
        }
    }
    world.collect();
    assert_eq!(world.state(1, passive), Some(State::Established));
    assert!(world.machines[1].dropped.stray > 0 && world.machines[1].dropped.malformed > 0);
    assert_eq!(world.machines[1].conns.len(), 1);
}
