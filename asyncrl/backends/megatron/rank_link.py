"""Messages between two ranks over a socket, in two lanes. Each end notices within seconds that the other end is gone.

When a process ends, its connection closes. When a machine vanishes, TCP keep-alives go unanswered. The kernel sends and
counts them, so a process that computes, imports, or waits in a collective need not do anything. A stopped process, or
one whose Python hangs, is detected by its silence: a thread at each end sends a sign of life every second. The sign
includes how long that end may be silent, since some calls hold the GIL for minutes. Ranks of one machine use a pair of
Unix sockets in place of TCP.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from asyncrl.errors import AsyncRLError

SILENT_SECONDS: Final = 8
"""A machine that has not answered for this long is gone."""
HUNG_SECONDS: Final = 6
"""A process that has been silent for this long hangs, unless it has announced a longer silence."""
TICK_SECONDS: Final = 1.0
_HEAD: Final = struct.Struct("<Q")
_SIGN: Final = 1 << 63
"""Flag in the size field: a sign of life without a message. The other bits are the seconds for which the sender may be
silent."""

_PARTS: Final = 1 << 62
"""Flag added to the size of a message in the second lane."""
_REASON: Final = 1 << 61
"""Flag added to the size of the last message, which says why its sender fails."""

_MOST_CHARACTERS: Final = 300
"""Length of an error in one line."""


class _Inbox:
    """Unread messages of one lane. No more messages arrive once ``gone`` is set."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self._taken = threading.Condition()
        self._messages: deque[bytes] = deque()

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Wait up to ``timeout`` seconds. Returns whether there is a message, or no more can arrive."""
        with self._taken:
            return self._taken.wait_for(lambda: bool(self._messages) or self.gone.is_set(), timeout)

    def recv_bytes(self) -> bytes:
        """Return the next message. Raises EOFError if no more messages can arrive."""
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
    """The lane for messages that must not wait behind commands."""

    def __init__(self, send_bytes: Callable[[bytes], None]) -> None:
        super().__init__()
        self.send_bytes = send_bytes


class RankLink(_Inbox):
    """Sends and receives whole messages. A thread reads them on arrival, so no buffer fills while a process computes.

    ``parts`` is the second lane. ``gone`` is set once the other end has closed, does not answer, or is silent;
    ``problem`` tells which. ``reason`` is what the other end said last if it failed (``fail``).
    """

    def __init__(self, connection: socket.socket, *, patience: float, tick_seconds: float = TICK_SECONDS) -> None:
        """patience: seconds for which the other end may be silent, until it announces another number"""
        super().__init__()
        self.parts = _SecondLane(self._send_parts)
        self.problem = "its connection has ended"
        self.reason = ""
        self._socket = connection
        self._socket.settimeout(None)
        if connection.family != socket.AF_UNIX:
            _keep_alive(connection)
        self._room = select.poll()  # select() takes no descriptor above 1,023
        self._room.register(connection, select.POLLOUT)
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
        """Announce that this end may be silent for ``seconds`` before it counts as hung."""
        self._may_be_silent = int(seconds)
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(_HEAD.pack(_SIGN | self._may_be_silent))

    def fail(self, error: Exception) -> None:
        """End the link and tell the other end why, before this process ends: that may take long."""
        data = described(error).encode(errors="replace")
        with contextlib.suppress(OSError), self._sending:
            self._socket.sendall(_HEAD.pack(_REASON | len(data)) + data)
            self._socket.shutdown(socket.SHUT_WR)  # closing would discard what the other end has not read

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reading thread
        self._socket.close()

    def _take(self) -> None:
        while True:
            try:
                (size,) = _HEAD.unpack(_exactly(self._socket, _HEAD.size, self._heard))
                if size & _SIGN:
                    self._patience = size ^ _SIGN
                    continue
                message = _exactly(self._socket, size & ~(_PARTS | _REASON), self._heard)
            except OSError:
                break
            if size & _REASON:
                self.reason = message.decode(errors="replace")
                self.problem = f"it failed: {self.reason}"
                continue
            (self.parts if size & _PARTS else self).put(message)
        self.parts.end()
        self.end()

    def _heard(self) -> None:
        self._silence = 0.0

    def _watch(self) -> None:
        while not self.gone.wait(self._tick_seconds):
            self.tick()

    def tick(self) -> None:
        """Send a sign of life, and count the time of silence.

        Silence is counted in our own ticks: while our process is stopped, it receives nothing.
        """
        if self._sending.acquire(blocking=False):  # otherwise a message is being sent, which is a sign of life itself
            with contextlib.suppress(OSError):
                if self._room.poll(0):  # otherwise the other end has many signs to read, and we must not wait for it
                    self._socket.sendall(_HEAD.pack(_SIGN | self._may_be_silent))
            self._sending.release()
        self._silence += self._tick_seconds
        if self._silence > self._patience:
            self.problem = f"it hangs: no sign of life for {self._patience:g} s"
            self.close()


def described(error: Exception) -> str:
    """Return the error in one line: its first lines may be empty, or only say where it was found."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return text if isinstance(error, AsyncRLError) else f"{type(error).__name__}: {text}"


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_HEAD.pack(len(data)) + data)


def receive(connection: socket.socket, *, largest: int, deadline: float) -> bytes:
    """Receive one message from someone who may be a stranger.

    Raises OSError if the connection ends early, for more than ``largest`` bytes, and after ``deadline``, a monotonic
    time, however many bytes keep arriving.
    """

    def limit() -> None:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)

    limit()
    (size,) = _HEAD.unpack(_exactly(connection, _HEAD.size, limit))
    if size > largest:
        raise OSError(f"a message of {size} bytes where at most {largest} are expected")
    return _exactly(connection, size, limit)


def _exactly(connection: socket.socket, size: int, heard: Callable[[], None]) -> bytes:
    """Receive ``size`` bytes. Calls ``heard`` whenever data arrive."""
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
        ("TCP_USER_TIMEOUT", SILENT_SECONDS * 1000),  # unacknowledged data count like keep-alives
    ):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
