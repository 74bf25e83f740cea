//! The `extern "C"` functions of XRC and of extended SRQs: domains, SRQs that are more than a queue, opening a responder
//! again. As in `entry.rs`: no logic.

use std::ffi::c_int;

use metaroce_proto::types::TagChange;
use rdma_core_sys::private::verbs_srq;
use rdma_core_sys::*;

use super::posted;
use crate::chain;
use crate::cq::Cq;
use crate::ffi::{Result, attributes, context, object, publish, put, reclaim, verb, verb_ptr};
use crate::limits::{MAX_TAG_OPS, MAX_TAGS};
use crate::pd::Pd;
use crate::qp::Qp;
use crate::srq::{Extended, Srq};
use crate::xrcd::Xrcd;

pub(super) unsafe extern "C" fn open_xrcd(
    ctx: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    // SAFETY: module comment of `entry.rs`.
    verb_ptr("ibv_open_xrcd", || unsafe {
        const NEEDED: u32 = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
        let attr = attributes(attr)?;
        if attr.comp_mask != NEEDED {
            return Err(if attr.comp_mask & !NEEDED != 0 { libc::EOPNOTSUPP } else { libc::EINVAL });
        }
        let _ = context(ctx)?;
        Ok(publish(Xrcd::open(ctx, attr.fd, attr.oflags)?))
    })
}

pub(super) unsafe extern "C" fn close_xrcd(xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: module comment of `entry.rs`; unused, so nobody else has it.
    verb("ibv_close_xrcd", || unsafe {
        object::<Xrcd>(xrcd)?.check_unused()?;
        drop(reclaim::<Xrcd>(xrcd));
        Ok(())
    })
}

pub(super) unsafe extern "C" fn create_srq_ex(
    ctx: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: module comment of `entry.rs`.
    verb_ptr("ibv_create_srq_ex", || unsafe { new_srq(ctx, attributes(init)?) })
}

/// # Safety
/// The pointers in `init` that its mask and type name are NULL or live objects of ours.
unsafe fn new_srq(ctx: *mut ibv_context, init: &mut ibv_srq_init_attr_ex) -> Result<*mut ibv_srq> {
    const XRC: u32 = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    let has = |bits: u32| init.comp_mask & bits == bits;
    let kind = if has(IBV_SRQ_INIT_ATTR_TYPE) { init.srq_type } else { IBV_SRQT_BASIC };
    const KNOWN: u32 = XRC | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_TM;
    if init.comp_mask & !KNOWN != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    if !has(IBV_SRQ_INIT_ATTR_PD) {
        return Err(libc::EINVAL);
    }
    // SAFETY: upheld by the caller.
    unsafe {
        let extended = match kind {
            IBV_SRQT_BASIC => None,
            IBV_SRQT_XRC if has(XRC) => {
                Some(Extended::Xrc(object::<Xrcd>(init.xrcd)?, object::<Cq>(init.cq)?))
            }
            IBV_SRQT_TM if has(IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM) => {
                let cap = init.tm_cap;
                if cap.max_num_tags > MAX_TAGS || cap.max_ops > MAX_TAG_OPS {
                    return Err(libc::EINVAL);
                }
                Some(Extended::Tags(cap.max_num_tags, object::<Cq>(init.cq)?))
            }
            IBV_SRQT_XRC | IBV_SRQT_TM => return Err(libc::EINVAL),
            _ => return Err(libc::EOPNOTSUPP),
        };
        let srq = Srq::create(object::<Pd>(init.pd)?, &mut init.attr, extended.as_ref())?;
        Ok(publish(srq.complete(|c: &mut verbs_srq| {
            (c.srq.context, c.srq.srq_context, c.srq.pd) = (ctx, init.srq_context, init.pd);
            match extended {
                Some(Extended::Xrc(..)) => (c.xrcd, c.cq) = (init.xrcd.cast(), init.cq),
                Some(Extended::Tags(..)) => c.cq = init.cq,
                None => {}
            }
        })))
    }
}

pub(super) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: module comment of `entry.rs`.
    verb("ibv_get_srq_num", || unsafe { put(number, object::<Srq>(srq)?.number()?) })
}

pub(super) unsafe extern "C" fn post_srq_ops(
    srq: *mut ibv_srq,
    mut op: *mut ibv_ops_wr,
    bad: *mut *mut ibv_ops_wr,
) -> c_int {
    // SAFETY: module comment of `entry.rs`; the chain and its lists are valid.
    unsafe {
        let Ok(srq) = object::<Srq>(srq) else { return libc::EINVAL };
        let mut outcome = Ok(());
        while let (Ok(()), Some(wr)) = (outcome, op.as_mut()) {
            outcome = chain::tag_op(wr).and_then(|change| {
                let number = srq.tag_op(&change)?;
                if let TagChange::Add(_) = change.change {
                    wr.tm.handle = number;
                }
                Ok(())
            });
            if outcome.is_ok() {
                op = wr.next;
            }
        }
        posted(outcome, bad, op)
    }
}

pub(super) unsafe extern "C" fn open_qp(ctx: *mut ibv_context, attr: *mut ibv_qp_open_attr) -> *mut ibv_qp {
    // SAFETY: module comment of `entry.rs`.
    verb_ptr("ibv_open_qp", || unsafe {
        const NEEDED: u32 = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
        let attr = attributes(attr)?;
        if attr.comp_mask & !(NEEDED | IBV_QP_OPEN_ATTR_CONTEXT) != 0
            || attr.comp_mask & NEEDED != NEEDED
            || attr.qp_type != IBV_QPT_XRC_RECV
        {
            return Err(libc::EINVAL);
        }
        Ok(publish(Qp::open(object::<Xrcd>(attr.xrcd)?, Pd::none(context(ctx)?), attr, ctx)?))
    })
}
