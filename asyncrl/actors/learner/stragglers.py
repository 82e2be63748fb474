"""Stragglers: groups in progress that a full batch waits for, because they would be too old for the step after it.

Bound 1, step 5 trains version 4: a group from version 3 that is still being generated would be too old for step 6. With
staleness.eviction = "wait" the full batch waits for it, up to staleness.wait_seconds. ``Selection.late_starts``
says which groups are late, and the heartbeats of workers since which version each is in progress.

Tests: tests/actors/learner/test_straggler_wait.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterator, Sequence

from asyncrl.actors.learner.live_workers import LiveWorkers
from asyncrl.actors.wait_tracker import OpenWait
from asyncrl.config import RunConfig
from asyncrl.errors import BusError
from asyncrl.policies.groups.selection import Selection
from asyncrl.policies.groups.started_groups import StartedGroups
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.health.waits import BEAT_SECONDS, STRAGGLERS

log = logging.getLogger("asyncrl.learner")

LOOK_SECONDS = BEAT_SECONDS / 2
"""Interval between looks at which groups workers have begun."""
LONG_WAIT_SECONDS = 30.0
"""A learner that has waited this long for a batch logs it."""


class Stragglers:
    """``changed`` is set when a wait is over, and when workers may be asked again."""

    def __init__(
        self,
        run: RunConfig,
        *,
        table: GroupTable,
        selection: Selection,
        changed: asyncio.Event,
        workers: LiveWorkers | None,
    ) -> None:
        """workers: None if it is unknown which groups workers have started"""
        self._table = table
        self._selection = selection
        self._changed = changed
        self._count = run.learner.groups_per_batch
        self._is_on = run.staleness.waits
        self._longest = run.staleness.wait_seconds or math.inf
        # Groups that start at this version or before are not waited for: too old, or a wait ended without them.
        self._given_up = table.policy_version - run.max_staleness - 1
        self._workers, self._started, self._may_ask = workers, StartedGroups(), True
        self._wait: OpenWait | None = None
        self._began: float | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._is_over = False
        self.seconds = 0.0
        """How long the batch that is waited for, or else the last one, was full and waited."""

    @property
    def is_waiting(self) -> bool:
        return self._began is not None

    @contextlib.contextmanager
    def of_batch(self, wait: OpenWait) -> Iterator[None]:
        """While open, one batch is waited for. ``wait``: the learner's; its note names the stragglers, if their wait
        has a time limit."""
        self.seconds, self._wait = 0.0, wait
        try:
            yield
        finally:
            self.stop()

    async def ask_workers(self) -> bool:
        """Ask workers which groups they have begun, if the batch would otherwise wait because of the versions that
        admitted its groups. Return False if this is known already or does not matter."""
        if self._workers is None or not self._may_ask or not self._late(StartedGroups()):
            return False
        self._may_ask = False  # only the timer resets this: uvloop's timers fire up to a millisecond early
        asyncio.get_running_loop().call_later(LOOK_SECONDS, self._allow_asking)
        with contextlib.suppress(BusError):  # with older knowledge the learner only waits longer
            beats = await self._workers.beats()
            self._started.update(beats, outstanding=self._table.outstanding, resume_points=self._table.resume_points)
        return True

    def hold(self) -> bool:
        """Return whether a full batch has to wait. The wait begins now, if it has not begun."""
        late = self._late(self._started)
        if late and not self._is_over:
            self._begin()
            return True
        self.stop()
        if late:
            log.warning(
                "step %d trains without older groups (%d) after waiting %g s for them (staleness.wait_seconds); groups "
                'that arrive too old are dropped (staleness.discard = "tokens" drops only tokens that are too old)',
                self._table.step + 1,
                len(late),
                self._longest,
            )
            self._given_up = max(late)
        return False

    def stop(self) -> None:
        """End the wait: the batch is taken, or no longer full. The next full batch begins a new one."""
        for timer in self._timers:
            timer.cancel()
        self.seconds += 0.0 if self._began is None else time.monotonic() - self._began
        self._began, self._timers, self._is_over = None, [], False
        if self._wait is not None:
            self._wait.note = ""

    def _begin(self) -> None:
        if self._began is None:
            self._began, loop = time.monotonic(), asyncio.get_running_loop()
            self._timers = [loop.call_later(LONG_WAIT_SECONDS, self._announce)]
            if math.isfinite(self._longest):
                self._timers.append(loop.call_later(self._longest, self._end))
                assert self._wait is not None
                self._wait.note = STRAGGLERS

    def _end(self) -> None:
        self._is_over = True
        self._changed.set()

    def _announce(self) -> None:
        table, longest = self._table, self._longest
        log.warning(
            "step %d has its %d groups but waits for older groups that would become too old, %s (staleness.eviction "
            'and wait_seconds; discard = "tokens" does not wait): %d are here and %d outstanding',
            table.step + 1,
            self._count,
            f"for {longest:g} s at most" if math.isfinite(longest) else "without a limit",
            len(table.buffered),
            len(table.outstanding),
        )

    def _allow_asking(self) -> None:
        self._may_ask = True
        self._changed.set()

    def _late(self, started: StartedGroups) -> Sequence[int]:
        """Return the starts of the groups that the next step waits for."""
        if not self._is_on:
            return ()
        starts = [start for start in started.starts(self._table.outstanding) if start > self._given_up]
        return self._selection.late_starts(self._table.policy_version, starts, count=self._count)
