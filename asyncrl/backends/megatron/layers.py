"""Megatron-Core's layers with our kernels between their matrix products: norms, SwiGLU, attention on packed rows.

Linear layers and blocks are Megatron's; the rest comes from kernels/fused.py and packed_attention.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.kernels import fused
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.mixture import mixture
from asyncrl.backends.megatron.packed_attention import attention
from asyncrl.backends.megatron.recompute import forgetting
from asyncrl.backends.micro_batches import PackedRow

with quiet(), cpu_shim.without_compilation():
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules


@dataclass
class RowParameters(PackedSeqParams):  # type: ignore[misc]
    """Carries attention's inputs through Megatron's layers, which treat the row as one dense sequence (sbhd)."""

    row: PackedRow | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None


class Norm(torch.nn.Module):
    """RMSNorm with Megatron's constructor."""

    def __init__(self, *, config: TransformerConfig, hidden_size: int, eps: float, **_unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fused.rms_norm(x, self.weight, self.eps)


class NormedLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A column-parallel linear layer preceded by its norm, like Transformer Engine's."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        normed = fused.rms_norm(x, self.layer_norm_weight, self.config.layernorm_epsilon)
        with forgetting(self.config, normed, fused.rms_norm, x, self.layer_norm_weight, self.config.layernorm_epsilon):
            return super().forward(normed, *arguments, **options)


class GatedLinear(RowParallelLinear):  # type: ignore[misc]
    """A row-parallel linear layer preceded by SwiGLU; its input is gate and up, concatenated."""

    def forward(self, x: torch.Tensor) -> Any:
        gated = fused.swiglu(x)
        with forgetting(self.config, gated, fused.swiglu, x):
            return super().forward(gated)


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Megatron's attention, with everything between its two linear layers in two kernels."""

    def forward(self, hidden: torch.Tensor, *_: Any, packed_seq_params: RowParameters, **__: Any) -> Any:
        assert packed_seq_params.row is not None
        assert packed_seq_params.rotary is not None
        mixed, _bias = self.linear_qkv(hidden)
        query, key, value = fused.heads(
            mixed.flatten(0, 1),
            *packed_seq_params.rotary,
            self.q_layernorm.weight if self.config.qk_layernorm else None,
            self.k_layernorm.weight if self.config.qk_layernorm else None,
            self.num_query_groups_per_partition,
            self.config.layernorm_epsilon,
        )
        attended = attention(query, key, value, packed_seq_params.row)
        return self.linear_proj(attended.flatten(1)[:, None])


def _add(_training: bool, _fused: bool) -> Any:
    """Megatron's bias_dropout_add without bias and dropout."""
    return lambda output_and_bias, residual, _probability: output_and_bias[0] + residual


def layers(config: TransformerConfig, shape: ModelShape) -> TransformerBlockSubmodules:
    """Layer specification: Megatron's parallel linears with our kernels.

    Transformer Engine's layers would need another function like this one (its modules take cu_seqlens instead of a
    PackedRow, and it fuses norms into linears under the same parameter names); untested, so not offered.
    """
    attention_spec = ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormedLinear,
            core_attention=IdentityOp,
            linear_proj=RowParallelLinear,
            q_layernorm=Norm if config.qk_layernorm else None,
            k_layernorm=Norm if config.qk_layernorm else None,
        ),
    )
    common = {"self_attention": attention_spec, "self_attn_bda": _add, "mlp_bda": _add}
    dense = TransformerLayerSubmodules(**common, mlp=_feed_forward())
    sparse = TransformerLayerSubmodules(**common, pre_mlp_layernorm=Norm, mlp=mixture())
    kinds = [sparse if shape.has_experts(layer) else dense for layer in range(shape.num_layers)]
    specs = [ModuleSpec(module=TransformerLayer, submodules=kind) for kind in kinds]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def _feed_forward() -> Any:
    """The activation is the identity because GatedLinear applies it; this is the only way to override Megatron's."""
    mlp = MLPSubmodules(linear_fc1=NormedLinear, linear_fc2=GatedLinear, activation_func=IdentityOp)
    of_mlp = getattr(MLP, "as_mlp_submodule", None)  # megatron-core before 0.17 has specs instead of builders
    return partial(of_mlp, submodules=mlp) if of_mlp else ModuleSpec(module=MLP, submodules=mlp)
