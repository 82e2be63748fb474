"""The default loss of prime-rl: a mask by how far a token's probability has moved, and a squared pull."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.policies.component import NonNegative, Positive
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import finite, log_ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimeRL(Loss):
    """-R A where the mask keeps the token, plus kl_coef (log R)^2 on every token; R = policy / behavior, with gradient.

    ``mask`` "dppo" is DPPO's mask by total variation. "ipo" rejects every token that moved by more than ``delta_high``
    up or ``delta_low`` down, whatever the sign of its advantage. R is not truncated. Clipped: masked.

    Source: prime-rl's default and IPO losses, with their 0.2 / 0.2 and 1e-3; the squared term is from Kimi K2.5.
    """

    name = "prime_rl"
    paper = "prime-rl; the mask is arXiv:2602.04879"

    mask: Literal["dppo", "ipo"] = "dppo"
    delta_low: Positive = 0.2
    delta_high: Positive = 0.2
    kl_coef: NonNegative = 1e-3

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        advantage = as_floats(advantages).detach()
        moved = finite(logprobs).detach().exp() - finite(behavior_logprobs).detach().exp()
        is_up, is_down = moved > self.delta_high, moved < -self.delta_low
        masked = is_up | is_down if self.mask == "ipo" else (is_up & (advantage > 0)) | (is_down & (advantage < 0))
        exponent = log_ratio(logprobs, behavior_logprobs)
        policy_loss = torch.where(masked, 0.0, -advantage * exponent.exp())
        return policy_loss + self.kl_coef * exponent.square(), masked
