"""Megatron-Core's layers with our kernels between their matrix products: norms, SwiGLU, attention on packed rows.

Linear layers and blocks are Megatron's. The kernels are in kernels/fused.py and packed_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.kernels import fused
from asyncrl.backends.kernels.delta_rule import Chunks
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.adapters import ColumnLinear, RowLinear
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.packed_attention import attention
from asyncrl.backends.megatron.process_groups import tensor_parallel_group
from asyncrl.backends.megatron.row_part import RowPart
from asyncrl.backends.megatron.sink_attention import attention_with_sinks
from asyncrl.backends.megatron.sparse_attention import Choice

with quiet(), cpu_shim.without_compilation():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.mappings import (
        copy_to_tensor_model_parallel_region,
        reduce_from_tensor_model_parallel_region,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass
class RowParameters(PackedSeqParams):  # type: ignore[misc]
    """Carries attention's inputs through Megatron's layers, which treat the row as one dense sequence (sbhd)."""

    row: RowPart | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    local_rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    """Rotary embeddings of layers with local attention, if they have their own."""
    chunks: Chunks | None = None
    """The sequences of the row, for layers with linear attention."""
    choices: dict[int, Choice] = field(default_factory=dict)
    """The keys that the indexer of a layer, numbered from 0, has chosen, for layers after it."""
    layer_features: tuple[torch.Tensor, ...] = ()
    """f[m, H] for each of the first layers, which adds them to the tokens of ``row`` that show an image."""

    def with_features(self, hidden: torch.Tensor, layer_number: int) -> torch.Tensor:
        """Return what a layer has computed, with its features added.  layer_number: from 1"""
        if layer_number > len(self.layer_features):
            return hidden
        assert self.row is not None
        assert self.row.images is not None
        return hidden.index_add(0, self.row.images.places, self.layer_features[layer_number - 1][:, None])


def recompute_selectively(
    config: Any, result: torch.Tensor, function: Callable[..., torch.Tensor], *arguments: Any
) -> AbstractContextManager[Any]:
    """With selective recomputation, recompute ``result`` in the backward pass of the operations inside.

    Otherwise they keep it as usual.
    """
    if config.recompute_granularity != "selective" or not torch.is_grad_enabled():
        return nullcontext()
    return fused.recompute_in_backward((result, lambda: function(*arguments)))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, config: TransformerConfig) -> torch.Tensor:
    return fused.rms_norm(x, weight, config.layernorm_epsilon, config.layernorm_zero_centered_gamma)


class Norm(torch.nn.Module):
    """RMSNorm with Megatron's constructor."""

    def __init__(self, *, config: TransformerConfig, hidden_size: int, eps: float, **_unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron adds up its gradients
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused.rms_norm(x, self.weight, self.eps, self.is_zero_centered)


class NormOfAllHeads(torch.nn.Module):
    """RMSNorm over numbers that tensor-parallel ranks share, [N, own numbers]. A rank has the weights of its own."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        """size: numbers of all ranks"""
        super().__init__()
        own = size // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(own, dtype=config.params_dtype))
        self._size, self._eps = size, config.layernorm_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, group = x.float(), tensor_parallel_group()
        squares = reduce_from_tensor_model_parallel_region(wide.square().sum(-1, keepdim=True), group=group)
        squares = copy_to_tensor_model_parallel_region(squares, group=group)  # every rank's loss depends on all of them
        return self.weight * (wide * torch.rsqrt(squares / self._size + self._eps)).to(x.dtype)


class NormedLinear(ColumnLinear):
    """A column-parallel linear layer with a norm before it, like Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> Any:
        normed = rms_norm(x, self.layer_norm_weight, self.config)
        with recompute_selectively(self.config, normed, rms_norm, x, self.layer_norm_weight, self.config):
            return super().forward(normed)


class GatedLinear(RowLinear):
    """A row-parallel linear layer with SwiGLU or GEGLU before it. Its input is gate and up, concatenated."""

    def forward(self, x: torch.Tensor) -> Any:
        activation = fused.geglu if self.config.activation_func is F.gelu else fused.swiglu
        gated = activation(x)
        with recompute_selectively(self.config, gated, activation, x):
            return super().forward(gated)


class BiasedRowLinear(RowLinear):
    """A row-parallel linear layer that adds a bias."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.bias = torch.nn.Parameter(torch.zeros(output_size, dtype=config.params_dtype))
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> Any:
        output, bias = super().forward(x)
        return output + bias, None


class PostNormLinear(RowLinear):
    """A row-parallel linear layer with a norm after it."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_norm = torch.nn.Parameter(torch.ones(output_size, dtype=config.params_dtype))
        self.post_norm.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> Any:
        output, bias = super().forward(x)
        return rms_norm(output, self.post_norm, self.config), bias


class GatedPostNormLinear(PostNormLinear, GatedLinear):
    """SwiGLU or GEGLU, then a row-parallel linear layer, then a norm."""


class Layer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer. Its own forward pass serves features that we do not have, at the cost of the host's time."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, packed_seq_params: RowParameters, **__: Any) -> Any:
        normed = self.input_layernorm(hidden_states)
        attended, left = self.self_attention(normed, packed_seq_params=packed_seq_params)
        assert left is None  # our linear layers add their biases
        hidden_states = hidden_states + attended
        mixed, left = self.mlp(self.pre_mlp_layernorm(hidden_states))
        assert left is None
        return packed_seq_params.with_features(hidden_states + mixed, self.layer_number), None


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's attention, with everything between its two linear layers in two kernels."""

    def __init__(self, config: TransformerConfig, *arguments: Any, shape: ModelShape, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self._window = shape.window(self.layer_number - 1)
        self._query_scale = shape.query_scale
        self._norms_all_heads = shape.has_qk_norm_of_all_heads
        if self._norms_all_heads:
            self.q_layernorm = NormOfAllHeads(config, shape.num_heads * shape.head_size)
            self.k_layernorm = NormOfAllHeads(config, shape.num_key_value_heads * shape.head_size)
        self.sinks: torch.nn.Parameter | None = None
        if shape.has_sinks:
            self.sinks = torch.nn.Parameter(
                torch.zeros(self.num_attention_heads_per_partition, dtype=config.params_dtype)
            )

    def forward(self, hidden: torch.Tensor, *_: Any, packed_seq_params: RowParameters, **__: Any) -> Any:
        own = packed_seq_params.local_rotary if self._window else None
        rotary = own or packed_seq_params.rotary
        assert packed_seq_params.row is not None
        assert rotary is not None
        mixed, _bias = self.linear_qkv(hidden)
        mixed, gate = self._without_gate(mixed.flatten(0, 1))
        if self._norms_all_heads:
            mixed = self._normalize_all_heads(mixed)
        query, key, value = fused.heads(
            mixed,
            *rotary,
            self.q_layernorm.weight if self.config.qk_layernorm else None,
            self.k_layernorm.weight if self.config.qk_layernorm else None,
            self.num_query_groups_per_partition,
            self.config.kv_channels,
            self.config.layernorm_epsilon,
            self.config.rotary_interleaved,
            self.config.layernorm_zero_centered_gamma,
            self._query_scale,
        )
        how = packed_seq_params.row.attention
        if self.sinks is None:
            attended = attention(query, key, value, how, window=self._window).flatten(1)
        else:
            attended = attention_with_sinks(query, key, value, self.sinks, how, window=self._window).flatten(1)
        return self.linear_proj((attended if gate is None else attended * gate.sigmoid())[:, None])

    def _normalize_all_heads(self, mixed: torch.Tensor) -> torch.Tensor:
        """Normalise the queries of all heads together, and all keys, in [N, groups x (queries, key, value) x d]."""
        groups, size = self.num_query_groups_per_partition, self.config.kv_channels
        query, key, value = mixed.view(len(mixed), groups, -1).tensor_split([-2 * size, -size], dim=2)
        query = self.q_layernorm(query.flatten(1)).view_as(query)
        key = self.k_layernorm(key.flatten(1)).view_as(key)
        return torch.cat([query, key, value], dim=2).flatten(1)

    def _without_gate(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split the gates [N, heads x d] from each group's queries, gates, key and value; None if there are none."""
        if not self.config.attention_output_gate:
            return mixed, None
        groups = self.num_query_groups_per_partition
        size = self.num_attention_heads_per_partition // groups * self.config.kv_channels
        query, gate, rest = mixed.view(len(mixed), groups, -1).tensor_split([size, 2 * size], dim=2)
        return torch.cat([query, rest], dim=2).flatten(1), gate.flatten(1)
