"""Two network namespaces with a slow and lossy link between them: kernel TCP on both ends, real round trips and losses.

    python -m benchmarks.far_link --delay 0.1 --loss 0.01        what a probe of such a link measures

If the kernel has ``tc netem``, the link is a pair of veth devices. Otherwise it is two TUN devices and a process that
carries IP packets between them: it delays each packet by ``delay`` seconds, drops some, and limits the rate to
``mbit``. Nothing outside the namespaces changes. Needs root on Linux; ``unavailable()`` returns the reason if it cannot
work.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import random
import selectors
import shutil
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

NETWORK, NEAR, FAR = "10.77.0.0/24", "10.77.0.1", "10.77.0.2"
_MTU: Final = 1500
_QUEUE_SECONDS: Final = 0.2
"""Length of the queue of a full line, in seconds; further packets are dropped."""
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET: Final = 0x40000000
_CONGESTION: Final = "net.ipv4.tcp_congestion_control"


def unavailable() -> str:
    """Return why this machine cannot have a link; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root on Linux, and iproute2"
    name = f"asyncrl-probe-{os.getpid()}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
        if made.returncode:
            return f"no network namespaces here: {made.stderr.strip()}"
        if not _has_netem(name) and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
            return "this kernel has neither tc netem nor /dev/net/tun"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


def _has_netem(namespace: str) -> bool:
    if shutil.which("tc") is None:
        return False
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@dataclass(slots=True, kw_only=True)
class FarLink:
    """``with FarLink(...) as link``: put ``link.near`` or ``link.far`` before a command to run it on that side.

    delay  seconds, one way
    loss   share of lost packets, each way
    mbit   rate, each way
    tcp    congestion control in both namespaces; "": the machine's
    """

    delay: float
    loss: float = 0.0
    mbit: float = 100.0
    tcp: str = ""
    how: str = field(default="", init=False)
    _mover: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def near(self) -> list[str]:
        return ["ip", "netns", "exec", self._name("near")]

    @property
    def far(self) -> list[str]:
        return ["ip", "netns", "exec", self._name("far")]

    def __enter__(self) -> FarLink:
        try:
            for side in ("near", "far"):
                _do("ip", "netns", "add", self._name(side))
                self._in(side, "ip", "link", "set", "lo", "up")
            if _has_netem(self._name("near")):
                self._in("near", "tc", "qdisc", "del", "dev", "lo", "root")
                self._join_by_netem()
            else:
                self._join_by_tun()
            for side, address in (("near", NEAR), ("far", FAR)):
                self._in(side, "sysctl", "-qw", "net.ipv4.tcp_no_metrics_save=1")
                if self.tcp:  # per route: a namespace's setting allows only algorithms open to all users
                    device = ["dev", self._device(side), "src", address]
                    self._in(side, "ip", "route", "replace", NETWORK, *device, "congctl", self.tcp)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._mover is not None:
            self._mover.terminate()
            self._mover.wait()
        for side in ("near", "far"):
            subprocess.run(["ip", "netns", "del", self._name(side)], capture_output=True, check=False)

    def _device(self, side: str) -> str:
        return "way" if self._mover is not None else f"a{side[0]}{os.getpid()}"

    def congestion_control(self) -> str:
        if self.tcp:
            return self.tcp
        done = subprocess.run([*self.far, "sysctl", "-n", _CONGESTION], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def _name(self, side: str) -> str:
        return f"asyncrl-{side}-{os.getpid()}"

    def _in(self, side: str, *command: str) -> None:
        _do("ip", "netns", "exec", self._name(side), *command)

    def _join_by_netem(self) -> None:
        self.how = "tc netem"
        veth = [self._device(side) for side in ("near", "far")]
        _do("ip", "link", "add", veth[0], "type", "veth", "peer", "name", veth[1])
        limit = max(100, int(self.mbit * 1e6 / 8 * (self.delay + _QUEUE_SECONDS) / _MTU))
        for side, device, address in zip(("near", "far"), veth, (NEAR, FAR), strict=True):
            _do("ip", "link", "set", device, "netns", self._name(side))
            self._in(side, "ip", "addr", "add", f"{address}/24", "dev", device)
            self._in(side, "ip", "link", "set", device, "up")
            shape = f"delay {self.delay * 1000}ms loss {self.loss * 100}% rate {self.mbit}mbit limit {limit}"
            self._in(side, "tc", "qdisc", "add", "dev", device, "root", "netem", *shape.split())

    def _join_by_tun(self) -> None:
        self.how = "TUN devices"
        numbers = [str(number) for number in (self.delay, self.loss, self.mbit)]
        names = [f"/run/netns/{self._name(side)}" for side in ("near", "far")]
        self._mover = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.far_link", "--carry", *names, *numbers], stdout=subprocess.PIPE
        )
        assert self._mover.stdout is not None
        if not self._mover.stdout.readline():
            raise OSError("the TUN devices cannot be made")
        for side, address in (("near", NEAR), ("far", FAR)):
            self._in(side, "ip", "addr", "add", f"{address}/24", "dev", "way")
            self._in(side, "ip", "link", "set", "way", "mtu", str(_MTU), "txqueuelen", "10000", "up")


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


# -- the process between two TUN devices -------------------------------------------------------------------------------


class _Way:
    """One direction of the link. Packets wait in order of arrival, each until its time."""

    def __init__(self, source: int, sink: int, *, delay: float, loss: float, mbit: float, seed: int) -> None:
        self.source, self._sink = source, sink
        self._delay, self._loss = delay, loss
        self._seconds_per_byte = 8 / (mbit * 1e6)
        self._random = random.Random(seed)
        self._free = 0.0  # time when the line has sent all packets so far
        self._packets: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """Read all packets that the kernel has ready."""
        while True:
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            now = time.monotonic()
            if self._random.random() < self._loss or self._free > now + _QUEUE_SECONDS:
                continue
            self._free = max(now, self._free) + len(packet) * self._seconds_per_byte
            self._packets.append((self._free + self._delay, packet))

    def give(self) -> float:
        """Send the packets that are due; return the seconds until the next one is due."""
        while self._packets:
            due, packet = self._packets[0]
            left = due - time.monotonic()
            if left > 0:
                return left
            self._packets.popleft()
            with contextlib.suppress(OSError):  # the device is not up yet
                os.write(self._sink, packet)
        return 1.0


def _carry(near: str, far: str, *, delay: float, loss: float, mbit: float) -> None:
    """Carry packets both ways until the process is ended."""
    devices = [_tun(path) for path in (near, far)]
    ways = [
        _Way(*ends, delay=delay, loss=loss, mbit=mbit, seed=seed)
        for seed, ends in enumerate((devices, reversed(devices)), start=1)
    ]
    print("ready", flush=True)
    with selectors.DefaultSelector() as selector:
        for way in ways:
            selector.register(way.source, selectors.EVENT_READ, way)
        while True:
            for key, _ in selector.select(min(way.give() for way in ways)):
                key.data.take()


def _tun(namespace: str) -> int:
    """Open a TUN device called "way" in a namespace. Packets that the kernel sends there can be read here."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as ours, open(namespace) as theirs:
        _enter(libc, theirs)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", b"way", _IFF_TUN | _IFF_NO_PI))
        _enter(libc, ours)
    return device


def _enter(libc: Any, namespace: Any) -> None:
    if libc.setns(namespace.fileno(), _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


# -- what the link is --------------------------------------------------------------------------------------------------

_ECHO: Final = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("0.0.0.0", 7))
print("ready", flush=True)
while True: s.sendto(*s.recvfrom(2048))
"""
_PING: Final = """
import socket, statistics, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(2.0)
count, seconds = int(sys.argv[2]), {}
for n in range(count):
    s.sendto(b"%d %f" % (n, time.monotonic()), (sys.argv[1], 7)); time.sleep(0.002)
    s.setblocking(False)
    try:
        while True:
            number, sent = s.recv(64).split(); seconds[int(number)] = time.monotonic() - float(sent)
    except BlockingIOError: pass
s.settimeout(2.0)
try:
    while len(seconds) < count:
        number, sent = s.recv(64).split(); seconds[int(number)] = time.monotonic() - float(sent)
except TimeoutError: pass
print(statistics.median(seconds.values()), 1 - len(seconds) / count)
"""
_SINK: Final = """
import socket, sys, time
s = socket.create_server(("0.0.0.0", 9))
print("ready", flush=True)
c, _ = s.accept(); c.settimeout(float(sys.argv[1])); first, total = 0.0, 0
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    try: data = c.recv(1 << 16)
    except TimeoutError: break
    if not data: break
    first = first or time.monotonic(); total += len(data)
print(total / max(time.monotonic() - first, 1e-9))
"""
_SOURCE: Final = """
import socket, sys
s = socket.create_connection((sys.argv[1], 9))
try:
    while True: s.sendall(bytes(1 << 16))
except OSError: pass
"""


def probe(link: FarLink, *, seconds: float = 8.0, packets: int = 2000) -> dict[str, Any]:
    """Measure rtt_ms and lost (both ways together) of datagrams, and bytes_per_second of one TCP connection to near."""
    echo = _ready([*link.near, sys.executable, "-c", _ECHO])
    ping = subprocess.run(
        [*link.far, sys.executable, "-c", _PING, NEAR, str(packets)], capture_output=True, text=True, check=True
    )
    echo.kill()
    echo.wait()
    sink = _ready([*link.near, sys.executable, "-c", _SINK, str(seconds)])
    source = subprocess.Popen([*link.far, sys.executable, "-c", _SOURCE, NEAR])
    said, _ = sink.communicate()
    source.kill()
    source.wait()
    rtt, lost = map(float, ping.stdout.split())
    return {
        "how": link.how,
        "tcp": link.congestion_control(),
        "rtt_ms": rtt * 1000,
        "lost": lost,
        "bytes_per_second": float(said),
    }


def _ready(command: Sequence[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def tcp_kinds() -> list[str]:
    return Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()


def main() -> int:
    if sys.argv[1:2] == ["--carry"]:
        delay, loss, mbit = map(float, sys.argv[4:7])
        _carry(*sys.argv[2:4], delay=delay, loss=loss, mbit=mbit)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.far_link", description=__doc__)
    parser.add_argument("--delay", type=float, default=0.1, help="seconds one way (default 0.1)")
    parser.add_argument("--loss", type=float, default=0.01, help="share lost each way (default 0.01)")
    parser.add_argument("--mbit", type=float, default=100.0, help="(default 100)")
    options = parser.parse_args()
    if problem := unavailable():
        print(f"skipped: {problem}")
        return 0
    for tcp in sorted(tcp_kinds()):
        with FarLink(delay=options.delay, loss=options.loss, mbit=options.mbit, tcp=tcp) as link:
            found = probe(link)
        print(
            f"{found['how']}, {tcp:6s} round trip {found['rtt_ms']:6.1f} ms, lost {found['lost']:.1%} of round trips, "
            f"{found['bytes_per_second'] / 1e3:10,.0f} KB/s in one connection"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
