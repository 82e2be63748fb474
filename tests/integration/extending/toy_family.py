"""A family of one's own: Arcee, which asyncrl does not know. Its feed-forward part is transformers' own module."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape
from asyncrl.backends.families.layer_weights import Row, attention
from asyncrl.backends.families.shape import ModelShape


def specification(config: Any, shape: ModelShape) -> Any:
    """Return asyncrl's layers with another feed-forward part."""
    from megatron.core.transformer.spec_utils import ModuleSpec

    from asyncrl.backends.megatron.layers import Norm
    from asyncrl.backends.megatron.model import layer_specification

    made = layer_specification(config, shape)
    for number, layer in enumerate(made.layer_specs):
        own = dataclasses.replace(layer.submodules, pre_mlp_layernorm=Norm, mlp=SquaredReLU)
        made.layer_specs[number] = ModuleSpec(module=layer.module, submodules=own)
    return made


class SquaredReLU(torch.nn.Module):
    """down(relu(up(x))^2), on one rank."""

    def __init__(self, config: Any, **_: Any) -> None:
        from transformers import ArceeConfig
        from transformers.models.arcee.modeling_arcee import ArceeMLP

        super().__init__()
        sizes = {"hidden_size": config.hidden_size, "intermediate_size": config.ffn_hidden_size}
        self.module = ArceeMLP(ArceeConfig(**sizes, num_attention_heads=1, hidden_act="relu2"))

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.module(hidden), None


def layer(shape: ModelShape, number: int, experts: range) -> Iterator[Row]:
    """Name the weights: Megatron's, how ranks cut them, and those of the Hugging Face folder."""
    yield from attention(shape)
    yield ("pre_mlp_layernorm.weight", "whole", ("post_attention_layernorm.weight",))
    yield ("mlp.module.up_proj.weight", "whole", ("mlp.up_proj.weight",))
    yield ("mlp.module.down_proj.weight", "whole", ("mlp.down_proj.weight",))


FAMILY = Family(
    architecture="ArceeForCausalLM",
    models="AFM-4.5B",
    shape=decoder_shape,
    only={**DENSE_ONLY, "hidden_act": ("relu2",)},
    layer=layer,
    specification=specification,
)
