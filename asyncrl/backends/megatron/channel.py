"""Interface of the message channel to a learner's rank."""

from __future__ import annotations

from typing import Protocol


class Channel(Protocol):
    """Implemented by both lanes of a rank_link.RankLink."""

    def send_bytes(self, data: bytes, /) -> None:
        """Raises OSError."""

    def recv_bytes(self) -> bytes:
        """Raises EOFError or OSError."""
        ...

    def poll(self, timeout: float, /) -> bool: ...
