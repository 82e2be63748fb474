"""Limits how long a draining worker waits for something that may never come, such as weights that are not stored again.

Before the drain such a wait has no limit: the learner may be away for hours. Tests: tests/actors/rollout/test_drain.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from asyncrl.errors import NotNow

SECONDS: Final = 10.0
"""Enough for a load in progress; a launcher waits two minutes before it kills."""


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
        """Limit a wait. Raises NotNow, SECONDS after the drain began."""
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
