"""Tracks the newest version that tokens arriving from an SGLang server may be labelled with.

The server stamps a streamed chunk with a version when it sends the chunk. The acknowledgement of a load can overtake
chunks that still wait for detokenization, so a stamp may be newer than all tokens of its chunk. Replies do not overtake
each other: once a request sent under a version has a token, every token sampled before that version has been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from asyncrl.engines.version_spans import Version
from asyncrl.errors import EngineError


class SettledVersion:
    """``newest``: tokens that arrive from now on may be labelled with this version, but not with a newer one."""

    def __init__(self, version: Version, ask: Callable[[], Awaitable[None]]) -> None:
        """``ask`` sends a short request and waits for its answer."""
        self.newest = version
        self._ask = ask
        self._task: asyncio.Task[None] | None = None

    def answered(self, sent: Version) -> None:
        """Note that a request sent under this version has a token."""
        self.newest = max(self.newest, sent)

    def stamped(self, version: Version) -> None:
        """Note that the server reports this version as loaded.

        If the version is newer than ``newest``, sends a short request, unless one is in flight.
        """
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
