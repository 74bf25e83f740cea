//! Shared receive queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use metaroce_proto::{Event, RecvBatch, RecvWqe, Sge, SrqId, TagOp};
use parking_lot::{Mutex, MutexGuard};

use crate::cq::Cq;
use crate::device::Device;
use crate::doorbell::Queue;
use crate::limits::SRQS_MAX;
use crate::qp::{QpNotify, Stage};
use crate::{Errno, errno_of};

/// What a receive queue is for.
pub(crate) enum Kind {
    /// QPs share it.
    Basic,
    /// The XRC connections of a domain share it; its receives complete on the CQ.
    Xrc(u32, Arc<Cq>),
    /// It matches tags against at most so many expected messages; its receives complete on the CQ.
    Tags(u32, Arc<Cq>),
    /// Frames are spread over it and others; its receives complete on the CQ.
    Work(Arc<Cq>),
}

impl Kind {
    fn cq(&self) -> Option<&Arc<Cq>> {
        match self {
            Kind::Basic => None,
            Kind::Xrc(_, cq) | Kind::Tags(_, cq) | Kind::Work(cq) => Some(cq),
        }
    }
}

/// A shared receive queue. Dropping it destroys it if no QP uses it.
pub struct Srq {
    shared: Arc<SrqShared>,
    device: Arc<Device>,
    max_sge: u32,
    /// Where the receives of an XRC SRQ complete.
    cq: Option<Arc<Cq>>,
    destroyed: AtomicBool,
}

/// The part of an SRQ that the engine's step knows too.
pub(crate) struct SrqShared {
    id: SrqId,
    notify: Option<Box<dyn QpNotify>>,
    max_wr: AtomicU32,
    stage: Mutex<Stage<RecvBatch>>,
}

impl SrqShared {
    pub(crate) fn id(&self) -> SrqId {
        self.id
    }
    pub(crate) fn notify(&self, event: Event) {
        if let Some(notify) = &self.notify {
            notify.event(event);
        }
    }
    /// Swaps what is staged with the empty `batch`; `false` when there was nothing or a poster is at it, who will
    /// ring again.
    pub(crate) fn take_recvs(&self, batch: &mut RecvBatch) -> bool {
        let Some(mut stage) = self.stage.try_lock() else { return false };
        std::mem::swap(&mut stage.batch, batch);
        !batch.wqes.is_empty()
    }
}

impl Srq {
    pub(crate) fn create(
        device: &Arc<Device>,
        pd: u32,
        max_wr: u32,
        max_sge: u32,
        kind: Kind,
        notify: Option<Box<dyn QpNotify>>,
    ) -> Result<Arc<Srq>, Errno> {
        let engine = device.engine();
        let shared = engine.control(|core, _| {
            let endpoint = &mut core.io(engine)?.endpoint;
            let id = match &kind {
                Kind::Basic => endpoint.create_srq(pd, max_wr),
                Kind::Xrc(domain, cq) => endpoint.create_xrc_srq(pd, max_wr, *domain, cq.shared().id()),
                Kind::Tags(tags, cq) => endpoint.create_tag_srq(pd, max_wr, *tags, cq.shared().id()),
                Kind::Work(cq) => endpoint.create_work_queue(pd, max_wr, cq.shared().id()),
            };
            let id = id.map_err(errno_of)?;
            if id as usize >= SRQS_MAX {
                endpoint.destroy_srq(id).map_err(errno_of)?;
                return Err(libc::ENOMEM);
            }
            let shared = Arc::new(SrqShared {
                id,
                notify,
                max_wr: AtomicU32::new(max_wr),
                // The counter of the number goes on from its former life.
                stage: Mutex::new(Stage { posted: engine.depths.srq_released(id), ..Stage::default() }),
            });
            core.out.add_srq(shared.clone());
            kind.cq().iter().for_each(|cq| cq.shared().add_user());
            Ok(shared)
        })?;
        let cq = kind.cq().cloned();
        Ok(Arc::new(Srq { shared, device: device.clone(), max_sge, cq, destroyed: AtomicBool::new(false) }))
    }

    /// Changes the expected messages of a tag matching SRQ; gives the number of one that is added, else 0.
    pub fn post_tag_op(&self, op: &TagOp) -> Result<u32, Errno> {
        self.device.engine().control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            io.endpoint.post_tag_op(self.id(), op, &mut core.out).map_err(errno_of)
        })
    }

    /// Of a work queue: it takes frames, or not; `flush` also ends what is posted, with WR_FLUSH_ERR.
    pub fn set_ready(&self, ready: bool, flush: bool) -> Result<(), Errno> {
        self.device.engine().control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            io.endpoint.set_work_queue(self.id(), ready, flush, &mut core.out).map_err(errno_of)
        })
    }

    /// Its number.
    pub fn id(&self) -> SrqId {
        self.shared.id
    }

    /// Posts one receive. ENOMEM when the queue is full, EINVAL with too many SGEs.
    pub fn post_recv(&self, wr_id: u64, sges: impl ExactSizeIterator<Item = Sge>) -> Result<(), Errno> {
        self.recv().push(wr_id, sges)
    }

    /// Begins posting receives: locks the stage until drop, which hands them over.
    pub fn recv(&self) -> SrqPost<'_> {
        let stage = (!self.device.engine().is_dead()).then(|| self.shared.stage.lock());
        SrqPost { srq: self, stage }
    }

    /// Changes the depth and the limit below which `SRQ_LIMIT_REACHED` is raised (0 disarms). EINVAL when the depth
    /// is below what is posted or the limit above the depth.
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), Errno> {
        self.device.engine().control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            io.endpoint.modify_srq(self.id(), max_wr, limit).map_err(errno_of)?;
            if let Some(max_wr) = max_wr {
                self.shared.max_wr.store(max_wr, Ordering::Relaxed);
            }
            Ok(())
        })
    }

    /// The limit as armed; 0 when there is none or it was reached.
    pub fn limit(&self) -> u32 {
        let limit = self.device.engine().control(|core, _| {
            let io = core.io.as_mut().ok_or(libc::EINVAL)?;
            io.endpoint.srq_limit(self.id()).map_err(errno_of)
        });
        limit.unwrap_or(0)
    }

    /// Ends the SRQ. EBUSY while QPs use it. A second call does nothing.
    pub fn destroy(&self) -> Result<(), Errno> {
        self.device.engine().control(|core, _| {
            if self.destroyed.load(Ordering::Relaxed) {
                return Ok(());
            }
            if let Some(io) = core.io.as_mut() {
                io.endpoint.destroy_srq(self.id()).map_err(errno_of)?;
            }
            self.destroyed.store(true, Ordering::Relaxed);
            self.cq.iter().for_each(|cq| cq.shared().remove_user());
            core.out.remove_srq(self.id());
            Ok(())
        })
    }
}

impl Drop for Srq {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

/// A chain of receives being posted; holds the lock of the SRQ's stage.
pub struct SrqPost<'a> {
    srq: &'a Srq,
    /// `None` in the child of a fork.
    stage: Option<MutexGuard<'a, Stage<RecvBatch>>>,
}

impl SrqPost<'_> {
    /// Adds a receive. Errors as [`Srq::post_recv`].
    pub fn push(&mut self, wr_id: u64, sges: impl ExactSizeIterator<Item = Sge>) -> Result<(), Errno> {
        let stage = self.stage.as_deref_mut().ok_or(libc::EIO)?;
        let count = sges.len();
        if count > self.srq.max_sge as usize {
            return Err(libc::EINVAL);
        }
        let released = self.srq.device.engine().depths.srq_released(self.srq.id());
        if stage.posted.wrapping_sub(released) >= self.srq.shared.max_wr.load(Ordering::Relaxed) {
            return Err(libc::ENOMEM);
        }
        stage.batch.sges.extend(sges);
        stage.batch.wqes.push(RecvWqe { wr_id, num_sge: count as u8 });
        stage.posted = stage.posted.wrapping_add(1);
        Ok(())
    }
}

impl Drop for SrqPost<'_> {
    fn drop(&mut self) {
        let Some(stage) = self.stage.take() else { return };
        let has_work = !stage.batch.wqes.is_empty();
        drop(stage);
        if has_work {
            self.srq.device.engine().ring(Queue::Srq, self.srq.id() as usize);
        }
    }
}
