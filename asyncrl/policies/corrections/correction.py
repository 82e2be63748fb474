"""Base of the off-policy corrections: the factor of a token that another policy than the learner's sampled.

A correction is a *weight* (a bounded importance ratio) or a *mask* (1 keeps, 0 rejects); chains.py multiplies them.
``log_ratio`` f32[M] is proximal - behavior logprobs: the learner's weights at the start of the step, in the learner's
numerics, relative to the policy that sampled the token. It covers both staleness and engine mismatch, even if the
tokens of a sequence come from several versions. Shapes as in losses/segments.py: M tokens of S sequences.

A "sequence ratio" is the product of the token ratios, as in verl, TRL, SkyRL, slime and NeMo-RL. AReaL and
open-instruct use the term for the geometric mean, which is "geometric" here. The ratios have no gradient. Log ratios
are clamped before exp, so an infinite one becomes a large one and none makes a nan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Final, Literal

import torch

from asyncrl.policies.component import Cap, Component, Floor
from asyncrl.policies.losses.ratios import MAX_LOG_RATIO
from asyncrl.policies.losses.segments import Array, as_floats, segment_mean, segment_sum, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionInputs:
    """The inputs of a correction: M tokens of S sequences.

    log_ratio      f32[M]  proximal - behavior logprobs
    sequence       i64[M]  index of the token's sequence
    num_sequences  S
    advantages     f32[M]
    behavior_logprobs  f32[M], for masks that look at probabilities
    mean_weight    mean weight of the whole batch, only for self_norm; 1.0 if the caller divides the summed gradients
                   by it
    """

    log_ratio: Array
    sequence: Array
    num_sequences: int
    advantages: Array
    behavior_logprobs: Array | None = None
    mean_weight: float | torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction(Component):
    """Base of all corrections. ``formula`` takes fields of CorrectionInputs and returns the factor of each token.

    The factors are f32[M] without gradient.

    kind   "weight" (a ratio; at most one per chain), "mask" (0 or 1), or "norm", whose formula takes the ``weights``
           so far and returns new ones
    level  of a weight: "token", or "sequence" if all tokens of a sequence have the same weight
    """

    kind: ClassVar[Literal["weight", "mask", "norm"]] = "weight"
    level: ClassVar[Literal["token", "sequence"]] = "token"

    def apply(self, weights: torch.Tensor, inputs: CorrectionInputs) -> torch.Tensor:
        """Apply this correction to ``weights``.  f32[M] -> f32[M].  Raises ValueError if an input is missing."""
        given = {name: weights if name == "weights" else getattr(inputs, name) for name in self.inputs}
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise ValueError(f"correction {self.name} needs {', '.join(missing)} of the whole batch")
        made: torch.Tensor = self.formula(**given)
        return made if self.kind == "norm" else weights * made


def bounds_problem(correction: Correction, low: float, high: float) -> str:
    """Return an error text if low >= high, so that nothing lies between the bounds; else ""."""
    return "" if low < high else f"low of {correction.name} must be < its high, got {low:g} and {high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded(Correction):
    """Base of corrections that treat ratios in [low, high] unlike others."""

    low: Floor = 0.0
    high: Cap = math.inf

    def problem(self) -> str:
        return bounds_problem(self, self.low, self.high)

    def is_inside(self, ratios: torch.Tensor) -> torch.Tensor:
        return (ratios >= self.low) & (ratios <= self.high)


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
