//! The `extern "C"` functions of memory: regions, windows, device memory, imports. As in `entry.rs`: no logic.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use rdma_core_sys::private::verbs_mr;
use rdma_core_sys::*;

use crate::chain::sge_list;
use crate::dm::Dm;
use crate::ffi::{context, inherited_context, object, publish, reclaim, set_errno, verb, verb_ptr};
use crate::mr::Mr;
use crate::mw::Mw;
use crate::pd::Pd;
use crate::qp::Qp;
use crate::{advise, chain};

pub(super) unsafe extern "C" fn reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: module comment.
    verb_ptr("ibv_reg_mr", || unsafe {
        Ok(publish(Mr::register(object(pd)?, addr as u64, length as u64, iova, access as u32)?))
    })
}

pub(super) unsafe extern "C" fn dereg_mr(mr: *mut verbs_mr) -> c_int {
    // SAFETY: module comment; verbs_mr begins with ibv_mr.
    verb("ibv_dereg_mr", || unsafe {
        object::<Mr>(mr.cast())?.deregister()?;
        drop(reclaim::<Mr>(mr.cast()));
        Ok(())
    })
}

pub(super) unsafe extern "C" fn rereg_mr(
    mr: *mut verbs_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> c_int {
    // SAFETY: module comment; verbs_mr begins with ibv_mr.
    verb("ibv_rereg_mr", || unsafe {
        let wants = |bit: u32| flags as u32 & bit != 0;
        let pd = if wants(IBV_REREG_MR_CHANGE_PD) { Some(object::<Pd>(pd)?) } else { None };
        let range = wants(IBV_REREG_MR_CHANGE_TRANSLATION).then_some((addr as u64, length as u64));
        let access = wants(IBV_REREG_MR_CHANGE_ACCESS).then_some(access as u32);
        object::<Mr>(mr.cast())?.reregister(pd, range, access)
    })
}

pub(super) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    // SAFETY: module comment of `entry.rs`.
    verb_ptr("ibv_alloc_null_mr", || unsafe {
        let c = (*pd).context;
        Ok(publish(Mr::null(object(pd)?, (c, pd))?))
    })
}

pub(super) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ib_uverbs_advise_mr_advice,
    flags: u32,
    list: *mut ibv_sge,
    count: u32,
) -> c_int {
    // SAFETY: module comment of `entry.rs`; the list has `count` entries.
    verb("ibv_advise_mr", || unsafe {
        let count = c_int::try_from(count).map_err(|_| libc::EINVAL)?;
        let sges = sge_list(list, count, u32::MAX)?;
        advise::advise(object(pd)?, advice, flags, sges)
    })
}

pub(super) unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: module comment of `entry.rs`; a PD's context was set when it was made.
    verb_ptr("ibv_alloc_mw", || unsafe {
        let shared = object::<Pd>(pd)?;
        Ok(publish(Mw::alloc(shared, kind, ((*pd).context, pd))?))
    })
}

pub(super) unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    // SAFETY: module comment of `entry.rs`.
    verb("ibv_dealloc_mw", || unsafe {
        object::<Mw>(mw)?.free()?;
        drop(reclaim::<Mw>(mw));
        Ok(())
    })
}

pub(super) unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: module comment of `entry.rs`; the region named in `bind` is a live one.
    unsafe {
        let (Ok(qp), Ok(mw), Some(bind)) = (object::<Qp>(qp), object::<Mw>(mw), bind.as_ref()) else {
            return libc::EINVAL;
        };
        let outcome = chain::bind_info(&bind.bind_info).and_then(|info| mw.bind(qp, bind, info));
        outcome.map_or_else(
            |errno| {
                set_errno(errno);
                errno
            },
            |()| 0,
        )
    }
}

pub(super) unsafe extern "C" fn alloc_dm(ctx: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    // SAFETY: module comment of `entry.rs`.
    verb_ptr("ibv_alloc_dm", || unsafe {
        let attr = attr.as_ref().ok_or(libc::EINVAL)?;
        let _ = inherited_context(ctx)?;
        Ok(publish(Dm::alloc(ctx, attr)?))
    })
}

pub(super) unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    // SAFETY: module comment of `entry.rs`; unused, so nobody else has it.
    verb("ibv_free_dm", || unsafe {
        object::<Dm>(dm)?.free()?;
        drop(reclaim::<Dm>(dm));
        Ok(())
    })
}

pub(super) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: module comment of `entry.rs`.
    verb_ptr("ibv_reg_dm_mr", || unsafe {
        let memory = object::<Dm>(dm)?.part(offset, length)?;
        Ok(publish(Mr::device(object(pd)?, ((*pd).context, pd), memory, offset, length as u64, access)?))
    })
}

pub(super) unsafe extern "C" fn import_pd(ctx: *mut ibv_context, handle: u32) -> *mut ibv_pd {
    // SAFETY: module comment of `entry.rs`.
    verb_ptr("ibv_import_pd", || unsafe { Ok(publish(Pd::import(Arc::clone(context(ctx)?), ctx, handle)?)) })
}

pub(super) unsafe extern "C" fn unimport_pd(pd: *mut ibv_pd) {
    // SAFETY: module comment of `entry.rs`; libibverbs' user gives the object back.
    drop(unsafe { reclaim::<Pd>(pd) });
}

pub(super) unsafe extern "C" fn import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr {
    // SAFETY: module comment of `entry.rs`.
    verb_ptr("ibv_import_mr", || unsafe {
        Ok(publish(Mr::import(object(pd)?, ((*pd).context, pd), handle)?))
    })
}

pub(super) unsafe extern "C" fn unimport_mr(mr: *mut ibv_mr) {
    // SAFETY: module comment of `entry.rs`; the region itself belongs to who registered it.
    drop(unsafe { reclaim::<Mr>(mr) });
}

pub(super) unsafe extern "C" fn import_dm(ctx: *mut ibv_context, handle: u32) -> *mut ibv_dm {
    // SAFETY: module comment of `entry.rs`.
    verb_ptr("ibv_import_dm", || unsafe {
        let _ = context(ctx)?;
        Ok(publish(Dm::import(ctx, handle)?))
    })
}

pub(super) unsafe extern "C" fn unimport_dm(dm: *mut ibv_dm) {
    // SAFETY: module comment of `entry.rs`; the memory itself stays with who allocated it.
    drop(unsafe { reclaim::<Dm>(dm) });
}
