"""How a learner's rank is talked to."""

from __future__ import annotations

from typing import Protocol


class Channel(Protocol):
    """A pipe's end, or tcp_link.TcpLink."""

    def send_bytes(self, data: bytes, /) -> None:
        """Raises OSError."""

    def recv_bytes(self) -> bytes:
        """Raises EOFError or OSError."""
        ...

    def poll(self, timeout: float, /) -> bool: ...
