"""An engine with a server of its own that records how long each request of a weight load takes, and load for it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.engines.generation import Version
from asyncrl.engines.sglang.client import ServerClient
from asyncrl.engines.sglang.engine import Options, SGLangEngine
from asyncrl.engines.sglang.weights import WeightLoader
from asyncrl.errors import EngineError
from asyncrl.messages import SamplingParams
from asyncrl.weights.port import LoadReport


class TimedClient(ServerClient):
    """Records the time of every request to the server: (path, seconds)."""

    def __init__(self, url: str, *, request_seconds: float) -> None:
        super().__init__(url, request_seconds=request_seconds)
        self.taken: list[tuple[str, float]] = []

    async def control(self, path: str, body: Mapping[str, Any]) -> Any:
        began = time.monotonic()
        try:
            return await super().control(path, body)
        finally:
            self.taken.append((path, time.monotonic() - began))


class TimedEngine(SGLangEngine):
    """Launches its server, as a rollout worker does, and records the time of every request to it."""

    def __init__(
        self, model_path: Path, *, device: str, dtype: str, version: Version, options: Options, log_path: Path
    ) -> None:
        super().__init__(model_path, device=device, dtype=dtype, version=version, options=options, log_path=log_path)
        self._read = 0
        """Bytes of the server's log that straight() has seen."""
        self._client = self._timed = TimedClient(self.url, request_seconds=options.request_seconds)
        self._loader = WeightLoader(
            self._timed.control,
            pause=options.pause,
            first_version=version,
            stamps=self._stamps,
            places=self._places,
        )

    @contextlib.contextmanager
    def reading(self, transport: str) -> Iterator[None]:
        """Use SGLang's own reading or receiving for a transport named after it, otherwise ours."""
        ranks = self._loader.ranks_with_loader
        self._loader.ranks_with_loader = 0 if transport.endswith("-sglang") else ranks
        try:
            yield
        finally:
            self._loader.ranks_with_loader = ranks

    async def load_nothing(self, version: Version) -> LoadReport:
        """Pause, let the server finish the steps it has begun, and continue with the weights it has."""
        return await self._loader._switch(version, [], what="nothing")

    async def kill(self) -> None:
        assert self._client.server is not None
        await self._client.server.close()

    def stages(self) -> dict[str, tuple[float, float]]:
        """Return median and worst seconds by path since the last call."""
        taken: dict[str, list[float]] = {}
        for path, seconds in self._timed.taken:
            taken.setdefault(path, []).append(seconds)
        self._timed.taken.clear()
        return {path: (statistics.median(seconds), max(seconds)) for path, seconds in taken.items()}

    def straight(self) -> list[int]:
        """Return how many tensors each load since the last call copied straight (destinations.py); [] if none did."""
        log = self._log_path.read_bytes()
        new, self._read = log[self._read :], len(log)
        return [int(number) for number in re.findall(rb"new weights: (\d+) tensors copied straight", new)]


@contextlib.asynccontextmanager
async def full_load(engine: SGLangEngine, requests: int) -> AsyncIterator[list[int]]:
    """Keep answers in progress all the time; yield the list to which each finished answer adds its number of tokens."""
    generator = np.random.default_rng(0)
    finished: list[int] = []
    failed: list[EngineError] = []

    async def one() -> None:
        while True:
            prompt = generator.integers(10, 30, 128).astype(np.int32)
            length = int(generator.integers(256, 1024))
            try:
                made = await engine.generate(prompt, SamplingParams(max_new_tokens=length, ignore_eos=True), seed=0)
                finished.append(len(made.tokens))
            except EngineError as error:  # another one replaces it, so the engine always has load
                failed.append(error)

    tasks = [asyncio.create_task(one()) for _ in range(requests)]
    try:
        yield finished
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if failed:
            print(f"{len(failed)} answers of the load failed, the last one: {failed[-1]}", flush=True)
