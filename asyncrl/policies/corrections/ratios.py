"""Importance ratios of tokens, sequences and prefixes, from the token log ratios.

A "sequence ratio" here is the product of the token ratios, as in verl, TRL, SkyRL, slime and NeMo-RL. AReaL and
open-instruct use the term for the geometric mean, which is "geometric" here. The ratios have no gradient. Log ratios
are clamped before exp, so an infinite one becomes a large one and none makes a nan.
"""

from __future__ import annotations

from typing import Final

import torch

from asyncrl.policies.losses.ratios import MAX_LOG_RATIO
from asyncrl.policies.losses.segments import Array, as_floats, segment_mean, segment_sum, spread

_SUMMAND_LIMIT: Final = 1e4
"""Token log ratios are clamped to +- this before they are summed, because -inf + inf is nan."""


def ratio(log_ratio: Array) -> torch.Tensor:
    """Return exp of the clamped log ratio, in float32 or better.  f32[M] -> f32[M] in [e^-20, e^20]"""
    return as_floats(log_ratio).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(log_ratio: Array, *, sequence: Array, num_sequences: int) -> torch.Tensor:
    """Return the product of each sequence's token ratios; 1 for a sequence without tokens.  f32[M] -> f32[S]

    The clamp applies to the sum of log ratios, as in verl, not to the tokens.
    """
    total = segment_sum(summands(log_ratio), sequence, num_sequences=num_sequences)
    return ratio(total).to(as_floats(log_ratio).dtype)


def geometric_ratio(log_ratio: Array, *, sequence: Array, num_sequences: int) -> torch.Tensor:
    """Return the geometric mean of each sequence's token ratios; 1 for one without tokens.  f32[M] -> f32[S]"""
    mean = segment_mean(summands(log_ratio), sequence, num_sequences=num_sequences)
    return ratio(mean).to(as_floats(log_ratio).dtype)


def prefix_ratio(log_ratio: Array, *, sequence: Array, num_sequences: int) -> torch.Tensor:
    """Return the product of the ratios of a token and of all tokens before it in its sequence.  f32[M] -> f32[M]"""
    parts = summands(log_ratio)
    totals = segment_sum(parts, sequence, num_sequences=num_sequences)
    before_sequence = totals.cumsum(0) - totals
    return ratio(parts.cumsum(0) - spread(before_sequence, sequence)).to(as_floats(log_ratio).dtype)


def summands(log_ratio: Array) -> torch.Tensor:
    """Return log ratios as float64, clamped so that they can be summed.  f32[M] -> f64[M]"""
    return as_floats(log_ratio).detach().double().clamp(-_SUMMAND_LIMIT, _SUMMAND_LIMIT)
