//! Objects that can be imported by their handle, within the process that made them.
//!
//! Handles are random, so that one of another process, which came here with a descriptor, finds nothing.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;

use crate::ffi::Result;

/// The exported objects of one kind, by handle.
pub(crate) struct Exports<T>(LazyLock<Mutex<HashMap<u32, Weak<T>>>>);

impl<T> Exports<T> {
    pub(crate) const fn new() -> Self {
        Self(LazyLock::new(Mutex::default))
    }
    /// Makes `object` known by `handle`, as long as it lives.
    pub(crate) fn add(&self, handle: u32, object: &Arc<T>) {
        let mut known = self.0.lock();
        if known.len() == known.capacity() {
            known.retain(|_, object| object.strong_count() > 0);
        }
        known.insert(handle, Arc::downgrade(object));
    }
    /// The object; ENOENT when this process has none of that handle (any more).
    pub(crate) fn find(&self, handle: u32) -> Result<Arc<T>> {
        self.0.lock().get(&handle).and_then(Weak::upgrade).ok_or(libc::ENOENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn find_only_what_lives() {
        let exports = Exports::new();
        let kept = Arc::new(1);
        exports.add(7, &kept);
        for handle in 100..1100 {
            exports.add(handle, &Arc::new(2));
        }
        assert_eq!(exports.find(7).as_deref(), Ok(&1));
        assert_eq!(exports.find(100), Err(libc::ENOENT));
        assert_eq!(exports.find(8), Err(libc::ENOENT));
        assert!(exports.0.lock().len() < 1000, "dead entries go");
    }
}
