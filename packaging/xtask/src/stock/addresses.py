"""Addresses that come and go while a program has the device open: after each event the GID table, sysfs and what
connections accept agree. Runs in a network namespace of its own; prints "done"."""

import subprocess

import pyverbs.enums as e
from pyverbs.addr import AH, AHAttr, GlobalRoute
from pyverbs.device import Context
from pyverbs.pd import PD

GIDS = "/sys/class/infiniband/metaroce0/ports/1/gids"
ENTRIES = 8
EMPTY = "0000:" * 7 + "0000"


def table(context):
    return [context.query_gid(1, index).gid for index in range(ENTRIES)]


def sysfs():
    return [open(f"{GIDS}/{index}").read().strip() for index in range(ENTRIES)]


def change(context, words, wanted):
    """Changes an address and reads events until the table is as wanted: the event must not come before the change."""
    subprocess.run(["ip", "addr", *words.split()], check=True)
    while True:
        event = context.get_async_event()
        assert event.event_type in (e.IBV_EVENT_GID_CHANGE, e.IBV_EVENT_PORT_ACTIVE), event.event_type
        event.ack()
        now = table(context)
        assert now == sysfs(), (now, sysfs())
        if wanted(now):
            return now


def main():
    context = Context(name="metaroce0")
    pd = PD(context)
    first = table(context)
    assert first == sysfs(), (first, sysfs())
    new = ":0a64:004d"
    after = change(context, "add 10.100.0.77/24 dev plane0", lambda gids: any(g.endswith("ffff:0a64:004d") for g in gids))
    index = next(i for i, gid in enumerate(after) if gid.endswith(new))
    assert first[0] == after[0], "indexes are kept"
    route = GlobalRoute(dgid=context.query_gid(1, index), sgid_index=index)
    AH(pd, attr=AHAttr(gr=route, is_global=1, port_num=1)).close()
    gone = change(context, "del 10.100.0.77/24 dev plane0", lambda gids: not any(g.endswith("ffff:0a64:004d") for g in gids))
    assert gone[index] == EMPTY, gone
    # One that comes as another goes: both sides must have seen the same history, or agree all the same.
    subprocess.run(["ip", "addr", "add", "10.100.0.78/24", "dev", "plane0"], check=True)
    last = change(context, "add 10.100.0.79/24 dev plane0", lambda gids: sum(":0a64:004" in g for g in gids) == 2)
    for index, gid in enumerate(last):
        if gid != EMPTY:
            route = GlobalRoute(dgid=context.query_gid(1, index), sgid_index=index)
            AH(pd, attr=AHAttr(gr=route, is_global=1, port_num=1)).close()
    print("done")


main()
