"""The simulated trainer of simulated.py as a plugin for run files, with weights of a realistic size.

    learner.backend = "benchmarks.far_backend:FarBackend"

The weights are random bf16 numbers. Each step changes a share of them to a neighbouring number.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends.port import StepResult
from asyncrl.planning.simulation import Timing
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.tensors.snapshot import Snapshot
from benchmarks.simulated import TimedBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """
    weights_bytes  size of the bf16 weights
    changed_share  share of the weights that each step changes
    log            file for one JSON line per step
    """

    train_tokens_per_second: float = 20_000.0
    weights_bytes: int = 2 * 2**20
    changed_share: float = 0.02
    log: str = ""


class FarBackend(TimedBackend):
    """A step of T tokens takes T / train_tokens_per_second."""

    options_type = Options

    def __init__(self, model_path: Path, *, options: Options, **rest: Any) -> None:
        timing = Timing(
            seconds_per_token=0.0,
            seconds_per_sequence=0.0,
            capacity=1,
            load_seconds=0.0,
            train_tokens_per_second=options.train_tokens_per_second,
            train_seconds=0.0,
        )
        super().__init__(timing, machines=1)
        self._options = options
        self._generator = torch.Generator().manual_seed(0)
        self._weights = torch.empty(0, dtype=torch.bfloat16)

    def start(self) -> None:
        count = self._options.weights_bytes // 2
        self._weights = (torch.randn(count, generator=self._generator) * 0.02).to(torch.bfloat16)

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        result = super().step(dp_shards, learning_rate=learning_rate, model=model)
        moved = torch.rand(len(self._weights), generator=self._generator) < self._options.changed_share
        bits = self._weights.view(torch.int16)
        bits += moved.to(torch.int16)
        if self._options.log:
            with Path(self._options.log).open("a") as log:
                log.write(json.dumps({"time": time.monotonic(), "tokens": self.steps[-1][0]}) + "\n")
        return result

    def forward(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        """Return the same logprobs as SimulatedEngine, so that its worker is not quarantined."""
        return [[np.full(micro_batch.num_tokens, -1, np.float32) for micro_batch in share] for share in dp_shards]

    def export(self) -> Snapshot:
        return Snapshot.from_tensors([("weights", self._weights)])

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "state").touch()
