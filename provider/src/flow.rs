//! Flow steering rules: from the layered specifications of the verbs API to one value and one mask.

use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

use metaroce_proto::steer::{Fields, Flow, FlowKind, field, has};
use metaroce_proto::types::Qpn;
use rdma_core_sys::*;

use crate::context::Context;
use crate::ffi::{CPart, Object, Result, next_handle};

/// A steering rule as C sees it.
#[repr(C)]
pub(crate) struct FlowRule {
    _c: CPart<ibv_flow>,
    number: u32,
    context: Arc<Context>,
}

// SAFETY: repr(C), the C part is first and is an ibv_flow.
unsafe impl Object for FlowRule {
    type C = ibv_flow;
}

impl FlowRule {
    /// EOPNOTSUPP for specifications and flags the device does not have, EINVAL for malformed ones or another port.
    pub(crate) fn create<'a>(
        context: &Arc<Context>,
        c: *mut ibv_context,
        qpn: u32,
        attr: &ibv_flow_attr,
        specs: impl Iterator<Item = &'a [u8]>,
    ) -> Result<Box<Self>> {
        let flow = rule(qpn, attr, specs)?;
        let number = context.device.add_flow(flow)?;
        let _c = CPart::new(|flow: &mut ibv_flow| (flow.context, flow.handle) = (c, next_handle()));
        Ok(Box::new(Self { _c, number, context: Arc::clone(context) }))
    }
    /// Takes the rule out; then the object may be dropped. That its QP went first is no error.
    pub(crate) fn destroy(&self) {
        let _ = self.context.device.remove_flow(self.number);
    }
}

fn rule<'a>(qpn: u32, attr: &ibv_flow_attr, specs: impl Iterator<Item = &'a [u8]>) -> Result<Flow> {
    if attr.comp_mask != 0 || attr.port != crate::limits::PORT {
        return Err(libc::EINVAL);
    }
    if attr.flags != 0 {
        return Err(libc::EOPNOTSUPP);
    }
    let kind = match attr.type_ {
        IBV_FLOW_ATTR_NORMAL => FlowKind::Normal,
        IBV_FLOW_ATTR_ALL_DEFAULT => FlowKind::Default,
        IBV_FLOW_ATTR_MC_DEFAULT => FlowKind::MulticastDefault,
        IBV_FLOW_ATTR_SNIFFER => FlowKind::Sniffer,
        _ => return Err(libc::EINVAL),
    };
    let (value, mask) = ([0; 80], [0; 80]);
    let mut flow = Flow { qpn: Qpn(qpn), kind, priority: attr.priority, drop: false, value, mask };
    for spec in specs {
        add(&mut flow, spec)?;
    }
    Ok(flow)
}

/// A field of a filter: its offset in the C structure and its place in the core's fields.
type Place = (usize, Range<usize>);

macro_rules! places {
    ($filter:ident: $($member:ident => $place:expr),+) => {
        [$((offset_of!($filter, $member), $place)),+]
    };
}

/// Where value and mask of a specification begin.
macro_rules! offsets {
    ($spec:ident) => {
        (offset_of!($spec, val), offset_of!($spec, mask))
    };
}

/// Adds one specification; `spec` is the whole C structure.
fn add(flow: &mut Flow, spec: &[u8]) -> Result<()> {
    let kind = spec.first_chunk::<4>().map(|bytes| u32::from_ne_bytes(*bytes)).ok_or(libc::EINVAL)?;
    match kind {
        IBV_FLOW_SPEC_ETH => {
            let places = places!(ibv_flow_eth_filter: dst_mac => field::DST_MAC, src_mac => field::SRC_MAC,
                ether_type => field::ETHER_TYPE, vlan_tag => field::VLAN_TAG);
            layer(flow, spec, 0, offsets!(ibv_flow_spec_eth), &places)
        }
        IBV_FLOW_SPEC_IPV4 => {
            let places = places!(ibv_flow_ipv4_filter: src_ip => field::V4_SRC, dst_ip => field::V4_DST);
            layer(flow, spec, has::V4, offsets!(ibv_flow_spec_ipv4), &places)
        }
        IBV_FLOW_SPEC_IPV4_EXT => {
            let places = places!(ibv_flow_ipv4_ext_filter: src_ip => field::V4_SRC, dst_ip => field::V4_DST,
                proto => field::V4_PROTO, tos => field::V4_TOS, ttl => field::V4_TTL, flags => field::V4_FLAGS);
            layer(flow, spec, has::V4, offsets!(ibv_flow_spec_ipv4_ext), &places)
        }
        IBV_FLOW_SPEC_IPV6 => {
            let places = places!(ibv_flow_ipv6_filter: src_ip => field::V6_SRC, dst_ip => field::V6_DST,
                flow_label => field::V6_FLOW_LABEL, next_hdr => field::V6_NEXT_HEADER,
                traffic_class => field::V6_CLASS, hop_limit => field::V6_HOP_LIMIT);
            layer(flow, spec, has::V6, offsets!(ibv_flow_spec_ipv6), &places)
        }
        IBV_FLOW_SPEC_TCP | IBV_FLOW_SPEC_UDP => {
            let has = if kind == IBV_FLOW_SPEC_TCP { has::TCP } else { has::UDP };
            let places =
                places!(ibv_flow_tcp_udp_filter: dst_port => field::DST_PORT, src_port => field::SRC_PORT);
            layer(flow, spec, has, offsets!(ibv_flow_spec_tcp_udp), &places)
        }
        IBV_FLOW_SPEC_ACTION_DROP => {
            flow.drop = true;
            Ok(())
        }
        _ => Err(libc::EOPNOTSUPP),
    }
}

fn layer(
    flow: &mut Flow,
    spec: &[u8],
    kinds: u8,
    (value_at, mask_at): (usize, usize),
    places: &[Place],
) -> Result<()> {
    let copy = |to: &mut Fields, base: usize| -> Result<()> {
        for (at, place) in places {
            let from = spec.get(base + at..base + at + place.len()).ok_or(libc::EINVAL)?;
            to[place.clone()].copy_from_slice(from);
        }
        to[field::KINDS.start] |= kinds;
        Ok(())
    };
    copy(&mut flow.value, value_at)?;
    copy(&mut flow.mask, mask_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes<T>(spec: &T) -> &[u8] {
        // SAFETY: plain C structures; padding is zeroed by Default.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(spec).cast(), size_of::<T>()) }
    }

    fn attr() -> ibv_flow_attr {
        ibv_flow_attr { port: 1, priority: 3, ..Default::default() }
    }

    #[test]
    fn rule_joins_the_layers() {
        let mut eth = ibv_flow_spec_eth { type_: IBV_FLOW_SPEC_ETH, size: 40, ..Default::default() };
        (eth.val.dst_mac, eth.mask.dst_mac) = ([1, 2, 3, 4, 5, 6], [0xff; 6]);
        (eth.val.ether_type, eth.mask.ether_type) = (0x86ddu16.to_be(), 0xffff);
        let mut tcp = ibv_flow_spec_tcp_udp { type_: IBV_FLOW_SPEC_TCP, size: 16, ..Default::default() };
        (tcp.val.src_port, tcp.mask.src_port) = (80u16.to_be(), 0xffff);
        let flow = rule(9, &attr(), [bytes(&eth), bytes(&tcp)].into_iter()).expect("legal");
        assert_eq!((flow.qpn, flow.priority, flow.kind), (Qpn(9), 3, FlowKind::Normal));
        assert_eq!(flow.value[field::DST_MAC], [1, 2, 3, 4, 5, 6]);
        assert_eq!(flow.mask[field::SRC_MAC], [0; 6]);
        assert_eq!(flow.value[field::ETHER_TYPE], [0x86, 0xdd]);
        assert_eq!(flow.value[field::SRC_PORT], [0, 80]);
        assert_eq!(flow.mask[field::DST_PORT], [0, 0]);
        assert_eq!(flow.mask[field::KINDS], [has::TCP]);
    }

    #[test]
    fn rule_refuses_what_is_not_there() {
        let unknown = [0x50u32, 0].map(u32::to_ne_bytes).concat();
        assert_eq!(rule(9, &attr(), [&unknown[..]].into_iter()).map(|_| ()), Err(libc::EOPNOTSUPP));
        let short = [IBV_FLOW_SPEC_ETH, 8].map(u32::to_ne_bytes).concat();
        assert_eq!(rule(9, &attr(), [&short[..]].into_iter()).map(|_| ()), Err(libc::EINVAL));
        let other_port = ibv_flow_attr { port: 2, ..attr() };
        assert_eq!(rule(9, &other_port, std::iter::empty()).map(|_| ()), Err(libc::EINVAL));
        let egress = ibv_flow_attr { flags: IBV_FLOW_ATTR_FLAGS_EGRESS, ..attr() };
        assert_eq!(rule(9, &egress, std::iter::empty()).map(|_| ()), Err(libc::EOPNOTSUPP));
    }
}
