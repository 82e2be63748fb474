"""An engine that shares its GPUs with the learner and holds them only while it samples or loads (run.colocated)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.gpu_turn import GpuTurn
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.port import Engine, EngineStats, SharesGpus
from asyncrl.errors import EngineDied, EngineError
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.weights.port import LoadReport

QUIET_SECONDS: Final = 0.1
"""Idle time before the GPUs are released: the next prompt often arrives at once."""


class TurnTakingEngine:
    """See Engine in engines/port.py.

    The engine leaves the GPUs before it returns its last pending answer, so a caller that has all answers finds the
    GPUs free. Weights come only from folders.
    """

    intake = None

    def __init__(self, engine: Engine, *, memory: SharesGpus, turn: GpuTurn) -> None:
        """memory: moves the engine's memory"""
        self._engine = engine
        self._memory = memory
        self._turn = turn
        self._users = 0
        self._used = asyncio.Event()
        self._switching = asyncio.Lock()
        self._is_away = False

    async def start(self) -> None:
        await self._turn.take()
        await self._engine.start()
        await self._hand_over()

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        async with self._on_gpus():
            return await self._engine.generate(prompt_tokens, sampling, seed=seed, partial=partial)

    async def load(self, weights: WeightVersion) -> LoadReport:
        async with self._on_gpus():
            return await self._engine.load(weights)

    @property
    def version(self) -> tuple[int, int]:
        return self._engine.version

    def stats(self) -> EngineStats:
        stats = self._engine.stats()
        return dataclasses.replace(stats, queued=self._users, is_away=True) if self._is_away else stats

    async def close(self) -> None:
        await self._engine.close()
        self._turn.give()

    @contextlib.asynccontextmanager
    async def _on_gpus(self) -> AsyncIterator[None]:
        self._users += 1
        self._used.set()
        try:
            async with self._switching:
                await self._turn.take()
                if self._is_away:
                    await self._memory.resume()
                    self._is_away = False
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._used.clear()
                await asyncio.shield(self._rest())

    async def _rest(self) -> None:
        """Release the GPUs unless the engine is needed again within QUIET_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_SECONDS):
                await self._used.wait()
                return
        async with self._switching:
            if not self._users:
                await self._hand_over()

    async def _hand_over(self) -> None:
        if not self._is_away:
            try:
                await self._memory.release()
            except EngineError as error:  # nothing may ask again, and the learner waits; the end frees the GPUs
                raise EngineDied(f"the engine does not leave the GPUs: {error}") from error
            self._is_away = True
        self._turn.give()
