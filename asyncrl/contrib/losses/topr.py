"""TOPR: good samples have weight 1, bad samples at most 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import MAX_LOG_RATIO, finite, log_ratio
from asyncrl.policies.losses.segments import Array, as_floats, segment_sum, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class TOPR(Loss):
    """-w A logprob, with w = 1 for good samples (A > 0) and the detached ratio clipped to [0, 1] for bad ones.

    Clipped: bad tokens whose ratio is over 1. ``level`` "sequence" uses the product of the sequence's ratios, as in the
    paper; "token" uses the token's ratio, as in ROLL.
    """

    name = "topr"
    paper = "arXiv:2503.14286 eq. 8"

    level: Literal["sequence", "token"] = "sequence"

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array, sequence: Array, num_sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        good = as_floats(advantages) > 0
        return self._tapered(good, logprobs, behavior_logprobs, advantages, sequence, num_sequences)

    def _tapered(
        self,
        good: torch.Tensor,
        logprobs: Array,
        behavior_logprobs: Array,
        advantages: Array,
        sequence: Array,
        num_sequences: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exponent = log_ratio(logprobs, behavior_logprobs).detach()
        if self.level == "sequence":
            exponent = spread(segment_sum(exponent, sequence, num_sequences=num_sequences), sequence)
        weight = exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        tapered = torch.where(good, 1.0, weight.clamp(max=1.0))
        return -tapered * as_floats(advantages).detach() * finite(logprobs), ~good & (weight > 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TOPRByReward(TOPR):
    """``topr``, but a sample is good if its reward, not its advantage, is over 0. As in ROLL."""

    name = "topr_by_reward"
    paper = "arXiv:2503.14286 eq. 8; the sign as in ROLL"

    def formula(  # type: ignore[override]
        self,
        logprobs: Array,
        behavior_logprobs: Array,
        advantages: Array,
        sequence: Array,
        num_sequences: int,
        rewards: Array,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        good = as_floats(rewards) > 0
        return self._tapered(good, logprobs, behavior_logprobs, advantages, sequence, num_sequences)
