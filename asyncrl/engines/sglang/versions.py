"""The versions that a server reports: the strings by which it knows its weights, and which of them tokens may carry.

A stamp is "INCARNATION:VERSION:OWNER". Each run counts from 0:0, so the version alone does not tell whose weights a
server has. The owner is one process of one worker. A server with another owner's stamp has unknown weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from asyncrl.engines.generation import Version, format_version
from asyncrl.errors import EngineDied, EngineError

_STAMP: Final = re.compile(r"(\d+):(\d+)(?::(\w+))?")


def new_owner() -> str:
    """Return a new owner."""
    return uuid.uuid4().hex[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamps:
    """The stamps of one owner.

    first_version  version for strings that asyncrl did not set, such as the "default" of a fresh server
    owner          empty: versions without an owner
    url            the server's, for messages; empty if it is not known
    """

    first_version: Version
    owner: str = ""
    url: str = ""

    def format(self, version: Version) -> str:
        return ":".join(filter(None, (format_version(version), self.owner)))

    def is_foreign(self, stamp: str) -> bool:
        """Whether another owner loaded the server's weights."""
        found = _STAMP.fullmatch(stamp)
        return found is not None and (found[3] or "") != self.owner

    def read(self, stamp: str) -> Version:
        """Return the version. Raises EngineDied for another owner's stamp."""
        if self.is_foreign(stamp):
            raise EngineDied(
                f"another run or worker loaded its weights ({stamp}) into this worker's SGLang server"
                f"{self.url and f' at {self.url}'}: `asyncrl evaluate`, or a worker that joined with the same url? "
                "Give each worker a server of its own (engine.options.url)"
            )
        found = _STAMP.fullmatch(stamp)
        return (int(found[1]), int(found[2])) if found else self.first_version


class SettledVersion:
    """``newest``: tokens that arrive from now on may be labelled with this version, but not with a newer one.

    The server stamps a streamed chunk with a version when it sends the chunk. The acknowledgement of a load can
    overtake chunks that still wait for detokenization, so a stamp may be newer than all tokens of its chunk. Replies do
    not overtake each other: once a request sent under a version has a token, every token sampled before that version
    has been sent.

    An evaluation may load an older version. No label is newer than that until a newer version has settled again.
    """

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

    def note_load(self, version: Version, *, before: Version) -> None:
        """Note that a load of this version has ended. If there was a newer one before, newest follows.

        before: the version before the load, or less if that is not known (after a transfer that broke off)
        """
        self._latest = max(self._latest, before, self.newest)
        if version < self._latest:
            self.newest = min(self.newest, version)
            self.older_loads.append(version)
        self._latest = max(self._latest, version)

    def note_stamp(self, version: Version) -> None:
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
            asked.note_token()


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

    def note_token(self) -> None:
        """Note that the request has a token."""
        self._at_last_token = len(self._settled.older_loads)
        if self._at_last_token == self._at_sending:
            self._settled.newest = max(self._settled.newest, self._sent)
