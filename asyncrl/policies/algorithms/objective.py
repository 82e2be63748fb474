"""What a backend asks of whatever it trains on: an algorithm for the policy, a value loss for the critic.

A backend runs the model over one micro-batch, hands what came out to ``objective`` and calls backward on the result;
nothing else about the loss is known to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from asyncrl.policies.corrections.diagnostics import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs:
    """The response tokens of one micro-batch, M of them, as a critic sees them.

    values         f32[M]  of the state in which each token was chosen (everything before it), with gradient
    old_values     f32[M]  the same by the critic as it was before the batch
    returns        f32[M]  what the values should have been
    loss_weights   f32[M]
    sequence       i64[M]  which of the micro-batch's ``num_sequences`` documents the token belongs to, rising
    """

    values: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    loss_weights: torch.Tensor
    sequence: torch.Tensor
    num_sequences: int


class Objective(Protocol):
    """policies.algorithms.Algorithm of a policy, policies.critic.Critic of a critic."""

    def objective(self, inputs: Any) -> tuple[torch.Tensor, Sums]:
        """What to call backward() on (this micro-batch's part of the batch's loss), and sums that add up to metrics.

        LossInputs of a model with logprobs, ValueInputs of one with values; M is at least 1. The first of the sums is
        the loss.
        """
        ...

    def zero(self, device: torch.device) -> Sums:
        """The sums of no tokens."""
        ...

    def gradient_scale(self, totals: Sums) -> float | None:
        """What the summed gradients of the whole batch are multiplied by before the step; None where it is 1."""
        ...

    def learning_rate_share(self, totals: Sums) -> float:
        """What the learning rate of this step is multiplied by, in [0, 1]; asked when the totals are on the host."""
        ...

    def metrics(self, totals: Sums) -> Mapping[str, float]:
        """The batch's metrics from its totals, by their full names ("critic/loss")."""
        ...
