"""How many engines of a run may load new weights at the same time: leases of the bus.

A turn limits how many engines are paused, and protects nothing: who has waited for much longer than those before it can
take goes without one. So a worker that never lets go of its turn holds up the others for that long, and not for ever.
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

from asyncrl.protocols import Bus, LoadReport

LOADING_SHARE: Final = 1 / 8
"""Of the engines, rounded up: this many may be paused by a load at once."""
LEAST_SECONDS: Final = 30.0
FIRST_SECONDS: Final = 300.0
LOADS: Final = 20
"""Eight engines share a turn, more where their names fall so; each takes about as long as we do."""


@contextlib.asynccontextmanager
async def turn_to_load(
    bus: Bus, *, worker: str, num_engines: int, last: LoadReport | None = None
) -> AsyncIterator[None]:
    """Entered when it is this worker's turn, or after our ``patience``.

    num_engines  of the run, 0 while nobody knows
    last         our last load; None before it
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
    """How long to wait for a turn. ``usual``: what a load takes, 0 if it is not known; both in seconds."""
    return max(LEAST_SECONDS, LOADS * usual) if usual else FIRST_SECONDS
