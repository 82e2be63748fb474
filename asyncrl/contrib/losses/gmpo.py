"""GMPO: the geometric mean of clipped token ratios."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.policies.component import ClipWidth
from asyncrl.policies.losses.loss import AnchoredLoss
from asyncrl.policies.losses.ratios import log_ratio
from asyncrl.policies.losses.segments import Array, as_floats, segment_mean, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class GMPO(AnchoredLoss):
    """-A exp(mean of the sequence's clipped log ratios).

    A log ratio is clipped to [-clip_low, clip_high], only on the side to which the advantage pushes it. One outlier
    token moves this geometric mean less than PPO's arithmetic mean. Each token carries the value of its sequence, so
    use the aggregation ``seq_mean_token_mean``. It is verl's "geo_mean", with the same range.
    """

    name = "gmpo"
    paper = "arXiv:2507.20673"

    clip_low: ClipWidth = 0.4
    clip_high: ClipWidth = 0.4

    def formula(
        self,
        logprobs: Array,
        prox_logprobs: Array,
        behavior_logprobs: Array,
        advantages: Array,
        sequence: Array,
        num_sequences: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        advantage = as_floats(advantages).detach()
        moved = log_ratio(logprobs, self.center(prox_logprobs, behavior_logprobs))
        bounded = moved.clamp(-self.clip_low, self.clip_high)
        pessimistic = torch.where(advantage >= 0, torch.minimum(moved, bounded), torch.maximum(moved, bounded))
        mean = segment_mean(pessimistic, sequence, num_sequences=num_sequences)
        return -advantage * spread(mean.exp(), sequence), (pessimistic != moved).detach()
