"""Pauses an engine while the learner trains on its GPUs (rollout.beside_learner)."""

from __future__ import annotations

import asyncio
import contextlib

from asyncrl.actors.base import Actor
from asyncrl.actors.gpu_turn import LOOK_SECONDS, GpuTurn
from asyncrl.bus.port import Bus
from asyncrl.engines.port import Pauses
from asyncrl.errors import EngineError


class StepPause(Actor):
    """consumes: nothing    owns: when the engine computes

    Both on one GPU take it by turns of a few milliseconds, half of it each. A learner that is the limit needs more, and
    an engine that then samples few sequences at a time would waste its half.
    """

    role = "step-pause"

    def __init__(self, name: str, bus: Bus, *, engine: Pauses, turn: GpuTurn) -> None:
        """turn: the lock that the learner holds while it trains, for its engines"""
        super().__init__(name, bus)
        self._engine = engine
        self._turn = turn

    async def run(self) -> None:
        """waits for: the learner's steps    woken by: the clock"""
        while True:
            if self._turn.is_free():
                await asyncio.sleep(LOOK_SECONDS)
                continue
            await self._engine.pause()
            try:
                await self._turn.acquire()
                self._turn.release()
            except asyncio.CancelledError:
                with contextlib.suppress(EngineError):  # it is about to be closed
                    await self._engine.unpause()
                raise
            await self._engine.unpause()
