//! The `extern "C"` functions of raw packets: steering rules, work queues and their tables. As in `entry.rs`: no logic.

use std::ffi::c_int;
use std::slice;

use rdma_core_sys::*;

use super::posted;
use crate::chain::RecvChain;
use crate::cq::Cq;
use crate::ffi::{Result, attributes, context, object, publish, reclaim, verb, verb_ptr};
use crate::flow::FlowRule;
use crate::pd::Pd;
use crate::post;
use crate::qp::Qp;
use crate::wq::{IndTable, Wq};

pub(super) unsafe extern "C" fn create_flow(qp: *mut ibv_qp, attr: *mut ibv_flow_attr) -> *mut ibv_flow {
    // SAFETY: module comment of `entry.rs`; the specifications lie behind the attributes.
    verb_ptr("ibv_create_flow", || unsafe {
        let rule = attr.as_ref().ok_or(libc::EINVAL)?;
        object::<Qp>(qp)?;
        let (c, number) = ((*qp).context, (*qp).qp_num);
        let specs = specs(attr.add(1).cast(), rule.num_of_specs)?;
        Ok(publish(FlowRule::create(context(c)?, c, number, rule, specs.into_iter())?))
    })
}

/// The specifications behind flow attributes, each with its own size.
///
/// # Safety
/// As many specifications as `count` says lie at `at`, each as long as its header says.
unsafe fn specs<'a>(mut at: *const u8, count: u8) -> Result<Vec<&'a [u8]>> {
    let mut specs = Vec::new();
    for _ in 0..count {
        // SAFETY: upheld by the caller.
        unsafe {
            let size = usize::from(at.add(4).cast::<u16>().read_unaligned());
            if size < 6 {
                return Err(libc::EINVAL);
            }
            specs.push(slice::from_raw_parts(at, size));
            at = at.add(size);
        }
    }
    Ok(specs)
}

pub(super) unsafe extern "C" fn destroy_flow(flow: *mut ibv_flow) -> c_int {
    // SAFETY: module comment of `entry.rs`.
    verb("ibv_destroy_flow", || unsafe {
        object::<FlowRule>(flow)?.destroy();
        drop(reclaim::<FlowRule>(flow));
        Ok(())
    })
}

pub(super) unsafe extern "C" fn create_wq(ctx: *mut ibv_context, attr: *mut ibv_wq_init_attr) -> *mut ibv_wq {
    // SAFETY: module comment of `entry.rs`.
    verb_ptr("ibv_create_wq", || unsafe {
        let attr = attributes(attr)?;
        Ok(publish(Wq::create(object::<Pd>(attr.pd)?, object::<Cq>(attr.cq)?, attr, |wq| {
            (wq.context, wq.pd, wq.cq) = (ctx, attr.pd, attr.cq);
            wq.post_recv = Some(post_wq_recv);
        })?))
    })
}

pub(super) unsafe extern "C" fn modify_wq(wq: *mut ibv_wq, attr: *mut ibv_wq_attr) -> c_int {
    // SAFETY: module comment of `entry.rs`.
    verb("ibv_modify_wq", || unsafe { object::<Wq>(wq)?.modify(attributes(attr)?) })
}

pub(super) unsafe extern "C" fn destroy_wq(wq: *mut ibv_wq) -> c_int {
    // SAFETY: module comment of `entry.rs`; unused, so nobody else has it.
    verb("ibv_destroy_wq", || unsafe {
        object::<Wq>(wq)?.destroy()?;
        drop(reclaim::<Wq>(wq));
        Ok(())
    })
}

unsafe extern "C" fn post_wq_recv(
    wq: *mut ibv_wq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: module comment of `entry.rs`; the chain and its lists are valid.
    unsafe {
        let Ok(wq) = object::<Wq>(wq) else { return libc::EINVAL };
        let mut chain = RecvChain::new(wr);
        let outcome = post::shared_recv(&wq.engine, &mut chain);
        posted(outcome, bad, chain.position())
    }
}

pub(super) unsafe extern "C" fn create_rwq_ind_table(
    ctx: *mut ibv_context,
    attr: *mut ibv_rwq_ind_table_init_attr,
) -> *mut ibv_rwq_ind_table {
    // SAFETY: module comment of `entry.rs`; the table has 2^log entries, each a live queue.
    verb_ptr("ibv_create_rwq_ind_table", || unsafe {
        let attr = attributes(attr)?;
        let size = 1usize.checked_shl(attr.log_ind_tbl_size).filter(|_| !attr.ind_tbl.is_null());
        let size = size.filter(|size| *size <= crate::limits::MAX_RWQ_TABLE as usize).ok_or(libc::EINVAL)?;
        let queues = slice::from_raw_parts(attr.ind_tbl, size).iter().map(|wq| object::<Wq>(*wq));
        Ok(publish(IndTable::create(ctx, attr, queues)?))
    })
}

pub(super) unsafe extern "C" fn destroy_rwq_ind_table(table: *mut ibv_rwq_ind_table) -> c_int {
    // SAFETY: module comment of `entry.rs`; unused, so nobody else has it.
    verb("ibv_destroy_rwq_ind_table", || unsafe {
        object::<IndTable>(table)?.check_unused()?;
        drop(reclaim::<IndTable>(table));
        Ok(())
    })
}
