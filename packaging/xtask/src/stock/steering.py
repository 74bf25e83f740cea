"""Looks at a running program from outside and steers it, as an operator would. Prints "done".

Arguments: the metaroce command, and the address of a host that runs `ibv_rc_pingpong` as a server.
"""

import json
import os
import subprocess
import sys
import time

METAROCE, SERVER = sys.argv[1:3]
PATIENCE = 20
PROGRAM = "ibv_rc_pingpong -d metaroce0 -g 0 -c -s 65536 -n 1000000".split()
PLANES = ["plane0", "plane1"]


def metaroce(*arguments):
    done = subprocess.run([METAROCE, *arguments], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, (arguments, done)
    return done.stdout


def show(what, pid):
    """All items of a kind; empty while the program does not have the device open."""
    command = [METAROCE, "show", what, "--json", "--pid", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    shown = json.loads(done.stdout)
    return shown[0]["items"] if shown else []


def sent(pid):
    """Data packets sent per plane, as the paths count them."""
    count = dict.fromkeys(PLANES, 0)
    for path in show("paths", pid):
        count[path["plane"]] += path["sent"]
    return count


def until(what, condition):
    """Waits for what only other processes can bring about; gives the first result that is true."""
    begun = time.monotonic()
    while time.monotonic() < begun + PATIENCE:
        result = condition()
        if result:
            return result
    raise AssertionError(f"no {what} in {PATIENCE} s")


def look(pid):
    """What the different views say of one program agrees."""
    until("traffic on both planes", lambda: all(count > 100 for count in sent(pid).values()))
    [connection] = show("connections", pid)
    [qp] = show("qps", pid)
    [mr] = show("mrs", pid)
    assert (connection["state"], connection["peer"]) == ("established", SERVER), connection
    assert (qp["type"], qp["state"], qp["connection"]) == ("RC", "RTS", connection["connection"]), qp
    assert mr["bytes"] == 65536, mr
    paths = show("paths", pid)
    assert len(paths) == connection["paths"], paths
    for path in paths:
        assert path["state"] == "active" and 0 < path["rtt_ns"] and path["cwnd_packets"] > 0, path
        assert path["delivered"] <= path["sent"], path
    # Counted before and after: the planes' own counters lie between, with control packets on top.
    before = sent(pid)
    planes = {plane["label"]: plane for plane in show("planes", pid)}
    after = sent(pid)
    for name in PLANES:
        assert before[name] <= planes[name]["tx_data_packets"] <= after[name], (before, planes, after)
        assert planes[name]["link"] == "up", planes
    for what in ("planes", "paths", "connections", "qps", "mrs"):
        text = metaroce("show", what, "--pid", str(pid))
        assert f"ibv_rc_pingpong pid {pid} (slot " in text, text


def growth(pid, plane, other):
    """Packets a plane sends while the other one sends a thousand."""
    before = sent(pid)
    until(f"traffic on {other}", lambda: sent(pid)[other] > before[other] + 1000)
    return sent(pid)[plane] - before[plane]


def states(pid, plane):
    return {state for state, _ in changes(pid, plane)}


def changes(pid, plane):
    """States of a plane's paths, and why."""
    return {(path["state"], path["cause"]) for path in show("paths", pid) if path["plane"] == plane}


def steer(pid):
    """Planes and ports out of use and back, while the program checks every byte."""
    one, two = PLANES
    back = lambda: growth(pid, two, one) > 100
    for how, state in (("down", "parked"), ("drain", "draining")):
        metaroce("plane", how, two, "--pid", str(pid))
        assert states(pid, two) == {state}, (how, show("paths", pid))
        assert growth(pid, two, one) == 0, (how, show("paths", pid))
        assert [plane["admin"] for plane in show("planes", pid)] == ["up", how]
        last = [METAROCE, "plane", "down", one, "--pid", str(pid)]
        assert subprocess.run(last, stderr=subprocess.DEVNULL, timeout=PATIENCE).returncode == 1, "the last plane"
        metaroce("plane", "up", two, "--pid", str(pid))
        until(f"traffic on {two} after {how} and up", back)
    # The link itself: whoever has the plane leaves it at once, and looks for it when the link is there again.
    subprocess.run(["ip", "link", "set", two, "down"], check=True, timeout=PATIENCE)
    # On a busy machine some paths are left for their silence before the event comes.
    until("link event", lambda: changes(pid, two) == {("left", "link")})
    assert [plane["link"] for plane in show("planes", pid)] == ["up", "down"]
    assert growth(pid, two, one) < 200, "more than probes"
    subprocess.run(["ip", "link", "set", two, "up"], check=True, timeout=PATIENCE)
    until(f"traffic on {two} after its link came up", back)
    # Source ports.
    path = show("paths", pid)[0]
    metaroce("path", "deny", path["plane"], str(path["entropy"]), "--pid", str(pid))
    moved = show("paths", pid)
    assert all(p["plane"] != path["plane"] or p["entropy"] != path["entropy"] for p in moved), moved
    metaroce("path", "allow", path["plane"], str(path["entropy"]), "--pid", str(pid))
    before = show("paths", pid)[1]
    metaroce("path", "rehash", "--pid", str(pid), f"{before['connection']}/1")
    after = show("paths", pid)[1]
    assert after["generation"] != before["generation"] and after["entropy"] != before["entropy"], (before, after)
    until("traffic on the new port", lambda: show("paths", pid)[1]["delivered"] > after["delivered"] + 100)


def strangers(pid):
    """Another user sees nothing of it."""
    if os.geteuid() != 0 or os.stat("/proc/self/root/proc/1").st_uid != 0:
        return
    command = ["setpriv", "--reuid", "65534", METAROCE, "show", "planes", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    except FileNotFoundError:
        return
    assert done.returncode != 0 and not done.stdout, done


def main():
    links = metaroce("link", "show").splitlines()
    assert [f" plane {name} " in line and " state ACTIVE " in line for name, line in zip(PLANES, links)] == [True] * 2
    assert SERVER.rsplit(".", 1)[0] in metaroce("gids")
    with subprocess.Popen([METAROCE, "run", "--", *PROGRAM, SERVER], stdout=subprocess.DEVNULL) as program:
        try:
            look(program.pid)
            strangers(program.pid)
            steer(program.pid)
            assert program.poll() is None, program.returncode
        finally:
            program.kill()
    print("done")


main()
