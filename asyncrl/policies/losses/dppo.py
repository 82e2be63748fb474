"""DPPO: masks tokens by how far their probability has moved instead of by their ratio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from asyncrl.policies.component import Cap, Positive
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import binary_kl, finite, ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPO(Loss):
    """-sg(min(r, cap)) A logprob; 0 where the token's probability has moved far and A would move it further.

    Far means that the divergence of the two-outcome distribution {this token, any other} exceeds ``delta_high`` upwards
    (A > 0) or ``delta_low`` downwards (A < 0). The divergence is total variation |pi - mu|, or KL(mu || pi) in nats
    with default deltas of 0.05. A rare token may change its ratio a lot without being masked. Clipped: masked.

    The cap of 20 is verl's; verl's loss differs from the paper's -A r in value, but not in gradient. SkyRL has no cap.
    """

    name = "dppo"
    paper = "arXiv:2602.04879"

    divergence: Literal["tv", "kl"] = "tv"
    delta_low: Positive = 0.2
    delta_high: Positive = 0.2
    ratio_cap: Cap = 20.0

    @classmethod
    def defaults_for(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"delta_low": 0.05, "delta_high": 0.05} if options.get("divergence") == "kl" else {}

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        advantage = as_floats(advantages).detach()
        policy, behavior = finite(logprobs).detach(), finite(behavior_logprobs).detach()
        moved = policy.exp() - behavior.exp()
        distance = moved.abs() if self.divergence == "tv" else binary_kl(behavior, policy)
        is_far_up = (distance > self.delta_high) & (moved > 0) & (advantage > 0)
        is_far_down = (distance > self.delta_low) & (moved < 0) & (advantage < 0)
        masked = is_far_up | is_far_down
        weight = ratio(logprobs, behavior_logprobs).detach().clamp(max=self.ratio_cap)
        return torch.where(masked, 0.0, -weight * advantage * finite(logprobs)), masked
