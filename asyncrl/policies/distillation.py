"""Learning from a teacher's logprobs: on the student's own samples, or over the whole vocabulary.

Off-policy distillation on a teacher's samples is losses.sft. On stale samples the forward KL stays right, the sampled
reverse KL does not (AsyncOPD, arXiv:2606.24143): recompute the signal under the present student, as both forms here do.
"""

from __future__ import annotations

import torch

from asyncrl.policies.losses.ratios import finite, log_ratio
from asyncrl.policies.segments import Array, as_floats


def opd_advantages(
    advantages: Array, prox_logprobs: Array, teacher_logprobs: Array, *, coef: float = 1.0
) -> torch.Tensor:
    """A - coef x (student's - teacher's logprob): the reward form of on-policy distillation.  f32[M] x 3 -> f32[M]

    The reverse KL as a reward per token, for any policy loss; pure distillation has advantages of 0. Without gradient.
    Source: tinker's on-policy distillation (2025), slime; coef 1 in both.
    """
    gap = log_ratio(as_floats(prox_logprobs).detach(), teacher_logprobs)
    return as_floats(advantages).detach() - coef * gap


def opd(
    logprobs: Array,
    behavior_logprobs: Array,
    teacher_logprobs: Array,
    *,
    max_drop: float = 0.2,
    kl_coef: float = 1e-3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-R sg(teacher's - student's logprob) + kl_coef (log R)^2, R = policy / behavior: the loss form.

    f32[M] x 3 -> loss f32[M], clipped bool[M]. The first part is 0 (clipped) for tokens whose probability has already
    dropped by more than ``max_drop`` since they were sampled; the second holds for all and keeps the policy near what
    sampled. R is live and not truncated.

    Source: prime-rl's loss against a reference; 0.2 and 1e-3 are its.
    """
    exponent = log_ratio(logprobs, behavior_logprobs)
    policy, behavior = finite(logprobs).detach(), finite(behavior_logprobs).detach()
    has_dropped = policy.exp() - behavior.exp() < -max_drop
    signal = log_ratio(as_floats(teacher_logprobs).detach(), policy)
    pull = torch.where(has_dropped, 0.0, -exponent.exp() * signal)
    return pull + kl_coef * exponent.square(), has_dropped


def forward_kl(logprobs: Array, teacher_logprobs: Array) -> torch.Tensor:
    """KL(teacher || student) over the vocabulary: cover all that the teacher does.  [..., V] x 2 -> [...], nats, >= 0

    Both sum to one over V. Gradient in ``logprobs``, right on samples of any policy.
    """
    return _kl(as_floats(teacher_logprobs).detach(), as_floats(logprobs))


def reverse_kl(logprobs: Array, teacher_logprobs: Array) -> torch.Tensor:
    """KL(student || teacher) over the vocabulary: do nothing the teacher would not.  [..., V] x 2 -> [...], nats"""
    return _kl(as_floats(logprobs), as_floats(teacher_logprobs).detach())


def mixed_kl(logprobs: Array, teacher_logprobs: Array, *, weight: float = 0.5) -> torch.Tensor:
    """weight x forward + (1 - weight) x reverse KL.  [..., V] x 2 -> [...], nats.  NeMo-RL's mixed, 0.5 there too."""
    forward = forward_kl(logprobs, teacher_logprobs)
    return weight * forward + (1.0 - weight) * reverse_kl(logprobs, teacher_logprobs)


def _kl(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """sum p_left (log p_left - log p_right); a token impossible under the left adds nothing."""
    return (left.exp() * (finite(left) - finite(right))).sum(dim=-1)
