"""Maps Hugging Face tensors to the parameters of a layer, and tells how Megatron splits these over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from asyncrl.backends.families.shape import Experts, LatentAttention, ModelShape

Cut = Literal[
    "whole",
    "vocabulary",
    "rows",
    "heads",
    "qkv",
    "gated_qkv",
    "delta_heads",
    "delta_parts",
    "delta_kernels",
    "gate_up",
    "gate_then_up",
    "expert_rows",
    "expert_gate_up",
    "expert_fused",
    "expert_fused_rows",
    "expert_fused_gate_up",
    "stacked",
    "stacked_rows",
    "expert_stacked",
]
"""How a parameter is split over tensor-parallel ranks (experts: over expert-tensor-parallel ranks).

whole           replicated
vocabulary      by rows, with the vocabulary padded to a multiple of the ranks
rows            by columns (Megatron's row-parallel)
heads           by rows, which are grouped by head
qkv             by key-value groups; each group is its queries, its key, its value
gated_qkv       like qkv, with the gates of a group's queries behind them; in files a gate is behind its own query
delta_heads     by key heads of linear attention, from two tensors that are grouped by key head
delta_parts     the same, from four: of all queries, all keys, all values; gates; steps; rates
delta_kernels   the same, from one tensor that holds those of all queries, all keys, all values
gate_up         gate and up by rows; a shard is its gate rows, then its up rows
gate_then_up    like gate_up, from one tensor that holds gate, then up
expert_rows     rows of every expert, stacked: [experts, H, F]
expert_gate_up  gate_up of every expert, stacked: [experts, 2 F, H]; its tensors are gate, up, gate, up, ...
expert_fused          gate_up or rows of every expert, as one tensor of all experts has it: [all experts, 2 F, H], gate
                      first, or [all experts, H, F]
expert_fused_rows     expert_rows, or biases [experts, H], from one tensor of all experts: [all experts, F, H]
expert_fused_gate_up  expert_gate_up, or biases [experts, 2 F], from one tensor of all experts: [all experts, H, 2 F],
                      where gate and up alternate in the last dimension
stacked         adapter tensors of one shape, stacked; replicated
stacked_rows    the same, split by their last dimension
expert_stacked  the same for every expert
"""

Row = tuple[str, Cut, tuple[str, ...]]
"""A parameter, its cut, and the Hugging Face tensors it is made of. Names are relative to the layer."""


LayerWeights = Callable[[ModelShape, int, range], Iterator[Row]]
"""Yields every parameter of a layer, by number, on a rank that holds a range of its experts."""


def decoder_layer(shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
    """Yield the parameters of a layer under the names that most families use."""
    if shape.has_linear_attention(layer):
        yield from linear_attention()
    else:
        yield from latent_attention(shape.latent, layer) if shape.latent else attention(shape)
    if shape.experts and shape.has_experts(layer):
        yield ("pre_mlp_layernorm.weight", "whole", ("post_attention_layernorm.weight",))
        yield from mixture(shape.experts, experts)
    else:
        yield ("mlp.linear_fc1.layer_norm_weight", "whole", ("post_attention_layernorm.weight",))
        yield from feed_forward("mlp")


def draft_layer(shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
    """Yield the parameters of a multi-token-prediction layer, as DeepSeek-V3 and GLM-4.5 name them.

    Its copies of the embedding and of the output layer are the model's own, and engines take those.
    """
    for name, theirs in (
        ("enorm", "enorm"),
        ("hnorm", "hnorm"),
        ("eh_proj", "eh_proj"),
        ("final_layernorm", "shared_head.norm"),
    ):
        yield (f"{name}.weight", "whole", (f"{theirs}.weight",))
    for name, cut, tensors in decoder_layer(shape, layer, experts):
        yield (f"layer.{name}", cut, tensors)


def attention(shape: ModelShape) -> Iterator[Row]:
    yield ("self_attention.linear_qkv.layer_norm_weight", "whole", ("input_layernorm.weight",))
    qkv: Cut = "gated_qkv" if shape.has_output_gate else "qkv"
    yield ("self_attention.linear_qkv.weight", qkv, tuple(f"self_attn.{x}_proj.weight" for x in "qkv"))
    yield ("self_attention.linear_proj.weight", "rows", ("self_attn.o_proj.weight",))
    if shape.has_qkv_bias:
        yield ("self_attention.linear_qkv.bias", qkv, tuple(f"self_attn.{x}_proj.bias" for x in "qkv"))
    if shape.has_qk_norm:
        yield ("self_attention.q_layernorm.weight", "whole", ("self_attn.q_norm.weight",))
        yield ("self_attention.k_layernorm.weight", "whole", ("self_attn.k_norm.weight",))
    if shape.has_qk_norm_of_all_heads:
        yield ("self_attention.q_layernorm.weight", "heads", ("self_attn.q_norm.weight",))
        yield ("self_attention.k_layernorm.weight", "heads", ("self_attn.k_norm.weight",))


def latent_attention(latent: LatentAttention, layer: int) -> Iterator[Row]:
    yield ("input_layernorm.weight", "whole", ("input_layernorm.weight",))
    if latent.query_rank:
        yield ("self_attention.query_down.weight", "whole", ("self_attn.q_a_proj.weight",))
        yield ("self_attention.query_norm.weight", "whole", ("self_attn.q_a_layernorm.weight",))
        yield ("self_attention.query_up.weight", "heads", ("self_attn.q_b_proj.weight",))
    else:
        yield ("self_attention.query_up.weight", "heads", ("self_attn.q_proj.weight",))
    yield ("self_attention.key_value_down.weight", "whole", ("self_attn.kv_a_proj_with_mqa.weight",))
    yield ("self_attention.key_value_norm.weight", "whole", ("self_attn.kv_a_layernorm.weight",))
    yield ("self_attention.key_value_up.weight", "heads", ("self_attn.kv_b_proj.weight",))
    yield ("self_attention.linear_proj.weight", "rows", ("self_attn.o_proj.weight",))
    if latent.indexer and layer in latent.indexer.layers:
        for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
            yield (f"self_attention.indexer.{name}", "whole", (f"self_attn.indexer.{name}",))


def linear_attention() -> Iterator[Row]:
    """Yield the weights of a gated DeltaNet. Its two input projections are one parameter."""
    ours, inputs = "self_attention.heads_in", ("linear_attn.in_proj_qkvz.weight", "linear_attn.in_proj_ba.weight")
    yield (f"{ours}.layer_norm_weight", "whole", ("input_layernorm.weight",))
    yield (f"{ours}.weight", "delta_heads", inputs)
    yield ("self_attention.kernels", "delta_kernels", ("linear_attn.conv1d.weight",))
    yield ("self_attention.log_rates", "heads", ("linear_attn.A_log",))
    yield ("self_attention.rate_bias", "heads", ("linear_attn.dt_bias",))
    yield ("self_attention.norm", "whole", ("linear_attn.norm.weight",))
    yield ("self_attention.linear_proj.weight", "rows", ("linear_attn.out_proj.weight",))


def feed_forward(name: str, *, theirs: str = "") -> Iterator[Row]:
    """Yield the weights of a SwiGLU.  theirs: its Hugging Face name, if that is not ``name``"""
    theirs = theirs or name
    yield (f"{name}.linear_fc1.weight", "gate_up", (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"))
    yield (f"{name}.linear_fc2.weight", "rows", (f"{theirs}.down_proj.weight",))


def mixture(experts: Experts, held: range) -> Iterator[Row]:
    """Yield the router and the rank's experts, which form two parameters. The router's bias is a Megatron buffer."""
    yield ("mlp.router.weight", "whole", ("mlp.gate.weight",))
    if experts.has_bias:
        yield ("mlp.router.expert_bias", "whole", ("mlp.gate.e_score_correction_bias",))
    if experts.has_shared_gate:
        yield ("mlp.shared_experts.gate_weight", "whole", ("mlp.shared_expert_gate.weight",))
        yield from feed_forward("mlp.shared_experts", theirs="mlp.shared_expert")
    elif experts.shared_size:
        yield from feed_forward("mlp.shared_experts")
    gate_up = tuple(f"mlp.experts.{expert}.{x}_proj.weight" for expert in held for x in ("gate", "up"))
    yield ("mlp.experts.gate_up", "expert_gate_up", gate_up)
    yield ("mlp.experts.down", "expert_rows", tuple(f"mlp.experts.{e}.down_proj.weight" for e in held))
