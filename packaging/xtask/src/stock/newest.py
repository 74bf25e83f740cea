"""What rdma-core's newest suite tests beyond the installed one, as far as the installed library has the calls: each
function here is named after what it stands for in docs/testing.md. Prints a line for each, and "done"."""

import ctypes
import errno
import struct
import time

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ, CQEX, CqInitAttrEx, PollCqAttr
from pyverbs.device import DM, AllocDmAttr, Context
from pyverbs.mr import MR, DMMR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPEx, QPInitAttr, QPInitAttrEx
from pyverbs.srq import SRQ, SrqAttr, SrqInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

SIZE = 4096
ALL = (e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC)
ON_DEMAND = e.IBV_ACCESS_ON_DEMAND
ZERO_BASED = e.IBV_ACCESS_ZERO_BASED

context = Context(name="metaroce0")
pd = PD(context)
GID = context.query_gid(1, 0)


class Pair:
    """Two connected RC QPs of this process; `a` has extended work requests."""

    def __init__(self, srq=None, cq=None, resources=4):
        self.cq_a, self.cq_b = cq or CQ(context, 64), CQ(context, 64)
        cap = QPCap(max_send_wr=16, max_recv_wr=16, max_send_sge=2, max_recv_sge=2)
        operations = e.IBV_QP_EX_WITH_ATOMIC_WRITE | e.IBV_QP_EX_WITH_RDMA_WRITE
        extended = QPInitAttrEx(qp_type=e.IBV_QPT_RC, scq=self.cq_a, rcq=self.cq_a, cap=cap, pd=pd,
                                send_ops_flags=operations, comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)
        self.a = QPEx(context, extended)
        self.b = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq_b, rcq=self.cq_b, srq=srq, cap=cap))
        for qp, peer in ((self.a, self.b), (self.b, self.a)):
            attr = QPAttr(port_num=1, path_mtu=e.IBV_MTU_1024)
            attr.dest_qp_num, attr.qp_access_flags, attr.min_rnr_timer = peer.qp_num, ALL, 12
            attr.max_rd_atomic = attr.max_dest_rd_atomic = resources
            attr.timeout, attr.retry_cnt, attr.rnr_retry = 14, 7, 7
            attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=GlobalRoute(dgid=GID, sgid_index=0, hop_limit=64))
            qp.to_rts(attr)

    def send(self, opcode, local, remote=None, offset=0, length=SIZE, imm=0, operands=(0, 0), remote_at=None):
        """Posts at `a` and waits for the completion there."""
        sge = SGE(local.buf + offset, length, local.lkey)
        wr = SendWR(wr_id=1, opcode=opcode, num_sge=1, sg=[sge], imm_data=imm)
        at = remote and (remote.buf + offset if remote_at is None else remote_at)
        if operands != (0, 0):
            wr.set_wr_atomic(remote.rkey, at, *operands)
        elif remote:
            wr.set_wr_rdma(remote.rkey, at)
        self.a.post_send(wr)
        return done(self.cq_a)

    def write_atomically(self, value, remote, at):
        self.a.wr_start()
        self.a.wr_id, self.a.wr_flags = 2, e.IBV_SEND_SIGNALED
        self.a.wr_atomic_write(remote.rkey, at, value)
        self.a.wr_complete()
        return done(self.cq_a)


def done(cq):
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        found, completions = cq.poll(1)
        if found:
            assert completions[0].status == e.IBV_WC_SUCCESS, completions[0].status
            return completions[0]
    raise AssertionError("no completion within ten seconds")


def memory(access=ALL, text=None):
    mr = MR(pd, SIZE, access)
    if text:
        mr.write(text, len(text))
    return mr


PATTERN = bytes(range(256)) * (SIZE // 256)


def get_pkey_index():
    lib = ctypes.CDLL("libibverbs.so.1", use_errno=True)
    lib.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    lib.ibv_open_device.restype = ctypes.c_void_p
    opened = ctypes.c_void_p(lib.ibv_open_device(ctypes.c_void_p(lib.ibv_get_device_list(None)[0])))
    assert lib.ibv_get_pkey_index(opened, 1, ctypes.c_uint16(0xFFFF)) == 0
    assert lib.ibv_get_pkey_index(opened, 1, ctypes.c_uint16(0x1234)) == -1
    lib.ibv_close_device(opened)


def mr_rereg_atomic():
    pair, local = Pair(), memory()
    remote = memory(e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ, struct.pack("=Q", 40))
    remote.rereg(e.IBV_REREG_MR_CHANGE_ACCESS, access=ALL)
    pair.send(e.IBV_WR_ATOMIC_FETCH_AND_ADD, local, remote, length=8, operands=(2, 0))
    assert remote.read(8, 0) == struct.pack("=Q", 42) and local.read(8, 0) == struct.pack("=Q", 40)


def device_memory(access=ALL):
    dm = DM(context, AllocDmAttr(length=SIZE))
    return dm, DMMR(pd, SIZE, access | ZERO_BASED, dm=dm, offset=0)


def dm_remote_write_traffic_imm():
    pair, local, (dm, remote) = Pair(), memory(text=PATTERN), device_memory()
    pair.b.post_recv(RecvWR(num_sge=1, sg=[SGE(local.buf, 0, local.lkey)]))
    pair.send(e.IBV_WR_RDMA_WRITE_WITH_IMM, local, remote, imm=7, remote_at=0)
    arrived = done(pair.cq_b)
    assert arrived.imm_data == 7 and arrived.byte_len == SIZE and dm.copy_from_dm(0, SIZE) == PATTERN


def dm_remote_read_traffic():
    pair, local, (dm, remote) = Pair(), memory(), device_memory()
    dm.copy_to_dm(0, PATTERN, SIZE)
    pair.send(e.IBV_WR_RDMA_READ, local, remote, remote_at=0)
    assert local.read(SIZE, 0) == PATTERN


def dm_atomic(opcode, operands, result):
    pair, local, (dm, remote) = Pair(), memory(), device_memory()
    dm.copy_to_dm(8, struct.pack("=Q", 5), 8)
    pair.send(opcode, local, remote, length=8, operands=operands, remote_at=8)
    assert dm.copy_from_dm(8, 8) == struct.pack("=Q", result) and local.read(8, 0) == struct.pack("=Q", 5)


def dm_atomic_fetch_add():
    dm_atomic(e.IBV_WR_ATOMIC_FETCH_AND_ADD, (37, 0), 42)


def dm_atomic_cmp_swp():
    dm_atomic(e.IBV_WR_ATOMIC_CMP_AND_SWP, (5, 99), 99)
    dm_atomic(e.IBV_WR_ATOMIC_CMP_AND_SWP, (6, 99), 5)


def odp_rc_mixed_mr():
    for local_access, remote_access in ((ALL | ON_DEMAND, ALL), (ALL, ALL | ON_DEMAND)):
        pair, local, remote = Pair(), memory(local_access, PATTERN), memory(remote_access)
        pair.b.post_recv(RecvWR(num_sge=1, sg=[SGE(remote.buf, SIZE, remote.lkey)]))
        pair.send(e.IBV_WR_SEND, local)
        assert done(pair.cq_b).byte_len == SIZE and remote.read(SIZE, 0) == PATTERN


def odp_qp_ex_rc_atomic_write():
    pair, remote = Pair(), memory(ALL | ON_DEMAND)
    pair.write_atomically(b"8 bytes!", remote, remote.buf + 16)
    assert remote.read(8, 16) == b"8 bytes!"


def timestamp_free_running_rc_traffic():
    flags = e.IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    pair = Pair(cq=CQEX(context, CqInitAttrEx(cqe=64, wc_flags=flags)))
    local, remote = memory(text=PATTERN), memory()
    stamps = []
    for _ in range(50):
        sge = SGE(local.buf, SIZE, local.lkey)
        wr = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[sge])
        wr.set_wr_rdma(remote.rkey, remote.buf)
        pair.a.post_send(wr)
        while pair.cq_a.start_poll(PollCqAttr()):
            pass
        assert pair.cq_a.status == e.IBV_WC_SUCCESS
        stamps.append(pair.cq_a.read_timestamp())
        pair.cq_a.end_poll()
    assert stamps == sorted(stamps) and stamps[0] > 0 and stamps[-1] > stamps[0]


def create_ud_qp_with_privileged_qkey():
    cq = CQ(context, 8)
    qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_UD, scq=cq, rcq=cq, cap=QPCap(max_send_wr=1, max_recv_wr=1)))
    attr = QPAttr(port_num=1)
    attr.qkey = 0x80000001
    qp.to_rts(attr)
    assert qp.query(e.IBV_QP_QKEY)[0].qkey == 0x80000001


def raw_qp_rate_limit_modify():
    limits = context.query_device_ex().packet_pacing_caps
    assert limits.qp_rate_limit_max == 0, "pacing is offered, so test it"
    attr = QPAttr(port_num=1)
    attr.rate_limit = 1000
    try:
        Pair().a.modify(attr, e.IBV_QP_RATE_LIMIT)
    except PyverbsRDMAError as error:
        assert error.error_code == errno.EOPNOTSUPP
        return
    raise AssertionError("a rate limit was accepted")


def modify_rc_qp_rd_atomic():
    for resources in (1, 2, 16):
        pair = Pair(resources=resources)
        attr = pair.b.query(e.IBV_QP_MAX_QP_RD_ATOMIC | e.IBV_QP_MAX_DEST_RD_ATOMIC)[0]
        assert (attr.max_rd_atomic, attr.max_dest_rd_atomic) == (resources, resources)
        local, remote = memory(), memory(text=PATTERN)
        for _ in range(40):
            pair.send(e.IBV_WR_RDMA_READ, local, remote)
        assert local.read(SIZE, 0) == PATTERN
    limit = context.query_device().max_qp_rd_atom
    try:
        Pair(resources=min(limit + 1, 255))
    except PyverbsRDMAError:
        return
    raise AssertionError("more than the device has")


def qp_ex_rc_rdma_write_zero_size():
    pair, local, remote = Pair(), memory(), memory(text=PATTERN)
    pair.send(e.IBV_WR_RDMA_WRITE, local, remote, length=0)
    pair.a.wr_start()
    pair.a.wr_id, pair.a.wr_flags = 3, e.IBV_SEND_SIGNALED
    pair.a.wr_rdma_write(remote.rkey, remote.buf)
    pair.a.wr_complete()
    done(pair.cq_a)
    assert remote.read(SIZE, 0) == PATTERN


def receives(srq, buffers):
    for buffer in buffers:
        srq.post_recv(RecvWR(num_sge=1, sg=[SGE(buffer.buf, SIZE, buffer.lkey)]))


def rc_srq_traffic():
    srq = SRQ(pd, SrqInitAttr(SrqAttr(max_wr=16)))
    pairs, local = [Pair(srq=srq) for _ in range(3)], memory(text=PATTERN)
    for _ in range(20):
        buffers = [memory() for _ in pairs]
        receives(srq, buffers)
        for pair in pairs:
            pair.send(e.IBV_WR_SEND, local)
            assert done(pair.cq_b).byte_len == SIZE
        assert all(buffer.read(SIZE, 0) == PATTERN for buffer in buffers)


def resize_srq():
    srq = SRQ(pd, SrqInitAttr(SrqAttr(max_wr=4)))
    assert srq.query().max_wr >= 4
    srq.modify(SrqAttr(max_wr=64), e.IBV_SRQ_MAX_WR)
    assert srq.query().max_wr >= 64
    receives(srq, [memory()] * 64)


def modify_srq_limit():
    srq = SRQ(pd, SrqInitAttr(SrqAttr(max_wr=8)))
    pair, local, buffer = Pair(srq=srq), memory(text=PATTERN), memory()
    receives(srq, [buffer] * 4)
    srq.modify(SrqAttr(srq_limit=3), e.IBV_SRQ_LIMIT)
    assert srq.query().srq_limit == 3
    for _ in range(2):
        pair.send(e.IBV_WR_SEND, local)
        done(pair.cq_b)
    event = context.get_async_event()
    assert event.event_type == e.IBV_EVENT_SRQ_LIMIT_REACHED
    event.ack()
    assert srq.query().srq_limit == 0


TESTS = [
    get_pkey_index, mr_rereg_atomic, dm_remote_write_traffic_imm, dm_remote_read_traffic, dm_atomic_fetch_add,
    dm_atomic_cmp_swp, odp_rc_mixed_mr, odp_qp_ex_rc_atomic_write, timestamp_free_running_rc_traffic,
    create_ud_qp_with_privileged_qkey, raw_qp_rate_limit_modify, modify_rc_qp_rd_atomic,
    qp_ex_rc_rdma_write_zero_size, rc_srq_traffic, resize_srq, modify_srq_limit,
]

for test in TESTS:
    print(test.__name__, flush=True)
    test()
print("done")
