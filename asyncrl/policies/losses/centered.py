"""REINFORCE with a capped ratio whose score is centered again: score centering."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.policies.component import Cap
from asyncrl.policies.losses.loss import LikeliestTokens, Loss
from asyncrl.policies.losses.ratios import finite, ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCentered(Loss):
    """-A [w(a) log pi(a) - sum over v of mu(v) w(v) log pi(v)], w = min(pi / mu, cap); w and mu w have no gradient.

    pi is the policy and mu the one that sampled. The expected score of an uncapped ratio is 0, so that a constant
    advantage teaches nothing. A cap takes from it what it cuts off; the sum over the vocabulary gives that back. It is
    exact where the behavior logprobs are known, for the likeliest tokens (rollout.top_logprobs). The others share what
    is left in the proportions of pi: mu = alpha pi, with alpha = (1 - sum of mu) / (1 - sum of pi) over the likeliest.

    Only the gradient of logprobs of the likeliest tokens is needed: sum of pi(v) grad log pi(v) over all tokens is 0,
    so over the others it is minus that over the likeliest.
    """

    name = "score_centered"
    paper = "arXiv:2609.20807, as slime's --use-score-centering"

    cap: Cap = 2.0

    def formula(
        self,
        logprobs: Array,
        behavior_logprobs: Array,
        advantages: Array,
        entropy: torch.Tensor,
        logits: torch.Tensor,
        behavior_likeliest: LikeliestTokens,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        uncapped = ratio(logprobs, behavior_logprobs).detach()
        weight = uncapped.clamp(max=self.cap)
        logprobs_of_head = torch.log_softmax(logits, dim=-1).gather(-1, behavior_likeliest.tokens)  # [M, K]
        pi, mu = logprobs_of_head.detach().exp(), behavior_likeliest.logprobs.exp()
        alpha = (1 - mu.sum(-1)).clamp(min=0) / (1 - pi.sum(-1)).clamp(min=_LEAST_MASS)
        share_of_tail = (self.cap * alpha).clamp(max=1)  # mu w = share_of_tail x pi, for each token of the tail
        of_head = ((torch.minimum(pi, self.cap * mu) - share_of_tail[:, None] * pi) * logprobs_of_head).sum(-1)
        center = of_head - share_of_tail * entropy.detach()  # -entropy = sum of pi log pi over all tokens
        loss = -as_floats(advantages).detach() * (weight * finite(logprobs) - center)
        return loss, uncapped > self.cap


_LEAST_MASS = 1e-6
"""Of the tokens that are not among the likeliest. If there are none, any share of them is the same."""
