"""The training stage's source: prompt groups from the topic ``prompts``, redelivered until a worker acks them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from asyncrl.actors.rollout.delivery_attempts import DeliveryAttempts
from asyncrl.actors.rollout.group_progress import GroupProgress
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.prefetch import Prefetch, Prefetched, PrefetchRate
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.bus.port import Bus, Delivery
from asyncrl.messages import PromptGroup
from asyncrl.messages.topics import PROMPTS, group_id_of

RETRY_SECONDS: Final = 0.5


class TrainingSource:
    """Prompt groups, prefetched and kept in flight while they are made. A Source (stage_ports.py)."""

    def __init__(
        self,
        bus: Bus,
        *,
        worker: str,
        engine: SharedEngine,
        partial_rollouts: PartialRollouts,
        max_attempts: int,
        keep_seconds: float,
        groups_ahead: Callable[[], int] | None = None,
    ) -> None:
        """
        max_attempts  a group begun this often without a result fails
        keep_seconds  interval between renewals of a delivery
        groups_ahead  returns how many groups to hold beyond those with free slots; None measures it
        """
        self._bus, self._worker = bus, worker
        self._slots, self._waits, self._follower = engine.slots, engine.waits, engine.follower
        self._partial_rollouts = partial_rollouts
        self._max_attempts = max_attempts
        self._keep_seconds = keep_seconds
        self._rate = PrefetchRate()
        self._groups_ahead = groups_ahead or self._rate.groups_ahead
        self._attempts = DeliveryAttempts(bus, worker=worker, max_attempts=max_attempts)
        self._draining = asyncio.Event()
        self._prefetch: Prefetch | None = None

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        async with self._bus.consume(PROMPTS) as deliveries, asyncio.TaskGroup() as group:
            prefetch = self._prefetch = Prefetch(
                deliveries,
                worker=self._worker,
                slots=self._slots,
                attempts=self._attempts,
                groups_ahead=self._groups_ahead,
                keep_seconds=self._keep_seconds,
                owner=group,
                is_open=lambda: not self._follower.is_held_back,
            )
            with self._slots.watched(prefetch.update), self._follower.watched(prefetch.update):
                group.create_task(prefetch.fetch(self._waits), name=f"{self._worker}.fetch")
                group.create_task(self._end(prefetch), name=f"{self._worker}.end")
                yield

    async def _end(self, prefetch: Prefetch) -> None:
        """consumes: nothing    waits for: ``drain``    woken by: ``drain``"""
        await self._draining.wait()
        prefetch.end()

    def drain(self) -> None:
        self._draining.set()

    async def next(self) -> PromptWork | None:
        """Return the next group to begin. Raises BusError."""
        assert self._prefetch is not None, "next() outside open()"
        while (prefetched := await self._prefetch.next()) is not None:
            delivery = prefetched.delivery
            group_id = group_id_of(delivery.key)
            problem = self._problem(delivery, group_id)
            if group_id is None:
                await delivery.ack()  # not a group that any learner waits for
            else:
                work = self._work(prefetched, group_id=group_id, problem=problem)
                if not (work.needs_worker_alone and self._follower.is_held):
                    return work
                await self._attempts.give_back(delivery, delay=RETRY_SECONDS)  # waiting here would block the evaluation
            prefetched.release()
            self._prefetch.update()  # no slot was taken, so no other event requests the next prompt
        return None

    def _problem(self, delivery: Delivery[PromptGroup], group_id: int | None) -> str:
        """Return why the message is not the prompt of this group; "" if it is."""
        prompt = delivery.message
        if prompt is not None and prompt.group_id == group_id:
            return ""
        problem = f"the prompt does not decode: {delivery.problem}"
        if prompt is not None:
            problem = f"the prompt under key {delivery.key!r} is group {prompt.group_id}"
        self._bus.rejections.note(PROMPTS.name, problem, kind="malformed" if prompt is None else "key")
        return problem

    def _work(self, prefetched: Prefetched, *, group_id: int, problem: str) -> PromptWork:
        attempt = prefetched.attempt
        prompt = None if problem else prefetched.delivery.message
        if attempt > self._max_attempts and not problem:
            problem = f"gave up after {self._max_attempts} attempts: the last worker that tried did not come back"
        return PromptWork(
            group_id=group_id,
            prompt=prompt,
            problem=problem,
            attempt=attempt,
            is_last_attempt=attempt >= self._max_attempts,
            prefetched=prefetched,
            rate=self._rate,
            attempts=self._attempts,
            partial_rollouts=self._partial_rollouts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptWork:
    """One prompt group in flight. A WorkItem (stage_ports.py)."""

    group_id: int
    prompt: PromptGroup | None
    problem: str
    attempt: int
    is_last_attempt: bool
    prefetched: Prefetched
    rate: PrefetchRate
    attempts: DeliveryAttempts
    partial_rollouts: PartialRollouts

    @property
    def needs_worker_alone(self) -> bool:
        """Whether this is the last of several attempts: a group that ended workers must not end other groups."""
        return self.is_last_attempt and self.attempt > 1 and not self.problem

    async def begin(self) -> GroupProgress:
        assert self.prompt is not None, "a group without a prompt cannot begin"
        delivery = self.prefetched.delivery
        await self.attempts.begin(delivery)
        return await self.partial_rollouts.open(self.prompt, attempt=delivery.attempt, begun=self.attempt)

    async def finish(self) -> None:
        delivery = self.prefetched.delivery
        await self.rate.ack(delivery)
        await self.partial_rollouts.forget(delivery.key)
        await self.attempts.forget(delivery)

    async def retry(self) -> None:
        self.prefetched.release()
        await self.prefetched.delivery.retry(delay=RETRY_SECONDS)

    async def give_back(self) -> None:
        await self.partial_rollouts.save()
        self.prefetched.release()
        await self.attempts.give_back(self.prefetched.delivery, has_begun=True)

    def close(self) -> None:
        self.prefetched.release()
        self.partial_rollouts.close(self.prefetched.delivery.key)
