"""Qwen3.5 (text, dense): Qwen3-Next without experts. In files, linear attention has four input projections.

Published models are a Qwen3_5ForConditionalGeneration, which trains as it is (below). `asyncrl import-model` writes
the text part alone, without the tower's memory; SGLang serves that from 0.5.23 on (not run yet), and 0.5.16 does not.
config.json has the rotary positions of images, too; those of text are the plain ones. What Qwen3-Next's page says of
layouts and kernels holds here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from asyncrl.backends.families.family import DENSE_ONLY, Family
from asyncrl.backends.families.layer_weights import Row, decoder_layer
from asyncrl.backends.families.qwen3_next import hybrid
from asyncrl.backends.families.shape import ModelShape

_INPUTS: Final = tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))


def shape(config: Any) -> ModelShape:
    return hybrid(config, None)


def layer(shape: ModelShape, layer: int, experts: range) -> Iterator[Row]:
    for row in decoder_layer(shape, layer, experts):
        yield (row[0], "delta_parts", _INPUTS) if row[1] == "delta_heads" else row


FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    models="Qwen3.5 0.8B to 27B (text)",
    shape=shape,
    only={**DENSE_ONLY, "output_gate_type": (None, "silu")},
    layer=layer,
)
