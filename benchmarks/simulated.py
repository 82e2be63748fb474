"""Simulated model side of the loop: engines and a trainer that take time and compute nothing.

A decode step takes ``a + b x running`` seconds and gives every running sequence one token (continuous batching). An
optimizer step takes ``tokens / rate`` seconds plus a constant. The length of an answer depends on its sample's seed, so
every mode and split has the same lengths. All other parts of a run (bus, actors, policies) are real.

``Decoding`` is the simulation of `asyncrl plan` (asyncrl/planning), here on the wall clock.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.rollout.generation_session import sample_seed
from asyncrl.backends.adapter import BackendAdapter
from asyncrl.backends.port import StepResult
from asyncrl.data.prompts import PromptRow
from asyncrl.engines.adapter import EngineAdapter
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.port import EngineStats
from asyncrl.images.store import ImageFile
from asyncrl.messages import SamplingParams, WeightVersion
from asyncrl.planning.simulation import Decoding, Finished, GroupLengths, Timing, version_spans
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.rewards.port import Reward, Sample
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.weights.port import LoadReport, WeightChannel, WeightUpdater

LengthKind = Literal["lognormal", "pareto", "constant"]
LENGTH_KINDS: Final = ("lognormal", "pareto", "constant")

_QUANTILES: Final = 4096
_SEED_BITS: Final = 63  # of generation_session.sample_seed
_TICK_SECONDS: Final = 0.002
"""Answers that end within one tick are returned together. Decoding itself is accounted exactly."""


# -- how long an answer is ---------------------------------------------------------------------------------------------


class Lengths:
    """Answer lengths: lognormal (sigma 1), Pareto (1.6) or constant, cut at ``maximum``, all with the same mean.

    An answer's length is the quantile given by its seed, so it depends on neither state nor order.
    """

    def __init__(self, kind: LengthKind, *, mean: int, maximum: int) -> None:
        if not mean <= maximum:
            raise ValueError(f"the mean length {mean} must not be over the maximum {maximum}")
        shape = _shape(kind)
        low, high = 0.0, float(maximum)  # bisection for the scale: cutting at the maximum lowers the mean
        for _ in range(60):
            scale = (low + high) / 2
            low, high = (scale, high) if _cut(shape * scale, maximum).mean() < mean else (low, scale)
        self._table = _cut(shape * high, maximum)

    def of(self, seed: int) -> int:
        return int(self._table[(seed * _QUANTILES) >> _SEED_BITS])

    @property
    def mean(self) -> float:
        return float(self._table.mean())


def group_lengths(lengths: Lengths, *, group_size: int, seed: int) -> GroupLengths:
    """Return the lengths that the real workers will draw, cached."""

    def of(group_id: int) -> list[int]:
        return [lengths.of(sample_seed(seed, group_id, index, 0)) for index in range(group_size)]

    return functools.cache(of)


def _shape(kind: LengthKind) -> NDArray[np.float64]:
    """Return the distribution's quantiles up to a factor, f64[_QUANTILES]."""
    at = [(index + 0.5) / _QUANTILES for index in range(_QUANTILES)]
    if kind == "lognormal":
        return np.array([math.exp(NormalDist().inv_cdf(p)) for p in at])
    if kind == "pareto":
        return np.array([(1 - p) ** (-1 / 1.6) for p in at])
    return np.ones(_QUANTILES)


def _cut(values: NDArray[np.float64], maximum: int) -> NDArray[np.int64]:
    return np.clip(np.rint(values), 1, maximum).astype(np.int64)


# -- adapters ----------------------------------------------------------------------------------------------------------


class DecodingTimer:
    """Calls ``advance`` whenever an answer ends. Must be set again whenever ``decoding`` gains or loses answers."""

    def __init__(self, decoding: Decoding, advance: Callable[[], None]) -> None:
        self._decoding, self._advance = decoding, advance
        self._handle: asyncio.Handle | None = None

    def set(self) -> None:
        self.stop()
        finish = self._decoding.next_finish()
        if finish < math.inf:
            delay = max(finish - time.monotonic(), _TICK_SECONDS)
            self._handle = asyncio.get_running_loop().call_later(delay, self._on_time)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _on_time(self) -> None:
        self._advance()
        self.set()


class SimulatedEngine(EngineAdapter):
    """An Engine on the wall clock. It needs no task, because an event loop timer fires when the next answer ends."""

    def __init__(self, timing: Timing, lengths: Lengths) -> None:
        self._timing, self._lengths = timing, lengths
        self._decoding = Decoding(timing, now=time.monotonic())
        self._changes: list[tuple[float, tuple[int, int]]] = [(-1.0, (0, 0))]
        self._futures: dict[int, asyncio.Future[Finished]] = {}
        self._numbers = itertools.count()
        self._timer = DecodingTimer(self._decoding, self._advance)
        self._generated = 0

    async def start(self) -> None:
        self._decoding.now = time.monotonic()

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
        images: Sequence[ImageFile] = (),
    ) -> Generation:
        future: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        number, length = next(self._numbers), min(self._lengths.of(seed), sampling.max_new_tokens)
        self._futures[number] = future
        self._advance()
        self._decoding.add(number, length)
        self._timer.set()
        ended = await future
        return Generation(
            tokens=np.full(length, 7, np.int32),
            logprobs=np.full(length, -1, np.float32),
            version_spans=version_spans(self._changes, entered=ended.entered, length=length),
            finish_reason="length" if length == sampling.max_new_tokens else "stop",
        )

    async def load(self, weights: WeightVersion, *, keep_running: bool = True) -> LoadReport:
        self._advance()
        self._decoding.is_paused = True
        await asyncio.sleep(self._timing.load_seconds)
        self._advance()
        self._decoding.is_paused = False
        self._changes.append((self._decoding.position, weights.version))
        self._timer.set()
        return LoadReport(pause_seconds=self._timing.load_seconds, load_seconds=self._timing.load_seconds)

    @property
    def version(self) -> tuple[int, int]:
        return self._changes[-1][1]

    @property
    def weight_updater(self) -> None:
        return None

    @property
    def busy_seconds(self) -> float:
        """Seconds since the start during which at least one sequence was running."""
        self._advance()
        return self._decoding.busy_seconds

    def stats(self) -> EngineStats:
        decoding = self._decoding
        return EngineStats(running=decoding.running, queued=decoding.queued, tokens_generated=self._generated)

    async def close(self) -> None:
        self._timer.stop()

    def _advance(self) -> None:
        for ended in self._decoding.advance(time.monotonic()):
            self._generated += ended.length
            future = self._futures.pop(ended.number)
            if not future.done():
                future.set_result(ended)


class TimedBackend(BackendAdapter):
    """A Backend that sleeps. ``steps`` lists (response tokens, seconds) of every step."""

    def __init__(self, timing: Timing, *, machines: int) -> None:
        self._timing, self._machines = timing, machines
        self.steps: list[tuple[int, float]] = []

    def start(self) -> None:
        pass

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        started = time.monotonic()
        batches = [micro_batch for share in dp_shards for micro_batch in share]
        seconds = self._timing.train_step(sum(batch.num_tokens for batch in batches), machines=self._machines)
        time.sleep(max(0.0, started + seconds - time.monotonic()))
        self.steps.append((sum(int(batch.response_mask.sum()) for batch in batches), time.monotonic() - started))
        return StepResult(metrics={"loss": 0.0})

    def forward(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        return [[np.zeros(micro_batch.num_tokens, np.float32) for micro_batch in share] for share in dp_shards]

    def export(self) -> Snapshot:
        return Snapshot.from_tensors(())

    def save(self, folder: Path) -> None:
        pass

    def restore(self, folder: Path) -> None:
        pass

    def close(self) -> None:
        pass


class NullChannel(WeightChannel):
    """A WeightChannel without weights. The time of a load is the engine's ``load_seconds``."""

    @property
    def progress(self) -> int:
        return 0

    @property
    def published_bytes(self) -> int:
        return 0

    def publish(self, snapshot: Snapshot, *, incarnation: int, policy_version: int) -> WeightVersion:
        return WeightVersion(incarnation=incarnation, policy_version=policy_version)

    def must_store(self, policy_version: int) -> bool:
        return True

    def retain(self, weights: WeightVersion) -> None:
        pass

    def release(self, weights: WeightVersion) -> None:
        pass

    def verify(self, weights: WeightVersion) -> Path:
        return Path()

    @property
    def sender(self) -> None:
        return None

    def receiver(self, updater: WeightUpdater, *, engine: str) -> None:
        return None


PROMPT_TOKENS: Final = 16


class PromptRows:
    """Endless prompts in memory."""

    def __init__(self) -> None:
        self._row = PromptRow(epoch=0, prompt="", tokens=np.arange(PROMPT_TOKENS, dtype=np.int32))

    def at(self, position: int) -> PromptRow:
        return self._row


class NoText:
    """A tokenizer for rewards that do not read text."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
        return ""


class EvenLength:
    """A RewardFn that gives 1 for an even number of tokens."""

    async def __call__(self, samples: Sequence[Sample]) -> list[Reward]:
        return [Reward(value=float(len(sample.trajectory.tokens) % 2 == 0)) for sample in samples]

    async def close(self) -> None:
        pass
