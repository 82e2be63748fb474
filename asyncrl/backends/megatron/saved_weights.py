"""Models that checkpoints hold: which part of each parameter a rank writes, and a reference that becomes the policy.

Tests: tests/contracts/test_backend_refresh.py, tests/unit/backends/megatron/test_layouts.py.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from asyncrl.backends import lora, weight_places
from asyncrl.backends.megatron import process_groups
from asyncrl.backends.megatron.background_save import RankState, SavedModel
from asyncrl.backends.megatron.job import Job
from asyncrl.backends.megatron.loaded_model import LoadedModel
from asyncrl.backends.megatron.process_groups import expert_replicas_group
from asyncrl.backends.models import VALUE_HEAD
from asyncrl.backends.weight_map import Mapping, Part, weight_map
from asyncrl.errors import CheckpointError
from asyncrl.tensors.torch_dist import Chunk, TorchDist

_EMBEDDING: Final = "embedding.word_embeddings.weight"
"""With tied embeddings, the weight that the output layer of a last stage is a copy of."""


class SavedWeights(LoadedModel):
    """A model whose weights are in checkpoints."""

    def __init__(self, name: str, job: Job, device: torch.device) -> None:
        super().__init__(name, job, device)
        self._replicas = process_groups.replicas_group()
        self._is_distributed = job.is_distributed_optimizer

    @abstractmethod
    def state_to_save(self, folder: Path) -> RankState:
        """Return what this rank writes to the checkpoint in ``folder``: views of tensors that may change later."""

    @abstractmethod
    def restore(self, folder: Path) -> None:
        """Restore a checkpoint written by ranks in any layout. Raises CheckpointError, ConfigError."""

    def require_restorable(self, folder: Path) -> None:
        """Raise CheckpointError if the checkpoint has more weights than the model, or other sizes of this rank's."""
        saved = SavedModel(folder)
        self._require_no_more(saved)
        for held in self._local_parameters():
            _require_size(saved, held.place.key, held.place)

    def _require_no_more(self, saved: SavedModel) -> None:
        """Raise CheckpointError if the checkpoint has layers or adapters that the model lacks: they would be lost."""
        part = dataclasses.replace(Part.whole(self._shape), num_draft_layers=self._num_draft_layers)
        maps: Iterable[Mapping] = weight_map(self._shape, head=self._model.head, part=part)
        if self._lora is not None:
            maps = lora.with_adapters(maps, self._lora)
        known = {weight_places.key(entry.megatron) for entry in maps} | {VALUE_HEAD}
        if more := sorted(saved.weights() - known):
            raise CheckpointError(
                f"{saved.folder}: has {more[0]} ({len(more)} such weights), which the model or its adapters lack; is "
                "it a checkpoint of another model?"
            )

    def _local_parameters(self) -> Iterator[LocalParameter]:
        """Yield this rank's parameters with their place in a checkpoint."""
        for name, parameter in self._parameters.items():
            if self._lora is not None and not parameter.requires_grad:
                continue  # a frozen base weight, which is in the model's folder
            cut = self._maps[name].cut if name in self._maps else "whole"  # a value head is in no folder
            is_of_experts = cut.startswith("expert_")
            group = self._expert_tensor if is_of_experts else self._tensor_parallel
            replicas = expert_replicas_group() if is_of_experts else self._replicas
            is_writer = self._is_writer(replicas) if parameter.requires_grad else replicas.rank() == 0
            yield LocalParameter(
                name=name,
                parameter=parameter,
                place=weight_places.place(
                    _EMBEDDING if is_copy(parameter) else name,
                    cut,
                    parameter.shape,
                    self._shape,
                    ranks=group.size(),
                    rank=group.rank(),
                    first_expert=self._stages[0].part.experts.start,
                ),
                is_of_experts=is_of_experts,
                is_written=is_writer
                and not is_copy(parameter)
                and (cut not in ("whole", "stacked") or group.rank() == 0),
            )

    def _is_writer(self, replicas: dist.ProcessGroup) -> bool:
        """Return whether this rank is responsible for its part of weights that all of ``replicas`` hold."""
        return self._is_distributed or replicas.rank() == 0


class RefreshedModel(SavedWeights):
    """A frozen model that becomes the policy now and then. Its checkpoint holds only the weights."""

    @torch.no_grad()
    def copy_from(self, policy: LoadedModel) -> None:
        """Become the policy, adapters merged. Both have the same parts on this rank."""
        for name, parameter in self._parameters.items():
            parameter.copy_(policy.own_shard(self._maps[name], name))

    def state_to_save(self, folder: Path) -> RankState:
        chunks = [
            Chunk(key=held.place.key, whole=held.place.whole, start=start, data=view)
            for held in self._local_parameters()
            if held.is_written
            for view, start in held.place.views(held.parameter.detach().reshape(-1), 0)
        ]
        return RankState(folder=folder, chunks=chunks, steps={}, base="")

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        saved = SavedModel(folder)
        self._require_no_more(saved)
        for held in self._local_parameters():
            read_into(saved, held.place.key, held.place, held.parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameter:
    """A parameter of this rank with its place in a checkpoint.

    name        numbers the layer by its place in the whole model
    is_written  whether this rank writes it; no other rank writes the same parameter or its original
    """

    name: str
    parameter: torch.Tensor
    place: weight_places.Place
    is_of_experts: bool
    is_written: bool


def read_into(saved: TorchDist, key: str, place: weight_places.Place, into: torch.Tensor, *, start: int = 0) -> None:
    """Fill a tensor whose flattened elements are those of ``place`` from ``start`` on. Raises CheckpointError."""
    _require_size(saved, key, place)
    for view, corner in place.views(into.detach().view(-1), start):
        view.copy_(saved.read(key, corner, tuple(view.shape)))


def _require_size(saved: TorchDist, key: str, place: weight_places.Place) -> None:
    if key in saved and saved.size(key) != place.whole:
        raise CheckpointError(
            f"{saved.folder}: {key} has the size {list(saved.size(key))}, the model needs {list(place.whole)}; is it a "
            "checkpoint of another model?"
        )


def is_copy(weight: Any) -> bool:
    """Return whether the weight is the output layer of a last stage whose original is on the first stage."""
    return bool(getattr(weight, "shared", False))
