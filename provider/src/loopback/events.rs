//! CQs and their events: arming between two threads, moderation, overflow, resizing under load, completion times;
//! SRQ limits, re-registration and what a closed device leaves.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rdma_core_sys::*;

use super::world::*;
use super::{PATIENCE, Published};
use crate::cq::{Cq, CqCreate};
use crate::mr::Mr;
use crate::pd::Pd;
use crate::td::Td;

/// Rounds of the tests that look for lost events; `METAROCE_TEST_ROUNDS` sets another number.
fn rounds() -> u64 {
    std::env::var("METAROCE_TEST_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000)
}

/// A CQ on a completion channel, with the application's end of the channel.
fn cq_with_channel(world: &World, cqe: u32) -> (Published<Cq>, std::io::PipeReader) {
    let (reader, _writer) = std::io::pipe().expect("pipe");
    // The address only names the channel.
    let name = reader.as_raw_fd() as usize;
    let channel = Some(world.context.comp_channel(name, reader.as_raw_fd()).expect("channel"));
    let create = CqCreate { cqe, comp_vector: 0, channel, wc_flags: None, parent_domain: None };
    (Published::new(Cq::create(&world.context, create).expect("CQ")), reader)
}

/// Reads one event, as `ibv_get_cq_event` and `ibv_ack_cq_events` do.
fn read_event(reader: &mut std::io::PipeReader, cq: &Published<Cq>) {
    let mut record = [0; 8];
    reader.read_exact(&mut record).expect("record");
    assert_eq!(u64::from_ne_bytes(record), cq.0 as u64);
    cq.get().event_read();
    // SAFETY: a live CQ; only this thread acknowledges.
    unsafe { (*cq.0).comp_events_completed += 1 };
}

/// An epoll instance that is edge-triggered on one descriptor.
struct Edge(i32);

impl Edge {
    fn on(fd: i32) -> Self {
        let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET) as u32, u64: 0 };
        // SAFETY: plain calls with a structure that lives through them.
        unsafe {
            let epoll = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            assert_eq!(libc::epoll_ctl(epoll, libc::EPOLL_CTL_ADD, fd, &mut event), 0);
            let flags = libc::fcntl(fd, libc::F_GETFL);
            assert_eq!(libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK), 0);
            Self(epoll)
        }
    }
    fn wait(&self) -> bool {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: room for one event.
        unsafe { libc::epoll_wait(self.0, &mut event, 1, PATIENCE.as_millis() as i32) == 1 }
    }
}

impl Drop for Edge {
    fn drop(&mut self) {
        // SAFETY: ours, and closed once.
        unsafe { libc::close(self.0) };
    }
}

/// One thread posts a request when the other has seen the one before; the other arms, polls and sleeps.
fn arm_poll_sleep(base_port: u16, edge: bool) {
    let world = World::new(base_port);
    let (cq, mut reader) = cq_with_channel(&world, 64);
    let other = world.cq(64);
    let (a, b) = (world.qp(IBV_QPT_RC, &cq, &cq, None), world.qp(IBV_QPT_RC, &other, &other, None));
    world.connect(&a, &b, Link::default());
    world.connect(&b, &a, Link::default());
    let seen = AtomicU64::new(0);
    let rounds = rounds();
    let epoll = edge.then(|| Edge::on(reader.as_raw_fd()));
    std::thread::scope(|scope| {
        let (world, a, seen) = (&world, &a, &seen);
        scope.spawn(move || {
            let write = at(request(0, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
            for id in 0..rounds {
                let begin = Instant::now();
                // Some of them while the other is still at the one before, some while it sleeps.
                let behind = id % 3;
                while seen.load(Ordering::Acquire) + behind < id {
                    assert!(begin.elapsed() < PATIENCE, "stalled at {id}");
                    std::thread::yield_now();
                }
                send(a, ibv_send_wr { wr_id: id, ..write }, world.sge(0, 8)).expect("post");
            }
        });
        let mut next = 0;
        while next < rounds {
            cq.get().arm(false);
            let wcs = some(&cq, 16);
            for wc in &wcs {
                assert_eq!((wc.wr_id, wc.status), (next, IBV_WC_SUCCESS));
                next += 1;
            }
            seen.store(next, Ordering::Release);
            if !wcs.is_empty() {
                continue;
            }
            match &epoll {
                // Level-triggered: the event of an arming before is as good.
                None => {
                    assert!(readable(reader.as_raw_fd(), PATIENCE), "no event at {next}");
                    read_event(&mut reader, &cq);
                }
                // Edge-triggered: read until EAGAIN, then wait for the next edge.
                Some(epoll) => {
                    assert!(epoll.wait(), "no edge at {next}");
                    while readable(reader.as_raw_fd(), Duration::ZERO) {
                        read_event(&mut reader, &cq);
                    }
                }
            }
        }
    });
    [&a, &b].iter().for_each(|qp| qp.get().destroy().expect("destroy QP"));
    [&cq, &other].iter().for_each(|cq| cq.get().destroy().expect("destroy CQ"));
}

#[test]
fn no_event_is_lost_level_triggered() {
    arm_poll_sleep(23_500, false);
}

#[test]
fn no_event_is_lost_edge_triggered() {
    arm_poll_sleep(23_600, true);
}

#[test]
fn solicited_only_arming_waits_for_a_solicited_message_or_an_error() {
    let world = World::new(23_700);
    let (cq, mut reader) = cq_with_channel(&world, 64);
    let other = world.cq(64);
    let (a, b) = (world.qp(IBV_QPT_RC, &other, &other, None), world.qp(IBV_QPT_RC, &cq, &cq, None));
    world.connect(&a, &b, Link::default());
    world.connect(&b, &a, Link::default());
    (0..8).for_each(|id| recv(&b, id, world.sge(0, 64)).expect("receive"));
    let quiet = |reader: &std::io::PipeReader| !readable(reader.as_raw_fd(), Duration::from_millis(20));
    cq.get().arm(true);
    send(&a, request(1, IBV_WR_SEND), world.sge(0, 8)).expect("post");
    assert_eq!(take(&other, 1), [(1, 0)]);
    assert!(quiet(&reader), "not solicited");
    let mut solicited = request(2, IBV_WR_SEND);
    solicited.send_flags |= IBV_SEND_SOLICITED;
    send(&a, solicited, world.sge(0, 8)).expect("post");
    assert!(readable(reader.as_raw_fd(), PATIENCE));
    read_event(&mut reader, &cq);
    // One event per arming.
    send(&a, solicited, world.sge(0, 8)).expect("post");
    assert_eq!(take(&other, 2).len(), 2);
    assert!(quiet(&reader), "not armed");
    // Arming for any is not weakened, and errors count as solicited.
    cq.get().arm(false);
    cq.get().arm(true);
    send(&a, request(3, IBV_WR_SEND), world.sge(0, 8)).expect("post");
    assert!(readable(reader.as_raw_fd(), PATIENCE));
    read_event(&mut reader, &cq);
    cq.get().arm(true);
    b.get().modify(&ibv_qp_attr { qp_state: IBV_QPS_ERR, ..Default::default() }, IBV_QP_STATE).expect("ERR");
    assert!(readable(reader.as_raw_fd(), PATIENCE));
    read_event(&mut reader, &cq);
    [&a, &b].iter().for_each(|qp| qp.get().destroy().expect("destroy QP"));
    [&cq, &other].iter().for_each(|cq| cq.get().destroy().expect("destroy CQ"));
}

#[test]
fn moderation_gathers_completions_and_never_holds_beyond_its_period() {
    let world = World::new(23_800);
    let (cq, mut reader) = cq_with_channel(&world, 256);
    let (a, b) = (world.qp(IBV_QPT_RC, &cq, &cq, None), world.qp(IBV_QPT_RC, &cq, &cq, None));
    world.connect(&a, &b, Link::default());
    world.connect(&b, &a, Link::default());
    let attr = |mask, count, period| ibv_modify_cq_attr {
        attr_mask: mask,
        moderate: ibv_moderate_cq { cq_count: count, cq_period: period },
    };
    assert_eq!(cq.get().modify(&attr(IBV_CQ_ATTR_RESERVED, 1, 1)), Err(libc::EINVAL));
    cq.get().modify(&attr(IBV_CQ_ATTR_MODERATE, 8, u16::MAX)).expect("moderate");
    let write = at(request(0, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
    let post = |count: u64| {
        (0..count).for_each(|_| {
            send(&a, write, world.sge(0, 8)).expect("post");
            wait(&cq, 1);
        });
    };
    // A machine that takes longer than the period (65 ms) for seven Writes says nothing about moderation.
    let mut in_time = false;
    while !in_time {
        let begin = Instant::now();
        cq.get().arm(false);
        post(7);
        let early = readable(reader.as_raw_fd(), Duration::ZERO);
        in_time = begin.elapsed() < Duration::from_millis(60);
        assert!(!(early && in_time), "7 of 8");
        post(1);
        assert!(readable(reader.as_raw_fd(), PATIENCE));
        read_event(&mut reader, &cq);
    }
    // One completion alone: the period ends the waiting though nobody polls.
    cq.get().arm(false);
    let begin = Instant::now();
    post(1);
    assert!(readable(reader.as_raw_fd(), PATIENCE));
    assert!(begin.elapsed() >= Duration::from_millis(60), "{:?}", begin.elapsed());
    read_event(&mut reader, &cq);
    cq.get().modify(&attr(IBV_CQ_ATTR_MODERATE, 0, 0)).expect("end it");
    cq.get().arm(false);
    post(1);
    assert!(readable(reader.as_raw_fd(), PATIENCE));
    read_event(&mut reader, &cq);
    [&a, &b].iter().for_each(|qp| qp.get().destroy().expect("destroy QP"));
    cq.get().destroy().expect("destroy CQ");
}

#[test]
fn overflow_raises_cq_err_and_ends_the_qps_on_it() {
    let world = World::new(23_900);
    let (small, other) = (world.cq(4), world.cq(64));
    let (a, b) = (world.qp(IBV_QPT_RC, &small, &other, None), world.qp(IBV_QPT_RC, &other, &other, None));
    let beside = world.connected(IBV_QPT_RC, Link::default());
    world.connect(&a, &b, Link::default());
    world.connect(&b, &a, Link::default());
    recv(&a, 5, world.sge(0, 64)).expect("receive");
    let write = |id| at(request(id, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
    let capacity = u64::from(small.get().engine.capacity());
    (0..capacity + 1).for_each(|id| send(&a, write(id), world.sge(0, 8)).expect("post"));
    assert_eq!(world.event(), (small.0 as u64, IBV_EVENT_CQ_ERR));
    // SAFETY: a live CQ that no other thread uses: the event is acknowledged.
    unsafe { (*small.0).async_events_completed += 1 };
    assert_eq!(a.get().query().0.qp_state, IBV_QPS_ERR);
    assert_eq!(take(&other, 1), [(5, IBV_WC_WR_FLUSH_ERR)], "what fits elsewhere is told there");
    let kept: Vec<u64> = take(&small, capacity as usize).iter().map(|c| c.0).collect();
    assert_eq!(kept, (0..capacity).collect::<Vec<_>>());
    // Once, and nobody else suffers.
    world.no_event();
    send(&beside.a, write(1), world.sge(0, 8)).expect("post");
    assert_eq!(beside.take(0, 1), [(1, 0)]);
    beside.destroy();
    [&a, &b].iter().for_each(|qp| qp.get().destroy().expect("destroy QP"));
    [&small, &other].iter().for_each(|cq| cq.get().destroy().expect("destroy CQ"));
}

/// Raises its flag when it goes, a panic included.
struct Raised<'a>(&'a AtomicBool);

impl Drop for Raised<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[test]
fn resizing_under_load_loses_and_doubles_nothing() {
    const COUNT: u64 = 5_000;
    let world = World::new(24_000);
    let cq = world.cq(64);
    let (a, b) = (world.qp(IBV_QPT_RC, &cq, &cq, None), world.qp(IBV_QPT_RC, &cq, &cq, None));
    world.connect(&a, &b, Link::default());
    world.connect(&b, &a, Link::default());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (world, cq, a, done) = (&world, &cq, &a, &done);
        scope.spawn(move || {
            let write = at(request(0, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
            for id in 0..COUNT {
                let begin = Instant::now();
                while send(a, ibv_send_wr { wr_id: id, ..write }, world.sge(0, 8)) == Err(libc::ENOMEM) {
                    assert!(begin.elapsed() < PATIENCE);
                    std::thread::yield_now();
                }
            }
        });
        scope.spawn(move || {
            // At least the depth of the send queue, so that nothing overflows.
            for cqe in [64, 1024, 100, 4096].into_iter().cycle() {
                if done.load(Ordering::Acquire) {
                    break;
                }
                cq.get().resize(cqe).expect("there is room for all that can be pending");
                std::thread::yield_now();
            }
        });
        // Set whatever happens: the resizing thread would otherwise outlive a failure for ever.
        let _end = Raised(done);
        let mut next = 0;
        let begin = Instant::now();
        while next < COUNT {
            assert!(begin.elapsed() < PATIENCE, "stalled at {next}");
            for wc in some(cq, 16) {
                assert_eq!((wc.wr_id, wc.status), (next, IBV_WC_SUCCESS));
                next += 1;
            }
        }
    });
    // Below the number pending.
    let write = at(request(7, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
    (0..8).for_each(|_| send(&a, write, world.sge(0, 8)).expect("post"));
    let begin = Instant::now();
    while cq.get().resize(7) == Ok(()) {
        assert!(begin.elapsed() < PATIENCE, "8 completions never were pending");
    }
    assert_eq!(cq.get().resize(0), Err(libc::EINVAL));
    assert_eq!(take(&cq, 8).len(), 8);
    assert_eq!(cq.get().resize(1), Ok(()));
    world.no_event();
    [&a, &b].iter().for_each(|qp| qp.get().destroy().expect("destroy QP"));
    cq.get().destroy().expect("destroy CQ");
}

#[test]
fn completion_times_grow_and_lie_between_post_and_poll() {
    let world = World::new(24_100);
    let times = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
    let create = CqCreate {
        cqe: 64,
        comp_vector: 0,
        channel: None,
        wc_flags: Some((IBV_WC_STANDARD_FLAGS | times).into()),
        parent_domain: None,
    };
    let cq = Published::new(Cq::create(&world.context, create).expect("CQ"));
    let (a, b) = (world.qp(IBV_QPT_RC, &cq, &cq, None), world.qp(IBV_QPT_RC, &cq, &cq, None));
    world.connect(&a, &b, Link::default());
    world.connect(&b, &a, Link::default());
    let write = at(request(7, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
    let ex = cq.0.cast::<ibv_cq_ex>();
    let now = || crate::device::raw_clock(&world.context, IBV_VALUES_MASK_RAW_CLOCK).expect("clock");
    let wall = || std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_nanos() as u64;
    let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
    for _ in 0..10 {
        let (before, wall_before) = (now().tv_nsec as u64, wall());
        send(&a, write, world.sge(0, 8)).expect("post");
        // SAFETY: a live extended CQ with the functions set.
        unsafe {
            let begin = Instant::now();
            while (*ex).start_poll.expect("set")(ex, &mut attr) != 0 {
                assert!(begin.elapsed() < PATIENCE);
            }
            let at = (*ex).read_completion_ts.expect("set")(ex);
            let at_wall = (*ex).read_completion_wallclock_ns.expect("set")(ex);
            (*ex).end_poll.expect("set")(ex);
            assert!(before <= at && at <= now().tv_nsec as u64);
            // The wall clock may be adjusted meanwhile, but not by a second.
            assert!(wall_before <= at_wall + 1_000_000_000 && at_wall <= wall() + 1_000_000_000);
        }
    }
    assert!(crate::device::raw_clock(&world.context, 2).is_err());
    let create = |flags: u32| CqCreate {
        cqe: 4,
        comp_vector: 0,
        channel: None,
        wc_flags: Some(flags.into()),
        parent_domain: None,
    };
    for flags in [IBV_WC_EX_WITH_CVLAN, IBV_WC_EX_WITH_FLOW_TAG, 1 << 12] {
        assert_eq!(Cq::create(&world.context, create(flags)).map(|_| ()), Err(libc::EOPNOTSUPP));
    }
    [&a, &b].iter().for_each(|qp| qp.get().destroy().expect("destroy QP"));
    cq.get().destroy().expect("destroy CQ");
}

#[test]
fn srq_limit_comes_once_per_arming_and_resizing_is_truthful() {
    let world = World::new(24_200);
    let two = world.two(IBV_QPT_RC, Some(world.srq(16)));
    let srq = two.srq.as_ref().expect("SRQ");
    world.connect(&two.a, &two.b, Link::default());
    world.connect(&two.b, &two.a, Link::default());
    let attr = |max_wr, srq_limit| ibv_srq_attr { max_wr, max_sge: 0, srq_limit };
    let modify = |attr: ibv_srq_attr, mask| srq.get().modify(&attr, mask);
    let queried = || (srq.get().query().max_wr, srq.get().query().srq_limit);
    (0..16).for_each(|id| srq_recv(srq, id, world.sge(0, 64)).expect("receive"));
    assert_eq!(srq_recv(srq, 99, world.sge(0, 64)), Err(libc::ENOMEM));
    for (attr, mask) in [
        (attr(0, 17), IBV_SRQ_LIMIT),
        (attr(15, 0), IBV_SRQ_MAX_WR),
        (attr(32, 33), IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT),
        (attr(0, 0), IBV_SRQ_MAX_WR),
        (attr(32, 1), 4),
    ] {
        assert_eq!(modify(attr, mask), Err(libc::EINVAL));
        assert_eq!(queried(), (16, 0), "nothing has changed");
    }
    modify(attr(20, 15), IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT).expect("modify");
    assert_eq!(queried(), (20, 15));
    (16..20).for_each(|id| srq_recv(srq, id, world.sge(0, 64)).expect("there is room now"));
    assert_eq!(srq_recv(srq, 99, world.sge(0, 64)), Err(libc::ENOMEM));
    for armed in [15, 8] {
        if armed == 8 {
            modify(attr(0, 8), IBV_SRQ_LIMIT).expect("arm again");
        }
        for id in 0..7 {
            send(&two.a, request(id, IBV_WR_SEND), world.sge(0, 8)).expect("post");
        }
        assert_eq!((two.take(0, 7).len(), two.take(3, 7).len()), (7, 7));
        assert_eq!(world.event(), (srq.0 as u64, IBV_EVENT_SRQ_LIMIT_REACHED));
        // SAFETY: a live SRQ that no other thread uses: the event is acknowledged.
        unsafe { (*srq.0).events_completed += 1 };
        assert_eq!(queried(), (20, 0), "disarmed");
        world.no_event();
    }
    assert_eq!(srq.get().destroy(), Err(libc::EBUSY));
    two.destroy();
}

#[test]
fn rereg_mr_changes_what_is_asked_and_keeps_the_keys() {
    let world = World::new(24_300);
    let two = world.connected(IBV_QPT_RC, Link::default());
    let far = world.address(FAR);
    let rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    let mr = Published::new(Mr::register(world.pd.get(), far, 64, far, rights).expect("MR"));
    let rkey = key(&mr);
    let other_pd = Published::new(Pd::alloc(&world.context));
    // One Write of 8 bytes through the MR; the QPs are made anew after an error.
    let outcome = |two: Two, address: u64| {
        send(&two.a, at(request(1, IBV_WR_RDMA_WRITE), address, rkey), world.sge(0, 8)).expect("post");
        let status = two.take(0, 1)[0].1;
        if status == IBV_WC_SUCCESS {
            return (two, status);
        }
        assert_eq!(world.event().1, IBV_EVENT_QP_ACCESS_ERR);
        // SAFETY: a live QP that no other thread uses: the event is acknowledged.
        unsafe { (*two.b.0).events_completed += 1 };
        two.destroy();
        (world.connected(IBV_QPT_RC, Link::default()), status)
    };
    let ok = IBV_WC_SUCCESS;
    let denied = IBV_WC_REM_ACCESS_ERR;
    let (two, status) = outcome(two, far);
    assert_eq!(status, ok);
    mr.get().reregister(None, Some((far + 1024, 64)), None).expect("other memory");
    let (two, status) = outcome(two, far);
    assert_eq!(status, denied);
    let (two, status) = outcome(two, far + 1024);
    assert_eq!(status, ok);
    mr.get().reregister(None, None, Some(IBV_ACCESS_LOCAL_WRITE)).expect("other rights");
    let (two, status) = outcome(two, far + 1024);
    assert_eq!(status, denied);
    mr.get().reregister(Some(other_pd.get()), None, Some(rights)).expect("other PD and rights");
    assert_eq!(other_pd.get().check_unused(), Err(libc::EBUSY), "the new PD is in use");
    let (two, status) = outcome(two, far + 1024);
    assert_eq!(status, denied);
    let all = (Some(world.pd.get()), Some((far, 64)), Some(rights));
    mr.get().reregister(all.0, all.1, all.2).expect("everything at once");
    assert_eq!(other_pd.get().check_unused(), Ok(()));
    let (two, status) = outcome(two, far);
    assert_eq!(status, ok);
    for (range, flags) in [
        (Some((far, 0)), None),
        (Some((u64::MAX, 2)), None),
        (None, Some(IBV_ACCESS_REMOTE_WRITE)),
        (None, Some(1 << 12)),
        (None, Some(rights | IBV_ACCESS_ZERO_BASED)),
    ] {
        assert_eq!(mr.get().reregister(None, range, flags), Err(libc::EINVAL));
    }
    let (two, status) = outcome(two, far);
    assert_eq!(status, ok, "refused changes change nothing");
    mr.get().reregister(None, Some((far, 64)), Some(rights | IBV_ACCESS_ZERO_BASED)).expect("zero based");
    let (two, status) = outcome(two, 8);
    assert_eq!(status, ok);
    two.destroy();
    mr.get().deregister().expect("deregister");
}

#[test]
fn parent_and_thread_domains_count_their_users() {
    let world = World::new(24_400);
    let pd = Published::new(Pd::alloc(&world.context));
    let td = Published::new(Td::alloc(std::ptr::null_mut()));
    let parent = Published::new(Pd::parent_domain(pd.get(), Some(td.get()), std::ptr::null_mut()));
    assert!(parent.get().is_parent_domain() && !pd.get().is_parent_domain());
    assert_eq!((pd.get().check_unused(), td.get().check_unused()), (Err(libc::EBUSY), Err(libc::EBUSY)));
    let mr = world.other_mr(&parent, IBV_ACCESS_LOCAL_WRITE);
    assert_eq!(parent.get().check_unused(), Err(libc::EBUSY));
    mr.get().deregister().expect("deregister");
    drop(mr);
    assert_eq!(parent.get().check_unused(), Ok(()));
    drop(parent);
    assert_eq!((pd.get().check_unused(), td.get().check_unused()), (Ok(()), Ok(())));
}

#[test]
fn a_closed_device_leaves_nothing_that_peers_can_reach() {
    let world = World::new(24_500);
    let quick = Link { timeout: 1, retry_cnt: 0, ..Link::default() };
    // The peer is another device of the same process, with the same memory.
    let peer = World::new(24_600);
    let (here, there) = (world.two(IBV_QPT_RC, None), peer.two(IBV_QPT_RC, None));
    here.a
        .get()
        .modify(&ibv_qp_attr { qp_state: IBV_QPS_ERR, ..Default::default() }, IBV_QP_STATE)
        .expect("ERR");
    world.connect(&here.b, &here.a, quick);
    let written = world.memory[FAR];
    world.context.close();
    assert_eq!(here.b.get().engine.state() as u32, IBV_QPS_RESET);
    assert_eq!(world.memory[FAR], written);
    let mr = world.mr.get().deregister();
    assert_eq!(mr, Err(libc::EINVAL), "the key is dead already");
    drop(here);
    there.destroy();
}
