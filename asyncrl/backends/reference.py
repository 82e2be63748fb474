"""The backend that is easy to believe: one process, plain PyTorch, Hugging Face models. Others are tested against it.

What a model does is in reference_models.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends import models
from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.backends.reference_models import LoadedModel, TrainedModel
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms import Algorithm
from asyncrl.policies.packing import MicroBatch
from asyncrl.protocols import StepResult
from asyncrl.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[learner.options] of the reference backend: none."""


class ReferenceBackend:
    """Trains any causal language model that transformers loads."""

    def __init__(
        self,
        model_path: Path,
        *,
        algorithm: Algorithm,
        optimizer: OptimizerSettings,
        temperature: float,
        device: str,
        dtype: str,
        threads: int,
        options: Options,
        auxiliary: Mapping[str, AuxiliaryModel] | None = None,
    ) -> None:
        policy = AuxiliaryModel(path=model_path, objective=algorithm, optimizer=optimizer)
        self._models = models.with_policy(policy, auxiliary or {})
        self._temperature = temperature
        self._device = torch.device(device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._threads = threads
        self._loaded: dict[str, LoadedModel] = {}
        self._trained: dict[str, TrainedModel] = {}

    def start(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        for name, model in self._models.items():
            kind = TrainedModel if model.is_trained else LoadedModel
            loaded = kind(name, model, temperature=self._temperature, device=self._device, dtype=self._dtype)
            self._loaded[name] = loaded
            if isinstance(loaded, TrainedModel):
                self._trained[name] = loaded

    def step(self, shares: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = POLICY) -> StepResult:
        return models.find(self._trained, model, doing="step").step(_only(shares), learning_rate=learning_rate)

    def score(self, shares: Sequence[Sequence[MicroBatch]], *, model: str = POLICY) -> list[list[NDArray[np.float32]]]:
        loaded = models.find(self._loaded, model, doing="score")
        return [[loaded.score(micro_batch) for micro_batch in _only(shares)]]

    def export(self) -> Snapshot:
        policy = self._trained[POLICY]
        return Snapshot.of(policy.parameters.items(), dtype=policy.folder_dtype)

    def save(self, folder: Path) -> None:
        for name, trained in self._trained.items():
            trained.save(models.saved_in(folder, name))

    def restore(self, folder: Path) -> None:
        models.require_saved(folder, self._trained)
        for name, trained in self._trained.items():
            trained.restore(models.saved_in(folder, name))

    def close(self) -> None:
        """Nothing to end."""


def _only(shares: Sequence[Sequence[MicroBatch]]) -> Sequence[MicroBatch]:
    if len(shares) != 1:
        raise BackendError(f"the reference backend is one rank and got {len(shares)} shares; set learner.ranks = 1")
    return shares[0]
