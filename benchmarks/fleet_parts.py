"""The model of the fleet benchmark: an engine and a trainer that only take time and compute nothing.

An answer takes a time that depends on its seed. Its tokens appear evenly over that time, and partial rollouts hold
those so far. The trainer takes a batch every ``step_seconds``. It alone decides how much work a run does, for every
fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends.adapter import BackendAdapter
from asyncrl.backends.port import StepResult
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.port import EngineStats
from asyncrl.messages import SamplingParams, VersionSpan, WeightVersion
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.port import LoadReport
from tests.harness.tiny.files import FIRST_DIGIT

LOGPROB: Final = -1.0
_SEED_BITS: Final = 63  # of generation_session.sample_seed


@dataclass(slots=True)
class Growing:
    """One answer in progress.

    versions  (first token, (incarnation, policy version)), in order
    """

    num_tokens: int
    began: float
    seconds: float
    versions: list[tuple[int, tuple[int, int]]] = field(default_factory=list)

    def __len__(self) -> int:
        share = (time.monotonic() - self.began) / self.seconds
        return max(0, min(self.num_tokens - 1, int(share * self.num_tokens)))

    def so_far(self, begin: int = 0) -> Generation:
        return self.whole().first(len(self)).after(begin)

    def whole(self) -> Generation:
        starts = dict(self.versions)  # of several versions at one token, the last
        return Generation(
            tokens=np.full(self.num_tokens, FIRST_DIGIT, np.int32),
            logprobs=np.full(self.num_tokens, LOGPROB, np.float32),
            version_spans=tuple(VersionSpan(start=s, incarnation=v[0], policy_version=v[1]) for s, v in starts.items()),
            finish_reason="stop",
        )


class FleetEngine:
    """An Engine. Answers take ``seconds`` on average, from 0.5 to 1.5 times that."""

    def __init__(self, *, seconds: float, num_tokens: int) -> None:
        self._seconds, self._num_tokens = seconds, num_tokens
        self._version = (0, 0)
        self._growing: dict[int, Growing] = {}
        self._generated = 0

    async def start(self) -> None:
        pass

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        growing = Growing(
            num_tokens=min(self._num_tokens, sampling.max_new_tokens),
            began=time.monotonic(),
            seconds=self._seconds * (0.5 + seed / 2**_SEED_BITS),
            versions=[(0, self._version)],
        )
        if partial is not None:
            partial.follow(growing)
        self._growing[id(growing)] = growing
        try:
            await asyncio.sleep(growing.seconds)
        finally:
            del self._growing[id(growing)]
        self._generated += growing.num_tokens
        return growing.whole()

    async def load(self, weights: WeightVersion) -> LoadReport:
        self._version = weights.order
        for growing in self._growing.values():
            start = len(growing) + 1 if len(growing) else 0
            if start < growing.num_tokens:  # else it is complete, but not yet returned
                growing.versions.append((start, self._version))
        return LoadReport(pause_seconds=0.0, load_seconds=0.0)

    @property
    def version(self) -> tuple[int, int]:
        return self._version

    @property
    def intake(self) -> None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._growing), tokens_generated=self._generated)

    async def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    step_seconds: float = 1.0


class FleetBackend(BackendAdapter):
    """learner.backend = "benchmarks.fleet_parts:FleetBackend": a step ends ``step_seconds`` after the previous one."""

    options_type = Options

    def __init__(self, model_path: Path, *, options: Options, **_: Any) -> None:
        self._seconds = options.step_seconds
        self._ended = time.monotonic()
        self._weights = torch.zeros(1024)

    def start(self) -> None:
        pass

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        time.sleep(max(0.0, self._ended + self._seconds - time.monotonic()))
        self._ended = time.monotonic()
        self._weights += 1
        return StepResult(metrics={"loss": 0.0})

    def score(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        return [[np.full(batch.num_tokens, LOGPROB, np.float32) for batch in share] for share in dp_shards]

    def export(self) -> Snapshot:
        return Snapshot.of([("weight", self._weights)])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._weights, folder / "weight.pt")

    def restore(self, folder: Path) -> None:
        self._weights = torch.load(folder / "weight.pt", weights_only=True)

    def close(self) -> None:
        pass
