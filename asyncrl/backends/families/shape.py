"""The shape of a decoder, independent of its family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The feed-forward part of sparse layers: a router sends each token to a few of many experts, all SwiGLUs.

    feed_forward_size  intermediate size of one expert
    shared_size        intermediate size of the shared expert that also sees every token; 0 if there is none
    has_shared_gate    whether a sigmoid of one number per token scales the shared expert's output
    scores             scores of the experts for a token: a softmax over all experts, or a sigmoid of each
    is_normalized      whether the chosen scores are divided by their sum
    scale              factor for the chosen scores, applied last
    has_bias           whether a bias is added for the choice but not for the score (arXiv:2408.15664)
    are_biased         whether the router's product and the experts' have biases, and experts a clamped gate, as gpt-oss
    num_groups, groups_per_token  experts are chosen from the best groups; 1: no groups
    dense_layers       layers that have a plain feed-forward part instead
    """

    num_experts: int
    experts_per_token: int
    feed_forward_size: int
    is_normalized: bool
    shared_size: int = 0
    has_shared_gate: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    has_bias: bool = False
    are_biased: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """What chooses the tokens that a query of latent attention sees (arXiv:2512.02556).

    Its weights have no gradients and stay as they are. A sequence of at most ``chosen`` tokens sees all of them.

    layers          layers with an indexer of their own; the others use the choice of the last one before them
    num_heads       heads of the indexer
    size            size of such a head
    chosen          tokens that a query sees at most
    is_interleaved  whether rotation pairs (2 i, 2 i + 1) of a head's first numbers instead of (i, i + rotary_size / 2)
    """

    layers: frozenset[int]
    num_heads: int
    size: int
    chosen: int
    is_interleaved: bool = False

    def source(self, layer: int) -> int:
        """Return the layer whose choice ``layer`` uses."""
        return max(one for one in self.layers if one <= layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434): keys and values of all heads come from a few numbers per token.

    query_rank      latent size of queries; 0 if queries come from the hidden state itself
    key_value_rank  latent size of keys and values
    plain_size, rotary_size  parts of a head's query and key; the second is rotated, and its key is shared by all heads
    value_size      size of a head's value
    score_scale     scores are multiplied by this / sqrt(plain_size + rotary_size); differs from 1 with YaRN
    indexer         None if a query sees all tokens before it
    """

    query_rank: int
    key_value_rank: int
    plain_size: int
    rotary_size: int
    value_size: int
    score_scale: float = 1.0
    indexer: Indexer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAttention:
    """Sliding-window attention in some ``layers`` (arXiv:2004.05150).

    window            tokens that a query sees: itself and those before it
    rope_frequencies  frequencies of these layers, which have no scale; None: frequencies and scale of the other layers
    """

    layers: frozenset[int]
    window: int
    rope_frequencies: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Gated DeltaNet in some ``layers`` (arXiv:2412.06464): a head has a state of fixed size instead of past keys.

    num_key_heads, num_value_heads  the values of several heads may share a query and a key
    key_size, value_size            sizes of a head's key and value
    convolved                       tokens that a convolution over queries, keys and values sees
    """

    layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    convolved: int

    @property
    def values_per_key(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def convolved_sizes(self) -> tuple[int, int, int]:
        """Sizes of a key head's query, key and values, which are convolved."""
        return self.key_size, self.key_size, self.values_per_key * self.value_size


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTower:
    """The vision tower in front of a decoder: transformers' own module, whose outputs replace placeholder tokens.

    module            its class in transformers, "package.module:Class"
    config            vision_config of config.json, from which it is built
    weights           names of its weights in the module
    prefix            what they begin with in files
    patch_size        numbers of a patch: channels x time x height x width
    merged            patches that become one token
    num_layer_features  first layers that each add features of their own to these tokens (DeepStack, arXiv:2406.04334)
    patch_products, token_products  parameters that are multiplied with each patch, and with each token
    size              of a patch's hidden state
    num_whole, num_windowed  layers in which a patch sees all of its image, and at most ``window`` patches
    """

    module: str
    config: Any
    weights: tuple[str, ...]
    prefix: str
    patch_size: int
    merged: int
    patch_products: int
    token_products: int
    size: int
    num_whole: int
    num_windowed: int = 0
    window: int = 0
    num_layer_features: int = 0


class MadeBy(Protocol):
    """What a shape knows of its family (family.py)."""

    @property
    def layer(self) -> Callable[..., Any]: ...

    @property
    def specification(self) -> Callable[[Any, ModelShape], Any] | None: ...

    @property
    def draft_layer(self) -> Callable[..., Any] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """config.json of a decoder with rotary positions and a gated feed-forward part."""

    architecture: str
    num_layers: int
    hidden_size: int
    feed_forward_size: int
    """Intermediate size of layers without experts."""
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary_size: int
    norm_eps: float
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    rope_frequencies: torch.Tensor
    """f32[size / 2]: radians per position, for the first ``size`` numbers of a head."""
    rope_scale: float = 1.0
    """Factor for cosines and sines; YaRN sets it."""
    is_interleaved: bool = False
    """Whether rotation pairs (2 i, 2 i + 1) instead of (i, i + size / 2)."""
    has_qk_norm_of_all_heads: bool = False
    """Whether the queries of all heads have one norm, and all keys another, instead of one for each head."""
    has_post_norms: bool = False
    """Whether attention and feed-forward part also have a norm after them."""
    has_zero_centered_norms: bool = False
    """Whether norms multiply by 1 + weight."""
    has_output_gate: bool = False
    """Whether a sigmoid scales what attention returns. The gate is part of the query projection."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the gate."""
    embedding_scale: float = 1.0
    """Factor for embeddings. The model rounds it to the dtype of its weights, as transformers does."""
    has_output_bias: bool = False
    """Whether attention's last linear layer has a bias."""
    has_sinks: bool = False
    """Whether every head has one learned score without a value, besides those of the keys (arXiv:2309.17453)."""
    query_scale: float = 1.0
    """Scores are multiplied by this / sqrt(head_size). Latent attention has its own scale."""
    local: LocalAttention | None = None
    linear: LinearAttention | None = None
    experts: Experts | None = None
    latent: LatentAttention | None = None
    vision: VisionTower | None = None
    rope_axes: torch.Tensor | None = None
    """i64[size / 2]: which of a token's positions (0 time, 1 height, 2 width) turns each frequency (M-RoPE,
    arXiv:2409.12191); None: tokens have one position."""
    prefix: str = "model."
    """What the decoder's tensors begin with in the folder's files, those of the output layer excepted."""
    num_draft_layers: int = 0
    """Multi-token-prediction layers in the folder, after the others (learner.options.draft_coefficient)."""
    family: MadeBy | None = None
    """The family that made the shape; set by read_shape."""

    def has_experts(self, layer: int) -> bool:
        """Return whether the feed-forward part of ``layer`` is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def has_linear_attention(self, layer: int) -> bool:
        return self.linear is not None and layer in self.linear.layers

    @property
    def why_no_shared_prefixes(self) -> str:
        """What in the model needs every sequence of a row whole; empty if it may compute shared tokens once."""
        if self.linear:
            return "linear attention, whose state runs through a whole sequence"
        if self.family and self.family.specification:
            return "layers of its own (model.family), which may look at whole sequences"
        return ""

    def window(self, layer: int) -> int:
        """Return how many tokens a query of ``layer`` sees at most; 0 if it sees all tokens before it."""
        return self.local.window if self.local and layer in self.local.layers else 0
