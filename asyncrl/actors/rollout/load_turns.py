"""How many engines of a run may load new weights at the same time: leases of the bus."""

from __future__ import annotations

import math
import zlib
from contextlib import AbstractAsyncContextManager
from typing import Final

from asyncrl.protocols import Bus

LOADING_SHARE: Final = 1 / 8
"""Of the engines, rounded up: this many may be paused by a load at once."""


def turn_to_load(bus: Bus, *, worker: str, num_engines: int) -> AbstractAsyncContextManager[None]:
    """Entered when it is this worker's turn. ``num_engines``: of the run, 0 while nobody knows."""
    turns = max(1, math.ceil(num_engines * LOADING_SHARE))
    return bus.lease(f"load-{zlib.crc32(worker.encode()) % turns}", holder=worker)
