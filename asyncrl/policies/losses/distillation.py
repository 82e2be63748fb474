"""Losses that learn from a teacher's logprobs on the student's own samples.

For off-policy distillation, on a teacher's samples, use the loss ``sft``. The sampled reverse KL is wrong on stale
samples (AsyncOPD, arXiv:2606.24143), so the losses on sampled tokens recompute the signal under the current student.
``distill`` compares distributions, of which a served teacher sends the likeliest tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

from asyncrl.policies.component import NonNegative, Positive
from asyncrl.policies.losses.loss import LikeliestTokens, Loss, LossInputs, never
from asyncrl.policies.losses.ratios import finite, log_ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class OPDReward(Loss):
    """REINFORCE with A - coef x (student's - teacher's logprob): the reward form of on-policy distillation.

    The reverse KL is a reward per token; pure distillation has advantages of 0. The loss adds the teacher's part to the
    advantages, because the policy's logprobs are available here without another pass. coef is 1 in tinker and slime.
    """

    name = "opd_reward"
    paper = "tinker's on-policy distillation (2025); slime"

    coef: Positive = 1.0

    def formula(
        self, logprobs: Array, prox_logprobs: Array, advantages: Array, teacher_logprobs: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        loss = -self.mixed(prox_logprobs, advantages, teacher_logprobs) * finite(logprobs)
        return loss, never(loss)

    def mixed(self, prox_logprobs: Array, advantages: Array, teacher_logprobs: Array) -> torch.Tensor:
        """Return the advantages plus the teacher's part, without gradient.  f32[M] x 3 -> f32[M]"""
        gap = log_ratio(as_floats(prox_logprobs).detach(), teacher_logprobs)
        return as_floats(advantages).detach() - self.coef * gap

    def trained_advantages(self, inputs: LossInputs) -> torch.Tensor:
        return self.mixed(inputs.prox_logprobs, inputs.advantages, inputs["teacher_logprobs"])


@dataclass(frozen=True, slots=True, kw_only=True)
class OPD(Loss):
    """-R sg(teacher's - student's logprob) + kl_coef (log R)^2, R = policy / behavior: the loss form.

    The first term is 0 (clipped) for tokens whose probability has already dropped by more than ``max_drop`` since they
    were sampled. The second term applies to all tokens and keeps the policy near the policy that sampled. R has a
    gradient and is not truncated.

    Source: prime-rl's loss against a reference, with its values 0.2 and 1e-3.
    """

    name = "opd"
    paper = "prime-rl"

    max_drop: Positive = 0.2
    kl_coef: NonNegative = 1e-3

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, teacher_logprobs: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        exponent = log_ratio(logprobs, behavior_logprobs)
        policy, behavior = finite(logprobs).detach(), finite(behavior_logprobs).detach()
        has_dropped = policy.exp() - behavior.exp() < -self.max_drop
        signal = log_ratio(as_floats(teacher_logprobs).detach(), policy)
        pull = torch.where(has_dropped, 0.0, -exponent.exp() * signal)
        return pull + self.kl_coef * exponent.square(), has_dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Distill(Loss):
    """KL between teacher and student over the teacher's likeliest tokens, and all others as one token.

    forward is KL(teacher || student), which covers what the teacher does; reverse is KL(student || teacher). Taking
    tokens together never raises a KL, so both are lower bounds of the one over the whole vocabulary, and equal it if
    all tokens are sent. The answer's tokens only choose the places, so stale answers need no correction.
    """

    name = "distill"
    paper = "arXiv:1503.02531, on the student's samples arXiv:2306.13649"
    is_supervised = True

    divergence: Literal["forward", "reverse"] = "forward"

    def formula(self, logits: torch.Tensor, teacher_likeliest: LikeliestTokens) -> tuple[torch.Tensor, torch.Tensor]:
        student = _of_student(logits, teacher_likeliest.tokens)
        teacher = _of_teacher(teacher_likeliest.logprobs.to(logits.dtype))
        if teacher_likeliest.tokens.shape[-1] == logits.shape[-1]:  # there are no others
            student, teacher = student[:, :-1], teacher[:, :-1]
        first, second = (teacher, student) if self.divergence == "forward" else (student, teacher)
        loss = (first.exp() * (first - second)).sum(-1)
        return loss, never(loss)


def _of_student(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logprobs of the tokens, and of all others together.  f32[M, V], i64[M, K] -> f32[M, K + 1]

    The others are summed by themselves: 1 - (sum of the tokens) is 0 for a certain student, and so is its gradient.
    """
    total = logits.logsumexp(-1, keepdim=True)
    others = logits.scatter(-1, tokens, _HIDDEN).logsumexp(-1, keepdim=True)
    return (torch.cat([logits.gather(-1, tokens), others], dim=-1) - total).clamp(min=_LEAST_LOGPROB)


def _of_teacher(logprobs: torch.Tensor) -> torch.Tensor:
    """Append the logprob of all other tokens together.  f32[M, K] -> f32[M, K + 1]"""
    rest = torch.log1p(-logprobs.exp().sum(-1, keepdim=True).clamp(max=1 - _LEAST_MASS))
    return torch.cat([logprobs.clamp(min=_LEAST_LOGPROB), rest], dim=-1)


_LEAST_MASS: Final = 1e-6
"""Of all other tokens together: float32 cannot tell it from less."""
_LEAST_LOGPROB: Final = -100.0
"""A server may send -inf, whose product with a probability of 0 would be NaN."""
_HIDDEN: Final = -1e30
"""Logit of a token that is left out of a sum; -inf would make the gradient of an empty sum NaN."""
