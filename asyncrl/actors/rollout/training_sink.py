"""The training stage's sink: publishes trajectory groups to the log that the learner reads."""

from __future__ import annotations

import asyncio
import logging

from asyncrl.actors.wait_tracker import WaitTracker
from asyncrl.bus.port import Bus
from asyncrl.errors import BusFull, MessageError, MessageTooLarge
from asyncrl.messages import TrajectoryGroup
from asyncrl.messages.roles import LEARNER
from asyncrl.messages.rollout import failed_group
from asyncrl.messages.topics import TRAJECTORIES, answer_key
from asyncrl.policies.health.waits import SPACE_IN_LOG

FULL_LOG_SECONDS = 1.0
"""Delay between attempts to publish to a full log: the bus does not announce free space."""


class TrainingSink:
    """Publishes to ``trajectories``. A Sink (stage_ports.py)."""

    def __init__(self, bus: Bus, *, worker: str, waits: WaitTracker) -> None:
        self._bus, self._worker, self._waits = bus, worker, waits
        self._log = logging.getLogger(f"asyncrl.{worker}")

    async def publish(self, group: TrajectoryGroup, *, ticket: str) -> None:
        """Publish a group; return once it is in the log. A full log means that the learner is behind: wait for it."""
        if (left := await self._unpublished(group, ticket)) is None:
            return
        with self._waits.waiting(SPACE_IN_LOG, on=LEARNER):
            while left is not None:
                await asyncio.sleep(FULL_LOG_SECONDS)
                left = await self._unpublished(left, ticket)

    async def _unpublished(self, group: TrajectoryGroup, ticket: str) -> TrajectoryGroup | None:
        """Publish a group. Return the group to try again if the log is full. A group over bus.max_group_bytes fails."""
        try:
            await self._bus.publish(TRAJECTORIES, group, key=answer_key(group.group_id, ticket=ticket))
        except BusFull:
            return group
        except (MessageTooLarge, MessageError) as error:
            self._log.error("group %d failed: %s", group.group_id, error)
            failed = failed_group(group.group_id, worker=self._worker, error=str(error))
            return await self._unpublished(failed, ticket)
        return None
