//! The state table on real QPs, and what the states do.

use rdma_core_sys::*;

use super::world::*;
use super::{PATIENCE, Published};
use crate::ah::Ah;
use crate::attr::transition;
use crate::qp::Qp;

const STATES: [ibv_qp_state; 7] =
    [IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPS_ERR];

/// Brings a QP to a state; `false` where the transport does not have it.
fn bring(world: &World, two: &Two, state: ibv_qp_state) -> bool {
    let (qp, link) = (&two.a, Link::default());
    qp.get().modify(&attr_of(IBV_QPS_RESET), IBV_QP_STATE).expect("RESET");
    let path: &[ibv_qp_state] = match state {
        IBV_QPS_RESET => &[],
        IBV_QPS_INIT => &[IBV_QPS_INIT],
        IBV_QPS_RTR => &[IBV_QPS_INIT, IBV_QPS_RTR],
        IBV_QPS_SQD => &[IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD],
        IBV_QPS_ERR => &[IBV_QPS_ERR],
        _ => &[IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS],
    };
    path.iter().for_each(|to| world.step(qp, &two.b, *to, link));
    if state != IBV_QPS_SQE {
        return true;
    }
    if qp.get().qp_type != IBV_QPT_UC {
        // Never with RC; with UD as with UC, which the tests of errors show.
        return false;
    }
    let bad = ibv_sge { lkey: world.key() ^ 1, ..world.sge(0, 8) };
    send(qp, request(1, IBV_WR_SEND), bad).expect("post");
    two.take(0, 1);
    true
}

fn attr_of(qp_state: ibv_qp_state) -> ibv_qp_attr {
    ibv_qp_attr { qp_state, ..Default::default() }
}

/// The attributes as bytes: all of them count.
fn seen(qp: &Published<Qp>) -> String {
    let (attr, init) = qp.get().query();
    // SAFETY: the GID's bytes are plain data.
    let gid = unsafe { attr.ah_attr.grh.dgid.raw };
    let ah = (attr.ah_attr.is_global, attr.ah_attr.grh.sgid_index, gid);
    let numbers = [
        attr.qp_state,
        attr.cur_qp_state,
        attr.path_mtu,
        attr.qkey,
        attr.rq_psn,
        attr.sq_psn,
        attr.dest_qp_num,
        attr.qp_access_flags,
        attr.pkey_index.into(),
        attr.sq_draining.into(),
        attr.max_rd_atomic.into(),
        attr.max_dest_rd_atomic.into(),
        attr.min_rnr_timer.into(),
        attr.port_num.into(),
        attr.timeout.into(),
        attr.retry_cnt.into(),
        attr.rnr_retry.into(),
        init.cap.max_send_wr,
        init.cap.max_recv_wr,
    ];
    format!("{numbers:?} {ah:?}")
}

#[test]
fn attributes_outside_the_table_are_refused_and_change_nothing() {
    let world = World::new(22_900);
    let mut seed = 1;
    for qp_type in [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD] {
        let two = world.two(qp_type, None);
        for from in STATES {
            if !bring(&world, &two, from) {
                continue;
            }
            let before = seen(&two.a);
            for to in STATES {
                let legal = transition(qp_type, from, to);
                let known = legal.map_or(0, |m| m.required | m.optional) | IBV_QP_STATE;
                let required = legal.map_or(0, |m| m.required) | IBV_QP_STATE;
                // Other values than the QP has, so that a change would show.
                let link =
                    Link { access: 0, timeout: 1, retry_cnt: 1, rnr_retry: 1, qkey: 5, ..Link::default() };
                let attr = ibv_qp_attr {
                    qp_state: to,
                    cur_qp_state: from,
                    sq_psn: 77,
                    rq_psn: 78,
                    ..world.attributes(&two.b, link)
                };
                // A bit too many or one required too few, and masks by chance.
                let bits = (0..26).map(|bit| 1u32 << bit);
                let single =
                    bits.map(|bit| if bit & required != 0 { required & !bit } else { required | bit });
                let chance = (0..200).map(|_| metaroce_proto::random(&mut seed) as u32 | IBV_QP_STATE);
                let masks: Vec<u32> = single.filter(|mask| mask & IBV_QP_STATE != 0).chain(chance).collect();
                for mask in masks {
                    if legal.is_some() && mask & required == required && mask & !known == 0 {
                        continue;
                    }
                    // A rate limit is not offered, whatever else is asked for.
                    let limits = mask & IBV_QP_RATE_LIMIT != 0;
                    let errno = if limits { libc::EOPNOTSUPP } else { libc::EINVAL };
                    assert_eq!(two.a.get().modify(&attr, mask), Err(errno), "{from}-{to} {mask:#x}");
                    assert_eq!(seen(&two.a), before, "{from}-{to} {mask:#x} has changed something");
                }
            }
        }
        two.destroy();
    }
}

#[test]
fn reset_and_error_are_open_from_everywhere() {
    let world = World::new(23_000);
    for qp_type in [IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD] {
        let two = world.two(qp_type, None);
        for from in STATES {
            for to in [IBV_QPS_RESET, IBV_QPS_ERR] {
                if bring(&world, &two, from) {
                    two.a.get().modify(&attr_of(to), IBV_QP_STATE).expect("open from everywhere");
                    assert_eq!(two.a.get().query().0.qp_state, to);
                }
            }
        }
        two.destroy();
    }
}

#[test]
fn reset_drops_old_completions_and_works_again() {
    let world = World::new(23_100);
    let link = Link::default();
    let two = world.connected(IBV_QPT_RC, link);
    for round in 0..3 {
        recv(&two.b, 1, world.sge(0, 64)).expect("receive");
        recv(&two.b, 2, world.sge(0, 64)).expect("receive");
        send(&two.a, request(1, IBV_WR_SEND), world.sge(0, 8)).expect("post");
        // The receiver's completion is there, and so soon is the sender's; neither is taken.
        let begin = std::time::Instant::now();
        while two.cqs[0].get().engine.poll(0, |_| {}) == 0 && begin.elapsed().as_millis() < 20 {
            std::thread::yield_now();
        }
        for qp in [&two.a, &two.b] {
            qp.get().modify(&attr_of(IBV_QPS_RESET), IBV_QP_STATE).expect("RESET");
        }
        (0..4).for_each(|queue| assert!(some(&two.cqs[queue], 8).is_empty(), "round {round}, queue {queue}"));
        assert_eq!(two.a.get().query().0.dest_qp_num, 0, "attributes go with the state");
        world.connect(&two.a, &two.b, link);
        world.connect(&two.b, &two.a, link);
    }
    recv(&two.b, 7, world.sge(0, 64)).expect("receive");
    send(&two.a, request(8, IBV_WR_SEND), world.sge(0, 8)).expect("post");
    assert_eq!((two.take(0, 1), two.take(3, 1)), (vec![(8, 0)], vec![(7, 0)]));
    two.destroy();
}

#[test]
fn sqd_drains_tells_once_if_asked_and_goes_on() {
    let world = World::new(23_200);
    let two = world.connected(IBV_QPT_RC, Link::default());
    let sqd = |notify: u8| {
        let attr = ibv_qp_attr { en_sqd_async_notify: notify, ..attr_of(IBV_QPS_SQD) };
        let mask = IBV_QP_STATE | if notify == 2 { 0 } else { IBV_QP_EN_SQD_ASYNC_NOTIFY };
        two.a.get().modify(&attr, mask).expect("SQD");
    };
    // Without asking (no bit, or a zero) there is no event, and nothing to drain.
    for notify in [2, 0] {
        sqd(notify);
        assert_eq!(two.a.get().query().0.sq_draining, 0);
        world.step(&two.a, &two.b, IBV_QPS_RTS, Link::default());
    }
    world.no_event();
    // A Send that was refused for lack of a receive keeps it draining.
    send(&two.a, request(1, IBV_WR_SEND), world.sge(0, 8)).expect("post");
    (0..100).for_each(|_| assert!(some(&two.cqs[0], 1).is_empty()));
    sqd(1);
    let (attr, _) = two.a.get().query();
    assert_eq!((attr.qp_state, attr.sq_draining), (IBV_QPS_SQD, 1));
    send(&two.a, request(2, IBV_WR_SEND), world.sge(0, 8)).expect("posting in SQD is allowed");
    world.no_event();
    (1..3).for_each(|id| recv(&two.b, id, world.sge(0, 64)).expect("receive"));
    assert_eq!(two.take(0, 1), [(1, 0)]);
    assert_eq!(world.event(), (two.a.0 as u64, IBV_EVENT_SQ_DRAINED));
    // SAFETY: a live QP that no other thread uses: the event is acknowledged.
    unsafe { (*two.a.0).events_completed += 1 };
    assert_eq!(two.a.get().query().0.sq_draining, 0);
    two.nothing(0);
    // Attributes may change while it is drained.
    let change = ibv_qp_attr { timeout: 9, retry_cnt: 3, ..attr_of(IBV_QPS_SQD) };
    two.a.get().modify(&change, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT).expect("SQD to SQD");
    let (now, _) = two.a.get().query();
    assert_eq!((now.timeout, now.retry_cnt), (9, 3));
    world.step(&two.a, &two.b, IBV_QPS_RTS, Link::default());
    assert_eq!(two.take(0, 1), [(2, 0)]);
    world.no_event();
    two.destroy();
}

#[test]
fn fence_waits_for_reads_and_read_limits_hold() {
    let world = World::new(23_300);
    // One Read at a time on either side, and many of them posted.
    let link = Link { max_rd_atomic: 1, max_dest_rd_atomic: 1, ..Link::default() };
    let two = world.connected(IBV_QPT_RC, link);
    for round in 0..50u64 {
        let value = round as u8 + 1;
        // SAFETY: nothing is outstanding, so nobody else touches the memory.
        unsafe {
            world.memory.as_ptr().cast_mut().write_bytes(0, 64);
            world.memory.as_ptr().cast_mut().add(FAR).write_bytes(value, 64);
        }
        // The Write's source is where the Read before it puts its data: only the fence makes that good.
        let read = at(request(1, IBV_WR_RDMA_READ), world.address(FAR), world.key());
        let mut write = at(request(2, IBV_WR_RDMA_WRITE), world.address(FAR + 4096), world.key());
        write.send_flags |= IBV_SEND_FENCE;
        for id in 10..20 {
            send(&two.a, ibv_send_wr { wr_id: id, ..read }, world.sge(512, 64)).expect("Read");
        }
        send(&two.a, read, world.sge(0, 64)).expect("Read");
        send(&two.a, write, world.sge(0, 64)).expect("Write");
        let ids: Vec<u64> = two.take(0, 12).iter().map(|c| c.0).collect();
        assert_eq!(ids, (10..20).chain([1, 2]).collect::<Vec<_>>());
        assert_eq!(world.memory[FAR + 4096..FAR + 4160], [value; 64], "round {round}");
    }
    two.destroy();
}

#[test]
fn query_tells_what_was_set_and_granted() {
    let world = World::new(23_400);
    let two = world.connected(IBV_QPT_RC, Link::default());
    let (attr, init) = two.a.get().query();
    assert_eq!((attr.qp_state, attr.cur_qp_state), (IBV_QPS_RTS, IBV_QPS_RTS));
    assert_eq!((attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer), (14, 7, 7, 1));
    assert_eq!((attr.max_rd_atomic, attr.max_dest_rd_atomic), (4, 4));
    assert_eq!((attr.path_mtu, attr.port_num), (IBV_MTU_1024, 1));
    assert_eq!(attr.dest_qp_num, two.b.get().engine.qpn().0);
    assert_eq!((init.cap.max_send_wr, init.cap.max_inline_data, attr.cap.max_recv_sge), (64, 64, 2));
    assert_eq!((init.qp_type, init.send_cq, init.recv_cq), (IBV_QPT_RC, two.cqs[0].0, two.cqs[1].0));
    // The core's own way to ERR shows as well.
    let begin = std::time::Instant::now();
    send(&two.a, at(request(1, IBV_WR_RDMA_WRITE), 0, 0), world.sge(0, 8)).expect("post");
    two.take(0, 1);
    while two.b.get().query().0.qp_state != IBV_QPS_ERR {
        assert!(begin.elapsed() < PATIENCE);
    }
    assert_eq!(world.event(), (two.b.0 as u64, IBV_EVENT_QP_ACCESS_ERR));
    // SAFETY: a live QP that no other thread uses: the event is acknowledged.
    unsafe { (*two.b.0).events_completed += 1 };
    two.destroy();
}

#[test]
fn an_address_without_route_is_this_port_and_only_where_rdma_cm_has_datagrams() {
    const RDMA_UDP_QKEY: u32 = 0x0123_4567;
    let world = World::new(23_950);
    let bare = ibv_ah_attr { port_num: 1, ..Default::default() };
    assert_eq!(Ah::create(world.pd.get(), &bare).err(), Some(libc::EINVAL));
    let two = world.two(IBV_QPT_UD, None);
    for (qkey, expected) in [(RDMA_UDP_QKEY - 1, Some(libc::EINVAL)), (RDMA_UDP_QKEY, None)] {
        let attr = ibv_qp_attr { qp_state: IBV_QPS_INIT, port_num: 1, qkey, ..Default::default() };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
        two.a.get().modify(&attr, mask).expect("INIT");
        assert_eq!(Ah::create(world.pd.get(), &bare).err(), expected);
    }
    let other_port = ibv_ah_attr { port_num: 2, ..bare };
    assert_eq!(Ah::create(world.pd.get(), &other_port).err(), Some(libc::EINVAL));
    two.destroy();
}
