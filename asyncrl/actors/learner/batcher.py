"""Makes batches: selects the groups of the next step and packs their micro-batches while the current step runs.

A batch is *taken* when the previous step is done, for the version it trains: groups that are too old are dropped, and
the first of the others (staleness.order, by default the oldest) form the batch. While a step runs, ``prepare_ahead``
prepares the batch that would be taken if the step ended now, and prepares again when an arrival changes that batch.
This preparation is speculative and takes nothing: no group changes its state, no counter moves, nothing is published.
It hides host work and changes no result:

  - Which groups form a batch, and which are dropped, is decided at the same instants as without speculation. If
    another batch is taken, the prepared one is discarded and the new one is prepared then.
  - Admission sees steps done and batches taken. In one_step_off taking a batch admits the next one: batch n + 2 is
    admitted when step n + 1 begins at version n, and trained from version n + 1. A batch prepared during step n is
    taken when step n + 1 begins, not earlier, so the bound of one version holds with and without speculation.
  - With max_staleness 0 nothing is outstanding beyond the batch in training, so nothing is prepared ahead, and async
    equals sync to the last bit (tests/integration/learning/test_learning.py).
  - A drained or killed run leaves no taken batch behind: checkpoints do not contain prepared batches.

Tests: tests/actors/learner/test_batcher.py, tests/actors/learner/test_straggler_wait.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from asyncrl.actors.learner.image_reader import ImageReader
from asyncrl.actors.learner.live_workers import LiveWorkers
from asyncrl.actors.learner.preparation import prepare
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.wait_tracker import OpenWait
from asyncrl.config import RunConfig
from asyncrl.errors import BusError, FilterError, StepFailed
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.hooks import Hooks
from asyncrl.policies.batching.packing import MiniBatches, recording
from asyncrl.policies.groups.selection import Selection, own_order
from asyncrl.policies.groups.started_groups import StartedGroups
from asyncrl.policies.groups.states import BufferedGroup
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.health.waits import BEAT_SECONDS, STRAGGLERS

log = logging.getLogger("asyncrl.learner")

LOOK_SECONDS = BEAT_SECONDS / 2
"""Interval between looks at which groups workers have begun, while the learner waits for stragglers."""
LONG_WAIT_SECONDS = 30.0
"""A learner that has waited this long for a batch logs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """seconds: host time for the preparation, whether hidden or not"""

    batch: Batch
    mini_batches: MiniBatches
    seconds: float


@dataclass(frozen=True, slots=True)
class _Preparation:
    """``key``: the policy version, then the group ids."""

    key: tuple[int, ...]
    task: asyncio.Task[PreparedBatch | Exception]


class _StragglerWait:
    """How long a full batch waits for older groups: after ``longest`` seconds it is over and ``changed`` is set.

    announce  called after LONG_WAIT_SECONDS
    wait      the learner's wait; its note names the stragglers, if the wait has a time limit
    """

    def __init__(self, longest: float, *, changed: asyncio.Event, announce: Callable[[], None], wait: OpenWait) -> None:
        self._longest, self._changed, self._announce, self._wait = longest, changed, announce, wait
        self._began: float | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._seconds = 0.0
        self.is_over = False

    def __enter__(self) -> _StragglerWait:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def is_on(self) -> bool:
        return self._began is not None

    @property
    def seconds(self) -> float:
        return self._seconds + (0.0 if self._began is None else time.monotonic() - self._began)

    def begin(self) -> None:
        """Begin to wait; does nothing if it has begun."""
        if self._began is None:
            self._began, loop = time.monotonic(), asyncio.get_running_loop()
            self._timers = [loop.call_later(LONG_WAIT_SECONDS, self._announce)]
            if math.isfinite(self._longest):
                self._timers.append(loop.call_later(self._longest, self._end))
                self._wait.note = STRAGGLERS

    def stop(self) -> None:
        """Stop because the batch is no longer full. The next full batch begins a new wait."""
        for timer in self._timers:
            timer.cancel()
        self._seconds, self._began, self._timers, self.is_over = self.seconds, None, [], False
        self._wait.note = ""

    def _end(self) -> None:
        self.is_over = True
        self._changed.set()


class Batcher:
    """Takes batches from ``table``. Code that adds something new to the table sets ``changed``."""

    def __init__(
        self,
        run: RunConfig,
        *,
        table: GroupTable,
        progress: ProgressReporter,
        changed: asyncio.Event,
        algorithm: Algorithm,
        picks: Callable[[int, int], Collection[int]] | None = None,
        workers: LiveWorkers | None = None,
        hooks: Hooks | None = None,
        shares_prefixes: bool = False,
        image_reader: ImageReader | None = None,
    ) -> None:
        """picks: maps a step's group count and number to the groups to record; None records no groups
        workers: None if it is unknown which groups workers have started
        shares_prefixes: whether the backend computes tokens once that sequences begin with"""
        self._run = run
        self._table = table
        self._picks = picks
        self._progress = progress
        self._changed = changed
        self._algorithm = algorithm
        self._hooks = hooks or Hooks()
        self._selection = Selection(
            max_staleness=run.max_staleness,
            order=run.staleness.order,
            rank=own_order(run.staleness.order),
            discard=run.staleness.discard,
        )
        self._count = run.learner.groups_per_batch
        self._shares_prefixes = shares_prefixes
        self._image_reader = image_reader
        self._waits_for_stragglers = run.staleness.waits
        self._longest_wait = run.staleness.wait_seconds or math.inf
        self.straggler_wait_seconds = 0.0
        """How long the batch taken last was full and waited for older groups."""
        # Groups that start at this version or before are not waited for: too old, or a wait ended without them.
        self._given_up = table.policy_version - run.max_staleness - 1
        self._workers, self._started, self._may_ask = workers, StartedGroups(), True
        self._draining = False
        self._preparation: _Preparation | None = None

    def drain(self) -> None:
        """Take no more batches."""
        self._draining = True
        self._changed.set()

    async def take(self, wait: OpenWait) -> list[BufferedGroup] | None:
        """Return the groups of the next step, now marked as in training. ``wait``: the learner's wait for the batch.

        Returns None when drained, or when the data has ended and the remaining groups cannot fill a batch.
        """
        table = self._table
        stragglers = _StragglerWait(
            self._longest_wait, changed=self._changed, announce=self._announce_straggler_wait, wait=wait
        )
        with stragglers, self._announce_long_wait(stragglers):
            while True:
                self._changed.clear()
                if self._draining:
                    return None
                # Bound 1, step 5 trains version 4: a group from version 2 is dropped, one from 3 may be trained.
                while stale := self._selection.stale(table):
                    await self._progress.announce(table.drop(stale))
                    await self._progress.publish_progress()  # another group may arrive while the bus is updated
                chosen = self._selection.next_batch(table, count=self._count)
                if chosen is not None and await self._ask_workers():
                    continue  # more groups may have arrived
                # The batch is full. In the example, a group from version 3 that is still being generated would be too
                # old for step 6: it is late, and the batch waits for it, up to staleness.wait_seconds.
                late = self._late(self._started.starts(table.outstanding)) if chosen is not None else []
                if chosen is not None and (not late or stragglers.is_over):
                    self._end_straggler_wait(stragglers.seconds, late)
                    table.take(chosen, has_waited=stragglers.seconds > 0)
                    return chosen
                if chosen is not None:
                    stragglers.begin()
                else:
                    stragglers.stop()
                if table.is_exhausted and not table.outstanding:
                    log.warning(
                        "the data has ended after %d steps; %d groups are left over, fewer than a batch of %d",
                        table.step,
                        len(table.buffered),
                        self._count,
                    )
                    return None
                await self._changed.wait()

    async def prepare(self, groups: Sequence[BufferedGroup], *, owner: asyncio.TaskGroup) -> PreparedBatch:
        """Return sequences and micro-batches of ``groups``, which the next step trains. They are prepared now unless
        they were prepared ahead.

        The work runs in a thread, as a task of ``owner``: it outlives a cancelled caller and can be used by the next.
        Raises StepFailed if the groups cannot be made into a batch.
        """
        made = await self._prepare_once(groups, policy_version=self._table.policy_version, owner=owner)
        if isinstance(made, Exception):
            self._preparation = None
            is_of_hook = isinstance(made, FilterError)  # which says that it is, and of which one
            raise StepFailed(str(made) if is_of_hook else f"{type(made).__name__}: {made}") from made
        return made

    async def prepare_ahead(self, *, owner: asyncio.TaskGroup) -> None:
        """Keep the batch of the step after the current one prepared.

        consumes: the table    waits for: an arrival    woken by: ``changed``    ends: cancelled when the step is done
        """
        version = self._table.policy_version + 1
        while True:
            self._changed.clear()
            groups = self._selection.foresee(self._table, count=self._count)
            if groups is not None:
                await self._prepare_once(groups, policy_version=version, owner=owner)
            await self._changed.wait()

    @contextlib.contextmanager
    def _announce_long_wait(self, stragglers: _StragglerWait) -> Iterator[None]:
        """Log a long wait, for people who look at a stalled run. A wait for stragglers logs its own message."""
        since, table, filtered = time.strftime("%H:%M:%S"), self._table, self._table.counts["filtered"]

        def announce() -> None:
            if stragglers.is_on:
                return
            log.warning(
                "waiting for trajectories since %s: step %d trains %d groups, %d are here and %d outstanding, %d were "
                "filtered; are rollout workers up and their engines started?",
                since,
                table.step + 1,
                self._count,
                len(table.buffered),
                len(table.outstanding),
                table.counts["filtered"] - filtered,
            )

        timer = asyncio.get_running_loop().call_later(LONG_WAIT_SECONDS, announce)
        try:
            yield
        finally:
            timer.cancel()

    def _announce_straggler_wait(self) -> None:
        table, longest = self._table, self._longest_wait
        log.warning(
            "step %d has its %d groups but waits for older groups that would become too old, %s (staleness.eviction "
            'and wait_seconds; discard = "tokens" does not wait): %d are here and %d outstanding',
            table.step + 1,
            self._count,
            f"for {longest:g} s at most" if math.isfinite(longest) else "without a limit",
            len(table.buffered),
            len(table.outstanding),
        )

    def _end_straggler_wait(self, seconds: float, late: Sequence[int]) -> None:
        """late: starts of the groups that the wait ended without; the next ones do not wait for them either."""
        self.straggler_wait_seconds = seconds
        if late:
            log.warning(
                "step %d trains without older groups (%d) after waiting %g s for them (staleness.wait_seconds); groups "
                'that arrive too old are dropped (staleness.discard = "tokens" drops only tokens that are too old)',
                *(self._table.step + 1, len(late), self._longest_wait),
            )
            self._given_up = max(late)

    async def _ask_workers(self) -> bool:
        """Ask workers which groups they have begun, if the batch would otherwise wait because of the versions that
        admitted its groups. Return False if this is known already or does not matter."""
        if self._workers is None or not self._may_ask:
            return False
        if not self._late(StartedGroups().starts(self._table.outstanding)):
            return False
        self._may_ask = False  # only the timer resets this: uvloop's timers fire up to a millisecond early
        asyncio.get_running_loop().call_later(LOOK_SECONDS, self._allow_asking)
        with contextlib.suppress(BusError):  # with older knowledge the learner only waits longer
            beats = await self._workers.beats()
            self._started.update(beats, outstanding=self._table.outstanding, resume_points=self._table.resume_points)
        return True

    def _allow_asking(self) -> None:
        self._may_ask = True
        self._changed.set()

    def _late(self, starts: Sequence[int]) -> list[int]:
        """Return those ``starts`` of stragglers that the next step waits for."""
        if not self._waits_for_stragglers:
            return []
        starts = [start for start in starts if start > self._given_up]
        return self._selection.late_starts(self._table.policy_version, starts, count=self._count)

    async def _prepare_once(
        self, groups: Sequence[BufferedGroup], *, policy_version: int, owner: asyncio.TaskGroup
    ) -> PreparedBatch | Exception:
        # Prepared ahead for (4, groups 7 and 9): used if step 5 trains just these groups, else made anew.
        key = (policy_version, *(one.group_id for one in groups))
        if self._preparation is None or self._preparation.key != key:
            work = asyncio.to_thread(self._try_to_prepare, groups, policy_version=policy_version)
            self._preparation = _Preparation(key, owner.create_task(work, name=f"prepare-{policy_version}"))
        task = self._preparation.task
        await asyncio.wait((task,))
        return task.result()

    def _try_to_prepare(self, groups: Sequence[BufferedGroup], *, policy_version: int) -> PreparedBatch | Exception:
        """Errors from a speculative preparation are raised only if that batch is actually taken."""
        try:
            return self._prepare(groups, policy_version=policy_version)
        except Exception as error:
            return error

    def _prepare(self, groups: Sequence[BufferedGroup], *, policy_version: int) -> PreparedBatch:
        started = time.monotonic()
        batch, mini_batches = prepare(
            [one.group for one in groups],
            run=self._run,
            algorithm=self._algorithm,
            hooks=self._hooks,
            shares_prefixes=self._shares_prefixes,
            policy_version=policy_version,
            max_staleness=self._selection.max_staleness,
            resume_points=self._table.resume_points,
            image_reader=self._image_reader,
        )
        mini_batches = recording(
            mini_batches,
            self._pick_sequences([len(one.group.trajectories) for one in groups], step=policy_version + 1),
        )
        return PreparedBatch(batch=batch, mini_batches=mini_batches, seconds=time.monotonic() - started)

    def _pick_sequences(self, sizes: Sequence[int], *, step: int) -> list[int]:
        """Return the numbers of recorded sequences. ``sizes``: number of sequences of each group of the batch."""
        if self._picks is None:
            return []
        # Groups of 2, 3 and 2 sequences have the numbers 0-1, 2-4 and 5-6; picking group 1 returns 2, 3, 4.
        ends = list(itertools.accumulate(sizes))
        picked = self._picks(len(sizes), step)
        return [number for index in picked for number in range(ends[index] - sizes[index], ends[index])]
