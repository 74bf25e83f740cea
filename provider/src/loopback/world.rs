//! What the tests need of a program: objects of every kind, connected as wanted, and the events they raise.

use std::fs::File;
use std::io::Read;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd};
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metaroce_config::NetView;
use metaroce_engine::Device;
use rdma_core_sys::*;

use super::{PATIENCE, Published, address_vector};
use crate::chain::{RecvChain, SendChain};
use crate::context::Context;
use crate::cq::{Cq, CqCreate};
use crate::ffi::{Result, zeroed};
use crate::mr::Mr;
use crate::pd::Pd;
use crate::qp::{Qp, QpCreate};
use crate::srq::Srq;
use crate::{poll, post};

/// Bytes of registered memory; the second half is what peers write to.
pub(super) const BYTES: usize = 1 << 16;
/// Where the second half begins.
pub(super) const FAR: usize = BYTES / 2;
/// Long enough for anything that is on its way on this machine.
const QUIET: Duration = Duration::from_millis(30);

/// A device with a PD, memory and the application's end of the event channel.
pub(super) struct World {
    pub(super) mr: Published<Mr>,
    pub(super) pd: Published<Pd>,
    pub(super) context: Arc<Context>,
    events: File,
    pub(super) memory: Box<[u8]>,
}

/// What tests vary of a connection.
#[derive(Clone, Copy)]
pub(super) struct Link {
    pub(super) access: u32,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) qkey: u32,
}

impl Default for Link {
    fn default() -> Self {
        Self {
            access: IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            qkey: 0x1111,
        }
    }
}

/// Two connected QPs with a CQ for each of their four queues.
pub(super) struct Two {
    pub(super) a: Published<Qp>,
    pub(super) b: Published<Qp>,
    /// Sends of a, receives of a, sends of b, receives of b.
    pub(super) cqs: [Published<Cq>; 4],
    pub(super) srq: Option<Published<Srq>>,
}

impl World {
    pub(super) fn new(base_port: u16) -> Self {
        let env = |name: &str| match name {
            "METAROCE_PLANES" => Some("lo".to_owned()),
            "METAROCE_BASE_PORT" => Some(base_port.to_string()),
            _ => None,
        };
        let net = NetView::of_this_host().expect("interfaces");
        let config = metaroce_config::resolve(&env, None, &net).expect("loopback");
        let (context, fd) = Context::over(Device::with_config(config), 1).expect("context");
        // SAFETY: a fresh descriptor that is ours, as it is libibverbs' otherwise.
        let events = unsafe { File::from_raw_fd(fd) };
        let pd = Published::new(Pd::alloc(&context));
        let memory = vec![0u8; BYTES].into_boxed_slice();
        let all = IBV_ACCESS_LOCAL_WRITE
            | IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_READ
            | IBV_ACCESS_REMOTE_ATOMIC;
        let address = memory.as_ptr() as u64;
        let mr = Mr::register(pd.get(), address, BYTES as u64, address, all).expect("MR");
        Self { mr: Published::new(mr), pd, context, events, memory }
    }

    pub(super) fn address(&self, offset: usize) -> u64 {
        self.memory.as_ptr() as u64 + offset as u64
    }

    pub(super) fn key(&self) -> u32 {
        key(&self.mr)
    }

    /// An MR over the same memory with other rights or another PD.
    pub(super) fn other_mr(&self, pd: &Published<Pd>, access: u32) -> Published<Mr> {
        let address = self.address(0);
        Published::new(Mr::register(pd.get(), address, BYTES as u64, address, access).expect("MR"))
    }

    pub(super) fn sge(&self, offset: usize, length: u32) -> ibv_sge {
        ibv_sge { addr: self.address(offset), length, lkey: self.key() }
    }

    pub(super) fn cq(&self, cqe: u32) -> Published<Cq> {
        let create = CqCreate { cqe, comp_vector: 0, channel: None, wc_flags: None, parent_domain: None };
        Published::new(Cq::create(&self.context, create).expect("CQ"))
    }

    pub(super) fn srq(&self, max_wr: u32) -> Published<Srq> {
        let mut attr = ibv_srq_attr { max_wr, max_sge: 1, srq_limit: 0 };
        Published::new(Srq::create(self.pd.get(), &mut attr, None).expect("SRQ"))
    }

    pub(super) fn qp(
        &self,
        qp_type: ibv_qp_type,
        send_cq: &Published<Cq>,
        recv_cq: &Published<Cq>,
        srq: Option<&Published<Srq>>,
    ) -> Published<Qp> {
        let mut attr: ibv_qp_init_attr_ex = zeroed();
        attr.qp_type = qp_type;
        attr.comp_mask = IBV_QP_INIT_ATTR_PD;
        (attr.send_cq, attr.recv_cq) = (send_cq.0, recv_cq.0);
        attr.cap = ibv_qp_cap {
            max_send_wr: 64,
            max_recv_wr: 64,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 64,
        };
        let create = QpCreate {
            pd: Arc::clone(&self.pd.get().shared),
            xrcd: None,
            rss: None,
            send_cq: Some(send_cq.get()),
            recv_cq: Some(recv_cq.get()),
            srq: srq.map(Published::get),
            attr: &mut attr,
            context: ptr::null_mut(),
        };
        Published::new(Qp::create(create).expect("QP"))
    }

    /// Two QPs, not connected.
    pub(super) fn two(&self, qp_type: ibv_qp_type, srq: Option<Published<Srq>>) -> Two {
        let cqs = [self.cq(128), self.cq(128), self.cq(128), self.cq(128)];
        let a = self.qp(qp_type, &cqs[0], &cqs[1], None);
        let b = self.qp(qp_type, &cqs[2], &cqs[3], srq.as_ref());
        Two { a, b, cqs, srq }
    }

    /// Two QPs in RTS; `b` as `link` says, `a` as `link` says too.
    pub(super) fn connected(&self, qp_type: ibv_qp_type, link: Link) -> Two {
        let two = self.two(qp_type, None);
        self.connect(&two.a, &two.b, link);
        self.connect(&two.b, &two.a, link);
        two
    }

    /// The attributes that bring `from` to talk to `to`.
    pub(super) fn attributes(&self, to: &Published<Qp>, link: Link) -> ibv_qp_attr {
        let gid = metaroce_config::gid_table(self.context.device.config())[0].gid;
        ibv_qp_attr {
            port_num: 1,
            qp_access_flags: link.access,
            path_mtu: IBV_MTU_1024,
            dest_qp_num: to.get().engine.qpn().0,
            max_dest_rd_atomic: link.max_dest_rd_atomic,
            max_rd_atomic: link.max_rd_atomic,
            timeout: link.timeout,
            retry_cnt: link.retry_cnt,
            rnr_retry: link.rnr_retry,
            min_rnr_timer: 1,
            qkey: link.qkey,
            ah_attr: address_vector(gid),
            ..Default::default()
        }
    }

    pub(super) fn connect(&self, from: &Published<Qp>, to: &Published<Qp>, link: Link) {
        for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
            self.step(from, to, state, link);
        }
    }

    /// One transition with exactly the required attributes.
    pub(super) fn step(&self, qp: &Published<Qp>, to: &Published<Qp>, state: ibv_qp_state, link: Link) {
        let mut attr = self.attributes(to, link);
        attr.qp_state = state;
        let from = qp.get().engine.state() as u32;
        let masks = crate::attr::transition(qp.get().qp_type, from, state).expect("legal");
        qp.get().modify(&attr, masks.required | IBV_QP_STATE).expect("transition");
    }

    /// The next asynchronous event: element and type.
    pub(super) fn event(&self) -> (u64, u32) {
        assert!(self.readable(PATIENCE), "no event");
        let mut record = [0; 16];
        (&self.events).read_exact(&mut record).expect("record");
        self.context.events.after_read();
        let element = u64::from_ne_bytes(record[..8].try_into().expect("8 bytes"));
        (element, u32::from_ne_bytes(record[8..12].try_into().expect("4 bytes")))
    }

    /// Checks that no event comes.
    pub(super) fn no_event(&self) {
        assert!(!self.readable(QUIET), "an event: {:?}", self.event());
    }

    fn readable(&self, limit: Duration) -> bool {
        readable(self.events.as_raw_fd(), limit)
    }
}

/// Waits until the descriptor has something to read.
pub(super) fn readable(fd: i32, limit: Duration) -> bool {
    let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry that lives through the call.
    unsafe { libc::poll(&mut entry, 1, limit.as_millis() as i32) > 0 }
}

impl Two {
    pub(super) fn destroy(self) {
        self.a.get().destroy().expect("destroy QP");
        self.b.get().destroy().expect("destroy QP");
        self.cqs.iter().for_each(|cq| cq.get().destroy().expect("destroy CQ"));
        if let Some(srq) = &self.srq {
            srq.get().destroy().expect("destroy SRQ");
        }
    }

    /// The next completions of a queue, as (wr_id, status).
    pub(super) fn take(&self, queue: usize, count: usize) -> Vec<(u64, u32)> {
        take(&self.cqs[queue], count)
    }

    /// Checks that the queue stays empty.
    pub(super) fn nothing(&self, queue: usize) {
        let begin = Instant::now();
        while begin.elapsed() < QUIET {
            let got = some(&self.cqs[queue], 1);
            assert!(got.is_empty(), "{:?}", got.iter().map(|wc| (wc.wr_id, wc.status)).collect::<Vec<_>>());
        }
    }
}

pub(super) fn key(mr: &Published<Mr>) -> u32 {
    // SAFETY: a live MR.
    unsafe { (*mr.0).lkey }
}

/// Up to `count` completions without waiting.
pub(super) fn some(cq: &Published<Cq>, count: usize) -> Vec<ibv_wc> {
    let mut wc = vec![MaybeUninit::<ibv_wc>::uninit(); count];
    let n = poll::poll(cq.get(), &mut wc);
    // SAFETY: poll has written the first n.
    wc[..n].iter().map(|wc| unsafe { wc.assume_init() }).collect()
}

/// Waits for `count` completions.
pub(super) fn wait(cq: &Published<Cq>, count: usize) -> Vec<ibv_wc> {
    let begin = Instant::now();
    let mut all = Vec::new();
    while all.len() < count {
        assert!(begin.elapsed() < PATIENCE, "only {} of {count} completions", all.len());
        all.extend(some(cq, count - all.len()));
    }
    all
}

/// Waits for `count` completions: (wr_id, status).
pub(super) fn take(cq: &Published<Cq>, count: usize) -> Vec<(u64, u32)> {
    wait(cq, count).iter().map(|wc| (wc.wr_id, wc.status)).collect()
}

/// A signaled request without addresses.
pub(super) fn request(wr_id: u64, opcode: ibv_wr_opcode) -> ibv_send_wr {
    // SAFETY: a structure of integers and pointers.
    let mut wr: ibv_send_wr = unsafe { MaybeUninit::zeroed().assume_init() };
    (wr.wr_id, wr.opcode, wr.send_flags) = (wr_id, opcode, IBV_SEND_SIGNALED);
    wr
}

/// The request with the remote address of a Write, Read or atomic.
pub(super) fn at(mut wr: ibv_send_wr, remote_addr: u64, rkey: u32) -> ibv_send_wr {
    if wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD {
        (wr.wr.atomic.remote_addr, wr.wr.atomic.rkey) = (remote_addr, rkey);
    } else {
        (wr.wr.rdma.remote_addr, wr.wr.rdma.rkey) = (remote_addr, rkey);
    }
    wr
}

/// Posts one request with one SGE.
pub(super) fn send(qp: &Published<Qp>, mut wr: ibv_send_wr, mut sge: ibv_sge) -> Result<()> {
    (wr.sg_list, wr.num_sge) = (&raw mut sge, 1);
    // SAFETY: a chain of one with one SGE.
    post::send(qp.get(), &mut unsafe { SendChain::new(&mut wr) })
}

/// Posts one receive with one SGE.
pub(super) fn recv(qp: &Published<Qp>, wr_id: u64, mut sge: ibv_sge) -> Result<()> {
    let mut wr = ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: &raw mut sge, num_sge: 1 };
    // SAFETY: a chain of one with one SGE.
    post::recv(qp.get(), &mut unsafe { RecvChain::new(&mut wr) })
}

/// Posts one receive to an SRQ.
pub(super) fn srq_recv(srq: &Published<Srq>, wr_id: u64, mut sge: ibv_sge) -> Result<()> {
    let mut wr = ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: &raw mut sge, num_sge: 1 };
    // SAFETY: a chain of one with one SGE.
    post::shared_recv(&srq.get().engine, &mut unsafe { RecvChain::new(&mut wr) })
}
