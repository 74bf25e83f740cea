//! Queue pairs: the stages in which posted work waits for the next step, and the control verbs.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};

use metaroce_proto::steer::Rss;
use metaroce_proto::{
    CqId, Event, QpInit, QpModify, QpState, QpType, Qpn, RecvBatch, RecvWqe, SendBatch, SendWqe, Sge,
    send_flags,
};
use parking_lot::{Mutex, MutexGuard};

use crate::cq::{self, Cq};
use crate::device::Device;
use crate::doorbell::Queue;
use crate::limits::{LAZY_BYTES_MAX, LAZY_DEPTH_MIN, LAZY_STAGE_MAX};
use crate::srq::Srq;
use crate::{Errno, errno_of};

/// Receives asynchronous events of one QP or SRQ; implemented by the verbs edge.
///
/// Called from engine steps, on any thread, with the engine's lock held: must neither block nor call the engine.
pub trait QpNotify: Send + Sync {
    /// Something happened.
    fn event(&self, event: Event);
}

/// What a QP is made of.
pub struct QpCreate {
    /// Transport.
    pub qp_type: QpType,
    /// Protection domain number.
    pub pd: u32,
    /// Where sends complete; none if it sends nothing (XRC).
    pub send_cq: Option<Arc<Cq>>,
    /// Where receives complete; none if it has no receives of its own (XRC).
    pub recv_cq: Option<Arc<Cq>>,
    /// XRC domain (XrcRecv).
    pub xrcd: Option<u32>,
    /// Where receives come from, if not from its own queue.
    pub srq: Option<Arc<Srq>>,
    /// Send queue depth.
    pub max_send_wr: u32,
    /// Receive queue depth.
    pub max_recv_wr: u32,
    /// SGEs per send.
    pub max_send_sge: u32,
    /// SGEs per receive.
    pub max_recv_sge: u32,
    /// Inline bytes per send.
    pub max_inline: u32,
}

/// Number of the CQ that is not there.
const NO_CQ: CqId = CqId::MAX;

/// A queue pair. Dropping it destroys it.
pub struct Qp {
    shared: Arc<QpShared>,
    device: Arc<Device>,
    send_cq: Option<Arc<Cq>>,
    recv_cq: Option<Arc<Cq>>,
    srq: Option<Arc<Srq>>,
    destroyed: AtomicBool,
}

/// The part of a QP that the engine's step knows too.
pub(crate) struct QpShared {
    qpn: Qpn,
    max_send_wr: u32,
    max_recv_wr: u32,
    max_send_sge: u32,
    max_recv_sge: u32,
    max_inline: u32,
    notify: Option<Box<dyn QpNotify>>,
    /// The core's state as far as posting cares: follows modify, and the core's own step into ERR.
    state: AtomicU8,
    send: Mutex<Stage<SendBatch>>,
    /// The thread that holds the send stage's lock between its own calls; 0 when none does.
    batch_of: AtomicI32,
    recv: Mutex<Stage<RecvBatch>>,
}

/// Work posted and not yet taken by a step.
#[derive(Debug, Default)]
pub(crate) struct Stage<B> {
    pub(crate) batch: B,
    /// Requests posted in the life of the queue, wrapping; less the slots released it is the queue's fill.
    pub(crate) posted: u32,
}

impl QpShared {
    pub(crate) fn qpn(&self) -> Qpn {
        self.qpn
    }
    pub(crate) fn set_state(&self, state: QpState) {
        self.state.store(state as u8, Ordering::Relaxed);
    }
    fn state(&self) -> QpState {
        state_from(self.state.load(Ordering::Relaxed))
    }
    pub(crate) fn notify(&self, event: Event) {
        if let Some(notify) = &self.notify {
            notify.event(event);
        }
    }
    /// Swaps what is staged with the empty `batch`; `false` when there was nothing or a poster is at it, who will
    /// ring again.
    pub(crate) fn take_sends(&self, batch: &mut SendBatch) -> bool {
        let Some(mut stage) = self.send.try_lock() else { return false };
        std::mem::swap(&mut stage.batch, batch);
        !batch.wqes.is_empty()
    }
    /// The same for receives.
    pub(crate) fn take_recvs(&self, batch: &mut RecvBatch) -> bool {
        let Some(mut stage) = self.recv.try_lock() else { return false };
        std::mem::swap(&mut stage.batch, batch);
        !batch.wqes.is_empty()
    }
}

impl QpShared {
    /// Runs `f` on the send stage. A batch that the calling thread, or one that has ended, left open keeps the lock:
    /// waiting for it would never end.
    fn with_sends<R>(&self, f: impl FnOnce(&mut Stage<SendBatch>) -> R) -> R {
        loop {
            let owner = self.batch_of.load(Ordering::Relaxed);
            if owner != 0 && (owner == thread_id() || !thread_exists(owner)) {
                // SAFETY: the lock is held by the batch of `owner`, so nobody else is at the stage; `owner` itself is
                // not: it is here, outside of the batch's calls, or gone.
                return f(unsafe { &mut *self.send.data_ptr() });
            }
            // A thread that ends is there for a moment after it was joined: its end is looked for again.
            if let Some(mut stage) = self.send.try_lock_for(OWNER_ENDS_WITHIN) {
                return f(&mut stage);
            }
        }
    }
}

/// How long a stage is waited for before its owner is looked at again.
const OWNER_ENDS_WITHIN: std::time::Duration = std::time::Duration::from_millis(5);

/// The kernel's number of the calling thread, remembered.
fn thread_id() -> i32 {
    thread_local! {
        // SAFETY: gettid has no conditions.
        static ID: i32 = unsafe { libc::gettid() };
    }
    ID.try_with(|id| *id).unwrap_or(0)
}

fn thread_exists(id: i32) -> bool {
    // SAFETY: signal 0 is sent to nobody.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), id, 0) == 0 }
}

impl Qp {
    pub(crate) fn create(
        device: &Arc<Device>,
        init: &QpCreate,
        notify: Option<Box<dyn QpNotify>>,
    ) -> Result<Arc<Qp>, Errno> {
        let engine = device.engine();
        engine.ensure_thread()?;
        let core_init = QpInit {
            qp_type: init.qp_type,
            pd: init.pd,
            send_cq: init.send_cq.as_ref().map_or(NO_CQ, |cq| cq.shared().id()),
            recv_cq: init.recv_cq.as_ref().map_or(NO_CQ, |cq| cq.shared().id()),
            srq: init.srq.as_ref().map(|srq| srq.id()),
            xrcd: init.xrcd,
            max_send_wr: init.max_send_wr,
            max_recv_wr: init.max_recv_wr,
            max_send_sge: init.max_send_sge,
            max_recv_sge: init.max_recv_sge,
            max_inline: init.max_inline,
        };
        let shared = engine.control(|core, _| {
            let qpn = core.io(engine)?.endpoint.create_qp(&core_init).map_err(errno_of)?;
            engine.depths.attach(qpn, core_init.srq);
            let shared = Arc::new(QpShared {
                qpn,
                max_send_wr: init.max_send_wr,
                max_recv_wr: init.max_recv_wr,
                max_send_sge: init.max_send_sge,
                max_recv_sge: init.max_recv_sge,
                max_inline: init.max_inline,
                notify,
                state: AtomicU8::new(QpState::Reset as u8),
                // The counters of the index go on from its former life.
                send: Mutex::new(Stage { posted: engine.depths.sends_released(qpn), ..Stage::default() }),
                batch_of: AtomicI32::new(0),
                recv: Mutex::new(Stage { posted: engine.depths.recvs_released(qpn), ..Stage::default() }),
            });
            core.out.add_qp(shared.clone());
            init.send_cq.iter().chain(&init.recv_cq).for_each(|cq| cq.shared().add_user());
            Ok(shared)
        })?;
        Ok(Arc::new(Qp {
            shared,
            device: device.clone(),
            send_cq: init.send_cq.clone(),
            recv_cq: init.recv_cq.clone(),
            srq: init.srq.clone(),
            destroyed: AtomicBool::new(false),
        }))
    }

    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.shared.qpn
    }

    /// Its state; cheap. The core's own step into ERR shows as soon as its completion or event is raised.
    pub fn state(&self) -> QpState {
        self.shared.state()
    }

    /// Spreads the frames of a raw packet QP over work queues, which must outlive it.
    pub fn set_rss(&self, rss: Rss) -> Result<(), Errno> {
        self.device.engine().control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            io.endpoint.set_rss(self.qpn(), rss).map_err(errno_of)
        })
    }

    /// Changes attributes and state; what was posted before is taken into account first. The caller has checked the
    /// transition. RESET drops what is queued and the QP's completions.
    pub fn modify(&self, change: &QpModify) -> Result<(), Errno> {
        let engine = self.device.engine();
        let qpn = self.shared.qpn;
        engine.control(|core, now| {
            let core_io = core.io.as_mut().ok_or(libc::EINVAL)?;
            core_io.endpoint.modify_qp(now, qpn, change, &mut core.out).map_err(errno_of)?;
            if change.state == Some(QpState::Reset) {
                self.forget_posted(&mut core.out);
            }
            if let Some(state) = core_io.endpoint.qp_state(qpn) {
                self.shared.set_state(state);
            }
            Ok(())
        })
    }

    /// Attaches the QP (UD) to a multicast group; once more changes nothing. EINVAL for what is no group or no such QP,
    /// ENOMEM when there are too many groups, EOPNOTSUPP where the network has no multicast; others from the kernel.
    pub fn attach_group(&self, group: IpAddr) -> Result<(), Errno> {
        let engine = self.device.engine();
        engine.control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            let had = io.endpoint.is_member(self.qpn(), group);
            io.endpoint.attach_group(self.qpn(), group).map_err(errno_of)?;
            io.follow_groups(engine).inspect_err(|_| {
                if !had {
                    let _ = io.endpoint.detach_group(self.qpn(), group);
                }
            })
        })
    }

    /// Detaches the QP from a multicast group. EINVAL if it is not attached.
    pub fn detach_group(&self, group: IpAddr) -> Result<(), Errno> {
        let engine = self.device.engine();
        engine.control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            io.endpoint.detach_group(self.qpn(), group).map_err(errno_of)?;
            // It is detached, whatever becomes of the other groups.
            let _ = io.follow_groups(engine);
            Ok(())
        })
    }

    /// The QP is attached to a multicast group.
    pub fn is_attached(&self) -> bool {
        let attached = self
            .device
            .engine()
            .control(|core, _| Ok(core.io.as_ref().is_some_and(|io| io.endpoint.is_attached(self.qpn()))));
        attached == Ok(true)
    }

    /// Destroys the QP; nothing of it completes or is called any more when this returns, and its completions are
    /// gone from its CQs. A second call does nothing.
    pub fn destroy(&self) -> Result<(), Errno> {
        let engine = self.device.engine();
        let qpn = self.shared.qpn;
        engine.control(|core, now| {
            if self.destroyed.swap(true, Ordering::Relaxed) {
                return Ok(());
            }
            if let Some(io) = core.io.as_mut() {
                let attached = io.endpoint.is_attached(qpn);
                io.endpoint.destroy_qp(now, qpn).map_err(errno_of)?;
                if attached {
                    let _ = io.follow_groups(engine);
                }
            }
            core.out.remove_qp(qpn);
            self.forget_posted(&mut core.out);
            self.send_cq.iter().chain(&self.recv_cq).for_each(|cq| cq.shared().remove_user());
            self.shared.set_state(QpState::Reset);
            Ok(())
        })
    }

    /// Drops what is staged and the completions that wait to be polled, and gives all slots back.
    fn forget_posted(&self, out: &mut crate::outbox::Outbox) {
        let qpn = self.shared.qpn;
        let depths = &self.device.engine().depths;
        // Entries of this very step are not shown yet; the purge wants all of them shown.
        out.publish(self.device.engine());
        // A CQ that is both is purged twice, which does no harm.
        let cqs = self.send_cq.iter().chain(&self.recv_cq);
        let recv_slots = cqs.map(|cq| cq::purge(out, cq.shared(), qpn)).sum();
        if self.srq.is_some() {
            depths.release_recv(qpn, recv_slots);
        }
        self.shared.with_sends(|send| {
            clear_sends(&mut send.batch);
            send.posted = depths.sends_released(qpn);
        });
        let mut recv = self.shared.recv.lock();
        recv.batch.wqes.clear();
        recv.batch.sges.clear();
        recv.posted = depths.recvs_released(qpn);
    }

    /// Begins posting sends: locks the send stage until [`SendPost::commit`], [`SendPost::discard`] or drop, which
    /// commits.
    pub fn send(&self) -> SendPost<'_> {
        // In the child of a fork the lock may belong to a thread that is not there.
        let stage = (!self.device.engine().is_dead()).then(|| self.shared.send.lock());
        let mark = stage.as_ref().map_or(Mark::default(), |s| Mark::of(&s.batch));
        SendPost { qp: self, stage, mark, batch: false }
    }

    /// As [`Qp::send`], to be held over several calls of the application. The QP can be reset and destroyed meanwhile
    /// by the calling thread; what was pushed is taken back then.
    pub fn send_batch(&self) -> SendPost<'_> {
        let mut post = self.send();
        if post.stage.is_some() {
            self.shared.batch_of.store(thread_id(), Ordering::Relaxed);
            post.batch = true;
        }
        post
    }

    /// Posts one receive. ENOMEM when the queue is full, EINVAL with too many SGEs, in RESET or on an SRQ.
    pub fn post_recv(&self, wr_id: u64, sges: impl ExactSizeIterator<Item = Sge>) -> Result<(), Errno> {
        let mut post = self.recv();
        post.push(wr_id, sges)
    }

    /// Begins posting receives: locks the receive stage until drop, which hands them over.
    pub fn recv(&self) -> RecvPost<'_> {
        let stage = (!self.device.engine().is_dead()).then(|| self.shared.recv.lock());
        RecvPost { qp: self, stage }
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

/// A chain of sends being posted; holds the lock of the QP's send stage.
pub struct SendPost<'a> {
    qp: &'a Qp,
    /// `None` in the child of a fork.
    stage: Option<MutexGuard<'a, Stage<SendBatch>>>,
    mark: Mark,
    /// `batch_of` says whose it is.
    batch: bool,
}

/// Where the batch stood when posting began.
#[derive(Debug, Clone, Copy, Default)]
struct Mark {
    wqes: usize,
    sges: usize,
    inline: usize,
}

impl Mark {
    fn of(batch: &SendBatch) -> Mark {
        Mark { wqes: batch.wqes.len(), sges: batch.sges.len(), inline: batch.inline.len() }
    }
}

impl SendPost<'_> {
    /// Adds a request with SGEs. ENOMEM when the queue is full; EINVAL with too many SGEs or when the QP's state
    /// does not allow sending.
    pub fn push(&mut self, mut wqe: SendWqe, sges: impl ExactSizeIterator<Item = Sge>) -> Result<(), Errno> {
        let count = sges.len();
        if count > self.qp.shared.max_send_sge as usize {
            return Err(libc::EINVAL);
        }
        let stage = self.room()?;
        wqe.num_sge = count as u8;
        stage.batch.sges.extend(sges);
        stage.batch.wqes.push(wqe);
        stage.posted = stage.posted.wrapping_add(1);
        Ok(())
    }

    /// Adds a request whose payload is copied now. EINVAL when it is longer than the QP's max_inline.
    pub fn push_inline<'a>(
        &mut self,
        mut wqe: SendWqe,
        parts: impl Iterator<Item = &'a [u8]>,
    ) -> Result<(), Errno> {
        let max = self.qp.shared.max_inline as usize;
        let stage = self.room()?;
        let start = stage.batch.inline.len();
        for part in parts {
            if stage.batch.inline.len() - start + part.len() > max {
                stage.batch.inline.truncate(start);
                return Err(libc::EINVAL);
            }
            stage.batch.inline.extend_from_slice(part);
        }
        wqe.flags |= send_flags::INLINE;
        wqe.num_sge = 0;
        wqe.inline_len = (stage.batch.inline.len() - start) as u16;
        wqe.length = u32::from(wqe.inline_len);
        stage.batch.wqes.push(wqe);
        stage.posted = stage.posted.wrapping_add(1);
        Ok(())
    }

    /// Hands the requests over and drives the engine.
    pub fn commit(self) {}

    /// Takes back what was pushed since posting began.
    pub fn discard(mut self) {
        let mark = self.mark;
        if let Some(stage) = &mut self.stage {
            // Less may be there than was pushed, if the QP was reset meanwhile.
            let taken_back = stage.batch.wqes.len().saturating_sub(mark.wqes);
            stage.posted = stage.posted.wrapping_sub(taken_back as u32);
            stage.batch.wqes.truncate(mark.wqes);
            stage.batch.sges.truncate(mark.sges);
            stage.batch.inline.truncate(mark.inline);
        }
    }

    /// The stage, if the QP may send and its queue has room.
    fn room(&mut self) -> Result<&mut Stage<SendBatch>, Errno> {
        let qp = &self.qp.shared;
        let stage = self.stage.as_deref_mut().ok_or(libc::EIO)?;
        if !matches!(qp.state(), QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err) {
            return Err(libc::EINVAL);
        }
        let released = self.qp.device.engine().depths.sends_released(qp.qpn);
        if stage.posted.wrapping_sub(released) >= qp.max_send_wr {
            return Err(libc::ENOMEM);
        }
        Ok(stage)
    }
}

impl Drop for SendPost<'_> {
    fn drop(&mut self) {
        let Some(stage) = self.stage.take() else { return };
        if self.batch {
            // Before the lock is given back: the next batch is another's.
            self.qp.shared.batch_of.store(0, Ordering::Relaxed);
        }
        // Also when nothing was pushed: a step that found the stage locked left others' work behind.
        let Some(last) = stage.batch.wqes.last() else { return };
        let engine = self.qp.device.engine();
        let qpn = self.qp.shared.qpn;
        let deep = stage.posted.wrapping_sub(engine.depths.sends_released(qpn)) >= LAZY_DEPTH_MIN;
        let small = last.length <= LAZY_BYTES_MAX && last.dest.is_none();
        let lazy = deep && small && stage.batch.wqes.len() < LAZY_STAGE_MAX;
        drop(stage);
        if lazy {
            engine.ring_lazily(Queue::Send, qpn.index());
        } else {
            engine.ring(Queue::Send, qpn.index());
        }
    }
}

/// A chain of receives being posted; holds the lock of the QP's receive stage.
pub struct RecvPost<'a> {
    qp: &'a Qp,
    /// `None` in the child of a fork.
    stage: Option<MutexGuard<'a, Stage<RecvBatch>>>,
}

impl RecvPost<'_> {
    /// Adds a receive. Errors as [`Qp::post_recv`].
    pub fn push(&mut self, wr_id: u64, sges: impl ExactSizeIterator<Item = Sge>) -> Result<(), Errno> {
        let qp = &self.qp.shared;
        let stage = self.stage.as_deref_mut().ok_or(libc::EIO)?;
        let count = sges.len();
        if self.qp.srq.is_some() || count > qp.max_recv_sge as usize || qp.state() == QpState::Reset {
            return Err(libc::EINVAL);
        }
        let released = self.qp.device.engine().depths.recvs_released(qp.qpn);
        if stage.posted.wrapping_sub(released) >= qp.max_recv_wr {
            return Err(libc::ENOMEM);
        }
        stage.batch.sges.extend(sges);
        stage.batch.wqes.push(RecvWqe { wr_id, num_sge: count as u8 });
        stage.posted = stage.posted.wrapping_add(1);
        Ok(())
    }
}

impl Drop for RecvPost<'_> {
    fn drop(&mut self) {
        let Some(stage) = self.stage.take() else { return };
        let has_work = !stage.batch.wqes.is_empty();
        drop(stage);
        if has_work {
            self.qp.device.engine().ring(Queue::Recv, self.qp.shared.qpn.index());
        }
    }
}

fn clear_sends(batch: &mut SendBatch) {
    batch.wqes.clear();
    batch.sges.clear();
    batch.inline.clear();
}

fn state_from(value: u8) -> QpState {
    const ALL: [QpState; 7] =
        [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Err];
    ALL.get(usize::from(value)).copied().unwrap_or_default()
}
