"""Ids of rdma_cm while the hardware behind their address changes, the address moves or vanishes, and the device goes:
each id hears of what concerns it, once, and of nothing else. Runs in a network namespace of its own; prints "done"."""

import ctypes as c
import errno
import socket
import struct
import subprocess

ADDR_RESOLVED, ROUTE_RESOLVED, CONNECT_REQUEST, CONNECT_RESPONSE = 0, 2, 4, 5
ESTABLISHED, DEVICE_REMOVAL, ADDR_CHANGE = 9, 11, 14
RDMA_PS_TCP = 0x106
cm = c.CDLL("librdmacm.so.1", use_errno=True)
cm.rdma_create_event_channel.restype = c.c_void_p


class Event(c.Structure):
    _fields_ = [("id", c.c_void_p), ("listen_id", c.c_void_p), ("event", c.c_int), ("status", c.c_int)]


class ConnParam(c.Structure):
    _fields_ = [("private_data", c.c_void_p), ("small", c.c_uint8 * 7), ("qp_num", c.c_uint32)]


def check(result):
    assert result == 0, errno.errorcode[c.get_errno()]


def ip(words):
    subprocess.run(["ip", *words.split()], check=True)


def address(text, port=0):
    packed = struct.pack("=HH4s8x", socket.AF_INET, socket.htons(port), socket.inet_aton(text))
    return c.create_string_buffer(packed, 16)


channel = c.c_void_p(cm.rdma_create_event_channel())


def new():
    made = c.c_void_p()
    check(cm.rdma_create_id(channel, c.byref(made), None, RDMA_PS_TCP))
    return made


def next_event():
    """Takes an event; gives what and whose it was."""
    event = c.POINTER(Event)()
    check(cm.rdma_get_cm_event(channel, c.byref(event)))
    found = (event.contents.event, event.contents.id)
    check(cm.rdma_ack_cm_event(event))
    return found


def expect(what, *ids):
    """The next events are this one of these ids, in any order."""
    wanted = sorted((what, made.value) for made in ids)
    found = sorted(next_event() for _ in ids)
    assert found == wanted, (found, wanted)


def bound(text):
    made = new()
    check(cm.rdma_bind_addr(made, address(text)))
    return made


def resolved(text, port):
    made = new()
    check(cm.rdma_resolve_addr(made, None, address(text, port), 2000))
    expect(ADDR_RESOLVED, made)
    return made


def connected(text, port):
    """Two ids of this process, connected to each other."""
    active = resolved(text, port)
    check(cm.rdma_resolve_route(active, 2000))
    expect(ROUTE_RESOLVED, active)
    param = ConnParam(qp_num=7)
    check(cm.rdma_connect(active, c.byref(param)))
    what, passive = next_event()
    assert what == CONNECT_REQUEST
    passive = c.c_void_p(passive)
    check(cm.rdma_accept(passive, c.byref(param)))
    expect(CONNECT_RESPONSE, active)
    check(cm.rdma_establish(active))
    expect(ESTABLISHED, passive)
    return active, passive


def main():
    everywhere = bound("0.0.0.0")
    check(cm.rdma_listen(everywhere, 8))
    cm.rdma_get_src_port.restype = c.c_uint16
    port = socket.ntohs(cm.rdma_get_src_port(everywhere))
    here, other = bound("10.100.0.2"), resolved("10.100.0.1", port)
    pair = connected("10.100.0.2", port)
    on_device = [here, other, *pair]

    ip("link set plane0 address 02:00:00:00:77:01")
    expect(ADDR_CHANGE, *on_device)

    # An address that has just come can be bound to at once; it moves to another interface, or vanishes.
    ip("addr add 10.100.0.77/32 dev plane0")
    wanderer = bound("10.100.0.77")
    ip("addr add 10.100.0.77/32 dev lo")
    ip("addr del 10.100.0.77/32 dev plane0")
    expect(ADDR_CHANGE, wanderer)
    ip("addr add 10.100.0.78/32 dev plane0")
    second = bound("10.100.0.78")
    ip("addr del 10.100.0.78/32 dev plane0")
    expect(ADDR_CHANGE, second)
    on_device += [wanderer, second]

    # No device is left when its interface is gone. The ids of the pair are of no use then, but can be destroyed.
    ip("link del plane0")
    expect(DEVICE_REMOVAL, *on_device)
    assert cm.rdma_disconnect(pair[0]) == -1 and c.get_errno() == errno.EINVAL
    for made in on_device:
        check(cm.rdma_destroy_id(made))

    # It is there again with the next interface of that name, and the wildcard listener never noticed.
    ip("link add plane0 type veth peer name far0")
    ip("addr add 10.100.0.2/24 dev plane0")
    ip("link set plane0 up")
    ip("link set far0 up")
    for made in [*connected("10.100.0.2", port), everywhere]:
        check(cm.rdma_destroy_id(made))
    print("done")


main()
