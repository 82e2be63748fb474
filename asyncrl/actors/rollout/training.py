"""The training stage: prompt groups from the topic ``prompts``, trajectory groups to the log that the learner reads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final

from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.prompt_deliveries import (
    RETRY_SECONDS,
    DeliveryAttempts,
    Prefetch,
    PromptWork,
)
from asyncrl.actors.rollout.shared_engine import SharedEngine
from asyncrl.actors.rollout.stage import Stage
from asyncrl.actors.rollout.worker import RolloutWorker
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus, Delivery
from asyncrl.errors import BusFull, MessageError, MessageTooLarge
from asyncrl.messages import PromptGroup, TrajectoryGroup
from asyncrl.messages.roles import LEARNER
from asyncrl.messages.rollout import failed_group
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES, answer_key, group_id_of
from asyncrl.policies.health.waits import SPACE_IN_LOG

FULL_LOG_SECONDS: Final = 1.0
"""Delay between attempts to publish to a full log: the bus does not announce free space."""


def training_worker(
    bus: Bus,
    maker: GroupMaker,
    *,
    max_attempts: int,
    keep_seconds: float,
    partial_rollouts: PartialRollouts | None = None,
) -> RolloutWorker:
    """Return a worker with only the training stage. ``partial_rollouts`` None saves and resumes nothing."""
    partial_rollouts = partial_rollouts or PartialRollouts(
        bus, worker=maker.worker, seconds=0, max_attempts=max_attempts, max_staleness=0
    )
    stage = training_stage(
        bus, maker, max_attempts=max_attempts, keep_seconds=keep_seconds, partial_rollouts=partial_rollouts
    )
    return RolloutWorker(maker.worker, bus, engine=maker.engine, stages=[stage], partial_rollouts=partial_rollouts)


def training_stage(
    bus: Bus, maker: GroupMaker, *, max_attempts: int, keep_seconds: float, partial_rollouts: PartialRollouts
) -> Stage:
    """Return the stage that makes the training groups of a worker.

    max_attempts  a group begun this often without a result fails
    keep_seconds  interval between renewals of a delivery
    """
    source = TrainingSource(
        bus,
        worker=maker.worker,
        engine=maker.engine,
        partial_rollouts=partial_rollouts,
        max_attempts=max_attempts,
        keep_seconds=keep_seconds,
    )
    sink = TrainingSink(bus, worker=maker.worker, waits=maker.engine.waits)
    return Stage("training", maker=maker, source=source, sink=sink)


class TrainingSource:
    """Prompt groups, redelivered until a worker acks them. A Source (stage.py)."""

    def __init__(
        self,
        bus: Bus,
        *,
        worker: str,
        engine: SharedEngine,
        partial_rollouts: PartialRollouts,
        max_attempts: int,
        keep_seconds: float,
    ) -> None:
        """See ``training_stage``."""
        self._bus = bus
        self._worker = worker
        self._slots = engine.slots
        self._waits = engine.waits
        self._gate = engine.follower.gate
        self._partial_rollouts = partial_rollouts
        self._keep_seconds = keep_seconds
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
                keep_seconds=self._keep_seconds,
                owner=group,
                is_open=lambda: not self._gate.is_held_back,
            )
            with self._slots.watched(prefetch.update), self._gate.watched(prefetch.update):
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
                work = PromptWork.from_delivery(
                    prefetched,
                    group_id=group_id,
                    problem=problem,
                    attempts=self._attempts,
                    partial_rollouts=self._partial_rollouts,
                )
                if not (work.needs_worker_alone and self._gate.is_held):
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


class TrainingSink:
    """Publishes to ``trajectories``. A Sink (stage.py)."""

    def __init__(self, bus: Bus, *, worker: str, waits: WaitTracker) -> None:
        self._bus = bus
        self._worker = worker
        self._waits = waits
        self._log = logging.getLogger(f"asyncrl.{worker}")

    async def publish(self, group: TrajectoryGroup, *, prompt: PromptGroup | None) -> None:
        """Publish a group; return once it is in the log. A full log means that the learner is behind: wait for it."""
        ticket = "" if prompt is None else prompt.ticket
        if (left := await self._try_to_publish(group, ticket)) is None:
            return
        with self._waits.waiting(SPACE_IN_LOG, on=LEARNER):
            while left is not None:
                await asyncio.sleep(FULL_LOG_SECONDS)
                left = await self._try_to_publish(left, ticket)

    async def _try_to_publish(self, group: TrajectoryGroup, ticket: str) -> TrajectoryGroup | None:
        """Publish a group. Return the group to try again if the log is full. A group over bus.max_group_bytes fails."""
        try:
            await self._bus.publish(TRAJECTORIES, group, key=answer_key(group.group_id, ticket=ticket))
        except BusFull:
            return group
        except (MessageTooLarge, MessageError) as error:
            self._log.error("group %d failed: %s", group.group_id, error)
            failed = failed_group(group.group_id, worker=self._worker, error=str(error))
            return await self._try_to_publish(failed, ticket)
        return None
