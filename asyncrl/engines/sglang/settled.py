"""Which weights the tokens that have arrived from an SGLang server are at least of.

A streamed chunk is stamped with a version when it is passed on to us. The acknowledgement of a load overtakes chunks
that still wait to be made text, so a stamp may be newer than all tokens of its chunk. Replies overtake nothing: once a
request that was sent under a version has a token, everything that was sampled before that version has been passed on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from asyncrl.engines.version_spans import Version
from asyncrl.errors import EngineError


class SettledVersion:
    """``newest``: tokens that arrive from now on may be said to be of it, not of a newer one."""

    def __init__(self, version: Version, ask: Callable[[], Awaitable[None]]) -> None:
        """``ask``: sends a short request and waits for its answer."""
        self.newest = version
        self._ask = ask
        self._task: asyncio.Task[None] | None = None

    def answered(self, sent: Version) -> None:
        """A request that was sent under this version has a token."""
        self.newest = max(self.newest, sent)

    def stamped(self, version: Version) -> None:
        """The server says that this version is loaded. Asks, unless an answer is on its way."""
        if version > self.newest and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._settle(version))

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _settle(self, version: Version) -> None:
        with contextlib.suppress(EngineError):  # the generations in progress report it; the next chunk asks again
            await self._ask()
            self.answered(version)
