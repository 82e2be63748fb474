"""Qwen3's mixtures of experts: Qwen3 with many small feed-forward parts and a softmax router."""

from __future__ import annotations

from typing import Any

from asyncrl.backends.families.family import DENSE_ONLY, Family, decoder_shape, softmax_experts
from asyncrl.backends.families.shape import ModelShape


def shape(config: Any) -> ModelShape:
    return decoder_shape(config, has_qk_norm=True, experts=softmax_experts(config))


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
    shape=shape,
    only=DENSE_ONLY,
)
