//! Multicast groups over the loopback interface (MR-MC-4).

use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use crate::common::*;
use metaroce_config::Impairment;
use metaroce_proto::groups::MULTICAST_QPN;
use metaroce_proto::{
    Completion, Destination, Opcode, QpModify, QpState, QpType, SendWqe, WcOpcode, WcStatus,
};

const CLEAN: Impairment = Impairment { loss: 0.0, reorder: 0.0, dup: 0.0, delay_us: 0, seed: 1 };
const QKEY: u32 = 0x0123_4567;

/// An end whose QP is UD and ready.
fn end(base_port: u16, loopback: &[IpAddr]) -> End {
    let mut config = config(base_port, CLEAN);
    config.planes[0].addrs = loopback.to_vec();
    let mut end = End::new(config, 1 << 16);
    let init = metaroce_engine::QpCreate { qp_type: QpType::Ud, ..qp_of(end.pd, &end.cq, None) };
    end.qp = end.device.create_qp(&init, None).unwrap();
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        end.qp.modify(&QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() }).unwrap();
    }
    end
}

fn send(from: &End, group: IpAddr, wr_id: u64) {
    let sge = from.sge(32 << 10, 1000);
    let dest = Some(Destination { ip: group, qpn: MULTICAST_QPN, qkey: QKEY });
    let wqe = SendWqe { dest, wr_id, ..wqe(Opcode::Send, sge.len, (0, 0)) };
    let mut post = from.qp.send();
    post.push(wqe, [sge].into_iter()).unwrap();
    post.commit();
}

/// Completions of receives that are there when all that was sent has long arrived: those of `count` and no more.
fn receives(end: &End, count: usize) -> Vec<Completion> {
    let mut got = Vec::new();
    let mut until = Instant::now() + Duration::from_secs(10);
    while Instant::now() < until {
        let before = got.len();
        end.cq.poll(16, |c| got.extend((c.opcode == WcOpcode::Recv).then_some(*c)));
        if before < count && got.len() >= count {
            // What is sent once more comes at the same time.
            until = Instant::now() + Duration::from_millis(20);
        }
    }
    got
}

fn members_get_one_copy(base_port: u16, loopback: &[IpAddr], groups: [IpAddr; 2]) {
    let [sender, member, outsider] = [(); 3].map(|()| end(base_port, loopback));
    for end in [&sender, &member, &outsider] {
        (0..4).for_each(|i| end.qp.post_recv(i, [end.sge(i as usize * 2048, 2048)].into_iter()).unwrap());
    }
    sender.qp.attach_group(groups[0]).unwrap();
    member.qp.attach_group(groups[0]).unwrap();
    outsider.qp.attach_group(groups[1]).unwrap();
    send(&sender, groups[0], 1);
    // The sender is a member, so it gets a copy too.
    for end in [&sender, &member] {
        let got = receives(end, 1);
        assert_eq!(got.len(), 1, "{got:?}");
        assert_eq!(
            (got[0].status, got[0].byte_len, got[0].src_qp),
            (WcStatus::Success, 1040, sender.qp.qpn())
        );
    }
    // Who has left gets no more, who is there gets the next.
    member.qp.detach_group(groups[0]).unwrap();
    assert_eq!(member.qp.detach_group(groups[0]), Err(libc::EINVAL));
    send(&sender, groups[0], 2);
    send(&sender, groups[1], 3);
    assert_eq!(receives(&sender, 1).len(), 1);
    assert_eq!(receives(&outsider, 1).len(), 1);
    let mut late = 0;
    member.cq.poll(16, |_| late += 1);
    assert_eq!(late, 0);
    // A QP that ends leaves its groups.
    outsider.qp.destroy().unwrap();
    assert!(!outsider.qp.is_attached());
}

#[test]
fn group__ipv4_over_loopback() {
    let groups = [[239, 1, 2, 3], [224, 0, 1, 99]].map(IpAddr::from);
    members_get_one_copy(29_000, &[[127, 0, 0, 1].into()], groups);
}

#[test]
fn group__ipv6_over_loopback_goes_by_ipv4() {
    // Both groups go by the same IPv4 one.
    let groups = ["ff0e::1:2", "ff0e::2:1"].map(|g| g.parse().unwrap());
    members_get_one_copy(30_100, &[[127, 0, 0, 1].into(), Ipv6Addr::LOCALHOST.into()], groups);
}

#[test]
fn attach__without_multicast_is_refused() {
    let end = end(31_200, &[Ipv6Addr::LOCALHOST.into()]);
    assert_eq!(end.qp.attach_group("ff0e::1".parse().unwrap()), Err(libc::EOPNOTSUPP));
    assert_eq!(end.qp.attach_group("10.0.0.1".parse().unwrap()), Err(libc::EINVAL));
    assert!(!end.qp.is_attached());
}
