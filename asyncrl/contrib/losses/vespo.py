"""VESPO: a soft weight of the sequence's ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.policies.component import NonNegative, Positive
from asyncrl.policies.losses.loss import Loss, never
from asyncrl.policies.losses.ratios import MAX_LOG_RATIO, finite, log_ratio
from asyncrl.policies.losses.segments import Array, as_floats, segment_sum, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class VESPO(Loss):
    """-sg(phi(W)) A logprob with phi(W) = W^k exp(lambda (1 - W)), W the product of the sequence's ratios.

    phi is 1 on policy and falls to 0 on both sides: faster downwards with a larger k, faster upwards with a larger
    lambda. As in TRL, (k, lambda) = (2, 3) where A >= 0 and (3, 2) where A < 0.
    """

    name = "vespo"
    paper = "arXiv:2602.10693"

    k_positive: Positive = 2.0
    lambda_positive: NonNegative = 3.0
    k_negative: Positive = 3.0
    lambda_negative: NonNegative = 2.0

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array, sequence: Array, num_sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exponent = log_ratio(logprobs, behavior_logprobs).detach()
        log_weight = segment_sum(exponent, sequence, num_sequences=num_sequences).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantage = as_floats(advantages).detach()
        loss = -self.phi(spread(log_weight, sequence), advantage) * advantage * finite(logprobs)
        return loss, never(loss)

    def phi(self, log_weight: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Return the weight from log W and advantages, per token or per sequence.  f32[M] x 2 -> f32[M]"""
        good = advantages >= 0
        k = torch.where(good, log_weight.new_tensor(self.k_positive), log_weight.new_tensor(self.k_negative))
        rate = torch.where(
            good, log_weight.new_tensor(self.lambda_positive), log_weight.new_tensor(self.lambda_negative)
        )
        return (k * log_weight + rate * (1.0 - log_weight.exp())).exp()
