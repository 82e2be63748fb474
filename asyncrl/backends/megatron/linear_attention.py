"""Linear attention on packed rows with Megatron's linear layers: a gated DeltaNet (arXiv:2412.06464).

Megatron's own needs the package flash-linear-attention, and takes one sequence per row.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncrl.backends.families.shape import LinearAttention
from asyncrl.backends.kernels import delta_rule
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.adapters import RowLinear
from asyncrl.backends.megatron.layers import NormedLinear, RowParameters, recompute_selectively
from asyncrl.backends.megatron.log_filter import quiet

with quiet(), cpu_shim.without_compilation():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule


class GatedDeltaNet(MegatronModule):  # type: ignore[misc]
    """Splits the key heads over ranks, each with its values. A rank has all tokens of the row.

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
        chunks, linear = packed_seq_params.chunks, self._linear
        assert chunks is not None
        mixed, _bias = self.heads_in(hidden)
        by_head = mixed.view(len(mixed), self._key_heads, -1)
        sizes = list(linear.convolved_sizes)
        of_numbers = [sum(sizes), sizes[-1], linear.values_per_key, linear.values_per_key]
        convolved, gate, steps, rates = torch.split(by_head, of_numbers, dim=-1)
        convolved = delta_rule.short_convolution(convolved.flatten(1), self.kernels, chunks).view_as(convolved)
        query, key, values = torch.split(convolved, sizes, dim=-1)
        read = delta_rule.gated_delta_rule(
            query,
            key,
            self._by_value(values),
            delta_rule.log_decays(rates.flatten(1), self.log_rates, self.rate_bias),
            steps.flatten(1).float().sigmoid(),
            chunks,
        )
        arguments = read, self._by_value(gate), self.norm, self.config.layernorm_epsilon
        gated = delta_rule.gated_norm(*arguments)
        with recompute_selectively(self.config, gated, delta_rule.gated_norm, *arguments):
            return self.linear_proj(gated)

    def _by_value(self, x: torch.Tensor) -> torch.Tensor:
        """[N, key heads, values per key x size] -> [N, value heads, size]"""
        return x.reshape(len(x), -1, self._linear.value_size)
