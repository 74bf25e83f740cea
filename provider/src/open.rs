//! What is open in a context, so that closing the device ends it whatever the application has left.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use metaroce_engine as engine;
use parking_lot::Mutex;

/// The QPs and MRs of a context: what peers can reach.
#[derive(Default)]
pub(crate) struct OpenObjects(Mutex<Lists>);

#[derive(Default)]
struct Lists {
    qps: HashMap<u32, Weak<engine::Qp>>,
    mrs: HashSet<u32>,
    windows: HashSet<u32>,
}

impl OpenObjects {
    /// A QP was made.
    pub(crate) fn qp_made(&self, qp: &Arc<engine::Qp>) {
        self.0.lock().qps.insert(qp.qpn().0, Arc::downgrade(qp));
    }
    /// A QP is about to be destroyed.
    pub(crate) fn qp_gone(&self, qp: &engine::Qp) {
        self.0.lock().qps.remove(&qp.qpn().0);
    }
    /// An MR was made.
    pub(crate) fn mr_made(&self, key: u32) {
        self.0.lock().mrs.insert(key);
    }
    /// An MR is about to be deregistered.
    pub(crate) fn mr_gone(&self, key: u32) {
        self.0.lock().mrs.remove(&key);
    }

    /// A window was made.
    pub(crate) fn window_made(&self, key: u32) {
        self.0.lock().windows.insert(key);
    }
    /// A window was freed.
    pub(crate) fn window_gone(&self, key: u32) {
        self.0.lock().windows.remove(&key);
    }

    /// Holds the lock, as a thread does that is about to do something.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> impl Drop + '_ {
        self.0.lock()
    }

    /// Ends all that is left, as the kernel does with a closed device: nothing is sent or received for it, and no
    /// byte passes into memory the application may have given up.
    pub(crate) fn close(&self, device: &engine::Device) {
        let Lists { qps, mrs, windows } = std::mem::take(&mut *self.0.lock());
        for qp in qps.values().filter_map(Weak::upgrade) {
            // In the child of a fork there is nothing to end; else it cannot fail.
            let _ = qp.destroy();
        }
        // Before the regions they are bound to.
        for key in windows {
            let _ = device.destroy_window(key);
        }
        for key in mrs {
            let _ = device.deregister_mr(key);
        }
    }
}
