//! Multicast groups through the edge: who may attach, and what members see of a datagram.

use rdma_core_sys::*;

use super::world::*;
use super::{Published, address_vector};
use crate::ah::Ah;
use crate::device;

const MULTICAST_QPN: u32 = 0xff_ffff;

fn gid(text: &str) -> [u8; 16] {
    text.parse::<std::net::Ipv6Addr>().expect("address").octets()
}

#[test]
fn members_of_a_group_get_its_datagrams_with_its_gid_in_the_header() {
    // Below 32768, where no socket of the machine's takes the port of groups by chance.
    let world = World::new(27_000);
    for group in [gid("::ffff:239.4.5.6"), gid("ff0e::ffff:ef04:506")] {
        let two = world.connected(IBV_QPT_UD, Link::default());
        let ah = Published::new(Ah::create(world.pd.get(), &address_vector(group)).expect("AH"));
        // More than once is once.
        (0..2).for_each(|_| two.b.get().attach_group(group).expect("attach"));
        recv(&two.b, 7, world.sge(0, 512)).expect("receive");
        recv(&two.b, 8, world.sge(0, 512)).expect("receive");
        let mut wr = request(1, IBV_WR_SEND);
        (wr.wr.ud.ah, wr.wr.ud.remote_qpn, wr.wr.ud.remote_qkey) = (ah.0, MULTICAST_QPN, 0x1111);
        send(&two.a, wr, world.sge(1024, 16)).expect("post");
        let got = wait(&two.cqs[3], 1)[0];
        assert_eq!((got.wr_id, got.status, got.byte_len), (7, IBV_WC_SUCCESS, 56));
        assert_eq!(got.src_qp, two.a.get().engine.qpn().0);
        assert_eq!(two.take(0, 1), [(1, IBV_WC_SUCCESS)]);
        two.nothing(3);
        let ipv4 = group[..2] != [0xff, 0x0e];
        let told = if ipv4 { &world.memory[36..40] } else { &world.memory[24..40] };
        assert_eq!(told, &group[16 - told.len()..]);

        let destroyed = two.b.get().destroy();
        assert_eq!(destroyed, Err(libc::EBUSY), "attached");
        two.b.get().detach_group(group).expect("detach");
        assert_eq!(two.b.get().detach_group(group), Err(libc::EINVAL));
        two.destroy();
    }
}

#[test]
fn only_datagram_qps_join_only_groups() {
    let world = World::new(28_100);
    let group = gid("::ffff:239.4.5.6");
    for (qp_type, gid, errno) in [
        (IBV_QPT_RC, group, libc::EINVAL),
        (IBV_QPT_UC, group, libc::EINVAL),
        (IBV_QPT_UD, gid("::ffff:127.0.0.1"), libc::EINVAL),
        (IBV_QPT_UD, gid("fe80::1"), libc::EINVAL),
        (IBV_QPT_UD, gid("::"), libc::EINVAL),
    ] {
        let two = world.two(qp_type, None);
        assert_eq!(two.a.get().attach_group(gid), Err(errno));
        two.destroy();
    }
    let attr = device::query(&world.context).orig_attr;
    assert_eq!((attr.max_mcast_grp, attr.max_mcast_qp_attach), (1024, attr.max_qp));
    assert_eq!(attr.max_total_mcast_qp_attach, 1024 * attr.max_qp);
    // Connections have one peer.
    let two = world.two(IBV_QPT_RC, None);
    world.step(&two.a, &two.b, IBV_QPS_INIT, Link::default());
    let mut attr = world.attributes(&two.b, Link::default());
    (attr.qp_state, attr.ah_attr) = (IBV_QPS_RTR, address_vector(group));
    let masks = crate::attr::transition(IBV_QPT_RC, IBV_QPS_INIT, IBV_QPS_RTR).expect("legal");
    assert_eq!(two.a.get().modify(&attr, masks.required | IBV_QP_STATE), Err(libc::EINVAL));
    two.destroy();
}
