//! Objects that end while something of theirs is still open, and in the child of a fork.

use rdma_core_sys::*;

use super::*;

/// A batch that was begun and not ended, with one request in it.
fn begin_batch(pair: &Pair) -> Wr {
    let wr = Wr::of(&pair.a);
    wr.start();
    wr.write(1, pair);
    wr.sge(pair.sge(0, 16));
    wr
}

fn reset(qp: &Published<Qp>) {
    let attr = ibv_qp_attr { qp_state: IBV_QPS_RESET, ..Default::default() };
    qp.get().modify(&attr, IBV_QP_STATE).expect("RESET");
}

#[test]
fn an_open_batch_ends_with_its_qp() {
    // Reset and destroyed by the thread that began it; the batch's end comes too late.
    let pair = Pair::new(21_450, DEPTH, false);
    let wr = begin_batch(&pair);
    reset(&pair.a);
    wr.abort();
    let wr = begin_batch(&pair);
    reset(&pair.a);
    assert_eq!(wr.complete(), libc::EINVAL, "nothing can be pushed in RESET");
    let wr = begin_batch(&pair);
    pair.a.get().destroy().expect("destroy with a batch open");
    assert_eq!(wr.complete(), libc::EINVAL);
    pair.destroy();

    // Closed.
    let pair = Pair::new(21_460, DEPTH, false);
    let _ = begin_batch(&pair);
    pair.context.close();
    // Its MR is gone, too.
    pair.a.get().destroy().expect("destroy after close");
    drop(pair);

    // Begun by a thread that has ended.
    let pair = Pair::new(21_470, DEPTH, false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            begin_batch(&pair);
        });
    });
    pair.destroy();
}

/// The locks of a parent's objects may be held by threads that the child does not have.
#[test]
fn child_of_a_fork_takes_no_lock_of_its_parent() {
    let pair = Pair::new(21_480, DEPTH, false);
    // Held for ever, as far as the child can see.
    let held = pair.context.open.hold();
    // SAFETY: the child makes only calls that must not lock or allocate, and ends by _exit; the alarm ends a hang.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe { libc::alarm(10) };
        let attr = ibv_qp_attr { qp_state: IBV_QPS_ERR, ..Default::default() };
        let answers =
            [pair.a.get().modify(&attr, IBV_QP_STATE), pair.a.get().destroy(), pair.mr.get().deregister()];
        pair.context.close();
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(answers != [Err(libc::EIO); 3])) };
    }
    let mut status = -1;
    // SAFETY: a child of this test.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child's calls give EIO and return");
    drop(held);
    pair.destroy();
}
