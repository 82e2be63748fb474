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
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from asyncrl.actors.learner.image_reader import ImageReader
from asyncrl.actors.learner.live_workers import LiveWorkers
from asyncrl.actors.learner.preparation import prepare
from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.learner.stragglers import LONG_WAIT_SECONDS, Stragglers
from asyncrl.actors.wait_tracker import OpenWait
from asyncrl.config import RunConfig
from asyncrl.errors import FilterError, StepFailed
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.hooks import Hooks
from asyncrl.policies.batching.packing import MiniBatches, recording
from asyncrl.policies.groups.selection import Selection, own_order
from asyncrl.policies.groups.states import BufferedGroup
from asyncrl.policies.groups.table import GroupTable

log = logging.getLogger("asyncrl.learner")


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
        self._stragglers = Stragglers(run, table=table, selection=self._selection, changed=changed, workers=workers)
        self._draining = False
        self._preparation: _Preparation | None = None

    @property
    def straggler_wait_seconds(self) -> float:
        """How long the batch that is taken, or was last, was full and waited for older groups."""
        return self._stragglers.seconds

    def drain(self) -> None:
        """Take no more batches."""
        self._draining = True
        self._changed.set()

    async def take(self, wait: OpenWait) -> list[BufferedGroup] | None:
        """Return the groups of the next step, now marked as in training. ``wait``: the learner's wait for the batch.

        Returns None when drained, or when the data has ended and the remaining groups cannot fill a batch.
        """
        table, stragglers = self._table, self._stragglers
        with stragglers.of_batch(wait), self._announce_long_wait():
            while True:
                self._changed.clear()
                if self._draining:
                    return None
                # Bound 1, step 5 trains version 4: a group from version 2 is dropped, one from 3 may be trained.
                while stale := self._selection.stale(table):
                    await self._progress.announce(table.drop(stale))
                    await self._progress.publish_progress()  # another group may arrive while the bus is updated
                chosen = self._selection.next_batch(table, count=self._count)
                if chosen is None:
                    stragglers.stop()
                elif await stragglers.ask_workers():
                    continue  # more groups may have arrived
                elif not stragglers.hold():
                    table.take(chosen, has_waited=stragglers.seconds > 0)
                    return chosen
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
    def _announce_long_wait(self) -> Iterator[None]:
        """Log a long wait, for people who look at a stalled run. A wait for stragglers logs its own message."""
        since, table, filtered = time.strftime("%H:%M:%S"), self._table, self._table.counts["filtered"]

        def announce() -> None:
            if self._stragglers.is_waiting:
                return
            log.warning(
                "waiting for trajectories since %s: step %d trains %d groups, %d are here and %d outstanding, %d were "
                "filtered; are rollout workers up, their engines started, and no disk full? `asyncrl doctor` says what "
                "each waits for",
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
