"""What a decoder is made of, whatever family it is from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The feed-forward part of sparse layers: a router sends each token to a few of many experts, SwiGLUs all.

    feed_forward_size  of one expert
    shared_size        of the expert that every token visits besides; 0: none
    scores             of the experts for a token: softmax over all of them, or a sigmoid of each
    is_normalized      the chosen scores are divided by their sum
    scale              and multiplied by this
    has_bias           a bias takes part in the choice, not in the score (arXiv:2408.15664)
    num_groups, groups_per_token  experts are chosen from the best groups; 1: no groups
    dense_layers       layers with a plain feed-forward part instead
    """

    num_experts: int
    experts_per_token: int
    feed_forward_size: int
    is_normalized: bool
    shared_size: int = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    has_bias: bool = False
    num_groups: int = 1
    groups_per_token: int = 1
    dense_layers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (arXiv:2405.04434): keys and values of all heads come from a few numbers per token.

    query_rank      numbers that queries come from; 0: the hidden state itself
    key_value_rank  numbers that keys and values come from
    plain_size, rotary_size  parts of a head's query and key, of which the second is rotated; its key is all heads'
    value_size      of a head
    score_scale     the scores are multiplied by this / sqrt(plain_size + rotary_size); YaRN has one
    """

    query_rank: int
    key_value_rank: int
    plain_size: int
    rotary_size: int
    value_size: int
    score_scale: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalAttention:
    """Attention of some ``layers`` reaches back only so far (arXiv:2004.05150).

    window            tokens that a query sees, itself and those before it
    rope_frequencies  of these layers, as ModelShape's
    """

    layers: frozenset[int]
    window: int
    rope_frequencies: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """config.json of a decoder with rotary positions and a gated feed-forward part."""

    architecture: str
    num_layers: int
    hidden_size: int
    feed_forward_size: int
    """Of layers without experts."""
    num_heads: int
    num_key_value_heads: int
    head_size: int
    vocabulary_size: int
    norm_eps: float
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool
    dtype: torch.dtype
    rope_frequencies: torch.Tensor
    """f32[size / 2]: radians per position, of the first ``size`` numbers of a head."""
    rope_scale: float = 1.0
    """Cosines and sines are multiplied by it: YaRN's."""
    is_interleaved: bool = False
    """Pairs that are rotated are (2 i, 2 i + 1), not (i, i + size / 2)."""
    has_norms_behind: bool = False
    """Attention and feed-forward part have a norm behind them, too."""
    has_zero_centered_norms: bool = False
    """Norms multiply by 1 + weight."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Of the gate."""
    embedding_scale: float = 1.0
    """Embeddings are multiplied by it."""
    query_scale: float = 1.0
    """Scores are multiplied by this / sqrt(head_size); latent attention has its own."""
    local: LocalAttention | None = None
    experts: Experts | None = None
    latent: LatentAttention | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward part of ``layer`` is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def window(self, layer: int) -> int:
        """Tokens that a query of ``layer`` sees at most; 0: all before it."""
        return self.local.window if self.local and layer in self.local.layers else 0
