"""The training stage: prompt groups from the topic ``prompts``, trajectory groups to the log that the learner reads."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from asyncrl.actors.rollout.group_maker import GroupMaker
from asyncrl.actors.rollout.partial_rollouts import PartialRollouts
from asyncrl.actors.rollout.prompt_deliveries import PromptWork, Source
from asyncrl.actors.rollout.stage import Stage
from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.errors import BusFull, MessageError, MessageTooLarge
from asyncrl.messages import PromptGroup, TrajectoryGroup
from asyncrl.messages.roles import LEARNER, PROMPT_SOURCE
from asyncrl.messages.rollout import failed_group
from asyncrl.messages.topics import PROMPTS, TRAJECTORIES, answer_key, group_id_of
from asyncrl.policies.health.waits import SPACE_IN_LOG

FULL_LOG_SECONDS: Final = 1.0
"""Delay between attempts to publish to a full log: the bus does not announce free space."""


def training_stage(bus: Bus, maker: GroupMaker, *, partial_rollouts: PartialRollouts, keep_seconds: float) -> Stage:
    """Return the stage that makes the training groups of a worker. ``keep_seconds``: interval between renewals of a
    delivery"""
    source = TrainingSource(
        bus,
        PROMPTS,
        maker,
        slots=maker.engine.slots,
        partial_rollouts=partial_rollouts,
        keep_seconds=keep_seconds,
        what="prompts",
        on=PROMPT_SOURCE,
    )
    sink = TrainingSink(bus, worker=maker.worker, waits=maker.engine.waits)
    return Stage("training", maker=maker, source=source, sink=sink)


class TrainingSource(Source):
    """Prompt groups of the learner."""

    @property
    def is_open(self) -> bool:
        return not self._engine.gate.is_behind

    async def accept(self, work: PromptWork) -> bool:
        delivery, group_id = work.delivery, group_id_of(work.delivery.key)
        prompt = delivery.message
        if prompt is None:
            work.problem = f"the prompt does not decode: {delivery.problem}"
            self._bus.rejections.note(PROMPTS.name, work.problem, kind="malformed")
        elif prompt.group_id != group_id:
            work.problem = f"the prompt under key {delivery.key!r} is group {prompt.group_id}"
            self._bus.rejections.note(PROMPTS.name, work.problem, kind="key")
        if group_id is None:
            await delivery.ack()  # not a group that any learner waits for
            return False
        if work.needs_worker_alone and self._engine.gate.is_pinned:
            await work.retry()  # waiting here would block the evaluation
            return False
        return True


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
        key = answer_key(group.group_id, worker=self._worker, ticket=ticket)
        try:
            await self._bus.publish(TRAJECTORIES, group, key=key)
        except BusFull:
            return group
        except (MessageTooLarge, MessageError) as error:
            self._log.error("group %d failed: %s", group.group_id, error)
            failed = failed_group(group.group_id, worker=self._worker, error=str(error))
            return await self._try_to_publish(failed, ticket)
        return None
