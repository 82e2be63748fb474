"""How long a worker that drains waits for what may never come: weights that nobody stores again, say.

Until it drains such a wait has no end: the learner may be away for hours. Tests: tests/actors/rollout/test_drain.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from asyncrl.errors import NotNow

SECONDS: Final = 10.0
"""A load that is under way is done by then; a launcher waits for two minutes until it kills."""


class DrainPatience:
    """One per stage."""

    def __init__(self) -> None:
        self._deadline: float | None = None
        self._waits: set[asyncio.Timeout] = set()

    def drain(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + SECONDS
            for wait in self._waits:
                wait.reschedule(self._deadline)

    @contextlib.asynccontextmanager
    async def limited(self, what: str) -> AsyncIterator[None]:
        """Around a wait. Raises NotNow, SECONDS after the drain began."""
        try:
            async with asyncio.timeout_at(self._deadline) as wait:
                self._waits.add(wait)
                try:
                    yield
                finally:
                    self._waits.discard(wait)
        except TimeoutError as error:
            if wait.expired():
                raise NotNow(f"{what} did not come in {SECONDS:g} s of draining") from error
            raise
