"""One rank's part of a model in the Megatron learner: loads the folder's weights, scores, exports.

Tests: tests/contracts/test_backend.py and tests/contracts/test_backend_models.py (equal to the reference).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from asyncrl.backends import huggingface, lora, micro_batches, models, weight_cuts
from asyncrl.backends.frozen import is_trained
from asyncrl.backends.megatron import adapters
from asyncrl.backends.megatron.agreement import Agreement
from asyncrl.backends.megatron.mixture import biases
from asyncrl.backends.megatron.model import PackedGPT, build_stages
from asyncrl.backends.megatron.passes import Passes
from asyncrl.backends.megatron.process_groups import expert_group, gathered, pipeline_group, tensor_parallel_group
from asyncrl.backends.megatron.rank_commands import Job, Scores
from asyncrl.backends.megatron.row_part import RowPart
from asyncrl.backends.optimizer_settings import Lora
from asyncrl.backends.weight_map import Mapping, weight_map
from asyncrl.errors import BackendError
from asyncrl.policies.algorithms.objective import ValueInputs
from asyncrl.policies.batching.packing import MicroBatch
from asyncrl.policies.losses.loss import LossInputs
from asyncrl.tensors import fp8
from asyncrl.tensors.snapshot import Snapshot


class LoadedModel:
    """One of the job's models; frozen unless it is a TrainedModel."""

    def __init__(self, name: str, job: Job, device: torch.device, agreement: Agreement) -> None:
        self._model = job.models[name]
        self._where = models.where(name)
        self._is_policy = name == models.POLICY
        self._temperature = job.temperature
        self._agreement = agreement
        self._layout = job.layout
        self._is_fp8 = job.is_fp8
        self._rank = dist.get_rank()
        self._device, self._dtype = device, job.torch_dtype
        self._tensor_parallel = tensor_parallel_group()
        self._pipeline = pipeline_group()
        self._experts = expert_group()
        self._first_of_stage = self._pipeline.rank() * (job.layout.ranks // job.layout.pipeline)
        self._shape = huggingface.read_shape(self._model.path, where=self._where)
        self._stages = build_stages(job, self._shape, device, head=self._model.head)
        self._maps: dict[str, Mapping] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._lora = self._model.optimizer.lora if self._model.optimizer else None
        self._adapters: dict[str, adapters.Adapter] = {}
        for stage in self._stages:
            stage.requires_grad_(self._model.is_trained)
            self._name_parameters(stage)
        self._held = self._held_by_stages()
        if (settings := self._model.optimizer) is not None:
            for name, entry in self._maps.items():  # of several tensors in one parameter all are trained, or none
                is_free = is_trained(entry.huggingface[0], freeze=settings.freeze, train_only=settings.train_only)
                is_free = entry.is_adapter if self._lora else is_free and not entry.is_bias_of_choice
                self._parameters[name].requires_grad_(is_free)
        self._load_weights()

    def _name_parameters(self, stage: PackedGPT) -> None:
        """Name the stage's parameters, and say what they are made of, by their layers' place in the whole model."""
        maps = {entry.megatron: entry for entry in weight_map(self._shape, head=self._model.head, part=stage.part)}
        parameters: dict[str, torch.Tensor] = {**dict(stage.named_parameters()), **biases(stage)}
        if maps.keys() != parameters.keys() - {models.VALUE_HEAD}:
            raise BackendError(f"the weight map does not cover {maps.keys() ^ parameters.keys()}")
        for name, parameter in parameters.items():
            in_model = _in_model(name, stage.part.layers.start)
            self._parameters[in_model] = parameter
            if name in maps:
                self._maps[in_model] = maps[name]
        if self._lora:
            self._add_adapters(stage, list(maps.values()), self._lora)

    def _add_adapters(self, stage: PackedGPT, maps: list[Mapping], settings: Lora) -> None:
        with_adapters = list(lora.with_adapters(maps, settings))
        is_sequence_parallel = self._layout.is_sequence_parallel
        for entry, adapter in adapters.attach(
            stage, with_adapters, settings, self._shape, is_sequence_parallel=is_sequence_parallel
        ):
            self._adapters[_in_model(entry.megatron, stage.part.layers.start)] = adapter
            for made, parameter in zip(lora.adapters_of(entry), (adapter.down, adapter.up), strict=True):
                in_model = _in_model(made.megatron, stage.part.layers.start)
                self._parameters[in_model], self._maps[in_model] = parameter, made

    def _held_by_stages(self) -> list[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
        """Of each stage its parameters' names, and their shapes and types on a rank."""
        own = {name: (list(one.shape), str(one.dtype).removeprefix("torch.")) for name, one in self._parameters.items()}
        held = gathered(json.dumps(own).encode(), self._pipeline, self._device)
        return [
            {name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in json.loads(stage).items()}
            for stage in held
        ]

    @torch.no_grad()
    def _load_weights(self) -> None:
        """Load the Hugging Face folder's weights into every parameter except a value head."""
        with huggingface.open_weights(self._model.path, where=self._where) as read:
            for name, entry in self._maps.items():
                ranks, rank = self._tensor_parallel.size(), self._tensor_parallel.rank()
                if entry.is_of_experts:  # each is on one rank
                    ranks, rank = 1, 0
                parameter: Any = self._parameters[name]
                if entry.is_adapter:
                    adapters.initialise(parameter, entry, shards=ranks, shard=rank)
                else:
                    parts = [read(tensor) for tensor in entry.huggingface]
                    shards = weight_cuts.fuse(parts, entry.cut, self._shape, tensor_parallel=ranks)
                    parameter.copy_(shards[rank])
                # The gradient norm counts replicated parameters once; older Megatron marks only those it initialises.
                parameter.tensor_model_parallel = not entry.is_replicated

    @torch.no_grad()
    def score(self, share: Sequence[MicroBatch]) -> Scores:
        """f32[N] per micro-batch on the rank that scores the share, see Backend.score; or what went wrong on this one.

        Synchronises with the device once, at the end.
        """
        if not share:
            return Scores()
        passes = Passes(self._stages, self._agreement, make_row=self._scored_row, finish=self._scored)
        scores = passes.run(share, is_scoring=True)
        if passes.problem is not None:
            return Scores(problem=f"{type(passes.problem).__name__}: {passes.problem}")
        if self._rank not in self._layout.scorers:
            return Scores()
        ends = np.cumsum([len(score) for score in scores])
        return Scores(rows=tuple(np.split(torch.cat(scores).cpu().numpy(), ends[:-1])))

    def _scored_row(self, micro_batch: MicroBatch) -> RowPart:
        has_values = self._model.head == "values"
        rows = np.empty(0, np.int64) if has_values else micro_batches.predicted_rows(micro_batch)
        return self._row(micro_batch, rows)

    def _scored(self, row: RowPart, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """f32[N], on the device; its first part is no loss."""
        num_tokens = len(row.row.tokens)
        if self._model.head == "values":
            (values,) = self._outputs(row, hidden)
            return hidden, values[:num_tokens]
        logprobs, _entropy = self._outputs(row, hidden)
        return hidden, logprobs.new_zeros(num_tokens).index_copy(0, row.row.rows, logprobs)

    def _row(self, micro_batch: MicroBatch, rows: NDArray[np.int64]) -> RowPart:
        return RowPart.of(
            micro_batch,
            rows,
            layout=self._layout,
            context_rank=self._layout.context_rank(self._rank),
            device=self._device,
            dtype=self._dtype,
            is_routed=self._is_policy,  # the engine ran no other model
        )

    def _outputs(self, row: RowPart, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logprobs and entropy f32[M] of ``row.row.rows``, or the value after every token of the filled row f32[N]."""
        if self._model.head == "values":
            return (self._stages[-1].values(hidden, row),)
        return self._stages[-1].logprobs(hidden, row, self._temperature)

    def _inputs(self, row: RowPart, outputs: tuple[torch.Tensor, ...]) -> LossInputs | ValueInputs:
        """The objective's inputs, from ``_outputs``."""
        return row.row.value_inputs(*outputs) if self._model.head == "values" else row.row.loss_inputs(*outputs)

    def export(self) -> Snapshot | None:
        """See Backend. The first rank gathers the model; other exporters return None."""
        snapshot = Snapshot.of(fp8.quantized(self.exported()) if self._is_fp8 else self.exported())
        return snapshot if snapshot.buckets else None

    @torch.no_grad()
    def exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor in the folder's type) of what this rank exports, one parameter after the other."""
        for entry in self._exported_maps():
            shards = self._sent_to_the_first_stage(entry)
            if shards:
                dtype = torch.float32 if entry.is_bias_of_choice else self._shape.dtype
                tensors = weight_cuts.unfuse(shards, entry.cut, self._shape)
                yield from ((name, one.to(dtype)) for name, one in zip(entry.huggingface, tensors, strict=True))

    def _exported_maps(self) -> list[Mapping]:
        """What an export has, of the whole model."""
        maps = weight_map(self._shape, head=self._model.head)
        if self._lora is None or self._lora.is_merged:
            return maps
        return [entry for entry in lora.with_adapters(maps, self._lora) if entry.is_adapter]

    def _own_shard(self, entry: Mapping) -> torch.Tensor:
        """This rank's part of what is exported."""
        parameter = self._parameters[entry.megatron].detach()
        if entry.is_adapter:  # with its scale, so that a folder needs to know of none
            return parameter * self._lora.scale if self._lora and entry.megatron.endswith(".up") else parameter
        adapter = self._adapters.get(entry.megatron)
        return parameter if adapter is None else adapter.merged(parameter)

    def _sent_to_the_first_stage(self, entry: Mapping) -> list[torch.Tensor]:
        """All shards of a parameter on the first rank; empty on the others."""
        stage = next(number for number, held in enumerate(self._held) if entry.megatron in held)
        own = self._pipeline.rank()
        shards = self._gathered(entry) if stage == own else []
        if stage == 0 or own not in (0, stage) or self._rank != self._first_of_stage:
            return shards
        if own == stage:
            dist.send(torch.stack(shards), group=self._pipeline, group_dst=0)
            return []
        (size, *rest), dtype = self._held[stage][entry.megatron]
        count = 1 if entry.is_of_experts or entry.is_replicated else self._tensor_parallel.size()
        size *= self._layout.expert if entry.is_of_experts else 1
        received = torch.empty((count, size, *rest), dtype=dtype, device=self._device)
        dist.recv(received, group=self._pipeline, group_src=stage)
        return list(received)

    def _gathered(self, entry: Mapping) -> list[torch.Tensor]:
        """All shards of a parameter on the stage's first rank; empty on the others. Experts are one shard."""
        shard = self._own_shard(entry)
        group = self._experts if entry.is_of_experts else self._tensor_parallel
        if group.size() == 1 or entry.is_replicated or dist.get_process_group_ranks(group)[0] != self._first_of_stage:
            return [shard] if self._rank == self._first_of_stage else []
        shards = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else []
        dist.gather(shard, shards or None, group=group, group_dst=0)
        return [torch.cat(shards)] if shards and entry.is_of_experts else shards


def _in_model(name: str, first_layer: int) -> str:
    """A parameter's name with its layer's number in the whole model."""
    before, layers, after = name.partition("decoder.layers.")
    if not layers:
        return name
    number, _, rest = after.partition(".")
    return f"{before}{layers}{int(number) + first_layer}.{rest}"
