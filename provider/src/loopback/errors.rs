//! The error table: each row provoked, with what both sides see.

use rdma_core_sys::*;

use super::Published;
use super::world::*;
use crate::ah::Ah;
use crate::mr::Mr;
use crate::pd::Pd;

const FLUSHED: u32 = IBV_WC_WR_FLUSH_ERR;

fn state(qp: &Published<crate::qp::Qp>) -> ibv_qp_state {
    qp.get().query().0.qp_state
}

/// One row: what `b` has posted, what `a` sends, and what comes of it.
struct Row<'a> {
    name: &'a str,
    link: Link,
    recv: Option<ibv_sge>,
    request: ibv_send_wr,
    sge: ibv_sge,
    requester: u32,
    responder: Option<u32>,
    event: Option<u32>,
    /// The responder's state afterwards.
    ends_in: ibv_qp_state,
}

/// Runs a row on reliable QPs: requests behind it and receives behind it are flushed in order.
fn check(world: &World, row: &Row<'_>) {
    let two = world.connected(IBV_QPT_RC, row.link);
    let name = row.name;
    if let Some(sge) = row.recv {
        recv(&two.b, 70, sge).expect("receive");
        recv(&two.b, 71, world.sge(0, 64)).expect("receive");
    }
    send(&two.a, row.request, row.sge).expect(name);
    assert_eq!(two.take(0, 1), [(row.request.wr_id, row.requester)], "{name}: requester");
    for id in 2..4 {
        send(&two.a, request(id, IBV_WR_SEND), world.sge(0, 8)).expect("posting in ERR is allowed");
    }
    assert_eq!(two.take(0, 2), [(2, FLUSHED), (3, FLUSHED)], "{name}: flushed in order");
    assert_eq!(state(&two.a), IBV_QPS_ERR, "{name}");
    if row.ends_in == IBV_QPS_ERR {
        let expected: Vec<(u64, u32)> = match (row.recv, row.responder) {
            (Some(_), Some(status)) => vec![(70, status), (71, FLUSHED)],
            (Some(_), None) => vec![(70, FLUSHED), (71, FLUSHED)],
            (None, _) => vec![],
        };
        assert_eq!(two.take(3, expected.len()), expected, "{name}: responder");
    }
    assert_eq!(state(&two.b), row.ends_in, "{name}");
    if let Some(event) = row.event {
        assert_eq!(world.event(), (two.b.0 as u64, event), "{name}");
        // SAFETY: a live QP that no other thread uses: the event is acknowledged.
        unsafe { (*two.b.0).events_completed += 1 };
    }
    two.nothing(3);
    world.no_event();
    two.destroy();
}

#[test]
fn rows_of_memory_and_rights() {
    let world = World::new(22_000);
    let other_pd = Published::new(Pd::alloc(&world.context));
    let foreign = world.other_mr(&other_pd, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    let read_only = world.other_mr(&world.pd, IBV_ACCESS_REMOTE_READ);
    let (good, far) = (world.sge(0, 64), world.address(FAR));
    let write = |address, rkey| at(request(1, IBV_WR_RDMA_WRITE), address, rkey);
    let base = Row {
        name: "",
        link: Link::default(),
        recv: None,
        request: request(1, IBV_WR_SEND),
        sge: good,
        requester: IBV_WC_REM_ACCESS_ERR,
        responder: None,
        event: Some(IBV_EVENT_QP_ACCESS_ERR),
        ends_in: IBV_QPS_ERR,
    };
    let with_key = |lkey| ibv_sge { lkey, ..world.sge(128, 64) };
    let bad_recv = |name, sge| Row {
        name,
        recv: Some(sge),
        requester: IBV_WC_REM_OP_ERR,
        responder: Some(IBV_WC_LOC_PROT_ERR),
        event: None,
        ..base
    };
    let remote = |name, address, rkey| Row { name, request: write(address, rkey), ..base };
    let beyond = world.address(BYTES) - 32;
    for row in [
        Row {
            name: "longer than the receive",
            recv: Some(world.sge(128, 63)),
            requester: IBV_WC_REM_INV_REQ_ERR,
            responder: Some(IBV_WC_LOC_LEN_ERR),
            event: None,
            ..base
        },
        bad_recv("receive with a bad lkey", with_key(world.key() ^ 1)),
        bad_recv("receive in another PD", with_key(key(&foreign))),
        bad_recv("receive without LOCAL_WRITE", with_key(key(&read_only))),
        remote("bad rkey", far, world.key() ^ 1),
        remote("out of bounds", beyond, world.key()),
        remote("before the region", world.address(0) - 8, world.key()),
        remote("rkey of another PD", far, key(&foreign)),
        remote("rkey without REMOTE_WRITE", far, key(&read_only)),
        Row {
            name: "Read of a bad rkey",
            request: at(request(1, IBV_WR_RDMA_READ), far, world.key() ^ 1),
            ..base
        },
        Row {
            name: "atomic without REMOTE_ATOMIC on the MR",
            request: at(request(1, IBV_WR_ATOMIC_FETCH_AND_ADD), far, key(&read_only)),
            sge: world.sge(0, 8),
            ..base
        },
    ] {
        check(&world, &row);
    }
    for mr in [&foreign, &read_only] {
        mr.get().deregister().expect("deregister");
    }
}

#[test]
fn rows_of_invalid_requests() {
    let world = World::new(22_200);
    let far = world.address(FAR);
    let only = |access| Link { access, ..Link::default() };
    let no_reads = Link { max_dest_rd_atomic: 0, ..Link::default() };
    let (reads, writes) = (only(IBV_ACCESS_REMOTE_READ), only(IBV_ACCESS_REMOTE_WRITE));
    let atomic = |opcode, address| at(request(1, opcode), address, world.key());
    for (name, link, request) in [
        ("Write not enabled", reads, at(request(1, IBV_WR_RDMA_WRITE), far, world.key())),
        ("Read not enabled", writes, at(request(1, IBV_WR_RDMA_READ), far, world.key())),
        ("atomic not enabled", reads, atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, far)),
        ("misaligned atomic", Link::default(), atomic(IBV_WR_ATOMIC_CMP_AND_SWP, far + 4)),
        ("Read with max_dest_rd_atomic 0", no_reads, at(request(1, IBV_WR_RDMA_READ), far, world.key())),
        ("atomic with max_dest_rd_atomic 0", no_reads, atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, far)),
    ] {
        let row = Row {
            name,
            link,
            recv: None,
            request,
            sge: world.sge(0, 8),
            requester: IBV_WC_REM_INV_REQ_ERR,
            responder: None,
            event: Some(IBV_EVENT_QP_REQ_ERR),
            ends_in: IBV_QPS_ERR,
        };
        check(&world, &row);
    }
}

/// More Reads or atomics at once than the responder serves: those it serves are answered, the next is refused.
#[test]
fn row_of_too_many_reads() {
    let world = World::new(25_000);
    let far = world.address(FAR);
    for (opcode, length) in [(IBV_WR_RDMA_READ, 64), (IBV_WR_ATOMIC_FETCH_AND_ADD, 8)] {
        let two = world.connected(IBV_QPT_RC, Link { max_dest_rd_atomic: 2, ..Link::default() });
        // One list, so that they travel together.
        let mut sge = world.sge(0, length);
        let mut list = [1, 2, 3, 4].map(|id| at(request(id, opcode), far, world.key()));
        for i in (0..list.len()).rev() {
            (list[i].sg_list, list[i].num_sge) = (&raw mut sge, 1);
            list[i].next = list.get_mut(i + 1).map_or(std::ptr::null_mut(), std::ptr::from_mut);
        }
        // SAFETY: a chain of four with one SGE each.
        let outcome =
            crate::post::send(two.a.get(), &mut unsafe { crate::chain::SendChain::new(&mut list[0]) });
        outcome.expect("post");
        let statuses = [(1, 0), (2, 0), (3, IBV_WC_REM_INV_REQ_ERR), (4, FLUSHED)];
        assert_eq!(two.take(0, 4), statuses, "{opcode}");
        assert_eq!((state(&two.a), state(&two.b)), (IBV_QPS_ERR, IBV_QPS_ERR));
        assert_eq!(world.event(), (two.b.0 as u64, IBV_EVENT_QP_REQ_ERR));
        // SAFETY: a live QP that no other thread uses: the event is acknowledged.
        unsafe { (*two.b.0).events_completed += 1 };
        world.no_event();
        two.destroy();
    }
}

#[test]
fn rows_of_the_requester_alone() {
    let world = World::new(22_400);
    let other_pd = Published::new(Pd::alloc(&world.context));
    let foreign = world.other_mr(&other_pd, IBV_ACCESS_LOCAL_WRITE);
    let quick = Link { timeout: 1, retry_cnt: 0, rnr_retry: 0, ..Link::default() };
    let base = Row {
        name: "no receive posted",
        link: quick,
        recv: None,
        request: request(1, IBV_WR_SEND),
        sge: world.sge(0, 8),
        requester: IBV_WC_RNR_RETRY_EXC_ERR,
        responder: None,
        event: None,
        ends_in: IBV_QPS_RTS,
    };
    check(&world, &base);
    let write = at(request(1, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
    for (name, sge) in [
        ("bad lkey", ibv_sge { lkey: world.key() ^ 1, ..base.sge }),
        ("lkey of another PD", ibv_sge { lkey: key(&foreign), ..base.sge }),
        ("local bounds", ibv_sge { length: 64, ..world.sge(BYTES - 32, 0) }),
    ] {
        check(&world, &Row { name, request: write, sge, requester: IBV_WC_LOC_PROT_ERR, ..base });
    }
    foreign.get().deregister().expect("deregister");
}

#[test]
fn a_local_error_of_an_unreliable_qp_ends_in_sqe() {
    let world = World::new(22_500);
    for qp_type in [IBV_QPT_UC, IBV_QPT_UD] {
        let two = world.connected(qp_type, Link::default());
        let ah = ah(&world);
        let mut wr = request(1, IBV_WR_SEND);
        if qp_type == IBV_QPT_UD {
            wr.wr.ud = to(&ah, &two.b, 0x1111);
        }
        recv(&two.b, 9, world.sge(0, 512)).expect("receive");
        send(&two.a, wr, ibv_sge { lkey: world.key() ^ 1, ..world.sge(0, 8) }).expect("post");
        assert_eq!(two.take(0, 1), [(1, IBV_WC_LOC_PROT_ERR)]);
        assert_eq!(state(&two.a), IBV_QPS_SQE);
        send(&two.a, ibv_send_wr { wr_id: 2, ..wr }, world.sge(0, 8)).expect("posting in SQE is allowed");
        assert_eq!(two.take(0, 1), [(2, FLUSHED)]);
        world.step(&two.a, &two.b, IBV_QPS_RTS, Link::default());
        send(&two.a, ibv_send_wr { wr_id: 3, ..wr }, world.sge(0, 8)).expect("post");
        assert_eq!((two.take(0, 1), two.take(3, 1)), (vec![(3, 0)], vec![(9, 0)]));
        world.no_event();
        two.destroy();
        drop(ah);
    }
}

fn ah(world: &World) -> Published<Ah> {
    let gid = metaroce_config::gid_table(world.context.device.config())[0].gid;
    Published::new(Ah::create(world.pd.get(), &super::address_vector(gid)).expect("AH"))
}

fn to(
    ah: &Published<Ah>,
    qp: &Published<crate::qp::Qp>,
    qkey: u32,
) -> ibv_send_wr__bindgen_ty_2__bindgen_ty_3 {
    let mut ud = ibv_send_wr__bindgen_ty_2__bindgen_ty_3::default();
    (ud.ah, ud.remote_qpn, ud.remote_qkey) = (ah.0, qp.get().engine.qpn().0, qkey);
    ud
}

#[test]
fn a_peer_that_does_not_receive_ends_in_retry_exceeded() {
    let world = World::new(22_600);
    let quick = Link { timeout: 1, retry_cnt: 0, ..Link::default() };
    let write = |id| at(request(id, IBV_WR_RDMA_WRITE), world.address(FAR), world.key());
    for last in [IBV_QPS_RESET, IBV_QPS_INIT, IBV_QPS_ERR] {
        let two = world.two(IBV_QPT_RC, None);
        world.connect(&two.a, &two.b, quick);
        if last != IBV_QPS_RESET {
            world.step(&two.b, &two.a, last, quick);
        }
        send(&two.a, write(1), world.sge(0, 8)).expect("post");
        send(&two.a, write(2), world.sge(0, 8)).expect("post");
        assert_eq!(two.take(0, 2), [(1, IBV_WC_RETRY_EXC_ERR), (2, FLUSHED)], "peer in {last}");
        assert_eq!((state(&two.a), state(&two.b)), (IBV_QPS_ERR, last));
        world.no_event();
        two.destroy();
    }
    // A peer bound to another QP, and one that never was.
    let (two, third) = (world.connected(IBV_QPT_RC, quick), world.two(IBV_QPT_RC, None));
    world.connect(&third.a, &two.b, quick);
    send(&third.a, write(1), world.sge(0, 8)).expect("post");
    assert_eq!(third.take(0, 1), [(1, IBV_WC_RETRY_EXC_ERR)], "bound to another");
    let gone = world.two(IBV_QPT_RC, None);
    world.connect(&third.b, &gone.a, quick);
    gone.destroy();
    send(&third.b, write(1), world.sge(0, 8)).expect("post");
    assert_eq!(third.take(2, 1), [(1, IBV_WC_RETRY_EXC_ERR)], "destroyed");
    // The pair beside them works on.
    send(&two.a, write(1), world.sge(0, 8)).expect("post");
    assert_eq!(two.take(0, 1), [(1, IBV_WC_SUCCESS)]);
    world.no_event();
    third.destroy();
    two.destroy();
}

#[test]
fn what_unreliable_transports_cannot_deliver_is_dropped_silently() {
    let world = World::new(22_700);
    let link = Link::default();
    let two = world.connected(IBV_QPT_UC, link);
    let write = |id, key| at(request(id, IBV_WR_RDMA_WRITE), world.address(FAR), key);
    send(&two.a, write(1, world.key() ^ 1), world.sge(0, 8)).expect("bad rkey");
    recv(&two.b, 9, world.sge(0, 16)).expect("receive");
    send(&two.a, request(2, IBV_WR_SEND), world.sge(0, 17)).expect("too long");
    send(&two.a, request(3, IBV_WR_SEND), world.sge(0, 16)).expect("fits");
    assert_eq!((two.take(0, 3), two.take(3, 1)), (vec![(1, 0), (2, 0), (3, 0)], vec![(9, 0)]));
    assert_eq!((state(&two.a), state(&two.b)), (IBV_QPS_RTS, IBV_QPS_RTS));
    two.destroy();

    let two = world.connected(IBV_QPT_UD, link);
    let ah = ah(&world);
    let datagram = |id, qkey| {
        let mut wr = request(id, IBV_WR_SEND);
        wr.wr.ud = to(&ah, &two.b, qkey);
        wr
    };
    send(&two.a, datagram(1, 0x1112), world.sge(0, 8)).expect("wrong qkey");
    send(&two.a, datagram(2, 0x1111), world.sge(0, 8)).expect("no receive");
    assert_eq!(two.take(0, 2), [(1, 0), (2, 0)]);
    two.nothing(3);
    recv(&two.b, 9, world.sge(0, 40 + 16)).expect("receive");
    send(&two.a, datagram(3, 0x1111), world.sge(0, 17)).expect("too long for the receive");
    let mtu = metaroce_config::active_mtu(world.context.device.config());
    send(&two.a, datagram(4, 0x1111), world.sge(0, mtu + 1)).expect("longer than the MTU");
    // The top bit: the QP's own key.
    send(&two.a, datagram(5, 0x8000_0000), world.sge(0, 16)).expect("fits");
    assert_eq!((two.take(0, 3), two.take(3, 1)), (vec![(3, 0), (4, 0), (5, 0)], vec![(9, 0)]));
    world.no_event();
    two.destroy();
}

#[test]
fn an_error_of_a_qp_on_an_srq_raises_last_wqe_reached_after_its_completions() {
    let world = World::new(22_800);
    let two = world.two(IBV_QPT_RC, Some(world.srq(16)));
    let srq = two.srq.as_ref().expect("SRQ");
    world.connect(&two.a, &two.b, Link::default());
    world.connect(&two.b, &two.a, Link::default());
    srq_recv(srq, 50, world.sge(0, 4)).expect("receive");
    srq_recv(srq, 51, world.sge(0, 64)).expect("receive");
    send(&two.a, request(1, IBV_WR_SEND), world.sge(0, 8)).expect("too long");
    assert_eq!(world.event(), (two.b.0 as u64, IBV_EVENT_QP_LAST_WQE_REACHED));
    // The event comes after the completion, so one poll finds it.
    let wcs: Vec<_> = some(&two.cqs[3], 4).iter().map(|wc| (wc.wr_id, wc.status)).collect();
    assert_eq!(wcs, [(50, IBV_WC_LOC_LEN_ERR)], "the SRQ's other receive is not flushed");
    assert_eq!(two.take(0, 1), [(1, IBV_WC_REM_INV_REQ_ERR)]);
    world.no_event();
    // SAFETY: a live QP that no other thread uses: the event is acknowledged.
    unsafe { (*two.b.0).events_completed += 1 };
    two.destroy();
}

/// A list that is too long is refused before it is read: a count that is wrong says nothing of the memory behind it.
#[test]
fn sge_lists_beyond_the_limit_are_not_read() {
    let world = World::new(22_850);
    let two = world.connected(IBV_QPT_RC, Link::default());
    let mut sge = world.sge(0, 8);
    for (flags, num_sge) in
        [(0, 3), (0, 1000), (0, i32::MAX), (0, -1), (IBV_SEND_INLINE, 3), (IBV_SEND_INLINE, i32::MAX)]
    {
        let mut wr = request(1, IBV_WR_SEND);
        wr.send_flags |= flags;
        (wr.sg_list, wr.num_sge) = (&raw mut sge, num_sge);
        // SAFETY: a chain of one, whose SGEs are not as many as it says, which is what must be noticed.
        let mut chain = unsafe { crate::chain::SendChain::new(&mut wr) };
        assert_eq!(crate::post::send(two.a.get(), &mut chain), Err(libc::EINVAL), "{num_sge} SGEs");
        assert_eq!(chain.position(), &raw mut wr, "bad_wr");
        let mut wr = ibv_recv_wr { wr_id: 1, next: std::ptr::null_mut(), sg_list: &raw mut sge, num_sge };
        // SAFETY: as above.
        let mut chain = unsafe { crate::chain::RecvChain::new(&mut wr) };
        assert_eq!(crate::post::recv(two.a.get(), &mut chain), Err(libc::EINVAL), "{num_sge} SGEs");
        assert_eq!(chain.position(), &raw mut wr, "bad_wr");
    }
    // SAFETY: likewise.
    unsafe {
        assert!(crate::chain::sge_list(&sge, i32::MAX, 2).is_err());
        let mut buf = ibv_data_buf { addr: sge.addr as _, length: 64 };
        assert!(crate::chain::inline_list(&buf, 1, 64).is_ok());
        assert!(crate::chain::inline_list(&buf, usize::MAX, 64).is_err());
        assert!(crate::chain::inline_list(std::ptr::null(), 1, 64).is_err());
        buf.length = usize::MAX;
        assert!(crate::chain::inline_list(&buf, 1, 64).is_err());
    }
    two.nothing(0);
    two.destroy();
}

#[test]
fn max_qp_is_what_can_be_made() {
    let world = World::new(22_860);
    let cq = world.cq(16);
    let max = crate::device::query(&world.context).orig_attr.max_qp as usize;
    let qps: Vec<_> = (0..max).map(|_| world.qp(IBV_QPT_UD, &cq, &cq, None)).collect();
    let device = &world.context.device;
    let init = metaroce_engine::QpCreate {
        qp_type: metaroce_proto::types::QpType::Ud,
        pd: world.pd.get().shared.number,
        send_cq: Some(std::sync::Arc::clone(&cq.get().engine)),
        recv_cq: Some(std::sync::Arc::clone(&cq.get().engine)),
        xrcd: None,
        srq: None,
        max_send_wr: 1,
        max_recv_wr: 1,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline: 0,
    };
    assert_eq!(device.create_qp(&init, None).err(), Some(libc::ENOMEM));
    qps.iter().for_each(|qp| qp.get().destroy().expect("destroy QP"));
}

/// As the kernel's: what cannot be pinned is EFAULT, at once; on demand it shows when it is used.
#[test]
fn memory_that_is_not_there_or_may_not_be_written_is_not_registered() {
    const PAGE: usize = 4096;
    let world = World::new(22_880);
    // SAFETY: a mapping of this test's own, whose first page is gone again, and whose others may be read, and nothing.
    let start = unsafe {
        let (rights, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let start = libc::mmap(std::ptr::null_mut(), 4 * PAGE, rights, kind, -1, 0);
        assert_ne!(start, libc::MAP_FAILED);
        assert_eq!(libc::mprotect(start.add(2 * PAGE), PAGE, libc::PROT_READ), 0);
        assert_eq!(libc::mprotect(start.add(3 * PAGE), PAGE, libc::PROT_NONE), 0);
        assert_eq!(libc::munmap(start, PAGE), 0);
        start as u64
    };
    let (gone, whole, read_only, nothing) = (0, 1, 2, 3);
    let register = |page: usize, pages: usize, flags| {
        let (va, length) = (start + (page * PAGE) as u64 + 8, (pages * PAGE - 16) as u64);
        Mr::register(world.pd.get(), va, length, va, flags)
    };
    for (page, pages, flags, fine) in [
        (gone, 1, 0, false),
        (gone, 2, IBV_ACCESS_LOCAL_WRITE, false),
        (whole, 1, IBV_ACCESS_LOCAL_WRITE, true),
        (whole, 2, IBV_ACCESS_REMOTE_READ, true),
        (whole, 2, IBV_ACCESS_LOCAL_WRITE, false),
        (read_only, 1, 0, true),
        (read_only, 1, IBV_ACCESS_MW_BIND, false),
        (read_only, 2, 0, false),
        (nothing, 1, 0, false),
    ] {
        let case = format!("{pages} from page {page}, {flags:#x}");
        match register(page, pages, flags) {
            Ok(mr) => assert!(Published::new(mr).get().deregister().is_ok() && fine, "{case}"),
            Err(errno) => assert_eq!((errno, fine), (libc::EFAULT, false), "{case}"),
        }
        let on_demand = register(page, pages, flags | IBV_ACCESS_ON_DEMAND).expect("on demand");
        Published::new(on_demand).get().deregister().expect("deregister");
    }
    // What is changed later is looked at, too, and stays as it was when it is refused.
    let mr = Published::new(register(read_only, 1, 0).expect("for reading"));
    assert_eq!(mr.get().reregister(None, None, Some(IBV_ACCESS_LOCAL_WRITE)), Err(libc::EFAULT));
    let elsewhere = (start + PAGE as u64, PAGE as u64);
    mr.get().reregister(None, Some(elsewhere), Some(IBV_ACCESS_LOCAL_WRITE)).expect("all may be written");
    assert_eq!(mr.get().reregister(None, Some((start, 8)), None), Err(libc::EFAULT));
    mr.get().deregister().expect("deregister");
    // SAFETY: what is left of the mapping, which nothing uses any more.
    unsafe { libc::munmap((start as *mut libc::c_void).add(PAGE), 3 * PAGE) };
}
