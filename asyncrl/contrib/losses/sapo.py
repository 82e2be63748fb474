"""SAPO: a soft clip without an edge."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.policies.component import Positive
from asyncrl.policies.losses.loss import AnchoredLoss, never
from asyncrl.policies.losses.ratios import ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class SAPO(AnchoredLoss):
    """-A (4 / tau) sigmoid(tau (r - 1)), with tau depending on the sign of the advantage.

    At r = 1 the gradient is that of REINFORCE; it fades on both sides. 1.0 and 1.05 in verl, AReaL, SkyRL and TRL.
    """

    name = "sapo"
    paper = "arXiv:2511.20347 eq. 5"

    tau_positive: Positive = 1.0
    tau_negative: Positive = 1.05

    def formula(
        self, logprobs: Array, prox_logprobs: Array, behavior_logprobs: Array, advantages: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        advantage = as_floats(advantages).detach()
        center = self.center(prox_logprobs, behavior_logprobs)
        loss = -advantage * self.gate(ratio(logprobs, center), advantage)
        return loss, never(loss)

    def gate(self, r: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
        """Return the gate of each token from ratios and advantages.  f32[M] x 2 -> f32[M] in (0, 4 / tau)"""
        tau = torch.where(advantages > 0, r.new_tensor(self.tau_positive), r.new_tensor(self.tau_negative))
        return 4.0 / tau * torch.sigmoid(tau * (r - 1.0))
