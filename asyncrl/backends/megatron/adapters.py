"""Low-rank adapters next to Megatron's linear layers and our experts. backends/lora.py decides which ones exist.

Every tensor-parallel rank has the whole narrow side of an adapter, so between its two products ranks exchange only
``rank`` numbers a token. Gradients are correct in the same way as the base's: the input and output of an adapter are
cut like those of its base. ``down`` of a column-parallel layer and ``up`` of a row-parallel layer are replicated; with
sequence parallelism their gradients are summed like those of norms.
Tests: tests/unit/backends/megatron/test_lora.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F

from asyncrl.backends import lora
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.megatron import cpu_shim, overlapped_linear, process_groups
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

_MERGE_NUMBERS: Final = 2**24
"""Numbers of a parameter that are merged at once in float32."""
Share = Callable[[torch.Tensor], torch.Tensor]
"""How tensor-parallel ranks exchange the narrow side of an adapter."""


class Adapter(torch.nn.Module):
    """An adapter of a parameter [out, in], or of experts [experts, out, in]. See lora.adapters_of for shapes."""

    scales: torch.Tensor

    def __init__(self, base: torch.Tensor, matrices: torch.Tensor, settings: Lora) -> None:
        """``matrices``: the Hugging Face matrix that each row of ``base`` (of an expert) belongs to, i64[out]."""
        super().__init__()
        *experts, _out, inputs = base.shape
        count = int(matrices.max()) + 1
        self.down = torch.nn.Parameter(base.new_zeros(*experts, count, settings.rank, inputs))
        self.up = torch.nn.Parameter(base.new_zeros(*base.shape[:-1], settings.rank))
        self.is_on = True
        scales = F.one_hot(matrices, count).float() * settings.scale
        self.register_buffer("scales", scales.to(base.device, base.dtype), persistent=False)

    def forward(self, x: torch.Tensor, share: Share = lambda narrow: narrow) -> torch.Tensor:
        """Return the term added to the output of a linear layer, [..., in] -> [..., out]."""
        return F.linear(share(F.linear(x, self._down())), self._up())

    def forward_experts(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the term added to the output of experts, [N, in] -> [N, out]. Tokens of expert i end at ends[i]."""
        narrow = F.grouped_mm(x, self._down().transpose(1, 2), offs=ends)
        return F.grouped_mm(narrow, self._up().transpose(1, 2), offs=ends)

    @torch.no_grad()
    def merge(self, base: torch.Tensor) -> torch.Tensor:
        """Return ``base`` plus the adapter, computed in float32 and rounded once."""
        return (base.float() + self._up().float() @ self._down().float()).to(base.dtype)

    @torch.no_grad()
    def keep(self, base: torch.Tensor) -> KeptSum:
        """Return ``base`` plus the adapter as it is now. No step changes ``base``, so only the adapter is copied."""
        return KeptSum(base=base, up=self.up.clone(), down=self._down().clone(), scales=self.scales)

    def _down(self) -> torch.Tensor:
        """Return [matrices x rank, in], or [experts, matrices x rank, in]."""
        return self.down.flatten(-3, -2)

    def _up(self) -> torch.Tensor:
        return _scaled(self.up, self.scales)


def _scaled(up: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return [out, matrices x rank], or [experts, ...]. Each row is nonzero only for its own matrix."""
    return (up.unsqueeze(-2) * scales.unsqueeze(-1)).flatten(-2)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSum:
    """A parameter plus its adapter at one moment, of which any rows can be made at any time.

    base [out, in] or [experts, out, in], up [out, rank] or [experts, out, rank], down [matrices x rank, in] or
    [experts, matrices x rank, in], scales [out, matrices]
    """

    base: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    scales: torch.Tensor

    def write(self, into: torch.Tensor, start: int, stop: int) -> None:
        """Write rows of the parameter, those of experts numbered through all of them: the numbers of Adapter.merge."""
        if self.base.ndim == 2:
            self.write_rows(into, slice(start, stop))
            return
        size = self.base.shape[1]
        at_once = max(1, _MERGE_NUMBERS // self.base[0].numel())
        row = start
        while row < stop:
            expert, first = divmod(row, size)
            count = min(stop - row, size - first)
            part = into[row - start :]
            if count == size:
                number = min((stop - row) // size, at_once)
                some, count = slice(expert, expert + number), number * size
                added = _scaled(self.up[some], self.scales).float() @ self.down[some].float()
                part[:count].copy_(added.add_(self.base[some]).to(self.base.dtype).flatten(0, 1))
            else:
                self.write_rows(part[:count], slice(first, first + count), expert=expert)
            row += count

    def write_rows(self, into: torch.Tensor, rows: slice | torch.Tensor, *, expert: int | None = None) -> None:
        """Write rows of the parameter, or of one expert."""
        base, up, down = (x if expert is None else x[expert] for x in (self.base, self.up, self.down))
        base, up, scales, down = base[rows], up[rows], self.scales[rows], down.float()
        step = max(1, _MERGE_NUMBERS // base.shape[1])  # bounds the float32 sums
        for start in range(0, len(base), step):
            part = slice(start, start + step)
            added = _scaled(up[part], scales[part]).float() @ down
            into[part].copy_(added.add_(base[part]).to(base.dtype))


class _TensorParallelLinear(torch.nn.Module):
    """Comes before one of Megatron's tensor-parallel layers, and adds an optional adapter.

    With one rank it is torch's linear layer.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    config: Any
    skip_bias_add: bool
    sequence_parallel: bool

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.weight_adapter: Adapter | None = None

    def forward(self, x: torch.Tensor) -> Any:
        output, bias = self._product(x)
        if self.weight_adapter is not None and self.weight_adapter.is_on:
            output = output + self.weight_adapter(x, self._share)
        return output, bias

    def _product(self, x: torch.Tensor) -> Any:
        added, returned = (None, self.bias) if self.skip_bias_add else (self.bias, None)
        if self.config.tensor_model_parallel_size == 1:
            return F.linear(x, self.weight, added), returned  # Megatron's function takes more of the host's time
        exchange = process_groups.exchange()
        if exchange is None:
            return super().forward(x)
        output = self._forward_overlapped(x, exchange)
        return (output if added is None else output + added), returned

    def _forward_overlapped(self, x: torch.Tensor, exchange: overlapped_linear.Exchange) -> torch.Tensor:
        raise NotImplementedError

    def _share(self, narrow: torch.Tensor) -> torch.Tensor:
        """Exchange the narrow side of the adapter."""
        raise NotImplementedError


class ColumnLinear(_TensorParallelLinear, ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's column-parallel layer: every rank has some outputs."""

    def _forward_overlapped(self, x: torch.Tensor, exchange: overlapped_linear.Exchange) -> torch.Tensor:
        return overlapped_linear.column(x, self.weight, exchange)

    def _share(self, narrow: torch.Tensor) -> torch.Tensor:
        """Give every rank all tokens; in the backward pass, sum the gradients of the ranks' output parts."""
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(narrow, tensor_parallel_output_grad=True)  # type: ignore[no-any-return]
        return copy_to_tensor_model_parallel_region(narrow)  # type: ignore[no-any-return]


class RowLinear(_TensorParallelLinear, RowParallelLinear):  # type: ignore[misc]
    """Megatron's row-parallel layer: every rank has some inputs."""

    def _forward_overlapped(self, x: torch.Tensor, exchange: overlapped_linear.Exchange) -> torch.Tensor:
        return overlapped_linear.row(x, self.weight, exchange)

    def _share(self, narrow: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks: each rank computes a partial sum from its part of the input."""
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(narrow)  # type: ignore[no-any-return]
        return reduce_from_tensor_model_parallel_region(narrow)  # type: ignore[no-any-return]


class WholeLinear(torch.nn.Linear):
    """A linear layer replicated on every rank, with an optional adapter."""

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
    """Add the adapters in ``maps`` to a stage. Yields each adapter with the map of the parameter that it adapts."""
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
    """Set the initial values of an adapter's parameter on shard ``shard`` of ``shards``."""
    parameter.zero_()
    if entry.megatron.endswith(".down"):
        inputs = parameter.shape[-1] * (shards if entry.cut == "stacked_rows" else 1)
        whole = torch.stack(lora.initial(entry, rank=parameter.shape[-2], inputs=inputs))
        own = whole.chunk(shards, dim=-1)[shard] if entry.cut == "stacked_rows" else whole
        parameter.copy_(own.view(parameter.shape))
