"""One rank's part of a model in the Megatron learner: loads the folder's weights, runs forward passes, exports.

Tests: tests/contracts/test_backend.py and tests/contracts/test_backend_models.py (equal to the reference).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.multiprocessing.reductions import StorageWeakRef

from asyncrl.backends import huggingface, lora, micro_batches, models, weight_cuts
from asyncrl.backends.frozen import is_trained
from asyncrl.backends.megatron import adapters
from asyncrl.backends.megatron.forward_backward import forward_backward
from asyncrl.backends.megatron.job import Job, Outputs
from asyncrl.backends.megatron.mixture import biases, round_experts
from asyncrl.backends.megatron.model import PackedGPT, build_stages
from asyncrl.backends.megatron.process_groups import (
    expert_parallel_group,
    expert_tensor_parallel_group,
    pipeline_group,
    tensor_parallel_group,
)
from asyncrl.backends.megatron.row_part import Routing, RowPart
from asyncrl.backends.optimizer_settings import Lora
from asyncrl.backends.weight_map import Mapping, weight_map
from asyncrl.errors import BackendError, ConfigError
from asyncrl.policies.batching.packing import MicroBatch, compute_all
from asyncrl.tensors import quantized_model
from asyncrl.tensors.host_copies import BUCKET_BYTES as HOST_BUCKET_BYTES
from asyncrl.tensors.host_copies import HostCopies
from asyncrl.tensors.snapshot import Bucket, Fill, Kept, Rows, Snapshot


class LoadedModel:
    """One of the job's models. It is frozen unless it is a TrainedModel."""

    def __init__(self, name: str, job: Job, device: torch.device) -> None:
        self._model = job.models[name]
        self._where = models.where(name)
        self._is_policy = name == models.POLICY
        self._temperature = job.temperature
        self._layout = job.layout
        self._quantization = job.quantization
        self._takes_turns = job.takes_turns
        self._rank = dist.get_rank()
        self._device, self._dtype = device, job.torch_dtype
        self._tensor_parallel = tensor_parallel_group()
        self._expert_parallel, self._expert_tensor = expert_parallel_group(), expert_tensor_parallel_group()
        self._pipeline = pipeline_group()
        self._first_of_stage = self._pipeline.rank() * (job.layout.ranks // job.layout.pipeline)
        self._shape = huggingface.read_shape(self._model.path, where=self._where, own=job.family)
        drafts = self._is_policy and self._model.is_trained and job.options.draft_coefficient > 0
        self._num_draft_layers = self._shape.num_draft_layers if drafts else 0
        self._stages = build_stages(job, self._model, self._shape, device, num_draft_layers=self._num_draft_layers)
        if self._is_policy and job.rounding_group:
            round_experts(self._stages, group=job.rounding_group)
        self._maps: dict[str, Mapping] = {}
        self._parameters: dict[str, torch.Tensor] = {}
        self._lora = self._model.optimizer.lora if self._model.optimizer else None
        self._adapters: dict[str, adapters.Adapter] = {}
        self._kept: dict[str, tuple[Kept, ...]] = {}  # by parameter; a mixture has tens of thousands
        self._exports_to = job.exports_to
        self._host_copies = HostCopies(device)
        self._on_device: list[StorageWeakRef] = []  # the copies of the last export that was copied on the device
        for stage in self._stages:
            stage.requires_grad_(self._model.is_trained)
            self._name_parameters(stage)
        if (settings := self._model.optimizer) is not None:
            for name, entry in self._maps.items():  # a parameter's tensors are all trained, or none
                is_free = is_trained(entry.huggingface[0], freeze=settings.freeze, train_only=settings.train_only)
                is_free = entry.is_adapter if self._lora else is_free and not entry.is_router_bias
                self._parameters[name].requires_grad_(is_free)
        self.routing: dict[bytes, Routing] = {}
        """Where the last recorded forward pass routed its rows, by the sequences of a row."""
        self._load_weights()

    @property
    def stages(self) -> list[PackedGPT]:
        """This rank's parts of the model."""
        return self._stages

    @property
    def expert_layers(self) -> tuple[int, ...] | None:
        """The layers of this stage that have experts, in the order in which micro-batches have them; None: a
        micro-batch has all layers of the model."""
        if self._layout.pipeline == 1:
            return None
        return tuple(layer for stage in self._stages for layer in stage.part.layers if self._shape.has_experts(layer))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all tensors kept on the device between two calls, except a trained model's ``gradients``."""
        for stage in self._stages:
            yield from stage.parameters()
            yield from stage.buffers()

    def _name_parameters(self, stage: PackedGPT) -> None:
        """Register the stage's parameters and their maps, by names that number layers within the whole model."""
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

    @torch.no_grad()
    def _load_weights(self) -> None:
        """Load the Hugging Face folder's weights into every parameter except a value head."""
        experts = self._stages[0].part.experts
        with huggingface.open_weights(self._model.path, where=self._where) as read:
            for name, entry in self._maps.items():
                group = self._cut_over(entry)
                ranks, rank = group.size(), group.rank()
                parameter: Any = self._parameters[name]
                if entry.is_adapter:
                    adapters.initialise(parameter, entry, shards=ranks, shard=rank)
                else:
                    parts = [read(tensor) for tensor in entry.huggingface]
                    if entry.is_fused:  # each tensor holds all experts of the layer
                        parts = [part[experts.start : experts.stop] for part in parts]
                    shard = weight_cuts.fuse(parts, entry.cut, self._shape, tensor_parallel=ranks)[rank]
                    if parameter.shape != shard.shape:  # copy_ would broadcast a smaller tensor
                        raise ConfigError(
                            f"{self._where}: {self._model.path}: {entry.huggingface[0]} gives the shape "
                            f"{list(shard.shape)} here, but config.json requires {list(parameter.shape)}"
                        )
                    parameter.copy_(shard)
                # The gradient norm counts replicated parameters once; older Megatron marks only those it initialises.
                parameter.tensor_model_parallel = not entry.is_replicated

    def _cut_over(self, entry: Mapping) -> dist.ProcessGroup:
        """Return the ranks over which a parameter is cut, unless they hold the same values."""
        return self._expert_tensor if entry.is_of_experts else self._tensor_parallel

    def forward(self, share: Sequence[MicroBatch], *, records: bool = False) -> Outputs:
        """Return f32[N] per micro-batch on the rank that has the share's outputs (see Backend.forward).

        Synchronises with the device once, at the end.  records: remember the routing of the rows
        """
        if not records:
            return self._forward(share, is_routed=self._is_policy)
        self.routing = {micro_batch.sequences.tobytes(): Routing() for micro_batch in share}
        made = self._forward(share, is_routed=self._is_policy, uses_routing=True)
        for one in self.routing.values():
            one.is_complete = True
        return made

    def forward_base(self, share: Sequence[MicroBatch]) -> Outputs:
        """Return what a frozen model in the same folder would: the outputs without adapters."""
        for adapter in self._adapters.values():
            adapter.is_on = False
        try:
            return self._forward(share, is_routed=False)
        finally:
            for adapter in self._adapters.values():
                adapter.is_on = True

    @torch.no_grad()
    def _forward(self, share: Sequence[MicroBatch], *, is_routed: bool, uses_routing: bool = False) -> Outputs:
        if not share:
            return Outputs()
        has_values = self._model.head == "values"

        def make_row(micro_batch: MicroBatch) -> RowPart:
            rows = np.empty(0, np.int64) if has_values else micro_batches.predicted_rows(micro_batch)
            return self._row(micro_batch, rows, is_routed=is_routed, uses_routing=uses_routing)

        def finish(row: RowPart, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Return a pair: a tensor for the schedule, not a loss, and outputs f32[N] on the device."""
            outputs, num_tokens = self._outputs(row, hidden), row.micro_batch.num_tokens
            if has_values:
                return hidden, outputs[0][:num_tokens]
            return hidden, outputs[0].new_zeros(num_tokens).index_copy(0, row.row.rows, outputs[0])

        outputs = forward_backward(self._stages, share, make_row=make_row, finish=finish, is_forward_only=True)
        if self._rank not in self._layout.output_ranks:
            return Outputs()
        ends = np.cumsum([len(output) for output in outputs])
        return Outputs(rows=tuple(np.split(torch.cat(outputs).cpu().numpy(), ends[:-1])))

    def _row(
        self,
        micro_batch: MicroBatch,
        rows: NDArray[np.int64],
        *,
        is_routed: bool,
        uses_routing: bool = False,
        batch_tokens: int = 0,
    ) -> RowPart:
        """
        is_routed     by the experts that the engine chose; it ran no other model than the policy
        uses_routing  whether the pass records its routing, or replays what was recorded of the row
        """
        if self._shape.why_no_shared_prefixes or self._num_draft_layers:
            micro_batch = compute_all(micro_batch)
        made = RowPart.from_micro_batch(
            micro_batch,
            rows,
            layout=self._layout,
            context_rank=self._layout.context_rank(self._rank),
            tensor_rank=self._tensor_parallel.rank(),
            device=self._device,
            dtype=self._dtype,
            is_routed=is_routed,
            expert_layers=self.expert_layers,
            batch_tokens=batch_tokens,
        )
        routing = self.routing.get(micro_batch.sequences.tobytes()) if uses_routing else None
        return made if routing is None else dataclasses.replace(made, routing=routing)

    def _outputs(self, row: RowPart, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return logprobs and entropy f32[M] of ``row.row.rows``, or the value after every token of the filled row
        f32[N]."""
        if self._model.head == "values":
            return (self._stages[-1].values(hidden, row),)
        return self._stages[-1].logprobs(hidden, row, self._temperature)

    def export(self) -> Snapshot:
        """Export this rank's part; see Backend.

        Frozen parameters that this rank has whole are not copied, only their adapters, unless they leave the device
        while engines read them. The rest is copied: on the device if it has room for one copy and the one before is not
        in use any more, else to the host, beside what the device does next (HostCopies). Memory besides the copy: a
        bucket of gathered tensors and one parameter.
        """
        to_host = self._goes_to_host()
        copies_all = bool(self._quantization) or self._takes_turns
        exported: Iterable[tuple[str, torch.Tensor | Kept]] = self._exported(
            keeps=not copies_all, until_update=to_host and not copies_all
        )
        if copies_all:
            tensors = ((name, tensor) for name, tensor in exported if not isinstance(tensor, Kept))
            exported = quantized_model.quantize_tensors(tensors, self._quantization)
        if to_host:
            return Snapshot.from_tensors(exported, to_host=self._host_copies.copy, bucket_bytes=HOST_BUCKET_BYTES)
        snapshot = Snapshot.from_tensors(exported)
        copies = [bucket.data for bucket in snapshot.buckets if isinstance(bucket, Bucket)]
        self._on_device = [StorageWeakRef(data.untyped_storage()) for data in copies]  # type: ignore[no-untyped-call]
        return snapshot

    def _goes_to_host(self) -> bool:
        if self._takes_turns:
            return False
        is_in_use = not all(copy.expired() for copy in self._on_device)  # type: ignore[no-untyped-call]
        return self._exports_to == "host" or (is_in_use and self._device.type == "cuda")

    def finish_exports(self) -> None:
        """Let the device wait for copies of exports before it changes the weights."""
        self._host_copies.fence()

    def _exported(self, *, keeps: bool, until_update: bool = False) -> Iterator[tuple[str, torch.Tensor | Kept]]:
        """Yield (Hugging Face name, tensor in the run's dtype) of what this rank exports, one parameter at a time.

        keeps         frozen parameters as they are
        until_update  others as well: the next update changes them

        One rank of a stage exports each of its parameters, the one in ``_exporters``. It gathers experts from the ranks
        that share them, fused experts from its expert-parallel ranks, and other parameters from its tensor-parallel
        ranks. Stages do not communicate.
        """
        exporters = self._exporters()
        for name, entry in self._maps.items():
            exporter = exporters.get(name, -1)
            if keeps and self._can_be_kept(entry, name, until_update=until_update):
                if exporter == self._rank - self._first_of_stage:
                    yield from zip(entry.huggingface, self._keep(entry, name), strict=True)
                continue
            shards = self._gather_shards(entry, name, exporter)
            if shards:
                dtype = torch.float32 if entry.is_router_bias else self._dtype
                tensors = weight_cuts.unfuse(shards, entry.cut, self._shape)
                del shards
                yield from ((theirs, one.to(dtype)) for theirs, one in zip(entry.huggingface, tensors, strict=True))

    def _exporters(self) -> dict[str, int]:
        """Return the rank of the stage that exports each parameter: the eligible rank with the fewest bytes so far.

        Experts go to one of the ranks that hold the same experts as this rank, or a part of them. Ranks with other
        experts assign theirs in the same way. Fused experts go to one rank, which gets those of the other ranks.
        """
        # Greedy: what has the least choice first, each to the rank with the fewest bytes so far. All ranks of a stage
        # compute the same table, so they exchange nothing. Four equal parameters on two ranks are two for each.
        tensor_parallel, parts = self._tensor_parallel.size(), self._layout.expert_tensor
        experts = self._layout.expert * parts  # ranks that together hold the experts of a layer
        own = self._rank - self._first_of_stage
        loads = [0] * self._layout.exporters_of_stage
        gathering = range(len(loads) - len(loads) % tensor_parallel)  # ranks whose tensor-parallel peers all export
        sharing = range(len(loads) - len(loads) % experts)  # the same for expert-parallel peers
        maps = {name: entry for name, entry in self._maps.items() if self._is_exported(entry)}
        found: dict[str, int] = {}
        for name, entry in sorted(maps.items(), key=lambda one: not one[1].is_of_experts):  # experts have less choice
            num_bytes = self._parameters[name].nbytes
            if entry.is_fused:
                rank = found[name] = min(sharing, key=loads.__getitem__)
                loads[rank] += num_bytes * experts
            elif entry.is_of_experts:
                whole = range(0, len(loads) - experts + 1, experts)
                first = min((start + part for start in whole for part in range(parts)), key=loads.__getitem__)
                found[name] = first + own % experts // parts * parts
                for rank in range(first, first - first % experts + experts, parts):
                    loads[rank] += num_bytes * parts
            else:
                rank = found[name] = min(gathering, key=loads.__getitem__)
                loads[rank] += num_bytes * (1 if entry.is_replicated else tensor_parallel)
        return found

    def _is_exported(self, entry: Mapping) -> bool:
        """Return whether the run exports this: only adapters, or all but adapters, without copies of the embedding.

        A tied output layer on another stage than the embedding is such a copy.
        """
        has_adapters = self._lora is not None and not self._lora.is_merged
        return entry.is_adapter == has_adapters and not entry.is_copy_of_embedding

    def own_shard(self, entry: Mapping, name: str) -> torch.Tensor:
        """Return this rank's part of an exported parameter.  name: the parameter's name in the whole model"""
        parameter = self._parameters[name].detach()
        if entry.is_adapter:  # scaled, so that the folder need not specify a scale
            return parameter * self._lora.scale if self._lora and name.endswith(".up") else parameter
        adapter = self._adapters.get(name)
        return parameter if adapter is None else adapter.merge(parameter)

    def _can_be_kept(self, entry: Mapping, name: str, *, until_update: bool) -> bool:
        """Return whether no step, or nothing before the next update, changes the parameter apart from its adapter, and
        no rank has a part of it."""
        parameter = self._parameters[name]
        if not isinstance(parameter, torch.nn.Parameter) or entry.is_adapter:  # a buffer may change at any time
            return False
        return (until_update or not parameter.requires_grad) and self._is_whole(entry)

    def _keep(self, entry: Mapping, name: str) -> Iterable[Kept]:
        """Return the folder's tensors that a parameter consists of, without copying it."""
        if name in self._adapters:
            return self._keep_sums(entry, name)
        if name not in self._kept:  # the same for every export
            self._kept[name] = tuple(self._keep_whole(entry, name))
        return self._kept[name]

    def _keep_sums(self, entry: Mapping, name: str) -> Iterator[Kept]:
        """Yield the tensors of a parameter plus its adapter as it is now."""
        parameter = self._parameters[name].detach()
        sums, (*experts, num_rows, inputs) = self._adapters[name].keep(parameter), parameter.shape
        numbers = torch.arange(num_rows).view(*[1] * len(experts), num_rows, 1)  # all experts are cut alike
        tensors = weight_cuts.unfuse([numbers], entry.cut, self._shape)
        parts = [_as_range(one.flatten()) for one in tensors]
        for first in range(0, num_rows * experts[0] if experts else num_rows, num_rows):
            for rows in parts:
                if isinstance(rows, range):
                    source: Fill = Rows(sums, first + rows.start, first + rows.stop)
                else:  # heads; rows of experts follow one another
                    assert not experts
                    source = functools.partial(sums.write_rows, rows=rows.to(parameter.device))
                yield self._kept_as(parameter, shape=(len(rows), inputs), source=source)

    def _keep_whole(self, entry: Mapping, name: str) -> Iterator[Kept]:
        whole = self._parameters[name]
        parameter, is_trained = whole.detach(), whole.requires_grad
        layout = parameter.to("meta")
        tensors = weight_cuts.unfuse([layout], entry.cut, self._shape)
        if all(one is layout or one._base is layout for one in tensors):
            for view in weight_cuts.unfuse([parameter], entry.cut, self._shape):
                yield self._kept_as(parameter, shape=view.shape, source=view, is_trained=is_trained)
            return
        for number, one in enumerate(tensors):  # its rows are mixed in Megatron: made when they are needed

            def write(into: torch.Tensor, number: int = number) -> None:
                into.copy_(weight_cuts.unfuse([parameter], entry.cut, self._shape)[number])

            yield self._kept_as(parameter, shape=one.shape, source=write, is_trained=is_trained)

    def _kept_as(
        self, parameter: torch.Tensor, *, shape: Sequence[int], source: torch.Tensor | Fill, is_trained: bool = False
    ) -> Kept:
        return Kept(
            shape=tuple(shape),
            dtype=self._dtype,
            device=parameter.device,
            source=source,
            until_update=is_trained,
        )

    def _is_whole(self, entry: Mapping) -> bool:
        """Return whether this rank has all of a parameter, or of its own experts."""
        group = self._expert_parallel if entry.is_fused else self._cut_over(entry)
        return entry.is_replicated or group.size() == 1

    def _gather_shards(self, entry: Mapping, name: str, exporter: int) -> list[torch.Tensor]:
        """Return all shards of a parameter on the rank of the stage that exports it; [] on other ranks."""
        group, own = self._cut_over(entry), self._rank - self._first_of_stage
        if entry.is_fused:
            group = self._expert_parallel
        if self._is_whole(entry):
            return [self.own_shard(entry, name)] if own == exporter else []
        if exporter < 0 or own // group.size() != exporter // group.size():
            return []
        shard = self.own_shard(entry, name).contiguous()
        gathered = shard.new_empty(group.size(), *shard.shape) if own == exporter else None
        shards = [] if gathered is None else list(gathered.unbind())
        dist.gather(shard, shards or None, group=group, group_dst=exporter % group.size())
        return shards if gathered is None or not entry.is_fused else [gathered.flatten(0, 1)]


def _as_range(rows: torch.Tensor) -> range | torch.Tensor:
    """Return numbers of rows as a range if they follow one another."""
    found = range(int(rows[0]), int(rows[0]) + len(rows))
    return found if rows.tolist() == list(found) else rows


def _in_model(name: str, first_layer: int) -> str:
    """Return a parameter's name with its layer's number in the whole model."""
    before, layers, after = name.partition("decoder.layers.")
    if not layers:
        return name
    number, _, rest = after.partition(".")
    return f"{before}{layers}{int(number) + first_layer}.{rest}"
