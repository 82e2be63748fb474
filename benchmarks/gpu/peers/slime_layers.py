"""Megatron's local layers for slime's trainer, on packed rows: slime's --spec where Transformer Engine is missing.

    --spec benchmarks.gpu.peers.slime_layers layers --transformer-impl local

Linear layers and blocks are Megatron's; attention, norms and rotary embeddings are the kernels that asyncrl's learner
has. Parameters have the names of Transformer Engine's layers, which slime's conversion of weights knows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from asyncrl.backends.kernels import flash, fused


class Norm(torch.nn.Module):
    """RMSNorm with Megatron's constructor."""

    def __init__(self, *, config: Any, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused.rms_norm(x, self.weight, self.eps)


class NormedLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A linear layer with a norm before it."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        return super().forward(fused.rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon))


class PackedAttention(SelfAttention):  # type: ignore[misc]
    """Causal attention within each sequence of a packed row, [n, 1, H] -> [n, 1, H]."""

    def forward(self, hidden: torch.Tensor, *_: Any, packed_seq_params: PackedSeqParams, **__: Any) -> Any:
        mixed, _bias = self.linear_qkv(hidden)
        query, key, value = fused.heads(
            mixed.flatten(0, 1),
            *rotary(packed_seq_params, len(hidden), self.config),
            self.q_layernorm.weight,
            self.k_layernorm.weight,
            self.num_query_groups_per_partition,
            self.config.kv_channels,
            self.config.layernorm_epsilon,
        )
        attended = attention(query, key, value, packed_seq_params)
        return self.linear_proj(attended.flatten(1)[:, None])


def rotary(row: PackedSeqParams, length: int, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines f32[length, d / 2] of a row; they are made once for all layers."""
    found = getattr(row, "rotary", None)
    if found is None:
        starts = row.cu_seqlens_q.long()
        tokens = torch.arange(length, device=starts.device)
        positions = tokens - starts[torch.searchsorted(starts, tokens, right=True) - 1]
        even = torch.arange(0, config.kv_channels, 2, device=starts.device, dtype=torch.float32)
        found = row.rotary = fused.rotary(positions, config.rotary_base ** -(even / config.kv_channels))
    return found


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, row: PackedSeqParams) -> torch.Tensor:
    """query [n, heads, d], key and value [n, key-value heads, d] -> [n, heads, d]"""
    if query.is_cuda:
        runs = flash.Runs(
            query_boundaries=row.cu_seqlens_q,
            key_boundaries=row.cu_seqlens_kv,
            longest_query=row.max_seqlen_q,
            longest_key=row.max_seqlen_kv,
        )
        return flash.attention(query, key, value, runs)
    ends = row.cu_seqlens_q.tolist()
    attended = []
    for begin, end in zip(ends, ends[1:], strict=False):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        of_run = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended.append(of_run[0].transpose(0, 1))
    return torch.cat(attended)


def layers(args: Any, config: Any, vp_stage: int | None) -> TransformerBlockSubmodules:
    """What slime calls for --spec."""
    config.rotary_base = args.rotary_base
    attention_of_layer = ModuleSpec(
        module=PackedAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormedLinear,
            core_attention=IdentityOp,
            linear_proj=RowParallelLinear,
            q_layernorm=Norm,
            k_layernorm=Norm,
        ),
    )
    feed_forward = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=NormedLinear, linear_fc2=RowParallelLinear)
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention_of_layer,
            self_attn_bda=get_bias_dropout_add,
            mlp=feed_forward,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=Norm)
