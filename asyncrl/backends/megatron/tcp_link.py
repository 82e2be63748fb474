"""Messages between two ranks over TCP, in two lanes. Either end knows within seconds that the other is gone, however.

A process that ends closes its connection; a machine that vanishes leaves keep-alives unanswered, which the kernel sends
and counts: a process that computes, imports, or waits in a collective need not do anything for it. A process that is
stopped, or whose Python hangs, is known by its silence: a thread of each end says every second that it is there, and
for how long it may not be heard, since some calls hold Python's lock for minutes.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

SILENT_SECONDS: Final = 8
"""A machine that has not answered for so long is gone."""
HUNG_SECONDS: Final = 6
"""A process that has said nothing for so long hangs, where it has not announced that it may."""
TICK_SECONDS: Final = 1.0
_HEAD: Final = struct.Struct("<Q")
_SIGN: Final = 1 << 63
"""In the place of a size: no message follows, the other end is there. The other bits are how many seconds it may not be
heard."""

_PARTS: Final = 1 << 62
"""Added to the size of a message of the second lane."""


class _Inbox:
    """Messages of one lane that nobody has read yet; there will be no other ones once it is ``gone``."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self._taken = threading.Condition()
        self._messages: deque[bytes] = deque()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether there is a message, or will never be another one, within ``timeout`` seconds."""
        with self._taken:
            return self._taken.wait_for(lambda: bool(self._messages) or self.gone.is_set(), timeout)

    def recv_bytes(self) -> bytes:
        """The next message. Raises EOFError when there is none any more."""
        self.poll(None)
        with self._taken:
            if not self._messages:
                raise EOFError
            return self._messages.popleft()

    def put(self, message: bytes) -> None:
        with self._taken:
            self._messages.append(message)
            self._taken.notify_all()

    def end(self) -> None:
        with self._taken:
            self.gone.set()
            self._taken.notify_all()


class _SecondLane(_Inbox):
    """For what is not to wait behind commands."""

    def __init__(self, send_bytes: Callable[[bytes], None]) -> None:
        super().__init__()
        self.send_bytes = send_bytes


class TcpLink(_Inbox):
    """Whole messages, taken as they come, so that no buffer fills while somebody computes. ``parts``: the second lane.

    ``gone`` is set once the other end has closed, does not answer, or is silent; ``problem`` says which.
    """

    def __init__(self, connection: socket.socket, *, patience: float, tick_seconds: float = TICK_SECONDS) -> None:
        """patience: seconds for which the other end may not be heard, until it says another number"""
        super().__init__()
        self.parts = _SecondLane(self._send_parts)
        self.problem = "its connection has ended"
        self._socket = connection
        self._socket.settimeout(None)
        _keep_alive(connection)
        self._patience, self._tick_seconds = patience, tick_seconds
        self._silence = 0.0
        self._sending = threading.Lock()
        self._may_be_silent = int(patience)
        for work in (self._take, self._watch):
            threading.Thread(target=work, name="rank-link", daemon=True).start()

    def send_bytes(self, data: bytes) -> None:
        """Raises OSError."""
        with self._sending:
            send(self._socket, data)

    def _send_parts(self, data: bytes) -> None:
        with self._sending:
            self._socket.sendall(_HEAD.pack(_PARTS | len(data)) + data)

    def may_be_silent(self, seconds: float) -> None:
        """From now on the other end is to wait so long before it takes us for hung."""
        self._may_be_silent = int(seconds)
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(_HEAD.pack(_SIGN | self._may_be_silent))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._socket.close()

    def _take(self) -> None:
        while True:
            try:
                (size,) = _HEAD.unpack(_exactly(self._socket, _HEAD.size, self._heard))
                if size & _SIGN:
                    self._patience = size ^ _SIGN
                    continue
                message = _exactly(self._socket, size & ~_PARTS, self._heard)
            except OSError:
                break
            (self.parts if size & _PARTS else self).put(message)
        self.parts.end()
        self.end()

    def _heard(self) -> None:
        self._silence = 0.0

    def _watch(self) -> None:
        while not self.gone.wait(self._tick_seconds):
            self.tick()

    def tick(self) -> None:
        """Say that we are here, and count for how long nothing was heard: in our own ticks, since while we are stopped
        ourselves nobody is heard."""
        if self._sending.acquire(blocking=False):  # else something is being sent, which says the same
            with contextlib.suppress(OSError):
                self._socket.sendall(_HEAD.pack(_SIGN | self._may_be_silent))
            self._sending.release()
        self._silence += self._tick_seconds
        if self._silence > self._patience:
            self.problem = f"it hangs: it has said nothing for {self._patience:g} s"
            self.close()


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_HEAD.pack(len(data)) + data)


def receive(connection: socket.socket, *, largest: int) -> bytes:
    """One message. Raises OSError when the connection ends before it does, or it is larger than ``largest`` bytes."""
    (size,) = _HEAD.unpack(_exactly(connection, _HEAD.size))
    if size > largest:
        raise OSError(f"a message of {size} bytes where at most {largest} are expected")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int, heard: Callable[[], None] = lambda: None) -> bytes:
    """``heard`` is called whenever something comes."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("closed")
        heard()
        view = view[count:]
    return bytes(data)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", SILENT_SECONDS * 1000),  # data under way counts like a keep-alive
    ):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
