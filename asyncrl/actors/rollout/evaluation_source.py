"""The evaluation stage's source: prompts of the evaluation whose version this worker holds.

  V1 Nothing begins before the engine has exactly the evaluated version, and the engine keeps it until every answer that
     has begun is done (WeightFollower.held).
  V2 place = "shared": a worker holds a version only with one of the evaluation's ``Evaluation.num_held`` leases. When a
     worker ends, its lease goes to another one.
  V3 A worker that holds a version older than the newest begins no training prompts; those in progress continue.
  V4 A group that needs the worker alone never runs beside another stage. A training group does not begin while a
     version is held; an evaluation group does not begin while training samples are in progress. Both are put back
     without using up an attempt.
Tests: tests/actors/test_evaluation.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.actors.rollout.delivery_attempts import DeliveryAttempts
from asyncrl.actors.rollout.prefetch import Prefetch, Prefetched
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.slots import SampleSlots
from asyncrl.bus.port import Bus, Delivery
from asyncrl.errors import BusFull, WeightsError
from asyncrl.messages import PromptGroup
from asyncrl.messages.evaluation import Evaluation, EvaluationAnswers
from asyncrl.messages.rollout import LONGEST_ERROR
from asyncrl.messages.topics import EVALUATION, EVALUATION_ANSWERS, EVALUATION_PROMPTS, SEGMENTS, group_id_of

RETRY_SECONDS: Final = 0.5


class EvaluationSource:
    """Hands out prompts of the held evaluation. A Source (stage_ports.py)."""

    def __init__(
        self,
        bus: Bus,
        *,
        worker: str,
        engine: SharedEngine,
        slots: SampleSlots,
        max_attempts: int,
        keep_seconds: float,
        is_dedicated: bool,
    ) -> None:
        """is_dedicated: the worker only evaluates, so it holds every version without a lease"""
        self._bus, self._worker, self._engine, self._slots = bus, worker, engine, slots
        self._max_attempts, self._keep_seconds, self._is_dedicated = max_attempts, keep_seconds, is_dedicated
        self._attempts = DeliveryAttempts(bus, worker=worker, max_attempts=max_attempts)
        self._log = logging.getLogger(f"asyncrl.{worker}")
        self._newest: Evaluation | None = None
        self._given_up = -1  # number of the evaluation whose version cannot be loaded here
        self._changed = asyncio.Event()
        self._draining = asyncio.Event()
        self._prefetch: Prefetch | None = None
        self._asked: dict[int, PromptGroup] = {}  # prompts of groups in flight
        self.current: Evaluation | None = None
        """The evaluation whose version the engine has and keeps."""
        self._held_since = 0.0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with self._bus.consume(EVALUATION_PROMPTS) as deliveries, asyncio.TaskGroup() as group:
            prefetch = self._prefetch = Prefetch(
                deliveries,
                worker=self._worker,
                slots=self._slots,
                attempts=self._attempts,
                groups_ahead=lambda: 0,
                keep_seconds=self._keep_seconds,
                owner=group,
                is_open=lambda: self.current is not None,
                what="evaluation prompts",
                on="",
            )
            tasks = [
                group.create_task(self._watch(), name=f"{self._worker}.watch-evaluation"),
                group.create_task(self._take_part(prefetch), name=f"{self._worker}.hold-version"),
                group.create_task(self._end(prefetch), name=f"{self._worker}.end-evaluation"),
            ]
            prefetch.update()
            with self._slots.watched(prefetch.update):
                group.create_task(prefetch.fetch(self._engine.waits), name=f"{self._worker}.fetch-evaluation")
                yield
            for task in tasks:
                task.cancel()

    def drain(self) -> None:
        self._draining.set()

    @property
    def is_draining(self) -> bool:
        return self._draining.is_set()

    @property
    def in_progress(self) -> Evaluation | None:
        """The evaluation that needs answers, whether or not the engine has its version."""
        newest = self._newest
        return newest if newest is not None and not newest.is_over else None

    @property
    def held_seconds(self) -> float:
        """How long the engine has had the version of ``current``."""
        return 0.0 if self.current is None else time.monotonic() - self._held_since

    async def next(self) -> EvaluationWork | None:
        """Return the next prompt to begin. Raises BusError."""
        assert self._prefetch is not None, "next() outside open()"
        while (prefetched := await self._prefetch.next()) is not None:
            delivery, current = prefetched.delivery, self.current
            group_id = group_id_of(delivery.key)
            prompt = delivery.message
            if prompt is None or group_id != prompt.group_id:
                problem = delivery.problem or f"the prompt under key {delivery.key!r} is group {prompt and group_id}"
                self._bus.rejections.note(EVALUATION_PROMPTS.name, problem)
                await self._pass_over(prefetched, delivery.ack)  # the learner asks again
            elif current is None or prompt.group_id >= current.group_id(current.num_prompts):
                await self._put_back(prefetched)
            elif prompt.group_id < current.group_id(0):
                await self._pass_over(prefetched, delivery.ack)  # of an evaluation that is over
            else:
                work = self._work(prefetched, prompt)
                if not (work.needs_worker_alone and self._slots.num_running_beside):
                    return work
                work.close()
                await self._put_back(prefetched)
        return None

    async def _put_back(self, prefetched: Prefetched) -> None:
        """Put back a prompt that was not begun here, without using up an attempt."""
        give_back = functools.partial(self._attempts.give_back, prefetched.delivery, delay=RETRY_SECONDS)
        await self._pass_over(prefetched, give_back)

    async def _pass_over(self, prefetched: Prefetched, say: Callable[[], Any]) -> None:
        prefetched.release()
        await say()
        if self._prefetch is not None:
            self._prefetch.update()  # no slot was taken, so no other event requests the next prompt

    def prompt_of(self, group_id: int) -> PromptGroup | None:
        """Return the prompt of a group in flight."""
        return self._asked.get(group_id)

    def _work(self, prefetched: Prefetched, prompt: PromptGroup) -> EvaluationWork:
        attempt, problem = prefetched.attempt, ""
        if attempt > self._max_attempts:
            problem = f"gave up after {self._max_attempts} attempts: the last worker that tried did not come back"
        self._asked[prompt.group_id] = prompt
        return EvaluationWork(
            group_id=prompt.group_id,
            prompt=prompt,
            problem=problem,
            attempt=attempt,
            is_last_attempt=attempt >= self._max_attempts,
            prefetched=prefetched,
            attempts=self._attempts,
            bus=self._bus,
            asked=self._asked,
        )

    # -- which version -----------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """consumes: evaluation    waits for: an evaluation that begins or ends    woken by: the learner"""
        async with self._bus.watch(EVALUATION) as evaluations:
            async for evaluation in evaluations:
                self._newest = evaluation
                self._changed.set()

    async def _end(self, prefetch: Prefetch) -> None:
        """consumes: nothing    waits for: ``drain``    woken by: ``drain``"""
        await self._draining.wait()
        prefetch.end()

    async def _take_part(self, prefetch: Prefetch) -> None:
        """consumes: nothing    waits for: an evaluation, a lease, its version, its end    woken by: _watch"""
        while True:
            await self._until(lambda: self._wanted() is not None)
            if (evaluation := self._wanted()) is None:
                continue
            holding = asyncio.create_task(self._hold(evaluation, prefetch), name=f"{self._worker}.hold")
            over = asyncio.create_task(self._until(functools.partial(self._is_over, evaluation.number)))
            try:
                await asyncio.wait((holding, over), return_when=asyncio.FIRST_COMPLETED)
            finally:
                over.cancel()
                holding.cancel()
                await asyncio.wait((holding, over))
            if not holding.cancelled() and (error := holding.exception()) is not None:
                if not isinstance(error, WeightsError):
                    raise error
                self._log.warning("evaluation of version %d: %s", evaluation.weights.policy_version, error)
                self._given_up = evaluation.number
                await self._say_unable(evaluation, error)

    async def _say_unable(self, evaluation: Evaluation, error: WeightsError) -> None:
        """Tell the learner that this worker cannot load the version: it need not wait if no worker can."""
        problem = f"cannot load version {evaluation.weights.policy_version}: {error}"
        said = EvaluationAnswers(
            number=evaluation.number, group_id=None, error=problem[:LONGEST_ERROR], worker=self._worker
        )
        with contextlib.suppress(BusFull):  # the learner then waits for its timeout
            await self._bus.publish(EVALUATION_ANSWERS, said, key=f"{evaluation.number}-{uuid.uuid4().hex[:12]}")

    async def _hold(self, evaluation: Evaluation, prefetch: Prefetch) -> None:
        """Hold the evaluated version until cancelled."""
        async with self._lease(evaluation):
            await self._slots.unreserved()  # no await between this and ``held``
            async with self._engine.follower.held(evaluation.weights):
                self.current, self._held_since = evaluation, time.monotonic()
                prefetch.update()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.current = None
                    prefetch.update()

    def _lease(self, evaluation: Evaluation) -> AbstractAsyncContextManager[None]:
        if self._is_dedicated:
            return contextlib.nullcontext()
        place = zlib.crc32(self._worker.encode()) % evaluation.num_held
        return self._bus.lease(f"evaluation-{place}", holder=self._worker)

    def _wanted(self) -> Evaluation | None:
        """Return the evaluation to take part in."""
        newest = self._newest
        if newest is None or newest.is_over or newest.number == self._given_up or self._draining.is_set():
            return None
        return newest if self._is_dedicated or newest.num_held else None

    def _is_over(self, number: int) -> bool:
        return self._newest is None or self._newest.number != number or self._newest.is_over

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition``, which depends only on state set by ``_watch``. One task waits at a time."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWork:
    """One prompt of an evaluation in flight. A WorkItem (stage_ports.py)."""

    group_id: int
    prompt: PromptGroup | None
    problem: str
    attempt: int
    is_last_attempt: bool
    prefetched: Prefetched
    attempts: DeliveryAttempts
    bus: Bus
    asked: dict[int, PromptGroup]

    @property
    def needs_worker_alone(self) -> bool:
        """As in training: a group that ended workers must not end other answers of the evaluation."""
        return self.is_last_attempt and self.attempt > 1 and not self.problem

    async def begin(self) -> None:
        """Note the attempt. Nothing is saved: tokens of another attempt might be of another version."""
        await self.attempts.begin(self._delivery)

    async def finish(self) -> None:
        await self._delivery.ack()
        await self.attempts.forget(self._delivery)
        if self._delivery.attempt > 1:
            await self.bus.forget(SEGMENTS, key=f"{self.group_id}/")

    async def retry(self) -> None:
        await self._delivery.retry(delay=RETRY_SECONDS)

    async def give_back(self) -> None:
        self.prefetched.release()
        await self.attempts.give_back(self._delivery, has_begun=True)

    def close(self) -> None:
        self.prefetched.release()
        self.asked.pop(self.group_id, None)

    @property
    def _delivery(self) -> Delivery[PromptGroup]:
        return self.prefetched.delivery
