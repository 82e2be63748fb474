"""The reference backend: one process, plain PyTorch, Hugging Face models. Other backends are tested against it.

The models are in reference/models.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.backends import models
from asyncrl.backends.adapter import BackendAdapter
from asyncrl.backends.models import POLICY, AuxiliaryModel
from asyncrl.backends.optimizer_settings import OptimizerSettings
from asyncrl.backends.port import StepResult
from asyncrl.backends.reference.models import LoadedModel, TrainedModel
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.tensors.host_memory import HostMemory
from asyncrl.tensors.snapshot import Snapshot
from asyncrl.tensors.transformers_models import by_names_in_files


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """[learner.options] of the reference backend: none."""


class ReferenceBackend(BackendAdapter):
    """Trains any causal language model that transformers loads."""

    options_type = Options
    shares_gpus = True

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
        self._memory = HostMemory(lambda: itertools.chain.from_iterable(one.tensors() for one in self._loaded.values()))

    def start(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        for name, model in self._models.items():
            kind = TrainedModel if model.is_trained else LoadedModel
            loaded = kind(name, model, temperature=self._temperature, device=self._device, dtype=self._dtype)
            self._loaded[name] = loaded
            if isinstance(loaded, TrainedModel):
                self._trained[name] = loaded

    def step(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, learning_rate: float, model: str = POLICY
    ) -> StepResult:
        return models.find(self._trained, model, doing="step").step(_only(dp_shards), learning_rate=learning_rate)

    def score(
        self, dp_shards: Sequence[Sequence[MicroBatch]], *, model: str = POLICY
    ) -> list[list[NDArray[np.float32]]]:
        loaded = models.find(self._loaded, model, doing="score")
        return [[loaded.score(micro_batch) for micro_batch in _only(dp_shards)]]

    def export(self) -> Snapshot:
        policy = self._trained[POLICY]
        tensors = by_names_in_files({**policy.parameters, **policy.buffers}, model_type=policy.model_type)
        return Snapshot.from_tensors(tensors.items(), dtype=policy.folder_dtype, kept=policy.buffers)

    def save(self, folder: Path) -> None:
        for name, trained in self._trained.items():
            trained.save(models.saved_in(folder, name))

    def restore(self, folder: Path) -> None:
        models.require_saved(folder, self._trained)
        for name, trained in self._trained.items():
            trained.restore(models.saved_in(folder, name))

    def offload(self) -> None:
        self._memory.offload()

    def onload(self) -> None:
        self._memory.onload()

    def close(self) -> None:
        """Do nothing."""


def _only(dp_shards: Sequence[Sequence[MicroBatch]]) -> Sequence[MicroBatch]:
    if len(dp_shards) != 1:
        raise BackendError(f"the reference backend has one rank but got {len(dp_shards)} shards; set learner.ranks = 1")
    return dp_shards[0]
