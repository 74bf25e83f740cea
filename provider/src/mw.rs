//! Memory windows: keys that show a part of a region, with rights of their own.

use std::sync::Arc;

use metaroce_proto::types::{Bind, Opcode, SendWqe};
use rdma_core_sys::*;

use crate::ffi::{CPart, Object, Result, next_handle};
use crate::pd::{Pd, PdShared};
use crate::post::{check_flags, sig_all};
use crate::qp::Qp;

/// The low bits of a window's key belong to whoever binds it.
const BINDER_MASK: u32 = 0xff;

/// A memory window.
#[repr(C)]
pub(crate) struct Mw {
    c: CPart<ibv_mw>,
    /// The key it began with; its high bits name the window for life.
    key: u32,
    type1: bool,
    pd: Arc<PdShared>,
}

// SAFETY: repr(C), the C part is first and is an ibv_mw.
unsafe impl Object for Mw {
    type C = ibv_mw;
}

impl Mw {
    /// EINVAL for a type there is not. `within` are context and PD as C knows them.
    pub(crate) fn alloc(
        pd: &Pd,
        kind: ibv_mw_type,
        within: (*mut ibv_context, *mut ibv_pd),
    ) -> Result<Box<Self>> {
        if kind != IBV_MW_TYPE_1 && kind != IBV_MW_TYPE_2 {
            return Err(libc::EINVAL);
        }
        let pd = Arc::clone(&pd.shared);
        let key = pd.context.device.create_window(pd.number, kind == IBV_MW_TYPE_2)?;
        pd.context.open.window_made(key);
        let c = CPart::new(|mw: &mut ibv_mw| {
            (mw.context, mw.pd) = within;
            (mw.rkey, mw.handle, mw.type_) = (key, next_handle(), kind);
        });
        Ok(Box::new(Self { c, key, type1: kind == IBV_MW_TYPE_1, pd }))
    }

    /// Its key dies, whatever it is bound to; then the object may be dropped.
    pub(crate) fn free(&self) -> Result<()> {
        self.pd.context.device.destroy_window(self.key)?;
        self.pd.context.open.window_gone(self.key);
        Ok(())
    }

    /// It is bound by requests, not by `ibv_bind_mw`.
    pub(crate) fn is_type2(&self) -> bool {
        !self.type1
    }

    /// `ibv_bind_mw`: posts the binding of a type 1 window and gives it its new key.
    pub(crate) fn bind(&self, qp: &Qp, bind: &ibv_mw_bind, info: Bind) -> Result<()> {
        if !self.type1 || !qp.has_windows() {
            return Err(libc::EINVAL);
        }
        let mut post = qp.engine.send();
        // Under the send lock: two binds of one window get different keys, in the order they are posted.
        let old = self.c.window_key();
        let new_key = old & !BINDER_MASK | old.wrapping_add(1) & BINDER_MASK;
        let flags = check_flags(Opcode::BindWindow, bind.send_flags)? | sig_all(qp);
        let mut wqe = SendWqe::new(bind.wr_id, Opcode::BindWindow, flags);
        wqe.set_bind(&Bind { new_key, ..info });
        post.push(wqe, std::iter::empty())?;
        self.c.set_window_key(new_key);
        post.commit();
        Ok(())
    }
}
