"""REINFORCE and maximum likelihood: the log likelihood of the tokens, with and without an advantage."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.policies.losses.loss import Loss, never
from asyncrl.policies.losses.ratios import finite
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(Loss):
    """-A logprob. Stale data needs a correction. GPG (arXiv:2504.02546) is this loss with the advantage gpg."""

    name = "reinforce"
    paper = "Williams 1992"

    def formula(self, logprobs: Array, advantages: Array) -> tuple[torch.Tensor, torch.Tensor]:
        loss = -as_floats(advantages).detach() * finite(logprobs)
        return loss, never(loss)


@dataclass(frozen=True, slots=True, kw_only=True)
class SFT(Loss):
    """-logprob: the negative log likelihood of the tokens, in nats.

    On a teacher's samples it is off-policy distillation. slime sums the means of the sequences; verl and asyncrl leave
    this to the aggregation.
    """

    name = "sft"
    paper = "maximum likelihood"
    is_supervised = True

    def formula(self, logprobs: Array) -> tuple[torch.Tensor, torch.Tensor]:
        loss = -finite(logprobs)
        return loss, never(loss)
