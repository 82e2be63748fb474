"""Tracks the newest version that tokens arriving from an SGLang server may be labelled with.

The server stamps a streamed chunk with a version when it sends the chunk. The acknowledgement of a load can overtake
chunks that still wait for detokenization, so a stamp may be newer than all tokens of its chunk. Replies do not overtake
each other: once a request sent under a version has a token, every token sampled before that version has been sent.

An evaluation may load an older version. No label is newer than that until a newer version has settled again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from asyncrl.engines.version_spans import Version
from asyncrl.errors import EngineError


class SettledVersion:
    """``newest``: tokens that arrive from now on may be labelled with this version, but not with a newer one."""

    def __init__(self, version: Version, ask: Callable[[], Awaitable[None]], current: Callable[[], Version]) -> None:
        """
        ask      sends a short request and waits for its answer
        current  returns the version under which requests are sent
        """
        self.newest = version
        self.older_loads: list[Version] = []
        """Versions that were loaded after newer ones, for evaluations."""
        self._ask = ask
        self._current = current
        self._latest = version
        self._task: asyncio.Task[None] | None = None

    def request(self, sent: Version) -> SentRequest:
        """Return what bounds the labels of a request that is sent under this version now."""
        return SentRequest(self, sent)

    def loaded(self, version: Version, *, before: Version) -> None:
        """Note that a load of this version has ended. If there was a newer one before, newest follows.

        before: the version before the load, or less if that is not known (after a transfer that broke off)
        """
        self._latest = max(self._latest, before, self.newest)
        if version < self._latest:
            self.newest = min(self.newest, version)
            self.older_loads.append(version)
        self._latest = max(self._latest, version)

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
        asked = self.request(min(version, self._current()))  # a late stamp may be newer than an older load
        with contextlib.suppress(EngineError):  # the generations in progress report it; the next chunk asks again
            await self._ask()
            asked.answered()


class SentRequest:
    """Bounds the labels of one request's tokens. An older load is an end to what was known before it."""

    def __init__(self, settled: SettledVersion, sent: Version) -> None:
        self._settled = settled
        self._sent = sent
        self._at_sending = self._at_last_token = len(settled.older_loads)

    @property
    def newest(self) -> Version:
        """The newest label of tokens that arrive now."""
        loads = self._settled.older_loads
        if since := loads[self._at_last_token :]:
            return min(since)
        is_old = len(loads) > self._at_sending
        return self._settled.newest if is_old else max(self._settled.newest, self._sent)

    def answered(self) -> None:
        """Note that the request has a token."""
        self._at_last_token = len(self._settled.older_loads)
        if self._at_last_token == self._at_sending:
            self._settled.newest = max(self._settled.newest, self._sent)
