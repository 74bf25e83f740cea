//! Rates of the planes' links: they pace what is sent, and what may come in is shared out among the senders.

use metaroce_config::{DeviceConfig, Plane, link_rate_bps};
use metaroce_proto::Endpoint;

/// What is known of the links.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    /// Bits per second of each plane's link; 0: not known, or without limit.
    links: Vec<u64>,
}

/// Bits per second of a plane's link, as configured or as the link says; 0: not known, or without limit.
pub fn of_plane(plane: &Plane) -> u64 {
    plane.rate_bps.unwrap_or_else(|| link_rate_bps(&plane.ifname, plane.ifindex))
}

impl Rates {
    /// All planes' links as they are now.
    pub(crate) fn new(config: &DeviceConfig) -> Rates {
        Rates { links: config.planes.iter().map(of_plane).collect() }
    }
    /// Rates in order of planes.
    pub(crate) fn links(&self) -> &[u64] {
        &self.links
    }
    /// A link has come up: it may have another rate than before.
    pub(crate) fn set(&mut self, plane: u8, bps: u64) {
        if let Some(link) = self.links.get_mut(usize::from(plane)) {
            *link = bps;
        }
    }
    /// Tells the core the rates, and what the links that are up (all but the bits of `down`) bring in together. One of
    /// unknown rate makes that unknown too.
    pub(crate) fn apply(&self, endpoint: &mut Endpoint, down: u64) {
        for (plane, bps) in (0u8..).zip(&self.links) {
            endpoint.set_plane_rate(plane, *bps);
        }
        endpoint.set_inbound_capacity(self.inbound_bps(down));
    }
    fn inbound_bps(&self, down: u64) -> u64 {
        let up = |plane: u32| down.checked_shr(plane).unwrap_or(0) & 1 == 0;
        let known = self.links.iter().all(|bps| *bps > 0);
        let sum = (0u32..).zip(&self.links).filter(|(plane, _)| up(*plane)).map(|(_, bps)| bps).sum();
        if known { sum } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inbound__links_that_are_up_and_only_if_all_are_known() {
        let rates = |links: &[u64]| Rates { links: links.to_vec() };
        assert_eq!(rates(&[10, 20, 30]).inbound_bps(0), 60);
        assert_eq!(rates(&[10, 20, 30]).inbound_bps(0b010), 40);
        assert_eq!(rates(&[10, 0, 30]).inbound_bps(0b010), 0);
    }
}
