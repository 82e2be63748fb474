"""Messages between two ranks over TCP. Either end knows within seconds that the other is gone, however it went.

A process that ends closes its connection; a machine that vanishes leaves keep-alives unanswered, which the kernel sends
and counts: a process that computes, imports, or waits in a collective need not do anything for it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from typing import Final

SILENT_SECONDS: Final = 8
"""A machine that has not answered for so long is gone."""
_HEAD: Final = struct.Struct("<Q")


class TcpLink:
    """Whole messages, taken as they come, so that no buffer fills while somebody computes.

    ``gone`` is set once the other end has closed, or does not answer.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.gone = threading.Event()
        self._socket = connection
        self._socket.settimeout(None)
        _keep_alive(connection)
        self._taken = threading.Condition()
        self._messages: deque[bytes] = deque()
        threading.Thread(target=self._take, name="rank-link", daemon=True).start()

    def send_bytes(self, data: bytes) -> None:
        """Raises OSError."""
        send(self._socket, data)

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

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
        self._socket.close()

    def _take(self) -> None:
        while True:
            try:
                message = receive(self._socket)
            except OSError:
                break
            with self._taken:
                self._messages.append(message)
                self._taken.notify_all()
        with self._taken:
            self.gone.set()
            self._taken.notify_all()


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(_HEAD.pack(len(data)) + data)


def receive(connection: socket.socket, *, largest: int | None = None) -> bytes:
    """One message. Raises OSError when the connection ends before it does, or it is larger than ``largest`` bytes."""
    (size,) = _HEAD.unpack(_exactly(connection, _HEAD.size))
    if largest is not None and size > largest:
        raise OSError(f"a message of {size} bytes where at most {largest} are expected")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("closed")
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
