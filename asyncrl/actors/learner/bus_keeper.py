"""Restores what is lost from the bus in the middle of a run, and logs each loss in one line.

    a stream or a consumer    recreated as it was (bus/jetstream/keeper.py); only the learner may, so all others wait
    states                    put again, so that their watchers see them
    prompts, trajectories     groups that are on neither topic are published again (lost_prompts.py)
    weights                   stored and announced again (weight_publisher.py), including files that were removed

Heartbeats, leases and partial rollouts come back by themselves. Past events and partly generated answers are lost. The
record of what was trained is safe in the history and the checkpoints, which are not on the bus.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from asyncrl.bus.port import Bus, Loss
from asyncrl.errors import BusError, WeightsError
from asyncrl.messages.topics import ALL, PROMPTS, TRAJECTORIES

LOOK_SECONDS: Final = 2.0
_STATES: Final = {topic.name for topic in ALL if topic.kind == "state" and not topic.seconds_to_live}

log = logging.getLogger("asyncrl.learner")


class BusKeeper:
    def __init__(
        self, bus: Bus, *, suspect_prompts: Callable[[], None], restore_weights: Callable[[], Awaitable[None]]
    ) -> None:
        """suspect_prompts: called if some may be lost;  restore_weights: stores missing parts of the newest version"""
        self._bus = bus
        self._suspect_prompts, self._restore_weights = suspect_prompts, restore_weights
        self._said: dict[str, str] = {}  # parts that cannot be recreated -> why
        self._are_states_lost = False

    async def run(self) -> None:
        """Run until cancelled. There are two loops because publishing waits for a stream that the other loop recreates.

        consumes: nothing    waits for: the clock, every LOOK_SECONDS    woken by: nobody
        """
        async with asyncio.TaskGroup() as group:
            for step in (self.repair, self.publish_again):
                group.create_task(self._repeat(step))

    async def repair(self) -> None:
        """Look at the bus once and recreate what is lost. Raises BusError."""
        losses = await self._bus.losses(repairs=True)
        for loss in losses:
            self._say(loss)
        self._said = {loss.name: loss.problem for loss in losses if not loss.is_repaired}
        topics = {name for loss in losses if loss.is_repaired for name in loss.topics}
        if topics & {PROMPTS.name, TRAJECTORIES.name}:
            self._suspect_prompts()
        self._are_states_lost |= bool(topics & _STATES)

    async def publish_again(self) -> None:
        """Publish lost states and weights again. Raises BusError or WeightsError if they cannot be stored."""
        if self._are_states_lost:
            self._are_states_lost = False
            await self._bus.restore(force=True)
        await self._restore_weights()

    async def _repeat(self, step: Callable[[], Awaitable[None]]) -> None:
        problem = ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await step()
            except (BusError, WeightsError, OSError) as error:  # the next look may succeed
                if str(error) != problem:
                    log.warning("the bus: some lost data is not restored yet, retrying: %s", error)
                problem = str(error)
            else:
                problem = ""

    def _say(self, loss: Loss) -> None:
        if loss.is_repaired:
            log.warning("the bus: %s %s; it is restored", loss.name, loss.problem)
        elif self._said.get(loss.name) != loss.problem:
            log.error("the bus: %s %s; processes that need it wait, and the repair is retried", loss.name, loss.problem)
