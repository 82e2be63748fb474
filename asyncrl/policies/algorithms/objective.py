"""The interface between a backend and the loss: an algorithm for the policy, a value loss for the critic.

A backend runs the model over one micro-batch, passes the outputs to ``objective`` and calls backward() on the result.
It knows nothing else about the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from asyncrl.policies.corrections.diagnostics import Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs:
    """The inputs of a critic: the M response tokens of one micro-batch.

    values         f32[M]  value of the state in which each token was chosen (everything before it), with gradient
    old_values     f32[M]  the same value from the critic before the batch
    returns        f32[M]  targets of the values
    loss_weights   f32[M]
    sequence       i64[M]  index of the token's sequence among the micro-batch's ``num_sequences``, non-decreasing
    """

    values: torch.Tensor
    old_values: torch.Tensor
    returns: torch.Tensor
    loss_weights: torch.Tensor
    sequence: torch.Tensor
    num_sequences: int


class Objective(Protocol):
    """The loss of a model: Algorithm for a policy (algorithm.py), Critic for a critic (critic.py)."""

    @property
    def needs_logits(self) -> bool:
        """Whether LossInputs must have the logits of every token, f32[M, V]."""
        ...

    def objective(self, inputs: Any) -> tuple[torch.Tensor, Sums]:
        """Return the tensor to call backward() on (this micro-batch's part of the batch loss), and sums for metrics.

        ``inputs`` is LossInputs for a model with logprobs, ValueInputs for one with values; M is at least 1. The first
        sum is the loss.
        """
        ...

    def zero(self, device: torch.device) -> Sums:
        """Return the sums over no tokens."""
        ...

    def gradient_scale(self, totals: Sums) -> float | None:
        """Return the factor for the summed gradients of the whole batch before the step; None if it is 1."""
        ...

    def learning_rate_share(self, totals: Sums) -> float:
        """Return the factor for the learning rate of this step, in [0, 1]; called once the totals are on the host."""
        ...

    def metrics(self, totals: Sums) -> Mapping[str, float]:
        """Return the metrics of the batch from its totals, by their full names ("critic/loss")."""
        ...
