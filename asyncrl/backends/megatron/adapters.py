"""Low-rank adapters beside Megatron's linear layers and our experts; which ones there are is in backends/lora.py.

The narrow side of an adapter is whole on every tensor-parallel rank; what goes over ranks between its two products are
``rank`` numbers a token. Gradients are right as the base's are: an adapter's input and output are cut like the base's,
``down`` of a column-parallel layer and ``up`` of a row-parallel one are replicated, and with sequence parallelism their
gradients are added up as those of norms are.
Tests: tests/unit/backends/megatron/test_lora.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from asyncrl.backends import lora
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.optimizer_settings import Lora
from asyncrl.backends.weight_map import Mapping

with quiet(), cpu_shim.without_compilation():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
        reduce_from_tensor_model_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

Share = Callable[[torch.Tensor], torch.Tensor]
"""What tensor-parallel ranks do with the narrow side of an adapter."""


class Adapter(torch.nn.Module):
    """Of a parameter [out, in], or of experts [experts, out, in]; shapes in lora.adapters_of."""

    scales: torch.Tensor

    def __init__(self, base: torch.Tensor, matrices: torch.Tensor, settings: Lora) -> None:
        """``matrices``: which Hugging Face matrix each row of ``base`` (of an expert) is of, i64[out]."""
        super().__init__()
        *experts, _out, inputs = base.shape
        count = int(matrices.max()) + 1
        self.down = torch.nn.Parameter(base.new_zeros(*experts, count, settings.rank, inputs))
        self.up = torch.nn.Parameter(base.new_zeros(*base.shape[:-1], settings.rank))
        self.is_on = True
        scales = F.one_hot(matrices, count).float() * settings.scale
        self.register_buffer("scales", scales.to(base.device, base.dtype), persistent=False)

    def forward(self, x: torch.Tensor, share: Share = lambda narrow: narrow) -> torch.Tensor:
        """What is added to the output of a linear layer, [..., in] -> [..., out]."""
        return F.linear(share(F.linear(x, self._down())), self._up())

    def of_experts(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """What is added to the output of experts, [N, in] -> [N, out]; tokens of the first one end at ends[0]."""
        narrow = F.grouped_mm(x, self._down().transpose(1, 2), offs=ends)
        return F.grouped_mm(narrow, self._up().transpose(1, 2), offs=ends)

    @torch.no_grad()
    def merged(self, base: torch.Tensor) -> torch.Tensor:
        """``base`` plus the adapter, computed in float32 and rounded once."""
        return (base.float() + self._up().float() @ self._down().float()).to(base.dtype)

    def _down(self) -> torch.Tensor:
        """[matrices x rank, in], or that of every expert."""
        return self.down.flatten(-3, -2)

    def _up(self) -> torch.Tensor:
        """[out, matrices x rank], with the scale: every row has numbers for its own matrix only."""
        return (self.up.unsqueeze(-2) * self.scales.unsqueeze(-1)).flatten(-2)


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's, with a place for an adapter."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.weight_adapter: Adapter | None = None

    def forward(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        output, bias = super().forward(x, *arguments, **options)
        if self.weight_adapter is not None and self.weight_adapter.is_on:
            output = output + self.weight_adapter(x, self._share)
        return output, bias

    def _share(self, narrow: torch.Tensor) -> torch.Tensor:
        """Every rank needs all tokens, and its part of the output sends back its part of their gradient."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True)  # type: ignore[no-any-return]
        return copy_to_tensor_model_parallel_region(narrow)  # type: ignore[no-any-return]


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's, with a place for an adapter."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.weight_adapter: Adapter | None = None

    def forward(self, x: torch.Tensor) -> Any:
        output, bias = super().forward(x)
        if self.weight_adapter is not None and self.weight_adapter.is_on:
            output = output + self.weight_adapter(x, self._share)
        return output, bias

    def _share(self, narrow: torch.Tensor) -> torch.Tensor:
        """A rank's part of the input makes a part of the sum."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(narrow)  # type: ignore[no-any-return]
        return reduce_from_tensor_model_parallel_region(narrow)  # type: ignore[no-any-return]


class WholeLinear(torch.nn.Linear):
    """Every rank has all of it, with a place for an adapter."""

    def __init__(self, inputs: int, outputs: int, *, dtype: torch.dtype, is_sequence_parallel: bool) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=dtype)
        self.weight.sequence_parallel = is_sequence_parallel  # type: ignore[attr-defined]
        self.weight_adapter: Adapter | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if self.weight_adapter is not None and self.weight_adapter.is_on:
            output = output + self.weight_adapter(x)
        return output


def attach(
    stage: torch.nn.Module, maps: list[Mapping], settings: Lora, shape: ModelShape, *, is_sequence_parallel: bool
) -> Iterator[tuple[Mapping, Adapter]]:
    """Give a stage the adapters of ``maps``; yields each with what it adapts."""
    names = {entry.megatron for entry in maps}
    for entry in maps:
        down, up = lora.adapters_of(entry)
        if down.megatron not in names:
            continue
        path, _, leaf = entry.megatron.rpartition(".")
        holder = stage.get_submodule(path)
        base = getattr(holder, leaf)
        adapter = Adapter(base, lora.matrix_of_rows(entry, shape, rows=base.shape[-2]), settings)
        setattr(holder, f"{leaf}_adapter", adapter)
        for made, parameter in ((down, adapter.down), (up, adapter.up)):
            if entry.is_of_experts:
                parameter.allreduce = base.allreduce  # type: ignore[attr-defined]
            elif made.is_replicated:
                parameter.sequence_parallel = is_sequence_parallel  # type: ignore[attr-defined]
        yield entry, adapter


@torch.no_grad()
def initialise(parameter: torch.Tensor, entry: Mapping, *, shards: int, shard: int) -> None:
    """Give an adapter's parameter what it starts as; ``shard`` of ``shards`` is this rank's."""
    parameter.zero_()
    if entry.megatron.endswith(".down"):
        inputs = parameter.shape[-1] * (shards if entry.cut == "stacked_rows" else 1)
        whole = torch.stack(lora.initial(entry, rank=parameter.shape[-2], inputs=inputs))
        own = whole.chunk(shards, dim=-1)[shard] if entry.cut == "stacked_rows" else whole
        parameter.copy_(own.view(parameter.shape))
