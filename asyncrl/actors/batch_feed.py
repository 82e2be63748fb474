"""Makes batches: which groups train next, and their packed micro-batches, ready when the step before them ends.

A batch is *taken* when the step before it is done, by the version it trains: what is too old is evicted, and the oldest
groups of what is left are the batch. While that step runs, ``prepare_ahead`` prepares the batch that would be taken if
the step ended now, and again when an arrival changes it. That is a guess, and it takes nothing: no group changes its
place, no counter moves, the bus hears nothing. So preparing ahead hides the host's work and changes no result:

  - Which groups make a batch, and which are dropped, is decided at the same instants as without it. A guess that is
    not what is taken is thrown away, and the batch is prepared then.
  - Admission sees steps done and batches taken. In one_step_off taking a batch admits the next one: batch n + 2 is
    admitted when step n + 1 begins at version n, and trained from version n + 1. A batch that was guessed during
    step n is taken when step n + 1 begins, not earlier, so the bound of one version holds with and without guesses.
  - With max_staleness 0 nothing is outstanding beyond the batch in training: there is nothing to guess, and async
    equals sync to the last bit (tests/test_learning.py).
  - A run that is drained or killed leaves no taken batch behind: a guess is in no ledger and in no checkpoint.

Tests: tests/test_batch_feed.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.actors.prompt_source import PromptSource
from asyncrl.policies import batch as batches
from asyncrl.policies.adaptive import AdaptiveBound
from asyncrl.policies.algorithms import Algorithm
from asyncrl.policies.batch import Batch
from asyncrl.policies.buffer import Buffer, Held
from asyncrl.policies.packing import MicroBatch, pack_for_ranks
from asyncrl.policies.staleness import AgeWeight

log = logging.getLogger("asyncrl.learner")

LONG_WAIT_SECONDS = 30.0
"""A learner that has waited so long for a batch says so."""

Drop = Callable[[Sequence[Held]], Awaitable[None]]
"""Says that groups were too old to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """shares: data-parallel ranks that a batch is dealt to; age_weight: what multiplies the loss weights, if any.

    wait_for_stragglers  hold rather than let a group that is still being generated get too old
    are_stragglers_cut   workers send a group off without its last answers when the next step is the last that may train
                         it: a learner that held earlier than for that step would wait for answers that nobody cuts
    """

    groups_per_batch: int
    max_staleness: int
    wait_for_stragglers: bool
    shares: int
    micro_batch_tokens: int
    age_weight: AgeWeight | None = None
    are_stragglers_cut: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """``shares[r]`` is what data-parallel rank r trains; seconds: host time to make it, hidden or not."""

    batch: Batch
    shares: list[list[MicroBatch]]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Preparation:
    """``key``: the policy version, then the group ids."""

    key: tuple[int, ...]
    task: asyncio.Task[Prepared]


class BatchFeed:
    """Waits for what the learner's reader puts into the buffer; ``wake`` says that something changed."""

    def __init__(
        self,
        settings: BatchSettings,
        *,
        buffer: Buffer,
        prompts: PromptSource,
        algorithm: Algorithm,
        bound: AdaptiveBound | None = None,
    ) -> None:
        self.settings = settings
        self.bound = bound or AdaptiveBound.fixed(settings.max_staleness)
        self.filtered = 0
        """Groups that filters passed over in this process, for whoever waits long."""
        self._buffer = buffer
        self._prompts = prompts
        self._algorithm = algorithm
        self._changed = asyncio.Event()
        self._draining = False
        self._preparation: _Preparation | None = None

    def wake(self) -> None:
        """The buffer or the prompt source changed."""
        self._changed.set()

    def drain(self) -> None:
        """Take no batch any more."""
        self._draining = True
        self._changed.set()

    async def take(self, policy_version: int, *, drop: Drop) -> list[Held] | None:
        """The groups that the step from ``policy_version`` trains; they stay in the buffer until it is done.

        None when drained, or when the data has ended and what is left cannot fill a batch.
        """
        with self._announcing_long_wait(policy_version + 1):
            while True:
                self._changed.clear()
                if self._draining:
                    return None
                while stale := self._buffer.evict(policy_version):
                    await drop(stale)  # while it tells the bus, another one may arrive
                taken = self._buffer.take(self.settings.groups_per_batch)
                if taken is not None and not self._holds_for_stragglers(policy_version):
                    return taken
                if self._prompts.exhausted.is_set() and not self._outstanding:
                    log.warning(
                        "the data has ended after %d steps; %d groups are left over, fewer than a batch of %d",
                        policy_version,
                        len(self._buffer.held),
                        self.settings.groups_per_batch,
                    )
                    return None
                await self._changed.wait()

    async def prepare(self, groups: Sequence[Held], *, policy_version: int, owner: asyncio.TaskGroup) -> Prepared:
        """Documents and micro-batches of ``groups``: those made ahead if they are for these, else made now.

        In a thread, as a task of ``owner``: it outlives a caller that is cancelled, for the next one to find.
        """
        key = (policy_version, *(held.group.group_id for held in groups))
        if self._preparation is None or self._preparation.key != key:
            work = asyncio.to_thread(self._prepare, groups, policy_version=policy_version)
            self._preparation = _Preparation(key, owner.create_task(work, name=f"prepare-{policy_version}"))
        task = self._preparation.task
        await asyncio.wait((task,))
        return task.result()

    async def prepare_ahead(self, policy_version: int, *, training: Sequence[Held], owner: asyncio.TaskGroup) -> None:
        """Keep ready what the step from ``policy_version`` would train, while ``training`` makes that version.

        consumes: the buffer    waits for: an arrival    woken by: ``wake``    ends: cancelled when the step is done
        """
        while True:
            self._changed.clear()
            groups = self._buffer.foresee(
                self.settings.groups_per_batch, policy_version=policy_version, training=training
            )
            if groups is not None:
                await self.prepare(groups, policy_version=policy_version, owner=owner)
            await self._changed.wait()

    def adapt(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Let the bound follow what a step measured; what to say about it when it changed, else nothing."""
        ess, before = metrics.get("offpolicy/sequence_ess", math.nan), self.bound.bound
        self.bound = self.bound.update(ess)
        if self.bound.bound == before:
            return {}
        log.info("staleness bound %d -> %d: sequence ESS %.3f", before, self.bound.bound, ess)
        return {"bound": self.bound.bound, "before": before, "ess": ess}

    @property
    def _outstanding(self) -> set[int]:
        """Ids of groups that were published and have not come back."""
        return self._prompts.state().outstanding.keys() - self._buffer.held.keys()

    @contextlib.contextmanager
    def _announcing_long_wait(self, step: int) -> Iterator[None]:
        """Somebody may be looking at a run that stands still."""
        since, filtered = time.strftime("%H:%M:%S"), self.filtered

        def announce() -> None:
            if self.settings.wait_for_stragglers and len(self._buffer.held) >= self.settings.groups_per_batch:
                log.warning(
                    "step %d has its %d groups and holds since %s for older ones that are still being generated "
                    '(staleness.eviction = "wait"): %d are here and %d outstanding',
                    step,
                    self.settings.groups_per_batch,
                    since,
                    len(self._buffer.held),
                    len(self._outstanding),
                )
                return
            log.warning(
                "waiting for trajectories since %s: step %d trains %d groups, %d are here and %d outstanding, %d were "
                "filtered; are rollout workers up and their engines started?",
                since,
                step,
                self.settings.groups_per_batch,
                len(self._buffer.held),
                len(self._outstanding),
                self.filtered - filtered,
            )

        timer = asyncio.get_running_loop().call_later(LONG_WAIT_SECONDS, announce)
        try:
            yield
        finally:
            timer.cancel()

    def _holds_for_stragglers(self, policy_version: int) -> bool:
        if not self.settings.wait_for_stragglers:
            return False
        starts = self._prompts.oldest_start.items()
        done = (self._buffer.held, self._buffer.groups)
        missing = [start for group_id, start in starts if not any(group_id in known for known in done)]
        at_once = len(missing) if self.settings.are_stragglers_cut else self.settings.groups_per_batch
        return self._buffer.must_wait(policy_version, missing, count=at_once)

    def _prepare(self, groups: Sequence[Held], *, policy_version: int) -> Prepared:
        started = time.monotonic()
        batch = batches.build(
            [held.group for held in groups],
            algorithm=self._algorithm,
            policy_version=policy_version,
            max_staleness=self.settings.max_staleness,
            forks=self._buffer.forks,
            age_weight=self.settings.age_weight,
        )
        shares = pack_for_ranks(
            batch.documents, ranks=self.settings.shares, max_tokens=self.settings.micro_batch_tokens
        )
        return Prepared(batch=batch, shares=shares, seconds=time.monotonic() - started)
