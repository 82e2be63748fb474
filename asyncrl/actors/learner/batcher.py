"""Makes batches: which groups train next, and their packed micro-batches, ready when the step before them ends.

A batch is *taken* when the step before it is done, by the version it trains: groups that are too old are dropped, and
the oldest of the others are the batch. While that step runs, ``prepare_ahead`` prepares the batch that would be taken
if the step ended now, and again when an arrival changes it. That is a guess, and it takes nothing: no group changes its
state, no counter moves, the bus hears nothing. So preparing ahead hides the host's work and changes no result:

  - Which groups make a batch, and which are dropped, is decided at the same instants as without it. A guess that is
    not what is taken is thrown away, and the batch is prepared then.
  - Admission sees steps done and batches taken. In one_step_off taking a batch admits the next one: batch n + 2 is
    admitted when step n + 1 begins at version n, and trained from version n + 1. A batch that was guessed during
    step n is taken when step n + 1 begins, not earlier, so the bound of one version holds with and without guesses.
  - With max_staleness 0 nothing is outstanding beyond the batch in training: there is nothing to guess, and async
    equals sync to the last bit (tests/integration/learning/test_learning.py).
  - A run that is drained or killed leaves no taken batch behind: a guess is in no checkpoint.

Tests: tests/actors/learner/test_batcher.py, tests/actors/learner/test_hold.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from asyncrl.actors.learner.progress_reporter import ProgressReporter
from asyncrl.actors.wait_tracker import OpenWait
from asyncrl.config import RunConfig
from asyncrl.errors import BusError
from asyncrl.messages import Heartbeat
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching import batch as batches
from asyncrl.policies.batching.batch import Batch
from asyncrl.policies.batching.packing import MicroBatch, pack_parts, recording
from asyncrl.policies.groups.begun import Begun
from asyncrl.policies.groups.selection import Selection
from asyncrl.policies.groups.states import BufferedGroup
from asyncrl.policies.groups.table import GroupTable
from asyncrl.policies.health.faults import BEAT_SECONDS, HELD
from asyncrl.policies.staleness.staleness import age_weight

log = logging.getLogger("asyncrl.learner")

LOOK_SECONDS = BEAT_SECONDS / 2
"""While it holds, between two looks at what workers have begun."""
LONG_WAIT_SECONDS = 30.0
"""A learner that has waited this long for a batch says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """``parts[i][r]`` is what data-parallel rank r trains in optimizer step i of the batch; seconds: host time to make
    it, hidden or not."""

    batch: Batch
    parts: list[list[list[MicroBatch]]]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Preparation:
    """``key``: the policy version, then the group ids."""

    key: tuple[int, ...]
    task: asyncio.Task[Prepared | Exception]


class _Hold:
    """How long a full batch waits for older groups: ``longest`` seconds, then it is over and ``changed`` is set.

    announce  called when it has lasted LONG_WAIT_SECONDS
    wait      of the learner, which says in it that it holds, if the hold has an end
    """

    def __init__(self, longest: float, *, changed: asyncio.Event, announce: Callable[[], None], wait: OpenWait) -> None:
        self._longest, self._changed, self._announce, self._wait = longest, changed, announce, wait
        self._began: float | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._seconds = 0.0
        self.is_over = False

    def __enter__(self) -> _Hold:
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
        """Nothing happens if it has begun."""
        if self._began is None:
            self._began, loop = time.monotonic(), asyncio.get_running_loop()
            self._timers = [loop.call_later(LONG_WAIT_SECONDS, self._announce)]
            if math.isfinite(self._longest):
                self._timers.append(loop.call_later(self._longest, self._end))
                self._wait.note = HELD

    def stop(self) -> None:
        """The batch is not full any more; the next time that it is the hold begins anew."""
        for timer in self._timers:
            timer.cancel()
        self._seconds, self._began, self._timers, self.is_over = self.seconds, None, [], False
        self._wait.note = ""

    def _end(self) -> None:
        self.is_over = True
        self._changed.set()


class Batcher:
    """Takes batches from ``table``; ``changed`` is set by whoever puts something new into it."""

    def __init__(
        self,
        run: RunConfig,
        *,
        table: GroupTable,
        progress: ProgressReporter,
        changed: asyncio.Event,
        algorithm: Algorithm,
        picks: Callable[[int, int], Collection[int]] | None = None,
        workers: Callable[[], Awaitable[Sequence[Heartbeat]]] | None = None,
    ) -> None:
        """picks: which of the groups of a step are recorded, by their count and the step's number;  None: none is
        workers: heartbeats of those that live;  None: it is not known what they have begun"""
        self._table = table
        self._picks = picks
        self._progress = progress
        self._changed = changed
        self._algorithm = algorithm
        self._selection = Selection(
            max_staleness=run.max_staleness,
            order=run.staleness.order,
            too_old=run.staleness.parts,
        )
        self._count = run.learner.groups_per_batch
        self._num_dp_shards = run.learner.data_parallel
        self._micro_batch_tokens = run.learner.micro_batch_tokens
        self._waits_for_stragglers = run.staleness.waits
        self._wait_seconds = self._longest_hold = run.staleness.wait_seconds or math.inf
        self.held_seconds = 0.0
        """That the batch taken last was full, and held for older groups."""
        # Groups that start there or before are not waited for: they are too old, or have been waited for in vain.
        self._given_up = table.policy_version - run.max_staleness - 1
        self._are_stragglers_cut = run.staleness.stragglers == "partial"
        self._age_weight = age_weight(
            run.staleness.weight, rate=run.staleness.weight_rate, max_staleness=run.max_staleness
        )
        self._workers, self._begun, self._may_look = workers, Begun(), True
        self._draining = False
        self._preparation: _Preparation | None = None

    def drain(self) -> None:
        """Take no batch any more."""
        self._draining = True
        self._changed.set()

    async def take(self, wait: OpenWait) -> list[BufferedGroup] | None:
        """The groups that the next step trains, now in training; behind them those that it trains again. ``wait``: the
        learner's for them.

        None when drained, or when the data has ended and what is left cannot fill a batch.
        """
        table = self._table
        hold = _Hold(self._longest_hold, changed=self._changed, announce=self._announce_hold, wait=wait)
        with hold, self._announcing_long_wait(hold):
            while True:
                self._changed.clear()
                if self._draining:
                    return None
                while stale := self._selection.stale(table):
                    await self._progress.announce(table.drop(stale))
                    await self._progress.progress()  # while it tells the bus, another one may arrive
                chosen = self._selection.next_batch(table, count=self._count)
                if chosen is not None and await self._has_looked():
                    continue  # meanwhile there may be others
                late = self._late(self._begun.starts(table.outstanding)) if chosen is not None else []
                if chosen is not None and (not late or hold.is_over):
                    self._note_hold(hold.seconds, late)
                    table.take(chosen)
                    return [*chosen, *table.replays.take(is_stale=self._is_stale_from(table.policy_version))]
                if chosen is not None:
                    hold.begin()
                else:
                    hold.stop()
                if table.is_exhausted and not table.outstanding:
                    log.warning(
                        "the data has ended after %d steps; %d groups are left over, fewer than a batch of %d",
                        table.step,
                        len(table.buffered),
                        self._count,
                    )
                    return None
                await self._changed.wait()

    async def prepare(self, groups: Sequence[BufferedGroup], *, owner: asyncio.TaskGroup) -> Prepared:
        """Documents and micro-batches of ``groups``, which the next step trains: those made ahead if they are for
        these, else made now.

        In a thread, as a task of ``owner``: it outlives a caller that is cancelled, for the next one to find. Raises
        what making them raised.
        """
        made = await self._prepared(groups, policy_version=self._table.policy_version, owner=owner)
        if isinstance(made, Exception):
            self._preparation = None
            raise made
        return made

    def prepare_now(self, groups: Sequence[BufferedGroup], *, policy_version: int) -> Prepared:
        """As ``prepare``, for a step from ``policy_version``, and kept for nobody. Blocks."""
        return self._prepare(groups, policy_version=policy_version)

    async def prepare_ahead(self, *, owner: asyncio.TaskGroup) -> None:
        """Keep ready what the step after the one in training would train.

        consumes: the table    waits for: an arrival    woken by: ``changed``    ends: cancelled when the step is done
        """
        version = self._table.policy_version + 1
        while True:
            self._changed.clear()
            groups = self._selection.foresee(self._table, count=self._count)
            if groups is not None:
                trained, is_stale = self._table.training.values(), self._is_stale_from(version)
                groups = [*groups, *self._table.replays.foresee(trained, is_stale=is_stale)]
                await self._prepared(groups, policy_version=version, owner=owner)
            await self._changed.wait()

    @contextlib.contextmanager
    def _announcing_long_wait(self, hold: _Hold) -> Iterator[None]:
        """Somebody may be looking at a run that stands still. A hold says so itself."""
        since, table, filtered = time.strftime("%H:%M:%S"), self._table, self._table.counts["filtered"]

        def announce() -> None:
            if hold.is_on:
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

    def _announce_hold(self) -> None:
        table, longest = self._table, self._longest_hold
        log.warning(
            "step %d has its %d groups and waits for older ones that would become too old, %s (staleness.eviction and "
            'wait_seconds; parts = "tokens" waits for none): %d are here and %d outstanding',
            table.step + 1,
            self._count,
            f"for {longest:g} s at most" if math.isfinite(longest) else "as long as they take",
            len(table.buffered),
            len(table.outstanding),
        )

    def _note_hold(self, seconds: float, late: Sequence[int]) -> None:
        """late: starts of the groups that were waited for in vain. The hold behind one in vain is half as long, so that
        those in a row take no more than twice staleness.wait_seconds together; one that was of use starts anew."""
        self.held_seconds = seconds
        if late:
            log.warning(
                "step %d trains without older groups (%d) that it has waited %g s for (staleness.wait_seconds); those "
                'that are too old when they arrive are dropped (staleness.parts = "tokens" trains what is not)',
                *(self._table.step + 1, len(late), self._longest_hold),
            )
            self._given_up = max(late)
            self._longest_hold /= 2
        elif seconds:
            self._longest_hold = self._wait_seconds

    def _is_stale_from(self, policy_version: int) -> Callable[[BufferedGroup], bool]:
        return lambda one: self._selection.is_stale(one, policy_version)

    async def _has_looked(self) -> bool:
        """Ask what workers have begun, where a batch would hold by the versions that admitted its groups; False if that
        is known already, or does not matter."""
        if self._workers is None or not self._may_look:
            return False
        if not self._late(Begun().starts(self._table.outstanding)):
            return False
        self._may_look = False  # and no clock beside the timer: uvloop's fire up to a millisecond early
        asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_again)
        with contextlib.suppress(BusError):  # by what was known the learner waits longer, and nothing is lost
            beats = await self._workers()
            self._begun.hear(beats, outstanding=self._table.outstanding, forks=self._table.forks)
        return True

    def _look_again(self) -> None:
        self._may_look = True
        self._changed.set()

    def _late(self, starts: Sequence[int]) -> list[int]:
        """Of the ``starts`` of stragglers those that the next step holds for. Where workers cut them off, with the next
        step as the last that may train them, holding earlier than for that step would be to wait for answers that
        nobody cuts."""
        if not self._waits_for_stragglers:
            return []
        starts = [start for start in starts if start > self._given_up]
        at_once = max(len(starts), 1) if self._are_stragglers_cut else self._count
        return self._selection.late_starts(self._table.policy_version, starts, count=at_once)

    async def _prepared(
        self, groups: Sequence[BufferedGroup], *, policy_version: int, owner: asyncio.TaskGroup
    ) -> Prepared | Exception:
        key = (policy_version, *(one.group_id for one in groups))
        if self._preparation is None or self._preparation.key != key:
            work = asyncio.to_thread(self._try_to_prepare, groups, policy_version=policy_version)
            self._preparation = _Preparation(key, owner.create_task(work, name=f"prepare-{policy_version}"))
        task = self._preparation.task
        await asyncio.wait((task,))
        return task.result()

    def _try_to_prepare(self, groups: Sequence[BufferedGroup], *, policy_version: int) -> Prepared | Exception:
        """What a guess raises is raised when the batch is taken, and else of no interest."""
        try:
            return self._prepare(groups, policy_version=policy_version)
        except Exception as error:
            return error

    def _prepare(self, groups: Sequence[BufferedGroup], *, policy_version: int) -> Prepared:
        started = time.monotonic()
        batch = batches.build(
            [one.group for one in groups],
            algorithm=self._algorithm,
            policy_version=policy_version,
            max_staleness=self._selection.max_staleness,
            forks=self._table.forks,
            age_weight=self._age_weight,
            too_old=self._selection.too_old,
        )
        parts = pack_parts(
            batch.documents, parts=batch.parts, ranks=self._num_dp_shards, max_tokens=self._micro_batch_tokens
        )
        parts = recording(
            parts,
            self._recorded([len(one.group.trajectories) for one in groups[: self._count]], step=policy_version + 1),
        )
        return Prepared(batch=batch, parts=parts, seconds=time.monotonic() - started)

    def _recorded(self, sizes: Sequence[int], *, step: int) -> list[int]:
        """Documents of the groups that are recorded. ``sizes``: documents of each group of the batch."""
        if self._picks is None:
            return []
        ends = list(itertools.accumulate(sizes))
        picked = self._picks(len(sizes), step)
        return [number for index in picked for number in range(ends[index] - sizes[index], ends[index])]
