//! Work queues and the tables that spread the frames of a raw packet QP over them.

use std::sync::Arc;

use metaroce_engine as engine;
use metaroce_proto::steer::{Rss, hashed};
use parking_lot::Mutex;
use rdma_core_sys::*;

use crate::cq::Cq;
use crate::ffi::{CPart, Object, Result, next_handle};
use crate::limits::{MAX_RWQ_TABLE, MAX_SRQ_SGE, MAX_SRQ_WR};
use crate::pd::{Pd, PdShared};

/// Key of the Toeplitz hash, bytes.
const KEY_LEN: usize = 40;
/// Fields the hash can take.
pub(crate) const HASHED: u64 = hashed::SRC_V4
    | hashed::DST_V4
    | hashed::SRC_V6
    | hashed::DST_V6
    | hashed::SRC_PORT_TCP
    | hashed::DST_PORT_TCP
    | hashed::SRC_PORT_UDP
    | hashed::DST_PORT_UDP;

/// A work queue.
#[repr(C)]
pub(crate) struct Wq {
    c: CPart<ibv_wq>,
    pub(crate) engine: Arc<engine::Srq>,
    state: Mutex<ibv_wq_state>,
    pd: Arc<PdShared>,
}

// SAFETY: repr(C), the C part is first and is an ibv_wq.
unsafe impl Object for Wq {
    type C = ibv_wq;
}

/// The queues of a table.
pub(crate) type Queues = Arc<Vec<Arc<engine::Srq>>>;

/// A table of work queues.
#[repr(C)]
pub(crate) struct IndTable {
    _c: CPart<ibv_rwq_ind_table>,
    pub(crate) queues: Queues,
}

// SAFETY: repr(C), the C part is first and is an ibv_rwq_ind_table.
unsafe impl Object for IndTable {
    type C = ibv_rwq_ind_table;
}

impl Wq {
    /// EINVAL beyond the device's limits, EOPNOTSUPP for creation flags. libibverbs fills mutex and condition.
    pub(crate) fn create(
        pd: &Pd,
        cq: &Cq,
        attr: &ibv_wq_init_attr,
        fill: impl FnOnce(&mut ibv_wq),
    ) -> Result<Box<Self>> {
        let flags = attr.comp_mask & IBV_WQ_INIT_ATTR_FLAGS != 0 && attr.create_flags != 0;
        if attr.comp_mask & !IBV_WQ_INIT_ATTR_FLAGS != 0 || flags {
            return Err(libc::EOPNOTSUPP);
        }
        let sized = (1..=MAX_SRQ_WR).contains(&attr.max_wr) && attr.max_sge <= MAX_SRQ_SGE;
        if attr.wq_type != IBV_WQT_RQ || !sized {
            return Err(libc::EINVAL);
        }
        let pd = Arc::clone(&pd.shared);
        let sizes = (attr.max_wr, attr.max_sge.max(1));
        let engine = pd.context.device.create_work_queue(pd.number, sizes, &cq.engine)?;
        let c = CPart::new(|wq: &mut ibv_wq| {
            (wq.wq_num, wq.handle) = (engine.id(), next_handle());
            (wq.state, wq.wq_type) = (IBV_WQS_RESET, IBV_WQT_RQ);
            fill(wq);
        });
        Ok(Box::new(Self { c, engine, state: Mutex::new(IBV_WQS_RESET), pd }))
    }

    /// Changes the state: from RESET to RDY, from any to ERR (what is posted is flushed) or RESET. EINVAL for others.
    pub(crate) fn modify(&self, attr: &ibv_wq_attr) -> Result<()> {
        const KNOWN: u32 = IBV_WQ_ATTR_STATE | IBV_WQ_ATTR_CURR_STATE;
        if attr.attr_mask & !KNOWN != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        self.pd.context.alive()?;
        let mut state = self.state.lock();
        let assumed = attr.attr_mask & IBV_WQ_ATTR_CURR_STATE == 0 || attr.curr_wq_state == *state;
        let to = if attr.attr_mask & IBV_WQ_ATTR_STATE != 0 { attr.wq_state } else { *state };
        let legal = match to {
            IBV_WQS_RDY => *state != IBV_WQS_ERR,
            IBV_WQS_ERR | IBV_WQS_RESET => true,
            _ => false,
        };
        if !assumed || !legal {
            return Err(libc::EINVAL);
        }
        let ends = to != IBV_WQS_RDY && *state == IBV_WQS_RDY;
        self.engine.set_ready(to == IBV_WQS_RDY, ends)?;
        *state = to;
        self.c.fill(|wq| wq.state = to);
        Ok(())
    }

    /// EBUSY while a table has it.
    pub(crate) fn destroy(&self) -> Result<()> {
        if Arc::strong_count(&self.engine) > 1 {
            return Err(libc::EBUSY);
        }
        self.engine.destroy()
    }
}

impl IndTable {
    /// EINVAL for a table that is too large or unknown attributes.
    pub(crate) fn create<'a>(
        context: *mut ibv_context,
        attr: &ibv_rwq_ind_table_init_attr,
        queues: impl Iterator<Item = Result<&'a Wq>>,
    ) -> Result<Box<Self>> {
        if attr.comp_mask != 0 || attr.log_ind_tbl_size > MAX_RWQ_TABLE.ilog2() {
            return Err(libc::EINVAL);
        }
        let queues = queues.map(|wq| wq.map(|wq| Arc::clone(&wq.engine))).collect::<Result<Vec<_>>>()?;
        let _c = CPart::new(|table: &mut ibv_rwq_ind_table| {
            let handle = next_handle();
            (table.context, table.ind_tbl_handle, table.ind_tbl_num) =
                (context, handle as i32, handle as i32);
        });
        Ok(Box::new(Self { _c, queues: Arc::new(queues) }))
    }

    /// EBUSY while a QP has it.
    pub(crate) fn check_unused(&self) -> Result<()> {
        if Arc::strong_count(&self.queues) > 1 { Err(libc::EBUSY) } else { Ok(()) }
    }
}

/// How the frames of a QP are spread: EOPNOTSUPP for another hash or fields, EINVAL for another length of key or
/// combinations the API excludes.
pub(crate) fn spread(queues: &Queues, function: u8, key: &[u8], fields: u64) -> Result<Rss> {
    let both = |a: u64, b: u64| fields & a != 0 && fields & b != 0;
    let ips = both(hashed::SRC_V4 | hashed::DST_V4, hashed::SRC_V6 | hashed::DST_V6);
    let ports =
        both(hashed::SRC_PORT_TCP | hashed::DST_PORT_TCP, hashed::SRC_PORT_UDP | hashed::DST_PORT_UDP);
    if u32::from(function) != IBV_RX_HASH_FUNC_TOEPLITZ || fields & !HASHED != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let key = <[u8; KEY_LEN]>::try_from(key).map_err(|_| libc::EINVAL)?;
    if ips || ports {
        return Err(libc::EINVAL);
    }
    Ok(Rss { table: queues.iter().map(|queue| queue.id()).collect(), key, fields })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_checks_hash_key_and_fields() {
        let queues = Queues::default();
        let toeplitz = IBV_RX_HASH_FUNC_TOEPLITZ as u8;
        let ask = |function, len, fields| spread(&queues, function, &vec![7; len], fields).map(|_| ());
        assert_eq!(ask(toeplitz, 40, hashed::SRC_V4 | hashed::DST_PORT_UDP), Ok(()));
        assert_eq!(ask(2, 40, 0), Err(libc::EOPNOTSUPP));
        assert_eq!(ask(toeplitz, 40, 1 << 31), Err(libc::EOPNOTSUPP));
        assert_eq!(ask(toeplitz, 39, 0), Err(libc::EINVAL));
        assert_eq!(ask(toeplitz, 40, hashed::SRC_V4 | hashed::DST_V6), Err(libc::EINVAL));
        assert_eq!(ask(toeplitz, 40, hashed::SRC_PORT_TCP | hashed::SRC_PORT_UDP), Err(libc::EINVAL));
    }
}
