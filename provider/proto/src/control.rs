//! The endpoint's control calls: memory regions, shared receive queues, queue pairs and their states, posting.

use crate::connection::responder;
use crate::endpoint::{Endpoint, parts};
use crate::parts::{self, Parts};
use crate::qp::tags::TagList;
use crate::qp::{Qp, RecvQueue, Srq};
use crate::types::*;
use crate::wire;

impl Endpoint {
    /// Registers `len` bytes at `va`, reachable as `iova..iova + len`; gives the key (lkey == rkey), unpredictable
    /// and not soon reused.
    pub fn register_mr(
        &mut self,
        pd: u32,
        va: u64,
        iova: u64,
        len: u64,
        access: u32,
    ) -> Result<u32, Refused> {
        self.mrs.add(pd, va, iova, len, access)
    }
    /// Changes PD, memory (address, address in the iova space, length) or rights behind a key; `None` leaves as is.
    pub fn reregister_mr(
        &mut self,
        key: u32,
        pd: Option<u32>,
        range: Option<(u64, u64, u64)>,
        access: Option<u32>,
    ) -> Result<(), Refused> {
        self.mrs.change(key, pd, range, access)
    }
    /// Registers memory that reads as zeros and takes writes without a trace, for local use.
    pub fn register_null_mr(&mut self, pd: u32) -> Result<u32, Refused> {
        self.mrs.add_null(pd)
    }
    /// Makes a memory window that shows nothing yet; gives its first key.
    pub fn create_window(&mut self, pd: u32, type2: bool) -> Result<u32, Refused> {
        self.mrs.add_window(pd, type2)
    }
    /// Ends the window that this is, or was, a key of.
    pub fn destroy_window(&mut self, key: u32) -> Result<(), Refused> {
        self.mrs.remove_window(key)
    }
    /// The address behind a local SGE, if `rights` are granted there.
    pub fn local_memory(&self, pd: u32, sge: &Sge, rights: u32) -> Option<u64> {
        self.mrs.check(sge.lkey, pd, sge.addr, u64::from(sge.len), rights).map(|m| m.0)
    }
    /// Kills a region's key; when it returns no byte passes any more. Busy while a window is bound to it.
    pub fn deregister_mr(&mut self, key: u32) -> Result<(), Refused> {
        self.mrs.remove(key)
    }
    /// Makes a shared receive queue.
    pub fn create_srq(&mut self, pd: u32, max_wr: u32) -> Result<SrqId, Refused> {
        let (xrcd, cq, ready, tags, queue) = (None, None, true, None, RecvQueue::default());
        Ok(self.srqs.insert(Srq { pd, max_wr, limit: 0, users: 0, xrcd, cq, ready, tags, queue }))
    }
    /// Makes one that serves the XRC connections of a domain; its receives complete on `cq`.
    pub fn create_xrc_srq(&mut self, pd: u32, max_wr: u32, xrcd: u32, cq: CqId) -> Result<SrqId, Refused> {
        let id = self.create_srq(pd, max_wr)?;
        let srq = self.srqs.get_mut(id).ok_or(Refused::NotFound)?;
        (srq.xrcd, srq.cq) = (Some(xrcd), Some(cq));
        Ok(id)
    }
    /// Makes one that matches tags against at most `max_tags` expected messages; its receives complete on `cq`.
    pub fn create_tag_srq(
        &mut self,
        pd: u32,
        max_wr: u32,
        max_tags: u32,
        cq: CqId,
    ) -> Result<SrqId, Refused> {
        let id = self.create_srq(pd, max_wr)?;
        let srq = self.srqs.get_mut(id).ok_or(Refused::NotFound)?;
        (srq.tags, srq.cq) = (Some(TagList::new(max_tags)), Some(cq));
        Ok(id)
    }
    /// Changes the expected messages of a tag matching SRQ; gives the number of one that is added, else 0.
    pub fn post_tag_op(&mut self, srq: SrqId, op: &TagOp, sink: &mut impl Sink) -> Result<u32, Refused> {
        let srq = self.srqs.get_mut(srq).ok_or(Refused::NotFound)?;
        let (Some(list), Some(cq)) = (&mut srq.tags, srq.cq) else { return Err(Refused::Invalid) };
        let mut completion = Completion::new(op.wr_id, WcOpcode::TmSync, Qpn(0));
        let mut number = 0;
        match op.change {
            TagChange::Add(expected) => {
                let (added, in_sync) = list.add(expected, op.heard)?;
                number = added;
                completion.opcode = WcOpcode::TmAdd;
                completion.wc_flags = if in_sync { 0 } else { WC_TM_SYNC_REQ };
            }
            TagChange::Delete(number) => {
                completion.opcode = WcOpcode::TmDel;
                if !list.remove(number) {
                    completion.status = WcStatus::TmErr;
                }
            }
            TagChange::Sync => {}
        }
        if op.sync && !list.sync(op.heard) {
            completion.wc_flags = WC_TM_SYNC_REQ;
        }
        if op.signaled || completion.status != WcStatus::Success {
            sink.complete(cq, &completion);
        }
        Ok(number)
    }
    /// Changes depth and limit (0 disarms) of an SRQ.
    pub fn modify_srq(&mut self, srq: SrqId, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), Refused> {
        let srq = self.srqs.get_mut(srq).ok_or(Refused::NotFound)?;
        if max_wr.is_some_and(|m| (m as usize) < srq.queue.len()) {
            return Err(Refused::Invalid);
        }
        let depth = max_wr.unwrap_or(srq.max_wr);
        if limit.is_some_and(|l| l > depth) {
            return Err(Refused::Invalid);
        }
        srq.max_wr = depth;
        srq.limit = limit.unwrap_or(srq.limit);
        Ok(())
    }
    /// The armed limit of an SRQ (0: none).
    pub fn srq_limit(&self, srq: SrqId) -> Result<u32, Refused> {
        self.srqs.get(srq).map(|s| s.limit).ok_or(Refused::NotFound)
    }
    /// Destroys an SRQ that no QP uses (else Busy).
    pub fn destroy_srq(&mut self, srq: SrqId) -> Result<(), Refused> {
        self.srqs.remove(srq)
    }
    /// Makes a QP in RESET.
    pub fn create_qp(&mut self, init: &QpInit) -> Result<Qpn, Refused> {
        let index = self.qps.claim().ok_or(Refused::Full)?;
        if let Some(id) = init.srq {
            self.srqs.get_mut(id).ok_or(Refused::NotFound)?.users += 1;
        }
        let qpn = Qpn::new(self.config.slot, index);
        self.qps.insert(index, Qp::new(qpn, *init));
        Ok(qpn)
    }
    /// Current state (the core moves a QP to ERR, SQE or from SQD-draining by itself).
    pub fn qp_state(&self, qpn: Qpn) -> Option<QpState> {
        self.qps.peek(qpn).map(|q| q.state)
    }
    /// Changes attributes and state. Flushes go to `sink`.
    pub fn modify_qp(
        &mut self,
        now: Nanos,
        qpn: Qpn,
        change: &QpModify,
        sink: &mut impl Sink,
    ) -> Result<(), Refused> {
        let qp = self.qps.get(qpn).ok_or(Refused::NotFound)?;
        let was = qp.state;
        let to = change.state.unwrap_or(was);
        let connected = qp.init.qp_type.is_connected();
        let a = &mut qp.attrs;
        a.access = change.access.unwrap_or(a.access);
        a.dest_qpn = change.dest_qpn.unwrap_or(a.dest_qpn);
        a.remote = change.remote.or(a.remote);
        a.qkey = change.qkey.unwrap_or(a.qkey);
        a.timeout = change.timeout.unwrap_or(a.timeout);
        a.retry_cnt = change.retry_cnt.unwrap_or(a.retry_cnt);
        a.rnr_retry = change.rnr_retry.unwrap_or(a.rnr_retry);
        a.min_rnr_timer = change.min_rnr_timer.unwrap_or(a.min_rnr_timer);
        a.max_rd_atomic = change.max_rd_atomic.unwrap_or(a.max_rd_atomic);
        a.max_dest_rd_atomic = change.max_dest_rd_atomic.unwrap_or(a.max_dest_rd_atomic);
        match to {
            QpState::Reset => self.reset_qp(now, qpn),
            QpState::Err => {
                let mut p = parts!(self, now, sink);
                p.enter_error(qpn.index() as u16);
            }
            QpState::Rtr if was == QpState::Init && connected => {
                let remote = self.qps.get(qpn).and_then(|q| q.attrs.remote).ok_or(Refused::Invalid)?;
                self.attach(now, qpn, remote)?;
                self.set_state(qpn, to);
            }
            QpState::Rts if was == QpState::Rtr => {
                // A new stream: what is still under way of the QP's former ones never matches it (MR-ADDR-5).
                let life = self.next_life;
                self.next_life = self.next_life.wrapping_add(1);
                if let Some(qp) = self.qps.get(qpn) {
                    qp.tx.life = life;
                }
                self.set_state(qpn, to);
            }
            QpState::Rts => {
                if let Some(qp) = self.qps.get(qpn) {
                    qp.tx.drained = false;
                }
                self.set_state(qpn, to);
                if connected {
                    self.wake(now, qpn, sink);
                } else {
                    self.enqueue_unconnected(qpn);
                }
            }
            QpState::Sqd => {
                self.set_state(qpn, to);
                let Some(qp) = self.qps.get(qpn) else { return Ok(()) };
                if qp.tx.is_drained() && !std::mem::replace(&mut qp.tx.drained, true) {
                    sink.event(Event::SqDrained(qpn));
                }
            }
            _ => self.set_state(qpn, to),
        }
        Ok(())
    }

    fn enqueue_unconnected(&mut self, qpn: Qpn) {
        match self.qps.peek(qpn).map(|q| q.init.qp_type) {
            Some(QpType::Raw) => self.enqueue_raw(qpn),
            _ => self.enqueue_datagrams(qpn),
        }
    }

    fn set_state(&mut self, qpn: Qpn, state: QpState) {
        if let Some(qp) = self.qps.get(qpn) {
            qp.state = state;
        }
    }

    /// RESET: both streams end, what is queued is dropped without completions.
    fn reset_qp(&mut self, now: Nanos, qpn: Qpn) {
        let Some(qp) = self.qps.get(qpn) else { return };
        let conn = qp.tx.conn.take();
        let used = !matches!(qp.state, QpState::Reset | QpState::Init);
        qp.state = QpState::Reset;
        let unanswered = qp.rx.jobs.front().map(|j| (j.msn, j.attempt));
        let (rx_conn, life, src) = (qp.rx.conn, qp.rx.life, qp.attrs.dest_qpn);
        qp.tx = Default::default();
        if used {
            qp.rx.end_of_life();
        }
        qp.rq.give_back(&mut self.srqs, qp.init.srq, true);
        qp.rq = RecvQueue::default();
        // Whoever waits for the answer of a Read must hear that none will come (MR-REFUSE-11).
        if let (Some((msn, attempt)), Some(rx_conn), Some(life)) = (unanswered, rx_conn, life)
            && let Some(conn) = self.conn_mut(rx_conn)
        {
            let refuse = wire::Refuse {
                code: wire::RefuseCode::NotReady,
                attempt,
                qpn: src,
                life,
                number: msn as u32,
                timer: 0,
            };
            responder::refuse(conn, qpn, refuse);
        }
        // Nobody would ask for them later: the peer's messages complete by what is owed now (MR-SACK-4).
        for index in [conn, rx_conn].into_iter().flatten() {
            self.flush_acks_of(now, index);
        }
        if let Some(conn) = conn.and_then(|i| self.conn_mut(i)) {
            conn.users = conn.users.saturating_sub(1);
        }
    }

    /// Destroys a QP; nothing of it completes afterwards. Owed acknowledgements leave with the next bursts.
    pub fn destroy_qp(&mut self, now: Nanos, qpn: Qpn) -> Result<(), Refused> {
        self.qps.get(qpn).ok_or(Refused::NotFound)?;
        self.reset_qp(now, qpn);
        self.mrs.unbind_qp(qpn);
        self.flows.remove_qp(qpn);
        self.groups.remove_qp(qpn);
        let qp = self.qps.remove(qpn).ok_or(Refused::NotFound)?;
        for id in qp.rss.iter().flat_map(|rss| &rss.table) {
            if let Some(queue) = self.srqs.get_mut(*id) {
                queue.users -= 1;
            }
        }
        if let Some(srq) = qp.init.srq.and_then(|s| self.srqs.get_mut(s)) {
            srq.users -= 1;
        }
        Ok(())
    }
    /// A completion queue lost completions: the QPs that complete on it go to ERR.
    pub fn fail_cq(&mut self, now: Nanos, cq: CqId, sink: &mut impl Sink) {
        let on_it = |q: &&mut Qp| q.init.send_cq == cq || q.init.recv_cq == cq;
        let lives = |q: &&mut Qp| !matches!(q.state, QpState::Reset | QpState::Err);
        let hit = self.qps.iter_mut().filter(on_it).filter(lives).map(|q| q.qpn.index() as u16);
        for index in hit.collect::<Vec<_>>() {
            parts!(self, now, sink).enter_error(index);
        }
    }
    /// Takes posted sends over; the batch is emptied. The caller guarantees the queue's depth.
    pub fn post_sends(&mut self, now: Nanos, qpn: Qpn, batch: &mut SendBatch, sink: &mut impl Sink) {
        let Some(qp) = self.qps.get(qpn) else {
            batch.wqes.clear();
            batch.sges.clear();
            batch.inline.clear();
            return;
        };
        if qp.tx.sq.is_empty() {
            qp.tx.stalled_since = now;
        }
        let mut recv_index = qp.tx.post_recv_index;
        qp.tx.sq.push_batch(batch, &mut recv_index);
        qp.tx.post_recv_index = recv_index;
        match qp.state {
            QpState::Err => parts::flush(qp, sink),
            QpState::Sqe => parts::flush_sends(qp, sink),
            _ if !qp.init.qp_type.is_connected() => self.enqueue_unconnected(qpn),
            _ => self.wake(now, qpn, sink),
        }
    }
    /// Takes posted receives over; the batch is emptied.
    pub fn post_recvs(&mut self, now: Nanos, qpn: Qpn, batch: &mut RecvBatch, sink: &mut impl Sink) {
        let Some(qp) = self.qps.get(qpn) else {
            batch.wqes.clear();
            batch.sges.clear();
            return;
        };
        qp.rq.push_batch(batch);
        if qp.state == QpState::Err {
            return parts::flush(qp, sink);
        }
        // A sender that was refused, or has used up what it was told, waits for this (MR-CREDIT-3).
        let starving = qp.rx.starved || qp.rx.told_limit == qp.rq.base();
        let conn = qp.rx.conn.filter(|_| qp.rx.life.is_some() && starving);
        if let Some(mut conn) = conn.and_then(|i| self.conns.get_mut(i as usize)?.take()) {
            if let Some(qp) = self.qps.get(qpn) {
                qp.rx.starved = false;
                conn.enqueue_credit(qp);
                conn.ack.now = true;
            }
            let mut p = parts!(self, now, sink);
            p.activate(&mut conn);
            self.put(conn);
        }
    }
    /// Takes receives posted to an SRQ over; the batch is emptied.
    pub fn post_srq_recvs(&mut self, now: Nanos, srq: SrqId, batch: &mut RecvBatch, sink: &mut impl Sink) {
        let _ = (now, sink);
        match self.srqs.get_mut(srq) {
            Some(srq) => srq.queue.push_batch(batch),
            None => {
                batch.wqes.clear();
                batch.sges.clear();
            }
        }
    }
}
