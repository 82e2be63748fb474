"""Policy mirror descent: REINFORCE with a squared pull to an anchor, and a simple form without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.policies.component import Positive
from asyncrl.policies.losses.loss import AnchoredLoss, Loss, never
from asyncrl.policies.losses.ratios import finite, log_ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class OPMD(AnchoredLoss):
    """-A logprob + (tau / 2) (log policy / anchor)^2.

    Around the behavior policy it is Kimi k1.5's loss (tau 0.1 in ROLL). Around the proximal policy it is verl's "dro",
    whose beta is this tau. The loss itself bounds the distance to the behavior policy, so no weight goes on top.
    """

    name = "opmd"
    paper = "Kimi k1.5, arXiv:2501.12599; DRO, arXiv:2405.19107"

    tau: Positive = 0.1
    anchor: Literal["prox", "behavior"] = "behavior"

    def formula(
        self, logprobs: Array, prox_logprobs: Array, behavior_logprobs: Array, advantages: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        distance = log_ratio(logprobs, self.center(prox_logprobs, behavior_logprobs))
        loss = -as_floats(advantages).detach() * finite(logprobs) + self.tau / 2 * distance.square()
        return loss, never(loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpleOPMD(Loss):
    """-A logprob / (1 + tau): REINFORCE with a smaller step. Trinity-RFT's simple form of mirror descent."""

    name = "opmd_simple"
    paper = "arXiv:2505.17826"

    tau: Positive = 1.0

    def formula(self, logprobs: Array, advantages: Array) -> tuple[torch.Tensor, torch.Tensor]:
        loss = -as_floats(advantages).detach() * finite(logprobs) / (1.0 + self.tau)
        return loss, never(loss)
