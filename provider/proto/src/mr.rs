//! Keys: memory regions and memory windows, their bounds and rights.

use crate::snapshot::MrView;
use crate::types::{Bind, Qpn, Refused, access};
use std::collections::VecDeque;

/// Keys below this many free slots are not handed out again, so that a stale key stays stale for long.
const REUSE_DELAY: usize = 1024;
/// Regions and windows at most (the low bits of a key are a nonce).
const MRS_MAX: usize = 1 << 20;
/// The low bits of a window's key belong to whoever binds it; the others name the window for its life.
const BINDER_BITS: u32 = 8;
/// Rights that let a peer change memory.
const REMOTE_CHANGES: u32 = access::REMOTE_WRITE | access::REMOTE_ATOMIC;

/// What one key stands for: a region, or the part of one that a window shows.
#[derive(Debug, Clone, Copy)]
pub struct Mr {
    key: u32,
    live: bool,
    pd: u32,
    va: u64,
    iova: u64,
    len: u64,
    access: u32,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Memory; and how many windows are bound to it.
    Region { windows: u32 },
    /// Nothing: reads as zeros, writes vanish. Local use only.
    Null,
    /// A window: the index of the region it is bound to, and (type 2) the QP. Type 1 has no QP.
    Window { type2: bool, bound: Option<u32>, qpn: Option<Qpn> },
}

impl Mr {
    /// The writer waived ordered appearance of data (IBV_ACCESS_RELAXED_ORDERING).
    pub fn relaxed(&self) -> bool {
        self.access & access::RELAXED_ORDERING != 0
    }
    /// There is no memory behind it.
    pub fn is_null(&self) -> bool {
        self.kind == Kind::Null
    }
    fn holds(&self, key: u32, pd: u32, addr: u64, len: u64, rights: u32) -> bool {
        let offset = addr.wrapping_sub(self.iova);
        self.live
            && self.key == key
            && self.pd == pd
            && offset <= self.len
            && len <= self.len - offset
            && self.access & rights == rights
    }
}

/// All regions and windows of an endpoint. A key is index (20 bits) | nonce (12 bits).
#[derive(Debug)]
pub struct MrTable {
    slots: Vec<Mr>,
    free: VecDeque<u32>,
    rng: u64,
    /// Type 2 windows that are bound.
    bound2: u32,
}

impl MrTable {
    /// An empty table; `seed` makes the keys unpredictable.
    pub fn new(seed: u64) -> Self {
        MrTable { slots: Vec::new(), free: VecDeque::new(), rng: seed, bound2: 0 }
    }
    /// What is live from an index on, with its index, for a look from outside.
    pub fn views_from(&self, index: usize) -> impl Iterator<Item = (usize, MrView)> {
        let live = self.slots.iter().enumerate().skip(index).filter(|(_, mr)| mr.live);
        live.map(|(at, mr)| {
            let (kind, windows) = match mr.kind {
                Kind::Region { windows } => ("region", windows),
                Kind::Null => ("null", 0),
                Kind::Window { type2: false, .. } => ("window1", 0),
                Kind::Window { type2: true, .. } => ("window2", 0),
            };
            let Mr { key, pd, va, iova, len, access, .. } = *mr;
            (at, MrView { key, kind, pd, va, iova, len, access, windows })
        })
    }
    /// Adds a region and gives its key.
    pub fn add(&mut self, pd: u32, va: u64, iova: u64, len: u64, access: u32) -> Result<u32, Refused> {
        va.checked_add(len).ok_or(Refused::Invalid)?;
        iova.checked_add(len).ok_or(Refused::Invalid)?;
        let kind = Kind::Region { windows: 0 };
        self.insert(Mr { key: 0, live: true, pd, va, iova, len, access, kind })
    }
    /// Adds a region without memory.
    pub fn add_null(&mut self, pd: u32) -> Result<u32, Refused> {
        let (va, iova, len, access) = (0, 0, u64::MAX, access::LOCAL_WRITE);
        self.insert(Mr { key: 0, live: true, pd, va, iova, len, access, kind: Kind::Null })
    }
    /// Adds a window that shows nothing yet.
    pub fn add_window(&mut self, pd: u32, type2: bool) -> Result<u32, Refused> {
        let kind = Kind::Window { type2, bound: None, qpn: None };
        self.insert(Mr { key: 0, live: true, pd, va: 0, iova: 0, len: 0, access: 0, kind })
    }
    fn insert(&mut self, mr: Mr) -> Result<u32, Refused> {
        let nonce = crate::random(&mut self.rng) as u32 & 0xfff;
        let reuse = self.free.len() > REUSE_DELAY || self.slots.len() == MRS_MAX;
        let recycled = if reuse { self.free.pop_front() } else { None };
        let index = match recycled {
            Some(index) => index,
            None if self.slots.len() < MRS_MAX => self.slots.len() as u32,
            None => return Err(Refused::Full),
        };
        // Never a nonce of the slot's last life, whatever a binder made of its low bits, and never key 0, which
        // programs use as "none".
        let old = self.slots.get(index as usize).map(|m| m.key >> BINDER_BITS & 0xf);
        let taken = |n: u32| old == Some(n >> BINDER_BITS) || index << 12 | n == 0;
        let nonce = (0..16).map(|step| (nonce + (step << BINDER_BITS) + step) & 0xfff).find(|n| !taken(*n));
        let mr = Mr { key: index << 12 | nonce.unwrap_or(1), ..mr };
        if index as usize == self.slots.len() {
            self.slots.push(mr);
        } else {
            self.slots[index as usize] = mr;
        }
        Ok(mr.key)
    }
    fn slot(&mut self, key: u32) -> Result<&mut Mr, Refused> {
        self.slots.get_mut((key >> 12) as usize).filter(|m| m.live && m.key == key).ok_or(Refused::NotFound)
    }
    /// Kills the key of a region; Busy while a window is bound to it.
    pub fn remove(&mut self, key: u32) -> Result<(), Refused> {
        let mr = self.slot(key)?;
        match mr.kind {
            Kind::Region { windows: 0 } | Kind::Null => {}
            Kind::Region { .. } => return Err(Refused::Busy),
            Kind::Window { .. } => return Err(Refused::NotFound),
        }
        mr.live = false;
        self.free.push_back(key >> 12);
        Ok(())
    }
    /// Unbinds and frees the window that this is, or was, a key of.
    pub fn remove_window(&mut self, key: u32) -> Result<(), Refused> {
        let index = self.window(key).ok_or(Refused::NotFound)?;
        self.unbind(index);
        self.slots[index as usize].live = false;
        self.free.push_back(index);
        Ok(())
    }
    /// Changes what a key stands for; `None` leaves as is. `range` is address, address in the iova space, length.
    /// Busy while a window is bound to it.
    pub fn change(
        &mut self,
        key: u32,
        pd: Option<u32>,
        range: Option<(u64, u64, u64)>,
        access: Option<u32>,
    ) -> Result<(), Refused> {
        let mr = self.slot(key)?;
        match mr.kind {
            Kind::Region { windows: 0 } => {}
            Kind::Region { .. } => return Err(Refused::Busy),
            _ => return Err(Refused::Invalid),
        }
        if let Some((va, iova, len)) = range {
            va.checked_add(len).ok_or(Refused::Invalid)?;
            iova.checked_add(len).ok_or(Refused::Invalid)?;
            (mr.va, mr.iova, mr.len) = (va, iova, len);
        }
        mr.pd = pd.unwrap_or(mr.pd);
        mr.access = access.unwrap_or(mr.access);
        Ok(())
    }
    /// The address behind `addr` for the owner's own use, if the key is a region's that lives, belongs to `pd`, holds
    /// `addr..addr + len` and grants `rights`.
    pub fn check(&self, key: u32, pd: u32, addr: u64, len: u64, rights: u32) -> Option<(u64, &Mr)> {
        let mr = self.slots.get((key >> 12) as usize)?;
        let ok = mr.holds(key, pd, addr, len, rights) && !matches!(mr.kind, Kind::Window { .. });
        ok.then(|| (mr.va.wrapping_add(addr.wrapping_sub(mr.iova)), mr))
    }
    /// The same for a peer that came through QP `qpn`: the key may be a window's.
    pub fn check_remote(
        &self,
        key: u32,
        (pd, qpn): (u32, Qpn),
        addr: u64,
        len: u64,
        rights: u32,
    ) -> Option<(u64, &Mr)> {
        let mr = self.slots.get((key >> 12) as usize)?;
        let reachable = match mr.kind {
            Kind::Region { .. } => true,
            Kind::Null => false,
            Kind::Window { bound, qpn: only, .. } => bound.is_some() && only.is_none_or(|only| only == qpn),
        };
        let ok = reachable && mr.holds(key, pd, addr, len, rights);
        ok.then(|| (mr.va.wrapping_add(addr.wrapping_sub(mr.iova)), mr))
    }

    /// The index of the living window that `key` is, was or may become a key of.
    fn window(&self, key: u32) -> Option<u32> {
        let mr = self.slots.get((key >> 12) as usize)?;
        let ours = mr.live && mr.key >> BINDER_BITS == key >> BINDER_BITS;
        (ours && matches!(mr.kind, Kind::Window { .. })).then_some(key >> 12)
    }
    /// Binds a window to (a part of) a region under a new key, for a QP in `pd`. A type 1 window may be bound before,
    /// and binding it to 0 bytes unbinds it; a type 2 window must not be. False: not allowed, and nothing has changed.
    pub fn bind(&mut self, bind: &Bind, (pd, qpn): (u32, Qpn)) -> bool {
        let Some(index) = self.window(bind.new_key) else { return false };
        let window = self.slots[index as usize];
        let Kind::Window { type2, bound, .. } = window.kind else { return false };
        if window.pd != pd || type2 && bound.is_some() {
            return false;
        }
        if bind.len == 0 && !type2 {
            self.unbind(index);
            self.slots[index as usize].key = bind.new_key;
            return true;
        }
        let changes = if bind.access & REMOTE_CHANGES != 0 { access::LOCAL_WRITE } else { 0 };
        let rights = access::MW_BIND | changes;
        let Some((va, region)) = self.check(bind.region, pd, bind.addr, bind.len, rights) else {
            return false;
        };
        if region.is_null() {
            return false;
        }
        let access = bind.access | region.access & access::RELAXED_ORDERING;
        self.unbind(index);
        let region = bind.region >> 12;
        if let Kind::Region { windows } = &mut self.slots[region as usize].kind {
            *windows += 1;
        }
        self.bound2 += u32::from(type2);
        let window = &mut self.slots[index as usize];
        window.kind = Kind::Window { type2, bound: Some(region), qpn: type2.then_some(qpn) };
        window.iova = if access & access::ZERO_BASED != 0 { 0 } else { bind.addr };
        (window.key, window.va, window.len, window.access) = (bind.new_key, va, bind.len, access);
        true
    }
    /// Takes its memory from a type 2 window bound for this QP; its key is dead then. False: not allowed.
    pub fn invalidate(&mut self, key: u32, (pd, qpn): (u32, Qpn)) -> bool {
        let Some(mr) = self.slots.get((key >> 12) as usize) else { return false };
        let bound = Kind::Window { type2: true, bound: None, qpn: Some(qpn) };
        let kind = match mr.kind {
            Kind::Window { type2, bound: Some(_), qpn } => Kind::Window { type2, bound: None, qpn },
            other => other,
        };
        let ok = mr.live && mr.key == key && mr.pd == pd && kind == bound;
        if ok {
            self.unbind(key >> 12);
        }
        ok
    }
    /// A QP is gone: the windows bound for it show nothing any more.
    pub fn unbind_qp(&mut self, gone: Qpn) {
        if self.bound2 == 0 {
            return;
        }
        for index in 0..self.slots.len() as u32 {
            let mr = &self.slots[index as usize];
            if mr.live && matches!(mr.kind, Kind::Window { qpn: Some(qpn), .. } if qpn == gone) {
                self.unbind(index);
            }
        }
    }
    fn unbind(&mut self, index: u32) {
        let Kind::Window { type2, bound: Some(region), .. } = self.slots[index as usize].kind else { return };
        if let Kind::Region { windows } = &mut self.slots[region as usize].kind {
            *windows -= 1;
        }
        self.bound2 -= u32::from(type2);
        let window = &mut self.slots[index as usize];
        window.kind = Kind::Window { type2, bound: None, qpn: None };
        (window.len, window.access) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check__bounds_rights_pd_and_stale_keys() {
        let mut table = MrTable::new(1);
        let key = table.add(7, 0x1000, 0x9000, 100, access::LOCAL_WRITE).unwrap();
        assert_eq!(table.check(key, 7, 0x9000, 100, 0).map(|m| m.0), Some(0x1000));
        assert_eq!(table.check(key, 7, 0x9064, 0, 0).map(|m| m.0), Some(0x1064));
        assert!(table.check(key, 7, 0x9001, 100, 0).is_none());
        assert!(table.check(key, 7, 0x8fff, 1, 0).is_none());
        assert!(table.check(key, 7, 0x9000, u64::MAX, 0).is_none());
        assert!(table.check(key, 8, 0x9000, 1, 0).is_none());
        assert!(table.check(key, 7, 0x9000, 1, access::REMOTE_WRITE).is_none());
        table.remove(key).unwrap();
        assert!(table.check(key, 7, 0x9000, 1, 0).is_none());
        assert_eq!(table.remove(key), Err(Refused::NotFound));
    }

    #[test]
    fn change__keeps_the_key_and_what_is_not_given() {
        let mut table = MrTable::new(3);
        let key = table.add(7, 0x1000, 0x9000, 100, access::LOCAL_WRITE).unwrap();
        table.change(key, Some(8), None, None).unwrap();
        assert!(table.check(key, 7, 0x9000, 1, 0).is_none());
        assert_eq!(table.check(key, 8, 0x9000, 100, access::LOCAL_WRITE).map(|m| m.0), Some(0x1000));
        table.change(key, None, Some((0x2000, 0, 10)), None).unwrap();
        assert_eq!(table.check(key, 8, 9, 1, access::LOCAL_WRITE).map(|m| m.0), Some(0x2009));
        assert!(table.check(key, 8, 0x9000, 1, 0).is_none());
        table.change(key, None, None, Some(access::REMOTE_READ)).unwrap();
        assert!(table.check(key, 8, 0, 1, access::LOCAL_WRITE).is_none());
        assert!(table.check(key, 8, 0, 1, access::REMOTE_READ).is_some());
        assert_eq!(table.change(key, None, Some((u64::MAX, 0, 2)), Some(0)), Err(Refused::Invalid));
        assert!(table.check(key, 8, 0, 1, access::REMOTE_READ).is_some());
        table.remove(key).unwrap();
        assert_eq!(table.change(key, None, None, None), Err(Refused::NotFound));
    }

    #[test]
    fn add__keys_are_not_soon_reused() {
        let mut table = MrTable::new(2);
        let mut seen = std::collections::HashSet::new();
        for _ in 0..10_000 {
            let key = table.add(0, 0, 0, 1, 0).unwrap();
            table.remove(key).unwrap();
            assert!(seen.insert(key) || seen.len() > 1024, "key {key:#x} came back after {}", seen.len());
        }
    }

    const QP: (u32, Qpn) = (7, Qpn(40));

    fn bind(new_key: u32, region: u32, addr: u64, len: u64, access: u32) -> Bind {
        Bind { new_key, region, addr, len, access }
    }

    #[test]
    fn window__shows_its_part_with_its_rights_and_nothing_else() {
        let mut table = MrTable::new(5);
        let region = table.add(7, 0x1000, 0x9000, 100, access::LOCAL_WRITE | access::MW_BIND).unwrap();
        let window = table.add_window(7, false).unwrap();
        assert!(table.check_remote(window, QP, 0x9000, 1, 0).is_none());
        let next = window ^ 1;
        assert!(table.bind(&bind(next, region, 0x9010, 16, access::REMOTE_WRITE), QP));
        assert!(table.check_remote(window, QP, 0x9010, 1, access::REMOTE_WRITE).is_none());
        let at = |addr, len, rights| table.check_remote(next, QP, addr, len, rights).map(|m| m.0);
        assert_eq!(at(0x9010, 16, access::REMOTE_WRITE), Some(0x1010));
        assert_eq!(at(0x900f, 1, access::REMOTE_WRITE), None);
        assert_eq!(at(0x9010, 17, access::REMOTE_WRITE), None);
        assert_eq!(at(0x9010, 1, access::REMOTE_READ), None);
        assert!(table.check(next, 7, 0x9010, 1, 0).is_none(), "a window is nobody's lkey");
        assert!(table.check_remote(next, (8, Qpn(40)), 0x9010, 1, 0).is_none());
        assert!(table.check_remote(next, (7, Qpn(41)), 0x9010, 1, 0).is_some(), "type 1 serves the whole PD");
        assert_eq!(table.remove(region), Err(Refused::Busy));
        assert_eq!(table.change(region, None, None, Some(0)), Err(Refused::Busy));
        assert!(table.bind(&bind(next ^ 2, region, 0, 0, 0), QP));
        assert!(table.check_remote(next, QP, 0x9010, 1, 0).is_none());
        table.remove(region).unwrap();
        table.remove_window(next).unwrap();
        assert_eq!(table.remove_window(next), Err(Refused::NotFound));
    }

    #[test]
    fn window2__belongs_to_its_qp_and_dies_by_invalidation() {
        let mut table = MrTable::new(6);
        let region = table.add(7, 0x1000, 0x1000, 100, access::LOCAL_WRITE | access::MW_BIND).unwrap();
        let window = table.add_window(7, true).unwrap();
        let key = window ^ 0x11;
        assert!(table.bind(&bind(key, region, 0x1000, 100, access::REMOTE_READ), QP));
        assert!(!table.bind(&bind(key ^ 1, region, 0x1000, 100, access::REMOTE_READ), QP), "bound already");
        assert!(table.check_remote(key, QP, 0x1000, 100, access::REMOTE_READ).is_some());
        assert!(table.check_remote(key, (7, Qpn(41)), 0x1000, 1, access::REMOTE_READ).is_none());
        assert!(!table.invalidate(region, QP), "a region is not invalidated");
        assert!(!table.invalidate(key, (7, Qpn(41))));
        assert!(!table.invalidate(key ^ 1, QP));
        assert!(table.invalidate(key, QP));
        assert!(!table.invalidate(key, QP));
        assert!(table.check_remote(key, QP, 0x1000, 1, 0).is_none());
        assert!(table.bind(&bind(key ^ 3, region, 0x1000, 1, access::ZERO_BASED | access::REMOTE_READ), QP));
        assert_eq!(table.check_remote(key ^ 3, QP, 0, 1, access::REMOTE_READ).map(|m| m.0), Some(0x1000));
        table.unbind_qp(Qpn(40));
        assert!(table.check_remote(key ^ 3, QP, 0, 1, 0).is_none());
        table.remove(region).unwrap();
    }

    #[test]
    fn bind__needs_the_right_region_and_window() {
        let mut table = MrTable::new(7);
        let plain = table.add(7, 0x1000, 0x1000, 100, access::LOCAL_WRITE).unwrap();
        let fixed = table.add(7, 0x1000, 0x1000, 100, access::MW_BIND).unwrap();
        let other = table.add(8, 0x1000, 0x1000, 100, access::MW_BIND).unwrap();
        let window = table.add_window(7, false).unwrap();
        assert!(!table.bind(&bind(window, plain, 0x1000, 1, access::REMOTE_READ), QP), "no MW_BIND");
        assert!(!table.bind(&bind(window, fixed, 0x1000, 1, access::REMOTE_WRITE), QP), "not writable");
        assert!(!table.bind(&bind(window, other, 0x1000, 1, access::REMOTE_READ), QP), "of another PD");
        assert!(!table.bind(&bind(window, fixed, 0x1000, 101, access::REMOTE_READ), QP), "too long");
        assert!(
            !table.bind(&bind(window ^ 0x100, fixed, 0x1000, 1, access::REMOTE_READ), QP),
            "no such window"
        );
        assert!(
            !table.bind(&bind(window, window, 0x1000, 1, access::REMOTE_READ), QP),
            "a window is no region"
        );
        assert!(table.bind(&bind(window, fixed, 0x1000, 1, access::REMOTE_READ), QP));
    }

    #[test]
    fn null__is_endless_and_local() {
        let mut table = MrTable::new(8);
        let key = table.add_null(7).unwrap();
        let (_, mr) = table.check(key, 7, 0x1234, 1 << 31, access::LOCAL_WRITE).unwrap();
        assert!(mr.is_null());
        assert!(table.check_remote(key, QP, 0, 1, 0).is_none());
        table.remove(key).unwrap();
        assert!(table.check(key, 7, 0, 1, 0).is_none());
    }
}
