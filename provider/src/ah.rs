//! Address handles: checked and resolved at creation, for datagrams to use.

use std::net::IpAddr;
use std::sync::Arc;

use rdma_core_sys::{ibv_ah, ibv_ah_attr};

use crate::addr::Addresses;
use crate::ffi::{CPart, Object, Result, next_handle};
use crate::limits::PORT;
use crate::pd::{Pd, PdShared};

/// An address handle.
#[repr(C)]
pub(crate) struct Ah {
    _c: CPart<ibv_ah>,
    /// Where datagrams with it go.
    pub(crate) remote: IpAddr,
    /// Keeps the PD in use.
    _pd: Arc<PdShared>,
}

// SAFETY: repr(C), the C part is first and is an ibv_ah.
unsafe impl Object for Ah {
    type C = ibv_ah;
}

impl Ah {
    /// EINVAL when the address vector is not one of RoCE, see [`PdShared::may_omit_route`].
    pub(crate) fn create(pd: &Pd, attr: &ibv_ah_attr) -> Result<Box<Self>> {
        let pd = Arc::clone(&pd.shared);
        pd.context.alive()?;
        let remote = match pd.context.net.gid_address(0) {
            Some(own) if attr.is_global == 0 && attr.port_num == PORT && pd.may_omit_route() => own,
            _ => Addresses::resolve(&pd.context.net, attr)?.remote,
        };
        let _c = CPart::new(|ah: &mut ibv_ah| ah.handle = next_handle());
        Ok(Box::new(Self { _c, remote, _pd: pd }))
    }
}
