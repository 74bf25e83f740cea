//! Tests of the edge with the real engine under it: two QPs of one process talk over loopback.
//!
//! Here: posting and polling. Beside it: `errors` (the error table), `states` (the state table), `events`, `groups`.

use std::io::Read;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use metaroce_config::NetView;
use metaroce_engine::Device;
use rdma_core_sys::*;

use crate::chain::{RecvChain, SendChain};
use crate::context::Context;
use crate::cq::{Cq, CqCreate};
use crate::ffi::{Object, Result, object, publish, reclaim, zeroed};
use crate::mr::Mr;
use crate::pd::Pd;
use crate::qp::{Qp, QpCreate};
use crate::{poll, post};

mod endings;
mod errors;
mod events;
mod groups;
mod states;
mod storms;
mod world;

/// A hang is a failure, not a stuck build.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of registered memory.
const BYTES: usize = 4096;
const DEPTH: u32 = 8;

/// A published object, taken back at the end as an application would.
struct Published<T: Object>(*mut T::C);

impl<T: Object> Published<T> {
    fn new(object: Box<T>) -> Self {
        Self(publish(object))
    }
    fn get(&self) -> &T {
        // SAFETY: published in `new`, reclaimed in `drop`.
        unsafe { object::<T>(self.0) }.expect("not NULL")
    }
}

impl<T: Object> Drop for Published<T> {
    fn drop(&mut self) {
        // SAFETY: published in `new`; nobody else has it.
        drop(unsafe { reclaim::<T>(self.0) });
    }
}

// SAFETY: tests share them as programs share verbs objects.
unsafe impl<T: Object> Sync for Published<T> {}
// SAFETY: as above.
unsafe impl<T: Object> Send for Published<T> {}

/// Two connected QPs on one CQ. Members are dropped in the order verbs want.
struct Pair {
    a: Published<Qp>,
    b: Published<Qp>,
    cq: Published<Cq>,
    mr: Published<Mr>,
    _pd: Published<Pd>,
    context: Arc<Context>,
    memory: Box<[u8]>,
}

fn context(base_port: u16) -> Arc<Context> {
    let env = |name: &str| match name {
        "METAROCE_PLANES" => Some("lo".to_owned()),
        "METAROCE_BASE_PORT" => Some(base_port.to_string()),
        _ => None,
    };
    let net = NetView::of_this_host().expect("interfaces");
    let config = metaroce_config::resolve(&env, None, &net).expect("loopback");
    Context::over(Device::with_config(config), 1).expect("context").0
}

fn cq(context: &Arc<Context>, extended: bool) -> Published<Cq> {
    let create = CqCreate {
        cqe: 1024,
        comp_vector: 0,
        channel: None,
        wc_flags: extended.then_some(0),
        parent_domain: None,
    };
    Published::new(Cq::create(context, create).expect("CQ"))
}

fn qp(pd: &Pd, cq: &Cq, send_wr: u32) -> Published<Qp> {
    let mut attr: ibv_qp_init_attr_ex = zeroed();
    attr.qp_type = IBV_QPT_RC;
    attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    attr.send_ops_flags = (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ).into();
    attr.cap = ibv_qp_cap {
        max_send_wr: send_wr,
        max_recv_wr: 512,
        max_send_sge: 2,
        max_recv_sge: 2,
        max_inline_data: 64,
    };
    let create = QpCreate {
        pd: Arc::clone(&pd.shared),
        send_cq: Some(cq),
        recv_cq: Some(cq),
        srq: None,
        xrcd: None,
        rss: None,
        attr: &mut attr,
        context: ptr::null_mut(),
    };
    Published::new(Qp::create(create).expect("QP"))
}

fn address_vector(gid: [u8; 16]) -> ibv_ah_attr {
    let mut av = ibv_ah_attr { is_global: 1, port_num: 1, ..Default::default() };
    av.grh.dgid = ibv_gid { raw: gid };
    av
}

impl Pair {
    fn new(base_port: u16, send_wr: u32, extended_cq: bool) -> Self {
        let context = context(base_port);
        let pd = Published::new(Pd::alloc(&context));
        let cq = cq(&context, extended_cq);
        let memory = vec![0u8; BYTES].into_boxed_slice();
        let address = memory.as_ptr() as u64;
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
        let mr = Mr::register(pd.get(), address, BYTES as u64, address, access).expect("MR");
        let (a, b) = (qp(pd.get(), cq.get(), send_wr), qp(pd.get(), cq.get(), send_wr));
        let pair = Self { a, b, cq, mr: Published::new(mr), _pd: pd, context, memory };
        pair.connect(&pair.a, &pair.b);
        pair.connect(&pair.b, &pair.a);
        pair
    }

    fn connect(&self, from: &Published<Qp>, to: &Published<Qp>) {
        let gid = metaroce_config::gid_table(self.context.device.config())[0].gid;
        let mut attr = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            port_num: 1,
            qp_access_flags: IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
            path_mtu: IBV_MTU_1024,
            dest_qp_num: to.get().engine.qpn().0,
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            ah_attr: address_vector(gid),
            ..Default::default()
        };
        let steps = [
            (IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
            (
                IBV_QPS_RTR,
                IBV_QP_AV
                    | IBV_QP_PATH_MTU
                    | IBV_QP_DEST_QPN
                    | IBV_QP_RQ_PSN
                    | IBV_QP_MAX_DEST_RD_ATOMIC
                    | IBV_QP_MIN_RNR_TIMER,
            ),
            (
                IBV_QPS_RTS,
                IBV_QP_SQ_PSN
                    | IBV_QP_TIMEOUT
                    | IBV_QP_RETRY_CNT
                    | IBV_QP_RNR_RETRY
                    | IBV_QP_MAX_QP_RD_ATOMIC,
            ),
        ];
        for (state, mask) in steps {
            attr.qp_state = state;
            from.get().modify(&attr, mask | IBV_QP_STATE).expect("transition");
        }
    }

    fn key(&self) -> u32 {
        // SAFETY: a live MR.
        unsafe { (*self.mr.0).lkey }
    }

    fn sge(&self, offset: usize, length: u32) -> ibv_sge {
        ibv_sge { addr: self.memory.as_ptr() as u64 + offset as u64, length, lkey: self.key() }
    }

    /// A Write of the SGE to the second half of the memory.
    fn write(&self, wr_id: u64, sge: &mut ibv_sge, flags: u32) -> ibv_send_wr {
        // SAFETY: a structure of integers and pointers.
        let mut wr: ibv_send_wr = unsafe { MaybeUninit::zeroed().assume_init() };
        wr.wr_id = wr_id;
        wr.sg_list = sge;
        wr.num_sge = 1;
        wr.opcode = IBV_WR_RDMA_WRITE;
        wr.send_flags = flags;
        wr.wr.rdma.remote_addr = self.memory.as_ptr() as u64 + BYTES as u64 / 2;
        wr.wr.rdma.rkey = self.key();
        wr
    }

    /// Waits for `count` completions.
    fn completions(&self, count: usize) -> Vec<ibv_wc> {
        let begin = Instant::now();
        let mut all = Vec::new();
        while all.len() < count {
            assert!(begin.elapsed() < PATIENCE, "only {} of {count} completions", all.len());
            let mut wc = [const { MaybeUninit::<ibv_wc>::uninit() }; 4];
            let n = poll::poll(self.cq.get(), &mut wc);
            // SAFETY: poll has written the first n.
            all.extend(wc[..n].iter().map(|wc| unsafe { wc.assume_init() }));
        }
        all
    }

    /// Ends the QPs before the CQ, as verbs want it.
    fn destroy(self) {
        for qp in [&self.a, &self.b] {
            qp.get().destroy().expect("destroy QP");
        }
        self.mr.get().deregister().expect("deregister");
    }
}

fn post_chain(qp: &Qp, first: *mut ibv_send_wr) -> (Result<()>, *mut ibv_send_wr) {
    // SAFETY: the tests pass well-formed chains.
    let mut chain = unsafe { SendChain::new(first) };
    let outcome = post::send(qp, &mut chain);
    (outcome, chain.position())
}

#[test]
fn post_send_stops_at_the_first_bad_request_and_posts_those_before() {
    let pair = Pair::new(21_000, DEPTH, false);
    let (mut sge, mut long) = (pair.sge(0, 16), pair.sge(0, 65));
    let mut third = pair.write(3, &mut sge, IBV_SEND_SIGNALED);
    // Inline data longer than the 64 bytes granted.
    let mut second = pair.write(2, &mut long, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
    second.next = &mut third;
    let mut first = pair.write(1, &mut sge, IBV_SEND_SIGNALED);
    first.next = &mut second;
    let (outcome, at) = post_chain(pair.a.get(), &mut first);
    assert_eq!((outcome, at), (Err(libc::EINVAL), &raw mut second));
    let wc = pair.completions(1);
    assert_eq!((wc[0].wr_id, wc[0].status), (1, IBV_WC_SUCCESS));
    pair.destroy();
}

#[test]
fn post_send_gives_slots_back_when_completions_are_polled() {
    let pair = Pair::new(21_100, DEPTH, false);
    let mut sge = pair.sge(0, 16);
    for round in 0..3 {
        for i in 0..u64::from(DEPTH) {
            // Unsignaled but for the last: its completion gives all slots back.
            let flags = if i + 1 == u64::from(DEPTH) { IBV_SEND_SIGNALED } else { 0 };
            let mut wr = pair.write(i, &mut sge, flags);
            assert_eq!(post_chain(pair.a.get(), &mut wr).0, Ok(()), "round {round}, request {i}");
        }
        let mut wr = pair.write(99, &mut sge, IBV_SEND_SIGNALED);
        assert_eq!(post_chain(pair.a.get(), &mut wr), (Err(libc::ENOMEM), &raw mut wr));
        assert_eq!(pair.completions(1)[0].wr_id, u64::from(DEPTH) - 1);
    }
    pair.destroy();
}

#[test]
fn post_recv_refuses_what_does_not_fit() {
    let pair = Pair::new(21_200, DEPTH, false);
    let mut sges = [pair.sge(0, 1), pair.sge(1, 1), pair.sge(2, 1)];
    let mut wr = ibv_recv_wr { wr_id: 1, next: ptr::null_mut(), sg_list: sges.as_mut_ptr(), num_sge: 3 };
    for (num_sge, expected) in [(3, Err(libc::EINVAL)), (-1, Err(libc::EINVAL)), (2, Ok(())), (0, Ok(()))] {
        wr.num_sge = num_sge;
        // SAFETY: a chain of one.
        let mut chain = unsafe { RecvChain::new(&mut wr) };
        assert_eq!(post::recv(pair.a.get(), &mut chain), expected, "{num_sge} SGEs");
    }
    pair.destroy();
}

#[test]
fn modify_without_grh_is_refused_and_changes_nothing() {
    let pair = Pair::new(21_300, DEPTH, false);
    let cq = cq(&pair.context, false);
    let qp = qp(pair._pd.get(), cq.get(), DEPTH);
    let mut attr = ibv_qp_attr { qp_state: IBV_QPS_INIT, port_num: 1, ..Default::default() };
    let to_init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    qp.get().modify(&attr, to_init).expect("INIT");
    let to_rtr = IBV_QP_STATE
        | IBV_QP_AV
        | IBV_QP_PATH_MTU
        | IBV_QP_DEST_QPN
        | IBV_QP_RQ_PSN
        | IBV_QP_MAX_DEST_RD_ATOMIC
        | IBV_QP_MIN_RNR_TIMER;
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    attr.dest_qp_num = 7;
    let gid = metaroce_config::gid_table(pair.context.device.config())[0].gid;
    let good = address_vector(gid);
    let no_grh = ibv_ah_attr { is_global: 0, ..good };
    let other_port = ibv_ah_attr { port_num: 2, ..good };
    let mut empty_index = good;
    empty_index.grh.sgid_index = 15;
    for bad in [no_grh, other_port, empty_index, address_vector([0; 16])] {
        attr.ah_attr = bad;
        assert_eq!(qp.get().modify(&attr, to_rtr), Err(libc::EINVAL));
        let (now, _) = qp.get().query();
        assert_eq!((now.qp_state, now.dest_qp_num, now.path_mtu), (IBV_QPS_INIT, 0, 0));
    }
    attr.ah_attr = good;
    assert_eq!(qp.get().modify(&attr, to_rtr), Ok(()));
    assert_eq!(qp.get().query().0.dest_qp_num, 7);
    qp.get().destroy().expect("destroy");
    drop((qp, cq));
    pair.destroy();
}

/// The builder functions of a QP, as `ibv_wr_*` calls them.
struct Wr(*mut ibv_qp_ex);

impl Wr {
    fn of(qp: &Published<Qp>) -> Self {
        Self(qp.0.cast())
    }
    fn start(&self) {
        // SAFETY: a live QP with the functions set; likewise below.
        unsafe { (*self.0).wr_start.expect("set")(self.0) }
    }
    fn write(&self, wr_id: u64, pair: &Pair) {
        // SAFETY: as start.
        unsafe {
            ((*self.0).wr_id, (*self.0).wr_flags) = (wr_id, IBV_SEND_SIGNALED);
            let remote = pair.memory.as_ptr() as u64 + BYTES as u64 / 2;
            (*self.0).wr_rdma_write.expect("set")(self.0, pair.key(), remote);
        }
    }
    fn sge(&self, sge: ibv_sge) {
        // SAFETY: as start.
        unsafe { (*self.0).wr_set_sge.expect("set")(self.0, sge.lkey, sge.addr, sge.length) }
    }
    fn inline(&self, data: &[u8]) {
        // SAFETY: as start.
        unsafe {
            (*self.0).wr_set_inline_data.expect("set")(self.0, data.as_ptr().cast_mut().cast(), data.len());
        }
    }
    fn complete(&self) -> i32 {
        // SAFETY: as start.
        unsafe { (*self.0).wr_complete.expect("set")(self.0) }
    }
    fn abort(&self) {
        // SAFETY: as start.
        unsafe { (*self.0).wr_abort.expect("set")(self.0) }
    }
}

#[test]
fn wr_batches_are_posted_whole_or_not_at_all() {
    let pair = Pair::new(21_400, DEPTH, false);
    let wr = Wr::of(&pair.a);
    // Aborted: nothing is posted.
    wr.start();
    wr.write(1, &pair);
    wr.sge(pair.sge(0, 16));
    wr.abort();
    // One request too long for inline: the good one beside it is taken back as well.
    wr.start();
    wr.write(2, &pair);
    wr.sge(pair.sge(0, 16));
    wr.write(3, &pair);
    wr.inline(&[0; 65]);
    assert_eq!(wr.complete(), libc::EINVAL);
    // A full queue: all or nothing, too. The slots are still free afterwards.
    for (count, expected) in [(DEPTH + 1, libc::ENOMEM), (DEPTH, 0)] {
        wr.start();
        for i in 0..count {
            wr.write(u64::from(10 + i), &pair);
            wr.inline(&[i as u8 + 1; 8]);
        }
        assert_eq!(wr.complete(), expected);
    }
    let ids: Vec<u64> = pair.completions(DEPTH as usize).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, (10..10 + u64::from(DEPTH)).collect::<Vec<_>>());
    assert_eq!(pair.memory[BYTES / 2..BYTES / 2 + 8], [DEPTH as u8; 8]);
    pair.destroy();
}

#[test]
fn wr_without_setter_is_a_request_without_data() {
    let pair = Pair::new(21_500, DEPTH, false);
    let wr = Wr::of(&pair.a);
    wr.start();
    wr.write(1, &pair);
    wr.write(2, &pair);
    wr.sge(pair.sge(0, 4));
    assert_eq!(wr.complete(), 0);
    let statuses: Vec<_> = pair.completions(2).iter().map(|wc| wc.status).collect();
    assert_eq!(statuses, [IBV_WC_SUCCESS; 2]);
    // Completing without start is misuse, answered and not obeyed.
    assert_eq!(wr.complete(), libc::EINVAL);
    pair.destroy();
}

#[test]
fn extended_polling_reads_each_completion_once() {
    let pair = Pair::new(21_600, DEPTH, true);
    let ex = pair.cq.0.cast::<ibv_cq_ex>();
    let mut attr = ibv_poll_cq_attr { comp_mask: 0 };
    // SAFETY: a live extended CQ with the functions set.
    unsafe {
        let start = (*ex).start_poll.expect("set");
        assert_eq!(start(ex, &mut attr), libc::ENOENT);
        let mut sge = pair.sge(0, 16);
        for id in [5, 6] {
            let mut wr = pair.write(id, &mut sge, IBV_SEND_SIGNALED);
            assert_eq!(post_chain(pair.a.get(), &mut wr).0, Ok(()));
        }
        let mut seen = Vec::new();
        let begin = Instant::now();
        while seen.len() < 2 {
            assert!(begin.elapsed() < PATIENCE);
            if start(ex, &mut attr) != 0 {
                continue;
            }
            loop {
                assert_eq!(
                    ((*ex).status, (*ex).read_opcode.expect("set")(ex)),
                    (IBV_WC_SUCCESS, IBV_WC_RDMA_WRITE)
                );
                assert_eq!((*ex).read_qp_num.expect("set")(ex), pair.a.get().engine.qpn().0);
                seen.push((*ex).wr_id);
                if (*ex).next_poll.expect("set")(ex) != 0 {
                    break;
                }
            }
            (*ex).end_poll.expect("set")(ex);
        }
        assert_eq!(seen, [5, 6]);
        attr.comp_mask = 1;
        assert_eq!(start(ex, &mut attr), libc::EINVAL);
    }
    pair.destroy();
}

#[test]
fn posting_and_polling_from_many_threads_loses_and_doubles_nothing() {
    const THREADS: u64 = 4;
    const EACH: u64 = 500;
    let pair = Pair::new(21_700, 64, false);
    let seen: Vec<AtomicU32> = (0..THREADS * EACH).map(|_| AtomicU32::new(0)).collect();
    let taken = AtomicU32::new(0);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (pair, taken, seen) = (&pair, &taken, &seen);
            scope.spawn(move || {
                for i in 0..EACH {
                    let mut sge = pair.sge(0, 8);
                    let mut wr = pair.write(thread * EACH + i, &mut sge, IBV_SEND_SIGNALED);
                    while post_chain(pair.a.get(), &mut wr).0 == Err(libc::ENOMEM) {
                        assert!(begin.elapsed() < PATIENCE);
                        std::thread::yield_now();
                    }
                }
            });
            scope.spawn(move || {
                while u64::from(taken.load(Ordering::Relaxed)) < THREADS * EACH {
                    assert!(begin.elapsed() < PATIENCE);
                    let mut wc = [const { MaybeUninit::<ibv_wc>::uninit() }; 3];
                    let n = poll::poll(pair.cq.get(), &mut wc);
                    for wc in &wc[..n] {
                        // SAFETY: poll has written the first n.
                        let wc = unsafe { wc.assume_init_ref() };
                        assert_eq!(wc.status, IBV_WC_SUCCESS);
                        seen[wc.wr_id as usize].fetch_add(1, Ordering::Relaxed);
                    }
                    taken.fetch_add(n as u32, Ordering::Relaxed);
                }
            });
        }
    });
    assert!(seen.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    pair.destroy();
}

#[test]
fn an_armed_cq_sends_one_event_and_destruction_takes_unread_ones_back() {
    let pair = Pair::new(21_800, DEPTH, false);
    let (mut reader, _writer) = std::io::pipe().expect("pipe");
    // The address only names the channel.
    let channel = pair.context.comp_channel(0x1000, reader.as_raw_fd()).expect("channel");
    let create =
        CqCreate { cqe: 16, comp_vector: 0, channel: Some(channel), wc_flags: None, parent_domain: None };
    let cq = Published::new(Cq::create(&pair.context, create).expect("CQ"));
    let a = qp(pair._pd.get(), cq.get(), DEPTH);
    let b = qp(pair._pd.get(), pair.cq.get(), DEPTH);
    pair.connect(&a, &b);
    pair.connect(&b, &a);
    let mut sge = pair.sge(0, 8);
    cq.get().arm(false);
    let mut wr = pair.write(1, &mut sge, IBV_SEND_SIGNALED);
    assert_eq!(post_chain(a.get(), &mut wr).0, Ok(()));
    let mut record = [0; 8];
    reader.read_exact(&mut record).expect("event");
    assert_eq!(u64::from_ne_bytes(record), cq.0 as u64);
    cq.get().event_read();
    // Read and acknowledged; a second event stays unread.
    // SAFETY: a live CQ; nobody else is at it.
    unsafe { (*cq.0).comp_events_completed += 1 };
    cq.get().arm(false);
    assert_eq!(post_chain(a.get(), &mut wr).0, Ok(()));
    let begin = Instant::now();
    let mut polled = 0;
    while polled < 2 {
        assert!(begin.elapsed() < PATIENCE);
        let mut wc = [const { MaybeUninit::<ibv_wc>::uninit() }; 2];
        polled += poll::poll(cq.get(), &mut wc);
    }
    assert_eq!(cq.get().destroy(), Err(libc::EBUSY));
    for qp in [&a, &b] {
        qp.get().destroy().expect("destroy QP");
    }
    // Returns, although the second event was never acknowledged: it was taken back.
    cq.get().destroy().expect("destroy CQ");
    drop((a, b, cq));
    pair.destroy();
}
