//! `ibv_advise_mr`: memory brought in before it is needed. Transfers fault pages in by themselves; this only saves them
//! the wait.

use metaroce_proto::types::{Sge, access};
use rdma_core_sys::*;

use crate::chain;
use crate::ffi::Result;
use crate::pages::{populate, will_need};
use crate::pd::Pd;

/// EFAULT when an SGE is not within a region of the PD with the rights the advice implies, or (with FLUSH) when its
/// memory is not there; EINVAL for unknown flags, EOPNOTSUPP for unknown advice.
pub(crate) fn advise(pd: &Pd, advice: u32, flags: u32, sges: &[ibv_sge]) -> Result<()> {
    if flags & !IB_UVERBS_ADVISE_MR_FLAG_FLUSH != 0 {
        return Err(libc::EINVAL);
    }
    let write = advice == IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE;
    let known = write
        || advice == IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH
        || advice == IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT;
    if !known {
        return Err(libc::EOPNOTSUPP);
    }
    let rights = if write { access::LOCAL_WRITE } else { 0 };
    let device = &pd.shared.context.device;
    let find = |sge: &Sge| device.local_memory(pd.shared.number, sge, rights).ok_or(libc::EFAULT);
    for sge in sges.iter().map(chain::sge) {
        find(&sge)?;
    }
    if advice == IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT {
        // What is there is there: nothing has to be entered into the tables of a device.
        return Ok(());
    }
    for sge in sges.iter().map(chain::sge).filter(|sge| sge.len > 0) {
        let va = find(&sge)?;
        if flags & IB_UVERBS_ADVISE_MR_FLAG_FLUSH != 0 {
            populate(va, u64::from(sge.len), write)?;
        } else {
            will_need(va, u64::from(sge.len));
        }
    }
    Ok(())
}
