//! Memory regions: keys, bounds, rights.

use crate::types::{Refused, access};
use std::collections::VecDeque;

/// Keys below this many free slots are not handed out again, so that a stale key stays stale for long.
const REUSE_DELAY: usize = 1024;
/// Regions at most (the low bits of a key are a nonce).
const MRS_MAX: usize = 1 << 20;

/// One registered region.
#[derive(Debug, Clone, Copy)]
pub struct Mr {
    key: u32,
    live: bool,
    pd: u32,
    va: u64,
    iova: u64,
    len: u64,
    access: u32,
}

impl Mr {
    /// The writer waived ordered appearance of data (IBV_ACCESS_RELAXED_ORDERING).
    pub fn relaxed(&self) -> bool {
        self.access & access::RELAXED_ORDERING != 0
    }
}

/// All regions of an endpoint. A key is index (20 bits) | nonce (12 bits).
#[derive(Debug)]
pub struct MrTable {
    slots: Vec<Mr>,
    free: VecDeque<u32>,
    rng: u64,
}

impl MrTable {
    /// An empty table; `seed` makes the keys unpredictable.
    pub fn new(seed: u64) -> Self {
        MrTable { slots: Vec::new(), free: VecDeque::new(), rng: seed }
    }
    /// Adds a region and gives its key.
    pub fn add(&mut self, pd: u32, va: u64, iova: u64, len: u64, access: u32) -> Result<u32, Refused> {
        va.checked_add(len).ok_or(Refused::Invalid)?;
        iova.checked_add(len).ok_or(Refused::Invalid)?;
        let nonce = crate::random(&mut self.rng) as u32 & 0xfff;
        let reuse = self.free.len() > REUSE_DELAY || self.slots.len() == MRS_MAX;
        let recycled = if reuse { self.free.pop_front() } else { None };
        let index = match recycled {
            Some(index) => index,
            None if self.slots.len() < MRS_MAX => self.slots.len() as u32,
            None => return Err(Refused::Full),
        };
        let old_nonce = self.slots.get(index as usize).map_or(0, |m| m.key & 0xfff);
        // Never the nonce of the slot's last life, and never key 0, which programs use as "none".
        let taken = |n: u32| n == old_nonce || index << 12 | n == 0;
        let free = (0..3).map(|step| (nonce + step) & 0xfff).find(|n| !taken(*n));
        let nonce = free.unwrap_or(nonce);
        let mr = Mr { key: index << 12 | nonce, live: true, pd, va, iova, len, access };
        if index as usize == self.slots.len() {
            self.slots.push(mr);
        } else {
            self.slots[index as usize] = mr;
        }
        Ok(mr.key)
    }
    /// Kills a key.
    pub fn remove(&mut self, key: u32) -> Result<(), Refused> {
        let mr = self.slots.get_mut((key >> 12) as usize).filter(|m| m.live && m.key == key);
        let mr = mr.ok_or(Refused::NotFound)?;
        mr.live = false;
        self.free.push_back(key >> 12);
        Ok(())
    }
    /// Changes what a key stands for; `None` leaves as is. `range` is address, address in the iova space, length.
    pub fn change(
        &mut self,
        key: u32,
        pd: Option<u32>,
        range: Option<(u64, u64, u64)>,
        access: Option<u32>,
    ) -> Result<(), Refused> {
        let mr = self.slots.get_mut((key >> 12) as usize).filter(|m| m.live && m.key == key);
        let mr = mr.ok_or(Refused::NotFound)?;
        if let Some((va, iova, len)) = range {
            va.checked_add(len).ok_or(Refused::Invalid)?;
            iova.checked_add(len).ok_or(Refused::Invalid)?;
            (mr.va, mr.iova, mr.len) = (va, iova, len);
        }
        mr.pd = pd.unwrap_or(mr.pd);
        mr.access = access.unwrap_or(mr.access);
        Ok(())
    }
    /// The address behind `addr` if the key lives, belongs to `pd`, holds `addr..addr + len` and grants `rights`.
    pub fn check(&self, key: u32, pd: u32, addr: u64, len: u64, rights: u32) -> Option<(u64, &Mr)> {
        let mr = self.slots.get((key >> 12) as usize)?;
        let offset = addr.wrapping_sub(mr.iova);
        let ok = mr.live
            && mr.key == key
            && mr.pd == pd
            && offset <= mr.len
            && len <= mr.len - offset
            && mr.access & rights == rights;
        ok.then(|| (mr.va + offset, mr))
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
}
