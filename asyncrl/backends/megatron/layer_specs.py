"""The layers of a model: Megatron's layer specification with our modules."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.megatron import cpu_shim
from asyncrl.backends.megatron.adapters import ColumnLinear, RowLinear
from asyncrl.backends.megatron.latent_attention import PackedLatentAttention
from asyncrl.backends.megatron.layers import (
    BiasedRowLinear,
    GatedLinear,
    GatedLinearNormBehind,
    Layer,
    Norm,
    NormBehind,
    NormedLinear,
    PackedSelfAttention,
)
from asyncrl.backends.megatron.linear_attention import GatedDeltaNet
from asyncrl.backends.megatron.log_filter import quiet
from asyncrl.backends.megatron.mixture import BiasedExperts, BiasedRouter, mixture
from asyncrl.backends.megatron.routing import SparseLayer

with quiet(), cpu_shim.without_compilation():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules


def layers(config: TransformerConfig, shape: ModelShape) -> TransformerBlockSubmodules:
    """Return the layer specification: Megatron's parallel linears with our kernels.

    Transformer Engine's layers would need another function like this one: its modules take cu_seqlens instead of a
    PackedRow, and it fuses norms into linears under the same parameter names. This is untested, so it is not offered.
    """
    if shape.latent:
        spec = ModuleSpec(module=PackedLatentAttention, params={"latent": shape.latent})
        common = {"input_layernorm": Norm, "self_attention": spec}
    else:
        common = {"self_attention": _attention(config, shape)}
    dense = TransformerLayerSubmodules(
        **common, mlp=_feed_forward(GatedLinearNormBehind if shape.has_norms_behind else GatedLinear)
    )
    sparse = TransformerLayerSubmodules(**common, pre_mlp_layernorm=Norm, mlp=_mixture(shape))
    with_experts = ModuleSpec(module=SparseLayer, submodules=sparse)
    without = ModuleSpec(module=Layer, submodules=dense)
    specs = [with_experts if shape.has_experts(layer) else without for layer in range(shape.num_layers)]
    if shape.linear:
        linear = ModuleSpec(module=GatedDeltaNet, params={"linear": shape.linear})
        specs = [_mixed_by(linear, spec) if layer in shape.linear.layers else spec for layer, spec in enumerate(specs)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm)


def _mixed_by(attention: ModuleSpec, layer: ModuleSpec) -> ModuleSpec:
    """Return the specification of a layer with another attention."""
    return ModuleSpec(module=layer.module, submodules=dataclasses.replace(layer.submodules, self_attention=attention))


def _attention(config: TransformerConfig, shape: ModelShape) -> ModuleSpec:
    """Return attention whose first linear layer includes the norm before it."""
    return ModuleSpec(
        module=PackedSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "shape": shape},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormedLinear,
            core_attention=IdentityOp,
            linear_proj=_last_of_attention(shape),
            q_layernorm=Norm if config.qk_layernorm else None,
            k_layernorm=Norm if config.qk_layernorm else None,
        ),
    )


def _mixture(shape: ModelShape) -> ModuleSpec:
    shared = _swiglu(ColumnLinear, GatedLinear)
    if shape.experts and shape.experts.are_biased:
        return mixture(shared, router=BiasedRouter, experts=BiasedExperts)
    return mixture(shared)


def _last_of_attention(shape: ModelShape) -> type[RowLinear]:
    if shape.has_norms_behind:
        return NormBehind
    return BiasedRowLinear if shape.has_output_bias else RowLinear


def _feed_forward(last: type) -> Any:
    mlp = _swiglu(NormedLinear, last)
    of_mlp = getattr(MLP, "as_mlp_submodule", None)  # megatron-core before 0.17 has specs instead of builders
    return partial(of_mlp, submodules=mlp) if of_mlp else ModuleSpec(module=MLP, submodules=mlp)


def _swiglu(first: type, last: type) -> MLPSubmodules:
    """Return an MLP whose activation is the identity, because GatedLinear applies the activation.

    Megatron's activation can only be overridden in this way.
    """
    return MLPSubmodules(linear_fc1=first, linear_fc2=last, activation_func=IdentityOp)
