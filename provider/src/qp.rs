//! Queue pairs: creation, state changes, queries and destruction. Posting is in `post.rs` and `wr.rs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use metaroce_engine as engine;
use metaroce_proto::steer::Rss;
use metaroce_proto::types::{Event, QpModify, QpState, QpType, Qpn, access};
use parking_lot::Mutex;
use rdma_core_sys::private::{VERBS_QP_EX, VERBS_QP_XRCD, verbs_qp};
use rdma_core_sys::*;

use crate::addr::{Addresses, address_of};
use crate::attr;
use crate::channel::Source;
use crate::context::Context;
use crate::cq::Cq;
use crate::ffi::{CPart, LockedCell, Object, Result};
use crate::limits::{MAX_INLINE, MAX_QP_WR, MAX_SGE};
use crate::pd::PdShared;
use crate::srq::Srq;
use crate::wq::Queues;
use crate::wr::{self, Builder};
use crate::xrcd::{Domain, Xrcd};

/// A queue pair.
#[repr(C)]
pub(crate) struct Qp {
    pub(crate) c: CPart<verbs_qp>,
    /// The chain of requests between `ibv_wr_start` and `ibv_wr_complete`; guarded by the engine's send lock, which
    /// it holds itself. Before `engine`, so that it is dropped first.
    pub(crate) builder: LockedCell<Builder>,
    pub(crate) engine: Arc<engine::Qp>,
    pub(crate) cap: ibv_qp_cap,
    pub(crate) sq_sig_all: bool,
    pub(crate) qp_type: ibv_qp_type,
    /// Attributes as last set, for `query_qp`.
    attributes: Mutex<ibv_qp_attr>,
    notify: Arc<Notifier>,
    pd: Arc<PdShared>,
    _xrcd: Option<Arc<Domain>>,
    _queues: Option<Queues>,
}

// SAFETY: repr(C), the C part is first and begins with an ibv_qp.
unsafe impl Object for Qp {
    type C = ibv_qp;
}

/// What a QP is made of, checked as far as C structures go.
pub(crate) struct QpCreate<'a> {
    /// Of an XRC responder, which has none, a PD of no consequence.
    pub(crate) pd: Arc<PdShared>,
    pub(crate) send_cq: Option<&'a Cq>,
    pub(crate) recv_cq: Option<&'a Cq>,
    pub(crate) srq: Option<&'a Srq>,
    pub(crate) xrcd: Option<&'a Xrcd>,
    /// Work queues its frames are spread over, and how.
    pub(crate) rss: Option<(Queues, Rss)>,
    /// The caller's attributes, whose `cap` becomes what was granted.
    pub(crate) attr: &'a mut ibv_qp_init_attr_ex,
    pub(crate) context: *mut ibv_context,
}

impl Qp {
    /// EINVAL for sizes beyond the device's limits, EOPNOTSUPP for what the device does not have.
    pub(crate) fn create(create: QpCreate<'_>) -> Result<Box<Self>> {
        let QpCreate { pd, send_cq, recv_cq, srq, xrcd, rss, attr, context } = create;
        let qp_type = check_features(attr)?;
        // Tags are matched in the order of reliable streams.
        if srq.is_some_and(Srq::has_tags) && qp_type != QpType::Rc {
            return Err(libc::EINVAL);
        }
        let ops = (attr.comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0).then_some(attr.send_ops_flags);
        wr::check_ops(attr.qp_type, ops.unwrap_or(0))?;
        // XRC requesters have no receives, and responders nothing else of their own either.
        let no_receives =
            srq.is_some() || rss.is_some() || matches!(qp_type, QpType::XrcSend | QpType::XrcRecv);
        let cap = granted(&attr.cap, no_receives)?;
        let notify = Arc::new(Notifier::new(&pd.context));
        let init = engine::QpCreate {
            qp_type,
            pd: pd.number,
            send_cq: send_cq.map(|cq| Arc::clone(&cq.engine)),
            recv_cq: recv_cq.map(|cq| Arc::clone(&cq.engine)),
            xrcd: xrcd.map(|xrcd| xrcd.domain.number),
            srq: srq.map(|srq| Arc::clone(&srq.engine)),
            max_send_wr: cap.max_send_wr,
            max_recv_wr: cap.max_recv_wr,
            max_send_sge: cap.max_send_sge,
            max_recv_sge: cap.max_recv_sge,
            max_inline: cap.max_inline_data,
        };
        let handle = NotifierHandle(Arc::clone(&notify));
        let engine = pd.context.device.create_qp(&init, Some(Box::new(handle)))?;
        if let Some((_, rss)) = &rss {
            engine.set_rss(rss.clone())?;
        }
        pd.context.open.qp_made(&engine);
        if let Some(xrcd) = xrcd {
            xrcd.domain.add(&engine);
        }
        let qpn = engine.qpn().0;
        let c = CPart::new(|c: &mut verbs_qp| {
            let qp = wr::plain_part(c);
            qp.context = context;
            qp.qp_context = attr.qp_context;
            qp.pd = if attr.comp_mask & IBV_QP_INIT_ATTR_PD != 0 { attr.pd } else { std::ptr::null_mut() };
            qp.send_cq = attr.send_cq;
            qp.recv_cq = attr.recv_cq;
            qp.srq = attr.srq;
            qp.handle = crate::ffi::next_handle();
            qp.qp_num = qpn;
            qp.state = IBV_QPS_RESET;
            qp.qp_type = attr.qp_type;
            if xrcd.is_some() {
                c.xrcd = attr.xrcd.cast();
                c.comp_mask |= VERBS_QP_XRCD;
            }
            if let Some(ops) = ops {
                wr::set_functions(c, ops);
                c.comp_mask |= VERBS_QP_EX;
            }
        });
        c.init_sync();
        attr.cap = cap;
        let qp = Box::new(Self {
            c,
            builder: LockedCell::new(Builder::default()),
            engine,
            cap,
            sq_sig_all: attr.sq_sig_all != 0,
            qp_type: attr.qp_type,
            attributes: Mutex::default(),
            notify,
            pd,
            _xrcd: xrcd.map(|xrcd| Arc::clone(&xrcd.domain)),
            _queues: rss.map(|(queues, _)| queues),
        });
        qp.notify.events.set_element(qp.c.as_ptr());
        Ok(qp)
    }

    /// Changes attributes and state. On any error nothing has changed.
    pub(crate) fn modify(&self, attr: &ibv_qp_attr, mask: u32) -> Result<()> {
        self.pd.context.alive()?;
        if mask & IBV_QP_RATE_LIMIT != 0 {
            // As the kernel says where there is no pacing, whatever else is asked for.
            return Err(libc::EOPNOTSUPP);
        }
        // Held over the engine's call: two threads' changes must not be recorded in another order than made.
        let mut recorded = self.attributes.lock();
        let mask = attr::relevant(self.qp_type, mask);
        let to = attr::check_mask(self.qp_type, self.engine.state() as u32, attr, mask)?;
        attr::check_values(attr, mask)?;
        let change = self.change(attr, mask, to)?;
        let to_sqd = mask & IBV_QP_STATE != 0 && to == IBV_QPS_SQD && self.engine.state() != QpState::Sqd;
        if to_sqd {
            let wanted = mask & IBV_QP_EN_SQD_ASYNC_NOTIFY != 0 && attr.en_sqd_async_notify != 0;
            self.notify.wants_drained.store(wanted, Ordering::Release);
            // Before the change: the event may come within it.
            self.notify.draining.store(true, Ordering::Release);
        }
        self.engine.modify(&change)?;
        if to == IBV_QPS_RESET {
            *recorded = ibv_qp_attr::default();
        }
        if self.qp_type == IBV_QPT_UD && mask & IBV_QP_QKEY != 0 {
            self.pd.note_qkey(attr.qkey);
        }
        record(&mut recorded, attr, mask);
        Ok(())
    }

    /// What the core needs to know of a checked change.
    fn change(&self, attr: &ibv_qp_attr, mask: u32, to: ibv_qp_state) -> Result<QpModify> {
        let given = |bit: u32| mask & bit != 0;
        let addresses = if given(IBV_QP_AV) {
            // Connections are with one peer.
            let to = Addresses::resolve(&self.pd.context.net, &attr.ah_attr)?;
            if to.remote.is_multicast() {
                return Err(libc::EINVAL);
            }
            Some(to)
        } else {
            None
        };
        const REMOTE: u32 = access::REMOTE_WRITE | access::REMOTE_READ | access::REMOTE_ATOMIC;
        Ok(QpModify {
            state: given(IBV_QP_STATE).then(|| state_of(to)),
            access: given(IBV_QP_ACCESS_FLAGS).then_some(attr.qp_access_flags & REMOTE),
            dest_qpn: given(IBV_QP_DEST_QPN).then_some(Qpn(attr.dest_qp_num)),
            remote: addresses.map(|a| a.remote),
            local: addresses.map(|a| a.local),
            qkey: given(IBV_QP_QKEY).then_some(attr.qkey),
            path_mtu: given(IBV_QP_PATH_MTU).then_some(128 << attr.path_mtu),
            timeout: given(IBV_QP_TIMEOUT).then_some(attr.timeout),
            retry_cnt: given(IBV_QP_RETRY_CNT).then_some(attr.retry_cnt),
            rnr_retry: given(IBV_QP_RNR_RETRY).then_some(attr.rnr_retry),
            min_rnr_timer: given(IBV_QP_MIN_RNR_TIMER).then_some(attr.min_rnr_timer),
            max_rd_atomic: given(IBV_QP_MAX_QP_RD_ATOMIC).then_some(attr.max_rd_atomic),
            max_dest_rd_atomic: given(IBV_QP_MAX_DEST_RD_ATOMIC).then_some(attr.max_dest_rd_atomic),
        })
    }

    /// Attaches the QP to the multicast group of a GID; once more changes nothing. EINVAL if it is not UD or the GID is
    /// not a group's, ENOMEM for too many groups.
    pub(crate) fn attach_group(&self, gid: [u8; 16]) -> Result<()> {
        self.engine.attach_group(address_of(gid))
    }

    /// Detaches it. EINVAL if it is not attached.
    pub(crate) fn detach_group(&self, gid: [u8; 16]) -> Result<()> {
        self.engine.detach_group(address_of(gid))
    }

    /// The attributes (all of them) and what the QP was made of.
    pub(crate) fn query(&self) -> (ibv_qp_attr, ibv_qp_init_attr) {
        let mut attr = *self.attributes.lock();
        attr.qp_state = self.engine.state() as u32;
        attr.cur_qp_state = attr.qp_state;
        let draining = attr.qp_state == IBV_QPS_SQD && self.notify.draining.load(Ordering::Acquire);
        attr.sq_draining = u8::from(draining);
        attr.path_mig_state = IBV_MIG_MIGRATED;
        attr.cap = self.cap;
        let mut init = wr::init_attr_of(&self.c);
        init.cap = self.cap;
        init.sq_sig_all = i32::from(self.sq_sig_all);
        (attr, init)
    }

    /// EIO in the child of a fork.
    pub(crate) fn alive(&self) -> Result<()> {
        self.pd.context.alive()
    }

    /// It has the requests that bind and invalidate windows.
    pub(crate) fn has_windows(&self) -> bool {
        matches!(self.qp_type, IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_XRC_SEND)
    }

    /// Another handle of an XRC responder. Asynchronous events go to the first one.
    pub(crate) fn open(
        xrcd: &Xrcd,
        pd: Arc<PdShared>,
        attr: &ibv_qp_open_attr,
        context: *mut ibv_context,
    ) -> Result<Box<Self>> {
        pd.context.alive()?;
        let engine = xrcd.domain.responder(attr.qp_num)?;
        let notify = Arc::new(Notifier::new(&pd.context));
        let c = CPart::new(|c: &mut verbs_qp| {
            let qp = wr::plain_part(c);
            (qp.context, qp.qp_context) = (context, attr.qp_context);
            qp.handle = crate::ffi::next_handle();
            (qp.qp_num, qp.state, qp.qp_type) = (attr.qp_num, engine.state() as u32, IBV_QPT_XRC_RECV);
            (c.xrcd, c.comp_mask) = (attr.xrcd.cast(), VERBS_QP_XRCD);
        });
        c.init_sync();
        let qp = Box::new(Self {
            c,
            builder: LockedCell::new(Builder::default()),
            engine,
            cap: ibv_qp_cap::default(),
            sq_sig_all: false,
            qp_type: IBV_QPT_XRC_RECV,
            attributes: Mutex::default(),
            notify,
            pd,
            _xrcd: Some(Arc::clone(&xrcd.domain)),
            _queues: None,
        });
        qp.notify.events.set_element(qp.c.as_ptr());
        Ok(qp)
    }

    /// Ends the QP; waits for the acknowledgement of delivered events. Then the object may be dropped. An XRC responder
    /// ends with its last handle. EBUSY while it is attached to a multicast group.
    pub(crate) fn destroy(&self) -> Result<()> {
        self.pd.context.alive()?;
        if self.qp_type == IBV_QPT_UD && self.engine.is_attached() {
            return Err(libc::EBUSY);
        }
        if self.qp_type != IBV_QPT_XRC_RECV || Arc::strong_count(&self.engine) == 1 {
            self.pd.context.open.qp_gone(&self.engine);
            self.engine.destroy()?;
        }
        self.c.wait_acks(self.notify.events.close());
        Ok(())
    }
}

/// EOPNOTSUPP for transports and creation features that are not there, EINVAL without a PD.
pub(crate) fn check_features(attr: &ibv_qp_init_attr_ex) -> Result<QpType> {
    const SPREAD: u32 = IBV_QP_INIT_ATTR_RX_HASH | IBV_QP_INIT_ATTR_IND_TABLE;
    const KNOWN: u32 = SPREAD
        | IBV_QP_INIT_ATTR_PD
        | IBV_QP_INIT_ATTR_XRCD
        | IBV_QP_INIT_ATTR_CREATE_FLAGS
        | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let wants_flags = attr.comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && attr.create_flags != 0;
    if attr.comp_mask & !KNOWN != 0 || wants_flags {
        return Err(libc::EOPNOTSUPP);
    }
    // A table and how to use it, both or none, and only for frames.
    let spread = attr.comp_mask & SPREAD;
    if spread != 0 && (spread != SPREAD || attr.qp_type != IBV_QPT_RAW_PACKET) {
        return Err(libc::EINVAL);
    }
    // A responder of XRC is in a domain, all others are in a PD. librdmacm gives it a PD besides, to ask for it again.
    let within = if attr.qp_type == IBV_QPT_XRC_RECV { IBV_QP_INIT_ATTR_XRCD } else { IBV_QP_INIT_ATTR_PD };
    if attr.comp_mask & within == 0 || attr.comp_mask & !within & IBV_QP_INIT_ATTR_XRCD != 0 {
        return Err(libc::EINVAL);
    }
    match attr.qp_type {
        IBV_QPT_RC => Ok(QpType::Rc),
        IBV_QPT_UC => Ok(QpType::Uc),
        IBV_QPT_UD => Ok(QpType::Ud),
        IBV_QPT_RAW_PACKET => Ok(QpType::Raw),
        IBV_QPT_XRC_SEND => Ok(QpType::XrcSend),
        IBV_QPT_XRC_RECV => Ok(QpType::XrcRecv),
        _ => Err(libc::EOPNOTSUPP),
    }
}

/// The sizes granted: what was asked, at least one SGE; a QP on an SRQ has no receive queue of its own.
fn granted(asked: &ibv_qp_cap, has_srq: bool) -> Result<ibv_qp_cap> {
    let (recv_wr, recv_sge) = if has_srq { (0, 0) } else { (asked.max_recv_wr, asked.max_recv_sge.max(1)) };
    let fits = asked.max_send_wr <= MAX_QP_WR
        && recv_wr <= MAX_QP_WR
        && asked.max_send_sge <= MAX_SGE
        && recv_sge <= MAX_SGE
        && asked.max_inline_data <= MAX_INLINE;
    if !fits {
        return Err(libc::EINVAL);
    }
    Ok(ibv_qp_cap {
        max_send_wr: asked.max_send_wr,
        max_recv_wr: recv_wr,
        max_send_sge: asked.max_send_sge.max(1),
        max_recv_sge: recv_sge,
        // A WQE has room for an SGE in any case; rdma_xclient counts on that, as it may on every device it knows.
        max_inline_data: asked.max_inline_data.max(size_of::<ibv_sge>() as u32),
    })
}

/// Remembers the attributes in `mask`.
fn record(to: &mut ibv_qp_attr, from: &ibv_qp_attr, mask: u32) {
    macro_rules! take {
        ($($bit:ident: $($field:ident),+;)*) => { $(
            if mask & $bit != 0 {
                $(to.$field = from.$field;)+
            }
        )* };
    }
    take! {
        IBV_QP_EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify;
        IBV_QP_ACCESS_FLAGS: qp_access_flags;
        IBV_QP_PKEY_INDEX: pkey_index;
        IBV_QP_PORT: port_num;
        IBV_QP_QKEY: qkey;
        IBV_QP_AV: ah_attr;
        IBV_QP_PATH_MTU: path_mtu;
        IBV_QP_TIMEOUT: timeout;
        IBV_QP_RETRY_CNT: retry_cnt;
        IBV_QP_RNR_RETRY: rnr_retry;
        IBV_QP_RQ_PSN: rq_psn;
        IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
        IBV_QP_MIN_RNR_TIMER: min_rnr_timer;
        IBV_QP_SQ_PSN: sq_psn;
        IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        IBV_QP_DEST_QPN: dest_qp_num;
    }
}

fn state_of(state: ibv_qp_state) -> QpState {
    match state {
        IBV_QPS_INIT => QpState::Init,
        IBV_QPS_RTR => QpState::Rtr,
        IBV_QPS_RTS => QpState::Rts,
        IBV_QPS_SQD => QpState::Sqd,
        IBV_QPS_SQE => QpState::Sqe,
        IBV_QPS_ERR => QpState::Err,
        // check_mask let only known states through.
        _ => QpState::Reset,
    }
}

/// Carries the engine's events into the asynchronous channel.
struct Notifier {
    events: Arc<Source<16>>,
    /// SQ_DRAINED was asked for with `en_sqd_async_notify`.
    wants_drained: AtomicBool,
    /// In SQD, and not all that was sent is complete.
    draining: AtomicBool,
}

impl Notifier {
    fn new(context: &Context) -> Self {
        Self {
            events: Source::new(Arc::clone(&context.events)),
            wants_drained: AtomicBool::new(false),
            draining: AtomicBool::new(false),
        }
    }
}

/// What the engine gets; the QP keeps the other reference.
struct NotifierHandle(Arc<Notifier>);

impl engine::QpNotify for NotifierHandle {
    fn event(&self, event: Event) {
        let event_type = match event {
            Event::QpFatal(_) => IBV_EVENT_QP_FATAL,
            Event::QpReqErr(_) => IBV_EVENT_QP_REQ_ERR,
            Event::QpAccessErr(_) => IBV_EVENT_QP_ACCESS_ERR,
            Event::CommEst(_) => IBV_EVENT_COMM_EST,
            Event::LastWqeReached(_) => IBV_EVENT_QP_LAST_WQE_REACHED,
            Event::SqDrained(_) => {
                self.0.draining.store(false, Ordering::Release);
                if !self.0.wants_drained.load(Ordering::Acquire) {
                    return;
                }
                IBV_EVENT_SQ_DRAINED
            }
            // An SRQ has a notifier of its own; the state is kept by the engine.
            Event::SrqLimit(_) | Event::State(..) => return,
        };
        self.0.events.event(event_type);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cap(send_wr: u32, recv_wr: u32, send_sge: u32, recv_sge: u32, inline: u32) -> ibv_qp_cap {
        ibv_qp_cap {
            max_send_wr: send_wr,
            max_recv_wr: recv_wr,
            max_send_sge: send_sge,
            max_recv_sge: recv_sge,
            max_inline_data: inline,
        }
    }

    #[test]
    fn granted_is_at_least_what_was_asked() {
        for asked in [cap(0, 0, 0, 0, 0), cap(1, 2, 3, 4, 512), cap(MAX_QP_WR, MAX_QP_WR, 32, 32, MAX_INLINE)]
        {
            let got = granted(&asked, false).expect("within limits");
            assert_eq!((got.max_send_wr, got.max_recv_wr), (asked.max_send_wr, asked.max_recv_wr));
            assert!(got.max_send_sge >= asked.max_send_sge.max(1));
            assert!(got.max_recv_sge >= asked.max_recv_sge.max(1));
            assert!(got.max_inline_data >= asked.max_inline_data);
        }
    }

    #[test]
    fn granted_refuses_each_size_beyond_its_limit() {
        for asked in [
            cap(MAX_QP_WR + 1, 1, 1, 1, 0),
            cap(1, u32::MAX, 1, 1, 0),
            cap(1, 1, MAX_SGE + 1, 1, 0),
            cap(1, 1, 1, 0xffff, 0),
            cap(1, 1, 1, 1, MAX_INLINE + 1),
        ] {
            assert_eq!(granted(&asked, false).map(|_| ()), Err(libc::EINVAL));
        }
    }

    #[test]
    fn granted_ignores_the_receive_queue_on_an_srq() {
        let got = granted(&cap(4, u32::MAX, 1, u32::MAX, 0), true).expect("receive sizes do not count");
        assert_eq!((got.max_recv_wr, got.max_recv_sge), (0, 0));
    }
}
