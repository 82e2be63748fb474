"""Waits while a service is away that groups need: a reward server, a judge, whatever a rollout function talks to.

Nothing fails meanwhile. What was sampled is kept, and what failed is tried again, with growing pauses, until it gets
through; the worker says what it waits for. As long as nobody gets through, that lasts as long as it takes.

A group that fails every time while others get through may be its own fault: a server that answers one question with 500
must not hold up the run. But a function may also ask its judge about some answers only, so that others get through an
outage. ``_most_tries`` decides.

Tests: tests/actors/rollout/test_outages.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from asyncrl.actors.rollout.load_gate import LoadGate
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.errors import MaybeOutage, NotNow, Outage
from asyncrl.logs import in_words
from asyncrl.policies.health.waits import SERVICE

T = TypeVar("T")

PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 10.0)
"""Seconds before each further try; the last pause is repeated."""
MAYBE_TRIES: Final = 1
"""More tries, while others get through, of what may be the group's own fault: a time-out, HTTP 500."""
ALONE_TRIES: Final = 6
"""Of a connection that fails for this group alone, as to a site that is gone."""
MOST_TRIES: Final = 60
"""Of a connection that fails for several groups: ten minutes."""
_SHOWN: Final = 300
"""Characters of an error to show in a wait."""


class Outages:
    """The outages of one service, or of services that are needed together."""

    def __init__(self, worker: str, *, waits: WaitTracker, gate: LoadGate) -> None:
        """gate: knows when the worker drains"""
        self._waits = waits
        self._gate = gate
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._waiting: Counter[int] = Counter()
        """group -> how many of its parts wait"""
        self._since = 0.0
        self._is_told = False
        self.num_through = 0
        """How often something got through."""

    async def get_through(self, work: Callable[[], Awaitable[T]], *, group_id: int, since: int | None = None) -> T:
        """Return what ``work`` returns, calling it again as long as it raises an Outage.

        since  ``num_through`` when the group began; None: it begins now

        Raises the Outage if only this group cannot get through; NotNow if the worker drains, so that another one tries.
        """
        since = self.num_through if since is None else since
        try:
            made = await work()
        except Outage as error:
            made = await self._try_again(work, error, group_id=group_id, since=since)
        self.num_through += 1
        return made

    async def get_each_through(
        self, work: Callable[[], Awaitable[Sequence[T]]], *, group_id: int, since: int
    ) -> Sequence[T]:
        """``get_through`` for the answers of a group: ``work`` returns an Outage in place of each that is left out.

        Those are asked for again with the others, as long as they get fewer; then they have no result.
        """
        partly: Sequence[T] = ()
        away_counts: list[int] = []

        async def ask() -> Sequence[T]:
            nonlocal partly
            partly = ()
            results = await work()
            away = [one for one in results if isinstance(one, Outage)]
            if not away:
                return results
            partly = results
            self.num_through += not away_counts or len(away) < away_counts[-1]  # siblings got through
            away_counts.append(len(away))
            raise away[0]

        while True:
            del away_counts[:-1]
            try:
                return await self.get_through(ask, group_id=group_id, since=since)
            except Outage:
                if not partly:
                    raise
                # Others get through: those answers have no result. But if some of them got through just now, the
                # service answers some requests, and it is no answer's fault.
                if away_counts[-1] == away_counts[0]:
                    return partly

    async def _try_again(self, work: Callable[[], Awaitable[T]], error: Outage, *, group_id: int, since: int) -> T:
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting[group_id] += 1
        tries, before = 0, self.num_through
        try:
            with self._waits.waiting(str(error)[:_SHOWN], on=SERVICE):
                while True:
                    await self._pause(tries)
                    tries += 1
                    try:
                        return await work()
                    except Outage as again:
                        most, is_alone = self._most_tries(again)
                        if tries >= most and self.num_through > (since if is_alone else before):
                            raise
                        if tries > MAYBE_TRIES and not self._is_told:
                            self._is_told = True
                            self._log.warning("a service is away: %s; groups that need it wait for it", again)
        finally:
            self._waiting[group_id] -= 1
            self._waiting += Counter()  # without zeros
            if not self._waiting and self._is_told:
                self._is_told = False
                away = in_words(time.monotonic() - self._since)
                self._log.warning("no group waits for that service any more, after %s", away)

    def _most_tries(self, error: Outage) -> tuple[int, bool]:
        """Return how often a group is tried while others get through, and whether it may be alone with its error.

        Others count that got through since it began to sample if it may be alone, since there may be no others now.
        """
        if isinstance(error, MaybeOutage):
            return MAYBE_TRIES, True
        return (ALONE_TRIES, True) if len(self._waiting) == 1 else (MOST_TRIES, False)

    async def _pause(self, tries: int) -> None:
        """Wait before a further try, after ``tries`` others. Raises NotNow if the worker drains."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PAUSES[min(tries, len(PAUSES) - 1)]):
                await self._gate.until_draining()
            raise NotNow("a service that it needs is away, and this worker drains")
