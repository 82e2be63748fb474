"""P3O: the batch's effective sample size sets the cap of the ratio and the pull back to the behavior policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import finite, log_ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class P3O(Loss):
    """-sg(min(ratio, E)) A logprob + (1 - E) k3(policy || behavior), where E is the effective sample fraction.

    E = (sum w)^2 / (n sum w^2), in (0, 1], over the token ratios w of all tokens of the batch on every rank
    (batching/model_outputs.py). An off-policy batch gets small weights and a strong pull back; an on-policy batch is
    plain REINFORCE. There is no hyper-parameter. Clipped: the ratio is over E. As in FeynRL; intended for
    ``token_mean``.
    """

    name = "p3o"
    paper = "arXiv:2605.12380"

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array, effective_fraction: float | torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exponent = log_ratio(logprobs, behavior_logprobs)
        weight = exponent.detach().exp()
        fraction = torch.as_tensor(effective_fraction, dtype=weight.dtype, device=weight.device).detach()
        pull = (-exponent).exp() + exponent - 1.0
        policy_loss = -torch.minimum(weight, fraction) * as_floats(advantages).detach() * finite(logprobs)
        return policy_loss + (1.0 - fraction) * pull, weight > fraction
