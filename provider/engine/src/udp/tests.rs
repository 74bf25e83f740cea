//! Sends bursts over loopback sockets and looks at what arrives.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use metaroce_config::Plane;
use metaroce_proto::{Piece, TxBurst};

use super::rx::Rx;
use super::slot;
use super::socket::{self, Family};
use super::tx::{Sent, Tx};

/// A range of ports no other test uses.
const BASE: u16 = 42_000;

fn lo() -> Plane {
    Plane {
        label: "lo".into(),
        ifname: "lo".into(),
        ifindex: 1,
        mtu: 65536,
        mac: [0; 6],
        addrs: vec![IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)],
        up: true,
        rate_bps: None,
    }
}

/// A burst of `count` packets of a 4-byte header and `payload` bytes of memory, the last one a byte shorter.
fn burst(dst: SocketAddr, payload: &[u8], count: u32) -> TxBurst {
    let mut burst = TxBurst::new();
    burst.dst = dst;
    burst.entropy = 3;
    for i in 0..count {
        burst.bytes.extend_from_slice(&i.to_le_bytes());
        burst.pieces.push(Piece::Bytes { start: i * 4, len: 4 });
        let len = payload.len() as u32 - u32::from(i + 1 == count);
        burst.pieces.push(Piece::Memory { va: payload.as_ptr() as u64, len });
        burst.packets.push((burst.pieces.len() as u32, len + 4));
    }
    burst
}

/// Receives until `count` datagrams have come; gives header, length, source and ECN of each.
fn collect(rx: &mut Rx, count: usize) -> Vec<(u32, usize, SocketAddr, IpAddr, u8)> {
    let wake = socket::Wake::new().unwrap();
    let mut got = Vec::new();
    while got.len() < count {
        assert!(
            socket::wait(wake.fd(), [Some(rx.fd()), None], Some(std::time::Duration::from_secs(10))).readable,
            "only {} of {count} datagrams came",
            got.len()
        );
        for i in 0..rx.receive() {
            let message = rx.message(i).expect("a datagram with all facts");
            for d in message.datagrams() {
                let number = u32::from_le_bytes(d[..4].try_into().unwrap());
                got.push((number, d.len(), message.meta.src, message.meta.dst_ip, message.meta.ecn));
            }
        }
    }
    got
}

/// Whether this machine has IPv6.
fn has_ipv6() -> bool {
    let socket = socket::udp(Family::V6);
    socket.and_then(|s| socket::bind(&s, (Ipv6Addr::LOCALHOST, 0).into(), 0)).is_ok()
}

fn check(gso: bool, ip: IpAddr, count: u32) {
    if ip.is_ipv6() && !has_ipv6() {
        return;
    }
    let slot = slot::claim(BASE, 4 << 20, gso).unwrap();
    let dst = SocketAddr::new(ip, BASE + slot.number);
    let mut rx = Rx::new(slot.socket);
    let mut tx = Tx::open(&[lo()], 8, gso).unwrap();
    let payload = vec![7u8; 1000];
    assert_eq!(tx.send(&burst(dst, &payload, count)), Sent::All);
    let got = collect(&mut rx, count as usize);
    let want = |i: u32| (i, 1004 - usize::from(i + 1 == count), got[0].2, ip, 2);
    assert_eq!(got, (0..count).map(want).collect::<Vec<_>>());
    assert_eq!(got[0].2.ip(), ip);
    assert!(got[0].2.port() >= 0xC000);
    assert_eq!(tx.counters().refused, 0);
}

#[test]
fn send__bursts_arrive_whole_with_ecn_and_addresses() {
    for ip in lo().addrs {
        for gso in [true, false] {
            for count in [1, 2, 15, 64, 100] {
                check(gso, ip, count);
            }
        }
    }
}

#[test]
fn send__unreadable_memory_is_a_fault_and_sends_nothing() {
    let slot = slot::claim(BASE, 1 << 20, true).unwrap();
    let dst = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), BASE + slot.number);
    let mut rx = Rx::new(slot.socket);
    for gso in [true, false] {
        let mut tx = Tx::open(&[lo()], 8, gso).unwrap();
        let payload = vec![7u8; 100];
        let mut bad = burst(dst, &payload, 3);
        for piece in [1, 5] {
            if let Piece::Memory { va, .. } = &mut bad.pieces[piece] {
                *va = 8;
            }
            if piece == 1 || gso {
                assert_eq!(tx.send(&bad), Sent::Fault);
            }
        }
        assert_eq!(rx.receive(), 0);
    }
}

#[test]
fn send__what_the_kernel_refuses_is_lost_and_counted() {
    let mut tx = Tx::open(&[lo()], 8, true).unwrap();
    let payload = vec![7u8; 70_000];
    assert_eq!(tx.send(&burst((Ipv4Addr::LOCALHOST, 9).into(), &payload, 1)), Sent::All);
    let mut elsewhere = burst((Ipv4Addr::LOCALHOST, 9).into(), &payload[..100], 2);
    elsewhere.plane = 1;
    assert_eq!(tx.send(&elsewhere), Sent::All);
    assert_eq!(tx.counters().refused, 3);
}
