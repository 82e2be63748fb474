"""Corrections of single papers and frameworks: weights and masks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch

from asyncrl.policies.component import Cap, Floor, NonNegative, Number, Positive
from asyncrl.policies.corrections.correction import Bounded, Correction, bounds_problem, prefix_ratio, ratio, summands
from asyncrl.policies.corrections.masks import Mask, all_inside
from asyncrl.policies.losses.ratios import MAX_LOG_RATIO, binary_kl, finite
from asyncrl.policies.losses.segments import Array, as_floats, segment_max, segment_mean, segment_sum, spread

_LOG_LIMITS: Final = (math.log(1e-6), math.log1p(-1e-6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Clamp(Bounded):
    """The token ratio, clamped on both sides. 0.5 and 5 as in OpenRLHF's "tis"; slime has tis_clip_low 0."""

    name = "clamp"

    low: Floor = 0.5
    high: Cap = 5.0

    def formula(self, log_ratio: Array) -> torch.Tensor:
        return ratio(log_ratio).clamp(min=self.low, max=self.high)


@dataclass(frozen=True, slots=True, kw_only=True)
class TISPrefix(Correction):
    """min(product of the ratios up to and including the token, cap).

    This is per-decision importance sampling. It is right for rewards per token, but biased for an advantage of the
    whole answer.
    """

    name = "tis_prefix"
    paper = "Precup et al., 2000"

    cap: Cap = 2.0

    def formula(self, log_ratio: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        return prefix_ratio(log_ratio, sequence=sequence, num_sequences=num_sequences).clamp(max=self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierMask(Mask):
    """Keep sequences whose token ratios are all within the bounds, as in SkyRL."""

    name = "outlier_mask"

    low: Floor = 1e-4
    high: Cap = 100.0

    def formula(self, log_ratio: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        return all_inside(ratio(log_ratio), self.low, self.high, sequence, num_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class OPSM(Correction):
    """Off-policy sequence masking: reject tokens of negative advantage in sequences that the policy has left behind.

    A token is rejected if its advantage < 0 and the mean of -log_ratio over its sequence > delta. TRL suggests delta
    0.5. slime uses 1e-4, and recomputed old logprobs instead of the sampling logprobs. The paper's numerator is the
    live policy, which equals the proximal policy with one optimizer step per batch.
    """

    name = "opsm"
    paper = "DeepSeek-V3.2, arXiv:2512.02556 eq. 9"
    kind = "mask"

    delta: NonNegative = 0.5

    def formula(self, log_ratio: Array, advantages: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        divergence = segment_mean(-summands(log_ratio), sequence, num_sequences=num_sequences)
        is_left = spread(divergence, sequence) > self.delta
        floats = as_floats(log_ratio)
        return (~(is_left & (torch.as_tensor(advantages).detach() < 0))).to(floats.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class KStat(Correction):
    """Keep tokens or sequences whose estimate of KL(behavior || proximal) is in [low, high], in nats.

    statistic  estimate per token: "k1" (-log_ratio), "k2" (its square / 2) or "k3" (ratio - 1 - log_ratio)
    over       "token" judges each token alone; "sum", "mean" and "max" judge whole sequences by that reduction

    This is verl's rollout_rs (its k3 preset: mean, 0.01). For k1, verl takes bounds of a ratio, which then hold for
    1 / ratio: its "0.5_5.0" is low = log 0.5, high = log 5 here, and keeps ratios in [0.2, 2].
    """

    name = "k_stat"
    kind = "mask"

    statistic: Literal["k1", "k2", "k3"] = "k3"
    over: Literal["token", "sum", "mean", "max"] = "mean"
    low: Number = -math.inf
    high: Number = 0.01

    def problem(self) -> str:
        return bounds_problem(self, self.low, self.high)

    def formula(self, log_ratio: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        clamped = as_floats(log_ratio).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        values = {
            "k1": lambda: -clamped,
            "k2": lambda: clamped.square() / 2,
            "k3": lambda: clamped.exp() - 1 - clamped,
        }[self.statistic]()
        if self.over != "token":
            reduce = {"sum": segment_sum, "mean": segment_mean, "max": segment_max}[self.over]
            values = spread(reduce(values.double(), sequence, num_sequences=num_sequences), sequence)
        return ((values >= self.low) & (values <= self.high)).to(clamped.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class BinaryKL(Correction):
    """Keep sequences whose mean binary KL(behavior || proximal) is at most delta, in nats.

    It is the KL of {the sampled token, any other}: unlike a ratio it is small where both policies give a token little
    probability. Probabilities are clamped to [1e-6, 1 - 1e-6] as in FlashREINFORCE: one that rounds to 1 says nothing
    of the other tokens. slime's --tis-binary-kl-threshold; with loss = "reinforce" and tis_token with cap = inf, its
    flash_reinforce.
    """

    name = "binary_kl"
    paper = "slime's FlashREINFORCE"
    kind = "mask"

    delta: Positive = 5e-3

    def formula(self, log_ratio: Array, behavior_logprobs: Array, sequence: Array, num_sequences: int) -> torch.Tensor:
        log_ratio = as_floats(log_ratio).detach()
        behavior = finite(behavior_logprobs).detach().double()
        distance = binary_kl(behavior.clamp(*_LOG_LIMITS), (behavior + log_ratio).clamp(*_LOG_LIMITS))
        mean = segment_mean(distance, sequence, num_sequences=num_sequences)
        return (spread(mean, sequence) <= self.delta).to(log_ratio.dtype)
