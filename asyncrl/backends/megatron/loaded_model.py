"""One rank's shard of a model in the Megatron learner: loads the folder's weights, scores, exports.

Tests: tests/contracts/test_backend.py and tests/contracts/test_backend_models.py (equal to the reference).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncrl.backends import huggingface, micro_batches, models, weight_cuts
from asyncrl.backends.families.layer_weights import Cut
from asyncrl.backends.frozen import is_trained
from asyncrl.backends.megatron.agreement import Agreement
from asyncrl.backends.megatron.mixture import biases
from asyncrl.backends.megatron.model import build_model
from asyncrl.backends.megatron.packed_attention import uses_varlen
from asyncrl.backends.megatron.process_groups import tensor_parallel_group
from asyncrl.backends.megatron.rank_commands import Job
from asyncrl.backends.micro_batches import PackedRow
from asyncrl.backends.weight_map import weight_map
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms.objective import ValueInputs
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.losses.loss import LossInputs
from asyncrl.tensors.snapshot import Snapshot


class LoadedModel:
    """One of the job's models; frozen unless it is a TrainedModel."""

    def __init__(self, name: str, job: Job, device: torch.device, agreement: Agreement) -> None:
        self._model = job.models[name]
        self._where = models.where(name)
        self._temperature = job.temperature
        self._agreement = agreement
        self._device, self._dtype = device, job.torch_dtype
        self._tensor_parallel = tensor_parallel_group()
        self._shape = huggingface.read_shape(self._model.path, where=self._where)
        self._maps = weight_map(self._shape, head=self._model.head)
        self._network = build_model(job, self._shape, device, head=self._model.head)
        self._network.requires_grad_(self._model.is_trained)
        self._parameters: dict[str, torch.Tensor] = {**dict(self._network.named_parameters()), **biases(self._network)}
        if (settings := self._model.optimizer) is not None:
            for entry in self._maps:  # of several tensors in one parameter all are trained, or none
                is_free = is_trained(entry.huggingface[0], freeze=settings.freeze, train_only=settings.train_only)
                self._parameters[entry.megatron].requires_grad_(is_free and not entry.is_bias_of_choice)
        self._load_weights()

    @torch.no_grad()
    def _load_weights(self) -> None:
        """Load the Hugging Face folder's weights into every parameter except a value head."""
        ranks, rank = self._tensor_parallel.size(), self._tensor_parallel.rank()
        if {entry.megatron for entry in self._maps} != set(self._parameters) - {models.VALUE_HEAD}:
            names = {entry.megatron for entry in self._maps} ^ set(self._parameters)
            raise BackendError(f"the weight map does not cover {names}")
        with huggingface.open_weights(self._model.path, where=self._where) as read:
            for entry in self._maps:
                parts = [read(name) for name in entry.huggingface]
                shards = weight_cuts.fuse(parts, entry.cut, self._shape, tensor_parallel=ranks)
                parameter: Any = self._parameters[entry.megatron]
                parameter.copy_(shards[rank])
                # The gradient norm counts replicated parameters once; older Megatron marks only those it initialises.
                parameter.tensor_model_parallel = entry.cut != "whole"

    @torch.no_grad()
    def score(self, share: Sequence[MicroBatch]) -> tuple[NDArray[np.float32], ...]:
        """f32[N] per micro-batch, see Backend.score. Synchronises with the device once, at the end."""
        scores = [self._scores(micro_batch) for micro_batch in share]
        if not scores:
            return ()
        ends = np.cumsum([len(score) for score in scores])
        return tuple(np.split(torch.cat(scores).cpu().numpy(), ends[:-1]))

    def _scores(self, micro_batch: MicroBatch) -> torch.Tensor:
        """f32[N], on the device."""
        if self._model.head == "values":
            (values,) = self._outputs(self._row(micro_batch, np.empty(0, np.int64)))
            return values
        row = self._row(micro_batch, micro_batches.predicted_rows(micro_batch))
        logprobs, _entropy = self._outputs(row)
        return logprobs.new_zeros(micro_batch.num_tokens).index_copy(0, row.rows, logprobs)

    def _row(self, micro_batch: MicroBatch, rows: NDArray[np.int64]) -> PackedRow:
        in_rectangles = not uses_varlen(self._device, self._dtype)
        return PackedRow.of(micro_batch, rows, device=self._device, in_rectangles=in_rectangles)

    def _outputs(self, row: PackedRow) -> tuple[torch.Tensor, ...]:
        """Logprobs and entropy f32[M] of ``row.rows``, or the value after every token f32[N]."""
        if self._model.head == "values":
            return (self._network.values(row),)
        return self._network.logprobs(row, self._temperature)

    def _inputs(self, row: PackedRow, outputs: tuple[torch.Tensor, ...]) -> LossInputs | ValueInputs:
        """The objective's inputs, from ``_outputs``."""
        return row.value_inputs(*outputs) if self._model.head == "values" else row.loss_inputs(*outputs)

    @torch.no_grad()
    def export(self) -> Snapshot | None:
        """See Backend. The first tensor-parallel rank gathers the shards; the others return None."""
        weights: list[tuple[str, torch.Tensor]] = []
        for entry in self._maps:
            shards = self._gathered(self._parameters[entry.megatron].detach(), entry.cut)
            if shards:
                tensors = weight_cuts.unfuse(shards, entry.cut, self._shape)
                weights += zip(entry.huggingface, tensors, strict=True)
        kept = {entry.huggingface[0] for entry in self._maps if entry.is_bias_of_choice}
        return Snapshot.of(weights, dtype=self._shape.dtype, kept=kept) if weights else None

    def _gathered(self, shard: torch.Tensor, cut: Cut) -> list[torch.Tensor]:
        """All shards of a parameter on the first tensor-parallel rank; empty on the others."""
        ranks, rank = self._tensor_parallel.size(), self._tensor_parallel.rank()
        if ranks == 1 or cut == "whole":
            return [shard] if rank == 0 else []
        shards = [torch.empty_like(shard) for _ in range(ranks)] if rank == 0 else []
        dist.gather(shard, shards or None, group=self._tensor_parallel, group_dst=0)
        return shards
