"""Limits how many engines of a run load new weights at the same time, with leases on the bus.

A turn limits how many engines are paused and protects nothing. A worker stops waiting, and loads without a turn, after
much more time than the loads before its own can take. So a worker that never releases its turn delays others only for
a limited time.
Tests: tests/actors/rollout/test_load_turns.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import zlib
from collections.abc import AsyncIterator
from typing import Final

from asyncrl.bus.port import Bus
from asyncrl.weights.port import LoadReport

LOADING_SHARE: Final = 1 / 8
"""Share of the engines, rounded up, that may be paused for a load at the same time."""
LEAST_SECONDS: Final = 30.0
FIRST_SECONDS: Final = 300.0
LOADS: Final = 20
"""Patience in loads of usual duration. About eight engines share a turn, or more, as names are hashed to turns."""


@contextlib.asynccontextmanager
async def turn_to_load(
    bus: Bus, *, worker: str, num_engines: int, last: LoadReport | None = None
) -> AsyncIterator[None]:
    """Entered when it is this worker's turn, or after its ``patience``.

    num_engines  number of engines in the run, 0 if unknown
    last         this worker's last load; None before the first
    """
    turns = max(1, math.ceil(num_engines * LOADING_SHARE))
    name, seconds = f"load-{zlib.crc32(worker.encode()) % turns}", patience(last.load_seconds if last else 0.0)
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(seconds):
                await stack.enter_async_context(bus.lease(name, holder=worker))
        except TimeoutError:
            logging.getLogger(f"asyncrl.{worker}").warning(
                "its turn to load weights (%s) did not come in %.0f s; loading without it", name, seconds
            )
        yield


def patience(usual: float) -> float:
    """Return how many seconds to wait for a turn. ``usual``: seconds that a load takes, 0 if unknown."""
    return max(LEAST_SECONDS, LOADS * usual) if usual else FIRST_SECONDS
