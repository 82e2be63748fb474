"""Lists the parameters of a model, or of the part that one rank holds, with the Hugging Face tensors they consist of.

The family defines the parameters of a layer (families/). Megatron numbers the layers of a pipeline stage and the
experts of a rank from 0; Hugging Face numbers them by their place in the whole model.
Test: test_weights_survive_being_cut_into_shards.
"""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.backends.families.layer_weights import Cut, Row
from asyncrl.backends.families.shape import ModelShape
from asyncrl.backends.families.table import FAMILIES
from asyncrl.backends.models import Head

_EMBEDDING = "embed_tokens.weight"
_OUTPUT = "output_layer.weight"
_VISION = "vision."


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """One Megatron parameter, how it is split, and the Hugging Face tensors it is made of."""

    megatron: str
    cut: Cut
    huggingface: tuple[str, ...]

    @property
    def is_of_experts(self) -> bool:
        """Whether expert-parallel ranks hold different parts of the parameter."""
        return self.cut.startswith("expert_")

    @property
    def is_fused(self) -> bool:
        """Whether each of its Hugging Face tensors holds all experts of the layer, also those of other ranks."""
        return self.cut.startswith("expert_fused")

    @property
    def is_replicated(self) -> bool:
        """Whether all tensor-parallel ranks hold the same values."""
        return self.cut in ("whole", "stacked")

    @property
    def is_adapter(self) -> bool:
        """Whether the parameter belongs to an adapter, which is in no model folder."""
        return self.megatron.endswith(("_adapter.down", "_adapter.up"))

    @property
    def is_copy_of_embedding(self) -> bool:
        """Whether the parameter is the output layer of tied embeddings, on another stage than the embedding."""
        return self.megatron == _OUTPUT and self.huggingface[0].endswith(_EMBEDDING)

    @property
    def is_of_vision(self) -> bool:
        """Whether the parameter belongs to the vision tower."""
        return self.megatron.startswith(_VISION)

    @property
    def is_router_bias(self) -> bool:
        """Whether this is a router's bias: a buffer in Megatron, float32 in every model, and not trained."""
        return self.megatron.endswith(".expert_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of a model that a rank holds: layers and experts by their place in the whole model."""

    layers: range
    experts: range
    has_embedding: bool = True
    has_output: bool = True
    num_draft_layers: int = 0
    """Multi-token-prediction layers that are trained (megatron/draft_layer.py)."""

    @classmethod
    def whole(cls, shape: ModelShape) -> Part:
        experts = shape.experts.num_experts if shape.experts else 0
        return cls(layers=range(shape.num_layers), experts=range(experts))


def weight_map(shape: ModelShape, *, head: Head = "logprobs", part: Part | None = None) -> list[Mapping]:
    """Map every parameter of ``part`` (None: the whole model) except a value head, which is in no model folder."""
    part = part or Part.whole(shape)
    family = shape.family or FAMILIES[shape.architecture]
    layer_weights, draft_weights = family.layer, family.draft_layer
    embedding = shape.prefix + _EMBEDDING
    maps = [_mapping("", "", _row("embedding.word_embeddings.weight", embedding))] if part.has_embedding else []
    if shape.vision and part.has_embedding:
        maps += [_mapping(_VISION, shape.vision.prefix, (name, "whole", (name,))) for name in shape.vision.weights]
    for ours, theirs in enumerate(part.layers):
        rows = layer_weights(shape, theirs, part.experts)
        maps += [_mapping(f"decoder.layers.{ours}.", f"{shape.prefix}layers.{theirs}.", row) for row in rows]
    for ours in range(part.num_draft_layers):
        assert draft_weights is not None, "refused before"
        theirs = shape.num_layers + ours
        rows = draft_weights(shape, theirs, part.experts)
        maps += [_mapping(f"draft_layers.{ours}.", f"{shape.prefix}layers.{theirs}.", row) for row in rows]
    if part.has_output:
        maps.append(_mapping("", shape.prefix, ("decoder.final_layernorm.weight", "whole", ("norm.weight",))))
        if head == "logprobs" and not shape.is_tied:
            maps.append(_mapping("", "", _row(_OUTPUT, "lm_head.weight")))
        elif head == "logprobs" and not part.has_embedding:  # a copy: its gradients are added to the embedding's
            maps.append(_mapping("", "", _row(_OUTPUT, embedding)))
    return maps


def _row(megatron: str, huggingface: str) -> Row:
    return (megatron, "vocabulary", (huggingface,))


def _mapping(ours: str, theirs: str, row: Row) -> Mapping:
    name, cut, tensors = row
    return Mapping(megatron=ours + name, cut=cut, huggingface=tuple(theirs + tensor for tensor in tensors))
