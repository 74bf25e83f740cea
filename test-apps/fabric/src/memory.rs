//! Memory of one simulated host: either real bytes, compared at the end, or lengths only, for scenarios of speed.
//!
//! The upper 32 bits of an address are the number of the region, which is the number of the flow it belongs to.

use metaroce_proto::{Fault, Memory};

/// Bytes of address space per region.
pub const REGION: u64 = 1 << 32;

/// Memory of one host.
#[derive(Debug, Default)]
pub struct HostMemory {
    /// Bytes placed per region since the beginning, however often.
    pub placed: Vec<u64>,
    /// Bytes placed outside every region that was registered here.
    pub stray: u64,
    regions: Vec<Option<Vec<u8>>>,
    real: bool,
}

impl HostMemory {
    /// Memory for `regions` regions; `real`: with bytes.
    pub fn new(regions: usize, real: bool) -> Self {
        HostMemory { placed: vec![0; regions], stray: 0, regions: (0..regions).map(|_| None).collect(), real }
    }
    /// Makes a region of `len` bytes, filled by `fill`; gives its address.
    pub fn make(&mut self, region: usize, len: usize, fill: impl FnMut(usize) -> u8) -> u64 {
        if self.real {
            self.regions[region] = Some((0..len).map(fill).collect());
        }
        (region as u64 + 1) * REGION
    }
    /// Bytes of a region, if this memory has bytes.
    pub fn bytes(&self, region: usize) -> Option<&[u8]> {
        self.regions.get(region)?.as_deref()
    }
    /// The same, to be changed by the application.
    pub fn bytes_mut(&mut self, region: usize) -> Option<&mut [u8]> {
        self.regions.get_mut(region)?.as_deref_mut()
    }
    /// Whether this memory has bytes.
    pub fn is_real(&self) -> bool {
        self.real
    }
    fn slice(&mut self, va: u64, len: usize) -> Result<Option<&mut [u8]>, Fault> {
        let region = (va / REGION).checked_sub(1).ok_or(Fault)? as usize;
        if !self.real {
            return if region < self.placed.len() { Ok(None) } else { Err(Fault) };
        }
        let at = (va % REGION) as usize;
        let bytes = self.regions.get_mut(region).and_then(Option::as_mut).ok_or(Fault)?;
        bytes.get_mut(at..at + len).map(Some).ok_or(Fault)
    }
}

impl Memory for HostMemory {
    fn place(&mut self, va: u64, bytes: &[u8]) -> Result<(), Fault> {
        match self.slice(va, bytes.len()) {
            Ok(Some(to)) => to.copy_from_slice(bytes),
            Ok(None) => {}
            Err(fault) => {
                self.stray += bytes.len() as u64;
                return Err(fault);
            }
        }
        self.placed[(va / REGION) as usize - 1] += bytes.len() as u64;
        Ok(())
    }
    fn place_last(&mut self, va: u64, bytes: &[u8]) -> Result<(), Fault> {
        self.place(va, bytes)
    }
    fn gather(&mut self, va: u64, out: &mut [u8]) -> Result<(), Fault> {
        if let Some(from) = self.slice(va, out.len())? {
            out.copy_from_slice(from);
        }
        Ok(())
    }
    fn compare_swap(&mut self, va: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
        let Some(bytes) = self.slice(va, 8)? else { return Ok(0) };
        let old = u64::from_ne_bytes(bytes.try_into().map_err(|_| Fault)?);
        if old == compare {
            bytes.copy_from_slice(&swap.to_ne_bytes());
        }
        Ok(old)
    }
    fn fetch_add(&mut self, va: u64, add: u64) -> Result<u64, Fault> {
        let Some(bytes) = self.slice(va, 8)? else { return Ok(0) };
        let old = u64::from_ne_bytes(bytes.try_into().map_err(|_| Fault)?);
        bytes.copy_from_slice(&old.wrapping_add(add).to_ne_bytes());
        Ok(old)
    }
}
