"""A backend that trains nothing, to try engines, prompts and rewards (``learner.backend = "none"``).

A step changes no weights and costs no time; every published version has the model's weights. forward returns the
behavior logprobs, so logprobs always agree and no worker is quarantined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors.torch
from numpy.typing import NDArray

from asyncrl.backends.adapter import BackendAdapter
from asyncrl.backends.models import AuxiliaryModel
from asyncrl.backends.port import Backend, StepResult
from asyncrl.config.adapter import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.tensors.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[learner.options]: none."""


class NullBackend(BackendAdapter):
    """Exports the weights in ``model_path`` without training them."""

    options_type = Options

    def __init__(self, model_path: Path) -> None:
        self._model_path = model_path
        self._weights: list[Path] = []

    @classmethod
    def build(cls, run: RunConfig, *, algorithm: Algorithm, auxiliary: Mapping[str, AuxiliaryModel]) -> Backend:
        return cls(Path(run.model.path))

    @classmethod
    def check(cls, run: RunConfig) -> None:
        super().check(run)
        if not list(Path(run.model.path).glob("*.safetensors")):
            raise ConfigError(f'model.path: {run.model.path} has no .safetensors file, which backend = "none" exports')

    @classmethod
    def check_machine(cls, run: RunConfig) -> None:
        pass

    @classmethod
    def num_gpus(cls, run: RunConfig) -> int:
        return 0

    def start(self) -> None:
        self._weights = sorted(self._model_path.glob("*.safetensors"))

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = "policy"
    ) -> StepResult:
        return StepResult(metrics={})

    def forward(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = "policy"
    ) -> list[list[NDArray[np.float32]]]:
        return [[micro_batch.behavior_logprobs for micro_batch in shard] for shard in dp_shards]

    def export(self) -> Snapshot:
        return Snapshot.from_tensors(
            [item for path in self._weights for item in safetensors.torch.load_file(path).items()]
        )

    def save(self, folder: Path) -> None:
        """Write a placeholder, because a checkpoint's folder must not be empty."""
        (folder / "none").write_text("this backend has no state\n")

    def restore(self, folder: Path) -> None:
        pass

    def close(self) -> None:
        self._weights = []
