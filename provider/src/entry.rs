//! The `extern "C"` functions libibverbs calls: boundary, casts, one call of the safe code. No logic.
//!
//! The SAFETY argument is the same for all: libibverbs calls them with objects of our own making that the
//! application keeps alive during the call, and with attribute structures the verbs API declares valid.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::slice;
use std::sync::Arc;

use metaroce_proto::steer::Rss;
use metaroce_proto::types::QpType;
use rdma_core_sys::private::verbs_context_ops;
use rdma_core_sys::*;

use crate::ah::Ah;
use crate::chain::{RecvChain, SendChain};
use crate::cq::{Cq, CqCreate};
use crate::ffi::{
    Result, attributes, context, inherited_context, object, publish, put, reclaim, set_errno, verb, verb_ptr,
    zeroed,
};
use crate::pd::Pd;
use crate::qp::{Qp, QpCreate};
use crate::srq::Srq;
use crate::td::Td;
use crate::wq::{self, IndTable, Queues};
use crate::xrcd::Xrcd;
use crate::{device, poll, post, register};

mod groups;
mod memory;
mod packet;
mod xrc;

use groups::*;
use memory::*;
use packet::*;
use xrc::*;

/// The verbs this device implements; libibverbs answers EOPNOTSUPP for the rest.
pub(crate) static OPS: verbs_context_ops = verbs_context_ops::EMPTY
    .advise_mr(advise_mr)
    .alloc_dm(alloc_dm)
    .alloc_mw(alloc_mw)
    .alloc_null_mr(alloc_null_mr)
    .alloc_parent_domain(alloc_parent_domain)
    .alloc_pd(alloc_pd)
    .alloc_td(alloc_td)
    .async_event(async_event)
    .attach_mcast(attach_mcast)
    .bind_mw(bind_mw)
    .close_xrcd(close_xrcd)
    .cq_event(cq_event)
    .create_ah(create_ah)
    .create_cq(create_cq)
    .create_cq_ex(create_cq_ex)
    .create_flow(create_flow)
    .create_qp(create_qp)
    .create_qp_ex(create_qp_ex)
    .create_rwq_ind_table(create_rwq_ind_table)
    .create_srq(create_srq)
    .create_srq_ex(create_srq_ex)
    .create_wq(create_wq)
    .dealloc_mw(dealloc_mw)
    .dealloc_pd(dealloc_pd)
    .dealloc_td(dealloc_td)
    .dereg_mr(dereg_mr)
    .destroy_ah(destroy_ah)
    .destroy_cq(destroy_cq)
    .destroy_flow(destroy_flow)
    .destroy_qp(destroy_qp)
    .destroy_rwq_ind_table(destroy_rwq_ind_table)
    .destroy_srq(destroy_srq)
    .destroy_wq(destroy_wq)
    .detach_mcast(detach_mcast)
    .free_context(register::free_context)
    .free_dm(free_dm)
    .get_srq_num(get_srq_num)
    .import_dm(import_dm)
    .import_mr(import_mr)
    .import_pd(import_pd)
    .modify_cq(modify_cq)
    .modify_qp(modify_qp)
    .modify_srq(modify_srq)
    .modify_wq(modify_wq)
    .open_qp(open_qp)
    .open_xrcd(open_xrcd)
    .poll_cq(poll_cq)
    .post_recv(post_recv)
    .post_send(post_send)
    .post_srq_ops(post_srq_ops)
    .post_srq_recv(post_srq_recv)
    .query_device_ex(query_device_ex)
    .query_ece(query_ece)
    .query_port(query_port)
    .query_qp(query_qp)
    .query_qp_data_in_order(query_qp_data_in_order)
    .query_rt_values(query_rt_values)
    .query_srq(query_srq)
    .reg_dm_mr(reg_dm_mr)
    .reg_mr(reg_mr)
    .req_notify_cq(req_notify_cq)
    .rereg_mr(rereg_mr)
    .resize_cq(resize_cq)
    .set_ece(set_ece)
    .unimport_dm(unimport_dm)
    .unimport_mr(unimport_mr)
    .unimport_pd(unimport_pd);

unsafe extern "C" fn query_device_ex(
    ctx: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    // SAFETY: module comment; `attr` has `size` bytes, which older callers have fewer of.
    verb("ibv_query_device_ex", || unsafe {
        if input.as_ref().is_some_and(|input| input.comp_mask != 0) || attr.is_null() {
            return Err(libc::EINVAL);
        }
        let answer = device::query(inherited_context(ctx)?);
        let known = size.min(size_of::<ibv_device_attr_ex>());
        attr.cast::<u8>().write_bytes(0, size);
        attr.cast::<u8>().copy_from_nonoverlapping((&raw const answer).cast(), known);
        Ok(())
    })
}

unsafe extern "C" fn query_port(ctx: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: module comment.
    verb("ibv_query_port", || unsafe { put(attr, device::query_port(context(ctx)?, port)?) })
}

unsafe extern "C" fn alloc_pd(ctx: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: module comment.
    verb_ptr("ibv_alloc_pd", || unsafe { Ok(publish(Pd::alloc(context(ctx)?))) })
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: module comment; unused, so nobody else has it.
    verb("ibv_dealloc_pd", || unsafe {
        object::<Pd>(pd)?.check_unused()?;
        drop(reclaim::<Pd>(pd));
        Ok(())
    })
}

unsafe extern "C" fn alloc_td(ctx: *mut ibv_context, attr: *mut ibv_td_init_attr) -> *mut ibv_td {
    // SAFETY: module comment.
    verb_ptr("ibv_alloc_td", || unsafe {
        if attributes(attr)?.comp_mask != 0 {
            return Err(libc::EINVAL);
        }
        Ok(publish(Td::alloc(ctx)))
    })
}

unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    // SAFETY: module comment; unused, so nobody else has it.
    verb("ibv_dealloc_td", || unsafe {
        object::<Td>(td)?.check_unused()?;
        drop(reclaim::<Td>(td));
        Ok(())
    })
}

unsafe extern "C" fn alloc_parent_domain(
    ctx: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: module comment.
    verb_ptr("ibv_alloc_parent_domain", || unsafe {
        let attr = attributes(attr)?;
        const KNOWN: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT | IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS;
        if attr.comp_mask & !KNOWN != 0 {
            return Err(libc::EINVAL);
        }
        // Allocators serve the queues that a device reads from memory. This one reads none: there is nothing to ask
        // them for.
        let td = if attr.td.is_null() { None } else { Some(object::<Td>(attr.td)?) };
        Ok(publish(Pd::parent_domain(object(attr.pd)?, td, ctx)))
    })
}

unsafe extern "C" fn query_rt_values(ctx: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    // SAFETY: module comment.
    verb("ibv_query_rt_values_ex", || unsafe {
        let values = attributes(values)?;
        values.raw_clock = device::raw_clock(context(ctx)?, values.comp_mask)?;
        Ok(())
    })
}

unsafe extern "C" fn create_cq(
    ctx: *mut ibv_context,
    cqe: c_int,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: module comment.
    verb_ptr("ibv_create_cq", || unsafe {
        let context = context(ctx)?;
        let create = CqCreate {
            cqe: u32::try_from(cqe).map_err(|_| libc::EINVAL)?,
            comp_vector: u32::try_from(comp_vector).map_err(|_| libc::EINVAL)?,
            channel: channel.as_ref().map(|c| context.comp_channel(channel as usize, c.fd)).transpose()?,
            wc_flags: None,
            parent_domain: None,
        };
        Ok(publish(Cq::create(context, create)?))
    })
}

unsafe extern "C" fn create_cq_ex(ctx: *mut ibv_context, attr: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex {
    // SAFETY: module comment; an extended CQ begins with a plain one.
    verb_ptr("ibv_create_cq_ex", || unsafe {
        let (context, attr) = (context(ctx)?, attributes(attr)?);
        let flags = if attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS != 0 { attr.flags } else { 0 };
        let with_pd = attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_PD != 0;
        let parent_domain = if with_pd { Some(object::<Pd>(attr.parent_domain)?) } else { None };
        if parent_domain.is_some_and(|pd| !pd.is_parent_domain()) {
            return Err(libc::EINVAL);
        }
        // A single-threaded CQ may be locked all the same; ignoring overruns is not there.
        if attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0
            || flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0
        {
            return Err(libc::EOPNOTSUPP);
        }
        let channel = attr.channel;
        let create = CqCreate {
            cqe: attr.cqe,
            comp_vector: attr.comp_vector,
            channel: channel.as_ref().map(|c| context.comp_channel(channel as usize, c.fd)).transpose()?,
            wc_flags: Some(attr.wc_flags),
            parent_domain: parent_domain.map(|pd| Arc::clone(&pd.shared)),
        };
        Ok(publish(Cq::create(context, create)?).cast())
    })
}

unsafe extern "C" fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    // SAFETY: module comment.
    verb("ibv_resize_cq", || unsafe {
        object::<Cq>(cq)?.resize(u32::try_from(cqe).map_err(|_| libc::EINVAL)?)
    })
}

unsafe extern "C" fn modify_cq(cq: *mut ibv_cq, attr: *mut ibv_modify_cq_attr) -> c_int {
    // SAFETY: module comment.
    verb("ibv_modify_cq", || unsafe { object::<Cq>(cq)?.modify(attributes(attr)?) })
}

unsafe extern "C" fn destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: module comment; after destroy nobody else has it.
    verb("ibv_destroy_cq", || unsafe {
        object::<Cq>(cq)?.destroy()?;
        drop(reclaim::<Cq>(cq));
        Ok(())
    })
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: module comment.
    verb("ibv_req_notify_cq", || unsafe {
        object::<Cq>(cq)?.arm(solicited_only != 0);
        Ok(())
    })
}

unsafe extern "C" fn cq_event(cq: *mut ibv_cq) {
    // SAFETY: module comment; a CQ is not destroyed before its events are acknowledged.
    if let Ok(cq) = unsafe { object::<Cq>(cq) } {
        cq.event_read();
    }
}

unsafe extern "C" fn async_event(ctx: *mut ibv_context, _event: *mut ibv_async_event) {
    // SAFETY: module comment.
    if let Ok(context) = unsafe { context(ctx) } {
        context.events.after_read();
    }
}

pub(crate) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: module comment; `wc` has room for `entries`.
    unsafe {
        let (Ok(cq), Ok(entries)) = (object::<Cq>(cq), usize::try_from(entries)) else {
            return -libc::EINVAL;
        };
        if entries == 0 || wc.is_null() {
            return 0;
        }
        poll::poll(cq, slice::from_raw_parts_mut(wc.cast::<MaybeUninit<ibv_wc>>(), entries)) as c_int
    }
}

unsafe extern "C" fn create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: module comment.
    verb_ptr("ibv_create_srq", || unsafe {
        Ok(publish(Srq::create(object(pd)?, &mut attributes(init)?.attr, None)?))
    })
}

unsafe extern "C" fn modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int {
    // SAFETY: module comment.
    verb("ibv_modify_srq", || unsafe { object::<Srq>(srq)?.modify(attributes(attr)?, mask as u32) })
}

unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: module comment.
    verb("ibv_query_srq", || unsafe {
        let srq = object::<Srq>(srq)?;
        srq.alive()?;
        put(attr, srq.query())
    })
}

unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: module comment; after destroy nobody else has it.
    verb("ibv_destroy_srq", || unsafe {
        object::<Srq>(srq)?.destroy()?;
        drop(reclaim::<Srq>(srq));
        Ok(())
    })
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: module comment; libibverbs has set the PD's context.
    verb_ptr("ibv_create_qp", || unsafe {
        let init = attributes(init)?;
        let mut extended: ibv_qp_init_attr_ex = zeroed();
        extended.qp_context = init.qp_context;
        extended.send_cq = init.send_cq;
        extended.recv_cq = init.recv_cq;
        extended.srq = init.srq;
        extended.cap = init.cap;
        extended.qp_type = init.qp_type;
        extended.sq_sig_all = init.sq_sig_all;
        extended.comp_mask = IBV_QP_INIT_ATTR_PD;
        extended.pd = pd;
        let qp = new_qp(attributes(pd)?.context, &mut extended)?;
        init.cap = extended.cap;
        Ok(qp)
    })
}

unsafe extern "C" fn create_qp_ex(ctx: *mut ibv_context, attr: *mut ibv_qp_init_attr_ex) -> *mut ibv_qp {
    // SAFETY: module comment.
    verb_ptr("ibv_create_qp_ex", || unsafe { new_qp(ctx, attributes(attr)?) })
}

/// # Safety
/// The pointers in `attr` are NULL or live objects of ours.
unsafe fn new_qp(context: *mut ibv_context, attr: &mut ibv_qp_init_attr_ex) -> Result<*mut ibv_qp> {
    // Before the pointers are looked at: transports that are not there may have none.
    let kind = crate::qp::check_features(attr)?;
    // SAFETY: upheld by the caller.
    unsafe {
        let (pd, xrcd) = if kind == QpType::XrcRecv {
            (Pd::none(crate::ffi::context(context)?), Some(object::<Xrcd>(attr.xrcd)?))
        } else {
            (Arc::clone(&object::<Pd>(attr.pd)?.shared), None)
        };
        let spread = attr.comp_mask & IBV_QP_INIT_ATTR_IND_TABLE != 0;
        let rss = if spread { Some(spread_of(attr)?) } else { None };
        let cq = |cq: *mut ibv_cq, wanted: bool| if wanted { object::<Cq>(cq).map(Some) } else { Ok(None) };
        let create = QpCreate {
            pd,
            send_cq: cq(attr.send_cq, kind != QpType::XrcRecv && !spread)?,
            recv_cq: cq(attr.recv_cq, !matches!(kind, QpType::XrcSend | QpType::XrcRecv) && !spread)?,
            srq: if attr.srq.is_null() { None } else { Some(object::<Srq>(attr.srq)?) },
            xrcd,
            rss,
            attr,
            context,
        };
        Ok(publish(Qp::create(create)?))
    }
}

/// How the frames of a raw packet QP are spread over work queues.
///
/// # Safety
/// The table in `attr` is NULL or a live one of ours, the key as long as it says.
unsafe fn spread_of(attr: &ibv_qp_init_attr_ex) -> Result<(Queues, Rss)> {
    let hash = &attr.rx_hash_conf;
    // SAFETY: upheld by the caller.
    unsafe {
        let table = object::<IndTable>(attr.rwq_ind_tbl)?;
        let key = crate::chain::bytes(hash.rx_hash_key, usize::from(hash.rx_hash_key_len));
        let rss = wq::spread(&table.queues, hash.rx_hash_function, key, hash.rx_hash_fields_mask)?;
        Ok((Arc::clone(&table.queues), rss))
    }
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: module comment.
    verb("ibv_modify_qp", || unsafe { object::<Qp>(qp)?.modify(attributes(attr)?, mask as u32) })
}

unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: module comment.
    verb("ibv_query_qp", || unsafe {
        let qp = object::<Qp>(qp)?;
        qp.alive()?;
        let (attributes, made_of) = qp.query();
        put(attr, attributes)?;
        put(init, made_of)
    })
}

/// There are no options to negotiate: a connection is what it is with every peer.
unsafe extern "C" fn query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: module comment.
    verb("ibv_query_ece", || unsafe {
        object::<Qp>(qp)?;
        put(ece, ibv_ece { vendor_id: crate::limits::VENDOR_ID, options: 0, comp_mask: 0 })
    })
}

/// Takes what `query_ece` of a peer gave; EOPNOTSUPP for any option, EINVAL for what is not known to mean something.
unsafe extern "C" fn set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int {
    // SAFETY: module comment.
    verb("ibv_set_ece", || unsafe {
        object::<Qp>(qp)?;
        match attributes(ece)? {
            ece if ece.comp_mask != 0 => Err(libc::EINVAL),
            ece if ece.options != 0 => Err(libc::EOPNOTSUPP),
            _ => Ok(()),
        }
    })
}

/// Never in order: packets take many paths, and only the end of a Write is held back.
unsafe extern "C" fn query_qp_data_in_order(_: *mut ibv_qp, _: ibv_wr_opcode, _: u32) -> c_int {
    0
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: module comment; after destroy nobody else has it.
    verb("ibv_destroy_qp", || unsafe {
        object::<Qp>(qp)?.destroy()?;
        drop(reclaim::<Qp>(qp));
        Ok(())
    })
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: module comment; the chain and its lists are valid, and so are the buffers of inline requests.
    unsafe {
        let Ok(qp) = object::<Qp>(qp) else { return libc::EINVAL };
        let mut chain = SendChain::new(wr);
        let outcome = post::send(qp, &mut chain);
        posted(outcome, bad, chain.position())
    }
}

unsafe extern "C" fn post_recv(qp: *mut ibv_qp, wr: *mut ibv_recv_wr, bad: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: module comment; the chain and its lists are valid.
    unsafe {
        let Ok(qp) = object::<Qp>(qp) else { return libc::EINVAL };
        let mut chain = RecvChain::new(wr);
        let outcome = post::recv(qp, &mut chain);
        posted(outcome, bad, chain.position())
    }
}

unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: module comment; the chain and its lists are valid.
    unsafe {
        let Ok(srq) = object::<Srq>(srq) else { return libc::EINVAL };
        let mut chain = RecvChain::new(wr);
        let outcome = post::shared_recv(&srq.engine, &mut chain);
        posted(outcome, bad, chain.position())
    }
}

/// Result of a post: 0, or the errno with `bad` at the refused request.
///
/// # Safety
/// `bad` is NULL or writable.
unsafe fn posted<T>(outcome: Result<()>, bad: *mut *mut T, at: *mut T) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            // SAFETY: upheld by the caller. A NULL is the application's fault, but no reason to crash.
            let _ = unsafe { put(bad, at) };
            errno
        }
    }
}

unsafe extern "C" fn create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: module comment.
    verb_ptr("ibv_create_ah", || unsafe { Ok(publish(Ah::create(object(pd)?, attributes(attr)?)?)) })
}

unsafe extern "C" fn destroy_ah(ah: *mut ibv_ah) -> c_int {
    // SAFETY: module comment.
    verb("ibv_destroy_ah", || unsafe {
        object::<Ah>(ah)?;
        drop(reclaim::<Ah>(ah));
        Ok(())
    })
}
