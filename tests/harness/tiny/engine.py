"""The tiny policy as an Engine: batched decode steps; new weights load between two steps.

    engine.kind = "tests.harness.tiny.engine:TinyEngine"

A sample's tokens depend only on its seed and the weights, not on concurrent samples (up to rounding).
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from asyncrl.engines.adapter import EngineAdapter
from asyncrl.engines.generation import Generation, PartialGeneration
from asyncrl.engines.port import EngineStats
from asyncrl.errors import WeightsError
from asyncrl.messages import SamplingParams, VersionSpan, WeightVersion
from asyncrl.weights.port import LoadReport
from tests.harness.tiny.files import FIRST_DIGIT, WEIGHTS_FILE
from tests.harness.tiny.task import LENGTH, SIZE, START, Policy

SHUFFLED_SAMPLES: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    behavior: Literal["right", "shuffled", "shifted"] = "right"
    """Which logprobs the engine reports. shuffled: another sample's, from a shuffle buffer of SHUFFLED_SAMPLES.
    shifted: each token gets its neighbour's."""
    step_seconds: float = 0.002
    """Delay before each decode step."""


@dataclass(slots=True)
class _Sequence:
    """uniforms f64[LENGTH]: the sample's own random numbers, one per token."""

    prompt: NDArray[np.int64]
    uniforms: NDArray[np.float64]
    future: asyncio.Future[Generation]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[tuple[int, int]] = field(default_factory=list)


class TinyEngine(EngineAdapter):
    """Computes in the event loop: a decode step of 128 sequences takes a fraction of a millisecond."""

    options_type = Options

    def __init__(
        self, model_path: Path, *, device: str, dtype: str, version: tuple[int, int], options: Options
    ) -> None:
        self._model_path = model_path
        self._options = options
        self._version = version
        self._policy: Policy
        self._running: list[_Sequence] = []
        self._step: asyncio.Handle | None = None
        self._buffer: list[NDArray[np.float32]] = []
        self._random = random.Random(0)
        self._generated = 0

    async def start(self) -> None:
        self._read(self._model_path)

    async def generate(
        self,
        prompt_tokens: NDArray[np.int32],
        sampling: SamplingParams,
        *,
        seed: int,
        partial: PartialGeneration | None = None,
    ) -> Generation:
        sequence = _Sequence(
            prompt=prompt_tokens.astype(np.int64) - FIRST_DIGIT,
            uniforms=np.random.default_rng(seed).random(LENGTH),
            future=asyncio.get_running_loop().create_future(),
        )
        self._running.append(sequence)
        self._schedule()
        return await sequence.future

    async def load(self, weights: WeightVersion) -> LoadReport:
        started = time.monotonic()
        self._read(Path(weights.uri))
        self._version = weights.version
        seconds = time.monotonic() - started
        return LoadReport(pause_seconds=seconds, load_seconds=seconds)

    @property
    def version(self) -> tuple[int, int]:
        return self._version

    @property
    def weight_updater(self) -> None:
        return None

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self._running), tokens_generated=self._generated)

    async def close(self) -> None:
        if self._step is not None:
            self._step.cancel()

    def _read(self, folder: Path) -> None:
        try:
            self._policy = Policy.of(safetensors.torch.load_file(folder / WEIGHTS_FILE))
        except (OSError, SafetensorError) as error:  # perhaps already deleted in favour of newer versions
            raise WeightsError(f"{folder / WEIGHTS_FILE}: cannot be read: {error}") from error

    def _schedule(self) -> None:
        if self._step is None and self._running:
            self._step = asyncio.get_running_loop().call_later(self._options.step_seconds, self._decode)

    @torch.no_grad()
    def _decode(self) -> None:
        """Decode one token for every running sequence."""
        self._step = None
        # drop cancelled sequences
        self._running = [sequence for sequence in self._running if not sequence.future.done()]
        if not self._running:
            return
        sequences = self._running
        each = self._policy.distribution(
            torch.from_numpy(np.stack([sequence.prompt for sequence in sequences])),
            torch.tensor([len(sequence.tokens) for sequence in sequences]),
            torch.tensor([sequence.tokens[-1] if sequence.tokens else START for sequence in sequences]),
        ).numpy()
        uniforms = np.array([sequence.uniforms[len(sequence.tokens)] for sequence in sequences])
        below = np.exp(each).cumsum(axis=1, dtype=np.float64) < uniforms[:, None]
        tokens = np.minimum(below.sum(axis=1), SIZE - 1)
        for sequence, token, logprobs in zip(sequences, tokens.tolist(), each, strict=True):
            sequence.tokens.append(token)
            sequence.logprobs.append(float(logprobs[token]))
            sequence.versions.append(self._version)
        self._generated += len(sequences)
        self._running = [sequence for sequence in sequences if len(sequence.tokens) < LENGTH]
        for sequence in sequences:
            if len(sequence.tokens) == LENGTH:
                sequence.future.set_result(self._generation(sequence))
        self._schedule()

    def _generation(self, sequence: _Sequence) -> Generation:
        return Generation(
            tokens=np.array(sequence.tokens, np.int32) + FIRST_DIGIT,
            logprobs=self._told(np.array(sequence.logprobs, np.float32)),
            version_spans=_spans(sequence.versions),
            finish_reason="stop",
        )

    def _told(self, logprobs: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._options.behavior == "shifted":
            return np.roll(logprobs, 1)
        if self._options.behavior == "shuffled":
            if len(self._buffer) < SHUFFLED_SAMPLES:
                self._buffer.append(logprobs)
            place = self._random.randrange(len(self._buffer))
            logprobs, self._buffer[place] = self._buffer[place], logprobs
        return logprobs


def _spans(versions: list[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """Return one span for each run of equal (incarnation, policy_version)."""
    starts = [at for at, version in enumerate(versions) if at == 0 or versions[at - 1] != version]
    return tuple(
        VersionSpan(start=start, incarnation=versions[start][0], policy_version=versions[start][1]) for start in starts
    )
