"""Device memory that kept buckets pass through on their way to engines; all engines of a rank share it.

However many engines ask at a time, no more than RING_BYTES are alive, or one bucket that is larger. A transfer that
waits for a block holds none, so those that hold some always go on.
Test: tests/unit/weights/test_ring.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Final

import torch

from asyncrl.tensors.snapshot import BUCKET_BYTES

RING_BYTES: Final = BUCKET_BYTES


class Ring:
    """Thread-safe. Blocks are kept for the next transfer."""

    def __init__(self, num_bytes: int = RING_BYTES) -> None:
        self._limit = num_bytes
        self._changed = threading.Condition()
        self._free: list[torch.Tensor] = []
        self._taken_bytes = 0
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def beside_steps(self, device: torch.device) -> Iterator[torch.cuda.Stream | None]:
        """Use the ring's stream, None on a CPU: on the learner's stream, transfers would wait for the running step.

        It is one stream for all, because torch keeps freed memory for the stream on which it was allocated.
        """
        with self._changed:
            if device.type == "cuda" and self._stream is None:
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield self._stream

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._taken_bytes + sum(block.numel() for block in self._free)

    def take(self, num_bytes: int, device: torch.device, *, seconds: float) -> torch.Tensor | None:
        """Return a block of at least ``num_bytes``, u8; None if none becomes free in time. RuntimeError: no memory.

        Use it on the current stream. Nothing else reads or writes it any more.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._fits(num_bytes), seconds):
                return None
            block = min((one for one in self._free if one.numel() >= num_bytes), key=torch.Tensor.numel, default=None)
            if block is not None:
                self._free = [one for one in self._free if one is not block]
            else:
                while self._free and self.num_bytes + num_bytes > self._limit:
                    self._free.pop()
                block = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            self._taken_bytes += block.numel()
            return block

    def _fits(self, num_bytes: int) -> bool:
        is_one_free = any(one.numel() >= num_bytes for one in self._free)
        return is_one_free or not self._taken_bytes or self._taken_bytes + num_bytes <= self._limit

    def give(self, block: torch.Tensor) -> None:
        """Return a block that nothing reads any more."""
        with self._changed:
            self._taken_bytes -= block.numel()
            self._free.append(block)
            self._changed.notify_all()

    def forget(self, block: torch.Tensor) -> None:
        """Give up a block that a broken transfer may still read: it is freed with that transfer, not used again."""
        with self._changed:
            self._taken_bytes -= block.numel()
            self._changed.notify_all()
