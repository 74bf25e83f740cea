//! Two engines in one process move data over loopback sockets, with and without faults.

use crate::common::*;
use metaroce_config::Impairment;
use metaroce_engine::QpCreate;
use metaroce_proto::{Opcode, WcOpcode, WcStatus};

const CLEAN: Impairment = Impairment { loss: 0.0, reorder: 0.0, dup: 0.0, delay_us: 0, seed: 1 };
const ROUGH: Impairment = Impairment { loss: 0.02, reorder: 0.05, dup: 0.02, delay_us: 20, seed: 1 };

/// Sizes around the segment and well beyond a burst.
const SIZES: [usize; 9] = [0, 1, 8, 1023, 4096, 4097, 65_536, 100_001, 1 << 20];

fn move_data(base_port: u16, impairment: Impairment) {
    let (mut a, b) = pair(base_port, impairment, 1 << 20);
    for (round, &size) in SIZES.iter().enumerate() {
        a.fill(round as u64);

        a.post(Opcode::Write, a.sge(0, size), (b.va(), b.key));
        let done = a.completions(1)[0];
        assert_eq!((done.status, done.opcode), (WcStatus::Success, WcOpcode::RdmaWrite));
        assert!(b.bytes()[..size] == a.bytes()[..size], "write of {size} bytes");

        a.fill(round as u64 + 100);
        b.qp.post_recv(7, [b.sge(0, size)].into_iter()).unwrap();
        a.post(Opcode::SendImm, a.sge(0, size), (0, 0));
        let done = b.completions(1)[0];
        assert_eq!((done.status, done.opcode, done.wr_id), (WcStatus::Success, WcOpcode::Recv, 7));
        assert_eq!((done.byte_len as usize, done.imm), (size, 0x1234_5678));
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        assert!(b.bytes()[..size] == a.bytes()[..size], "send of {size} bytes");

        a.fill(round as u64 + 200);
        b.post(Opcode::Read, b.sge(0, size), (a.va(), a.key));
        let done = b.completions(1)[0];
        assert_eq!((done.status, done.opcode), (WcStatus::Success, WcOpcode::RdmaRead));
        assert!(b.bytes()[..size] == a.bytes()[..size], "read of {size} bytes");
    }
}

#[test]
fn pair__moves_data() {
    move_data(43_000, CLEAN);
}

#[test]
fn pair__moves_data_under_faults() {
    println!("seed {}", ROUGH.seed);
    move_data(44_000, ROUGH);
}

#[test]
fn pair__receiver_that_only_sleeps_is_served_by_its_thread() {
    // B never polls nor posts: only its background thread can place the data and acknowledge.
    let (mut a, b) = pair(45_000, CLEAN, 1 << 16);
    a.fill(5);
    for _ in 0..50 {
        a.post(Opcode::Write, a.sge(0, 1 << 16), (b.va(), b.key));
    }
    assert!(a.completions(50).iter().all(|c| c.status == WcStatus::Success));
    assert!(b.bytes() == a.bytes());
}

#[test]
fn pair__sender_that_only_posts_is_served_by_its_thread() {
    // A posts once and then looks at nothing of the engine; the lost packets are repaired by its thread alone.
    let (mut a, b) = pair(46_000, ROUGH, 1 << 20);
    a.fill(9);
    a.post(Opcode::Write, a.sge(0, 1 << 20), (b.va(), b.key));
    b.qp.post_recv(1, [b.sge(0, 8)].into_iter()).unwrap();
    a.post(Opcode::WriteImm, a.sge(0, 8), (b.va(), b.key));
    assert_eq!(b.completions(1)[0].opcode, WcOpcode::RecvRdmaWithImm);
    assert!(b.bytes() == a.bytes());
}

#[test]
fn queue__full_until_its_completions_are_polled() {
    let (a, b) = pair(47_000, CLEAN, 4096);
    let mut post = a.qp.send();
    for _ in 0..64 {
        post.push(wqe(Opcode::Write, 8, (b.va(), b.key)), [a.sge(0, 8)].into_iter()).unwrap();
    }
    let more = post.push(wqe(Opcode::Write, 8, (b.va(), b.key)), [a.sge(0, 8)].into_iter());
    assert_eq!(more, Err(libc::ENOMEM));
    post.commit();
    assert_eq!(a.completions(64).len(), 64);
    a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    assert_eq!(a.completions(1).len(), 1);

    for _ in 0..64 {
        b.qp.post_recv(0, [b.sge(0, 8)].into_iter()).unwrap();
    }
    assert_eq!(b.qp.post_recv(0, [b.sge(0, 8)].into_iter()), Err(libc::ENOMEM));
}

#[test]
fn post__discarded_and_refused() {
    let (a, b) = pair(48_000, CLEAN, 4096);
    let mut post = a.qp.send();
    post.push(wqe(Opcode::Write, 8, (b.va(), b.key)), [a.sge(0, 8)].into_iter()).unwrap();
    post.discard();
    let mut post = a.qp.send();
    assert_eq!(post.push(wqe(Opcode::Write, 8, (0, 0)), [a.sge(0, 8); 5].into_iter()), Err(libc::EINVAL));
    let long = [0u8; 257];
    assert_eq!(post.push_inline(wqe(Opcode::Write, 0, (0, 0)), [&long[..]].into_iter()), Err(libc::EINVAL));
    post.push_inline(wqe(Opcode::Write, 0, (b.va(), b.key)), [&b"ab"[..], b"cd"].into_iter()).unwrap();
    post.commit();
    assert_eq!(a.completions(1)[0].status, WcStatus::Success);
    assert_eq!(b.bytes()[..5], *b"abcd\0");
    let fresh = a.device.create_qp(&qp_of(a.pd, &a.cq, None), None).unwrap();
    let mut post = fresh.send();
    assert_eq!(post.push(wqe(Opcode::Write, 8, (0, 0)), [a.sge(0, 8)].into_iter()), Err(libc::EINVAL));
    drop(post);
    assert_eq!(fresh.post_recv(0, [a.sge(0, 8)].into_iter()), Err(libc::EINVAL));
}

#[test]
fn destroy__purges_completions_and_frees_the_cq() {
    let (a, b) = pair(49_000, CLEAN, 4096);
    a.post(Opcode::Write, a.sge(0, 8), (b.va(), b.key));
    let other = a.device.create_cq(4, None).unwrap();
    // Drive without taking the completion.
    let since = std::time::Instant::now();
    while a.cq.resize(0) == Ok(0) || since.elapsed().as_millis() < 20 {
        other.poll(1, |_| panic!("nothing completes here"));
    }
    assert_eq!(a.cq.destroy(), Err(libc::EBUSY));
    a.qp.destroy().unwrap();
    assert_eq!(a.qp.destroy(), Ok(()));
    assert_eq!(a.cq.poll(16, |_| panic!("the QP is gone")), 0);
    a.cq.destroy().unwrap();
}

#[test]
fn srq__feeds_and_counts() {
    let a = End::new(config(50_000, CLEAN), 4096);
    let mut srq = None;
    let b = End::with_srq(config(50_000, CLEAN), 4096, |device, pd| {
        srq = Some(device.create_srq(pd, 4, 2, None).unwrap());
        srq.clone()
    });
    let srq = srq.unwrap();
    connect(&a.qp, &b.qp);
    assert_eq!(b.qp.post_recv(0, [b.sge(0, 8)].into_iter()), Err(libc::EINVAL));
    for i in 0..4 {
        srq.post_recv(i, [b.sge(0, 8)].into_iter()).unwrap();
    }
    assert_eq!(srq.post_recv(4, [b.sge(0, 8)].into_iter()), Err(libc::ENOMEM));
    for i in 0..10 {
        a.post(Opcode::Send, a.sge(0, 8), (0, 0));
        assert_eq!(b.completions(1)[0].wr_id, i);
        assert_eq!(a.completions(1)[0].status, WcStatus::Success);
        srq.post_recv(i + 4, [b.sge(0, 8)].into_iter()).unwrap();
    }
    assert_eq!(srq.destroy(), Err(libc::EBUSY));
    b.qp.destroy().unwrap();
    srq.destroy().unwrap();
}

/// A CQ as deep as the queue on it cannot overflow: a place in the queue is free when the one in the CQ is, not before.
#[test]
fn pair__a_polled_request_gives_its_place_back_after_its_entry() {
    let end = End::new(config(50_500, CLEAN), 4096);
    let cq = end.device.create_cq(4, None).unwrap();
    let qp = end.device.create_qp(&QpCreate { max_send_wr: 4, ..qp_of(end.pd, &cq, None) }, None).unwrap();
    connect(&qp, &qp);
    let post = || {
        let request = wqe(Opcode::Write, 8, (end.va() + 2048, end.key));
        qp.send().push(request, [end.sge(0, 8)].into_iter())
    };
    for _ in 0..100 {
        (0..4).for_each(|_| post().unwrap());
        let mut seen = 0;
        let mut early = Vec::new();
        while seen < 4 {
            let so_far = seen;
            seen += cq.poll(4, |completion| {
                assert_eq!(completion.status, WcStatus::Success);
                // Entries of this poll still fill the ring, which another thread's post must not find out.
                early.extend((so_far == 0).then(&post));
            });
        }
        assert!(early.iter().all(|outcome| *outcome == Err(libc::ENOMEM)), "{early:?}");
    }
    assert_eq!(cq.overruns(), 0);
}
