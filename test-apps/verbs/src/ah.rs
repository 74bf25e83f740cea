//! Address handles: where datagrams go.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::context::PORT;
use crate::{Pd, last_error, sys};

/// An address handle.
#[derive(Debug)]
pub struct Ah {
    raw: NonNull<sys::ibv_ah>,
    _pd: Arc<Pd>,
}

// SAFETY: verbs objects may be used from any thread.
unsafe impl Send for Ah {}
// SAFETY: as above.
unsafe impl Sync for Ah {}

/// Where a datagram goes.
#[derive(Debug, Clone)]
pub struct Destination {
    /// The host.
    pub ah: Arc<Ah>,
    /// The QP there.
    pub qpn: u32,
    /// Its key.
    pub qkey: u32,
}

impl Ah {
    /// Makes one for the port with this GID, sent from our GID of that index.
    pub fn new(pd: &Arc<Pd>, gid: [u8; 16], gid_index: u8) -> io::Result<Arc<Self>> {
        let mut attr = sys::ibv_ah_attr { is_global: 1, port_num: PORT, ..Default::default() };
        attr.grh.dgid.raw = gid;
        attr.grh.sgid_index = gid_index;
        attr.grh.hop_limit = 64;
        // SAFETY: the PD is alive and kept so by the Arc stored below; the call reads one attr struct.
        let raw = unsafe { sys::ibv_create_ah(pd.raw(), &mut attr) };
        let raw = NonNull::new(raw).ok_or_else(|| last_error("ibv_create_ah"))?;
        Ok(Arc::new(Self { raw, _pd: pd.clone() }))
    }

    pub(crate) fn raw(&self) -> *mut sys::ibv_ah {
        self.raw.as_ptr()
    }
}

impl Drop for Ah {
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        unsafe { sys::ibv_destroy_ah(self.raw()) };
    }
}
