"""Qwen3-Next: most layers have linear attention, a gated DeltaNet; every fourth has attention with a gate.

A quarter of every head is rotated. Norms are zero-centred, except the one within the DeltaNet. Experts are chosen as in
Qwen3-MoE, and a shared expert has a gate.

Tensor-parallel ranks share the key heads of linear attention. Its state runs through the row, so context-parallel ranks
share those of a tensor-parallel rank, for the whole row each. On GPUs in 16 bits, kernels of the package flash-linear-
attention compute it, if that is installed and works (on Hopper with Triton 3.7.1 or newer). SGLang on a GPU samples as
it is trained (docs/results/gpu/sglang_families.jsonl); without a GPU it refuses linear attention, as the in-process
engine does.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from asyncrl.backends.families.family import (
    DENSE_ONLY,
    GLOBAL,
    Family,
    Unsupported,
    decoder_shape,
    layers_of,
    softmax_experts,
)
from asyncrl.backends.families.shape import Experts, LinearAttention, ModelShape


def shape(config: Any) -> ModelShape:
    return hybrid(config, softmax_experts(config, gated_size=config.shared_expert_intermediate_size))


def hybrid(config: Any, experts: Experts | None) -> ModelShape:
    """Return the shape of a decoder with both kinds of attention. Raises Unsupported."""
    linear = LinearAttention(
        layers=layers_of(config, "layer_types", kind="linear_attention", others=(GLOBAL,)),
        num_key_heads=config.linear_num_key_heads,
        num_value_heads=config.linear_num_value_heads,
        key_size=config.linear_key_head_dim,
        value_size=config.linear_value_head_dim,
        convolved=config.linear_conv_kernel_dim,
    )
    if linear.num_value_heads % linear.num_key_heads:
        raise Unsupported(
            f"linear_num_value_heads = {linear.num_value_heads}, no multiple of linear_num_key_heads = "
            f"{linear.num_key_heads}"
        )
    made = decoder_shape(config, has_qk_norm=True, is_partly_rotated=True, experts=experts)
    return dataclasses.replace(made, linear=linear, has_zero_centered_norms=True, has_output_gate=True)


FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    models="Qwen3-Next-80B-A3B",
    shape=shape,
    only={**DENSE_ONLY, "output_gate_type": (None, "silu")},
)
