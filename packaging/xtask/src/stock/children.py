"""A program with an open device that has children: system(), fork without exec, multiprocessing. Prints "done"."""

import multiprocessing
import os
import sys

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

RIGHTS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
SIZE = 4096


class Loop:
    """Two connected QPs of this process."""

    def __init__(self):
        self.context = Context(name="metaroce0")
        self.pd = PD(self.context)
        self.cq = CQ(self.context, 64)
        self.mr = MR(self.pd, 2 * SIZE, RIGHTS)
        cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=1)
        self.qps = [QP(self.pd, init) for _ in range(2)]
        gid = self.context.query_gid(1, 0)
        for qp, peer in (self.qps, self.qps[::-1]):
            attr = QPAttr(port_num=1)
            attr.qp_access_flags = RIGHTS
            attr.dest_qp_num = peer.qp_num
            attr.path_mtu = e.IBV_MTU_1024
            attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
            attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 7, 7
            attr.ah_attr = AHAttr(gr=GlobalRoute(dgid=gid, sgid_index=0), is_global=1, port_num=1)
            qp.to_rts(attr)

    def run(self, text):
        """Writes a text from one half of the memory to the other."""
        self.mr.write(text, len(text))
        self.mr.write("-" * len(text), len(text), SIZE)
        wr = SendWR(1, num_sge=1, sg=[SGE(self.mr.buf, len(text), self.mr.lkey)], opcode=e.IBV_WR_RDMA_WRITE)
        wr.set_wr_rdma(self.mr.rkey, self.mr.buf + SIZE)
        self.qps[0].post_send(wr)
        while True:
            count, wcs = self.cq.poll(1)
            if count:
                break
        assert wcs[0].status == e.IBV_WC_SUCCESS, wcs[0]
        assert self.mr.read(len(text), SIZE).decode() == text


def child(number):
    """What a child does with a device of its own; the parent's is not there any more."""
    loop = Loop()
    for i in range(20):
        loop.run(f"child {number}, {i}")
    return number


def main():
    loop = Loop()
    for i in range(5):
        assert os.system("/bin/true") == 0
        loop.run(f"after system() {i}")
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    loop.run("after fork")
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=child, args=(1,))
    process.start()
    loop.run("beside a process")
    process.join()
    assert process.exitcode == 0, process.exitcode
    with fork.Pool(2) as pool:
        results = pool.map_async(child, range(4))
        for i in range(50):
            loop.run(f"beside a pool {i}")
        assert results.get() == list(range(4))
    loop.run("after all")
    print("done")


if __name__ == "__main__":
    sys.exit(main())
