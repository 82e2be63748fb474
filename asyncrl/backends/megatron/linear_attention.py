"""Linear attention on packed rows with Megatron's linear layers: a gated DeltaNet (arXiv:2412.06464).

Megatron's own needs the package flash-linear-attention, and takes one sequence per row.

The convolution and the state need every token before the one they are at. So context-parallel ranks, which each have a
part of the row, exchange tokens for heads before them and back after (Ulysses, arXiv:2309.14509): between the two
exchanges a rank has the whole row for its share of the heads.
Tests: tests/unit/backends/megatron/test_layouts.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from asyncrl.backends.families.shape import LinearAttention
from asyncrl.backends.kernels import delta_rule
from asyncrl.backends.kernels.delta_rule import Chunks
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.adapters import RowLinear
from asyncrl.backends.megatron.layers import NormedLinear, RowParameters, recompute_selectively
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.packed_attention import Pieces
from asyncrl.backends.megatron.process_groups import context_parallel_group

with quiet(), cpu_shim.without_compilation():
    from megatron.core.tensor_parallel.mappings import all_to_all
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """Splits the key heads over tensor-parallel ranks, each with its values.

    Context-parallel ranks have the same weights, and each uses those of its share of the heads.

    kernels    [channels, 1, width]: of the convolution
    log_rates, rate_bias  [value heads]; they make decays from the numbers of a token
    norm       [value size]: of every head's output; not zero-centred
    """

    def __init__(self, config: TransformerConfig, *_: Any, linear: LinearAttention, **__: Any) -> None:
        super().__init__(config=config)
        self._linear = linear
        self._key_heads = linear.num_key_heads // config.tensor_model_parallel_size
        heads = self._key_heads * linear.values_per_key
        convolved, values = sum(linear.convolved_sizes), linear.num_value_heads * linear.value_size
        self.heads_in = NormedLinear(
            config.hidden_size,
            linear.num_key_heads * convolved + values + 2 * linear.num_value_heads,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=True,
        )
        self.kernels = self._weights(self._key_heads * convolved, 1, linear.convolved)
        self.log_rates = self._weights(heads)
        self.rate_bias = self._weights(heads)
        self.norm = self._weights(linear.value_size)
        self.norm.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # each rank has some heads
        self.linear_proj = RowLinear(
            values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )

    def _weights(self, *sizes: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.empty(*sizes, dtype=self.config.params_dtype))

    def forward(self, hidden: torch.Tensor, *_: Any, packed_seq_params: RowParameters, **__: Any) -> Any:
        chunks, row, linear = packed_seq_params.chunks, packed_seq_params.row, self._linear
        assert chunks is not None
        assert row is not None
        mixed, _bias = self.heads_in(hidden)
        by_head = mixed.view(len(mixed), self._key_heads, -1)
        convolved, gate, numbers = torch.split(
            by_head, [sum(linear.convolved_sizes), linear.convolved_sizes[-1], 2 * linear.values_per_key], dim=-1
        )
        order = row.attention.order if isinstance(row.attention, Pieces) else None
        if order is None:
            read = self._read(convolved, numbers, chunks, self.kernels, self.log_rates, self.rate_bias)
        else:
            read = self._read_with_others(convolved, numbers, chunks, order, context_parallel_group())
        arguments = read, self._by_value(gate), self.norm, self.config.layernorm_epsilon
        gated = delta_rule.gated_norm(*arguments)
        with recompute_selectively(self.config, gated, delta_rule.gated_norm, *arguments):
            return self.linear_proj(gated)

    def _read_with_others(
        self,
        convolved: torch.Tensor,
        numbers: torch.Tensor,
        chunks: Chunks,
        order: torch.Tensor,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Return what each token of a rank's part reads, with the ranks that have the other parts; see ``_read``.

        order: see Pieces
        """
        whole = exchange_tokens_for_heads(torch.cat([convolved, numbers], dim=-1), order, group)
        convolved, numbers = torch.split(whole, [convolved.shape[-1], numbers.shape[-1]], dim=-1)
        own = (x.chunk(group.size())[group.rank()] for x in (self.kernels, self.log_rates, self.rate_bias))
        read = self._read(convolved, numbers, chunks, *own)
        return exchange_heads_for_tokens(read, order, group)

    def _read(
        self,
        convolved: torch.Tensor,
        numbers: torch.Tensor,
        chunks: Chunks,
        kernels: torch.Tensor,
        log_rates: torch.Tensor,
        rate_bias: torch.Tensor,
    ) -> torch.Tensor:
        """Return what each token of the row reads from the states of some heads, [N, value heads, value size].

        convolved  [N, key heads, query, key and values]
        numbers    [N, key heads, 2 x values per key]: of steps and decays
        kernels, log_rates, rate_bias  of these heads
        """
        convolved = delta_rule.short_convolution(convolved.flatten(1), kernels, chunks).view(convolved.shape)
        query, key, values = torch.split(convolved, list(self._linear.convolved_sizes), dim=-1)
        steps, rates = numbers.chunk(2, dim=-1)
        return delta_rule.gated_delta_rule(
            query,
            key,
            self._by_value(values),
            delta_rule.log_decays(rates.flatten(1), log_rates, rate_bias),
            steps.flatten(1).float().sigmoid(),
            chunks,
        )

    def _by_value(self, x: torch.Tensor) -> torch.Tensor:
        """[N, key heads, values per key x size] -> [N, value heads, size]"""
        return x.reshape(len(x), -1, self._linear.value_size)


def exchange_tokens_for_heads(x: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the whole row for this rank's share of the heads.  [n, heads, ...] -> [N, heads / ranks, ...]

    order: see Pieces
    """
    by_rank = x.reshape(len(x), group.size(), -1, *x.shape[2:]).transpose(0, 1)
    exchanged: torch.Tensor = all_to_all(group, by_rank.flatten(0, 1))  # the parts of all ranks, one after the other
    return exchanged.index_select(0, order)


def exchange_heads_for_tokens(x: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all heads for this rank's part of the row.  [N, heads / ranks, ...] -> [n, heads, ...]"""
    parts = torch.empty_like(x).index_copy(0, order, x)
    exchanged: torch.Tensor = all_to_all(group, parts)  # the shares of all ranks, one after the other
    return exchanged.view(group.size(), -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
