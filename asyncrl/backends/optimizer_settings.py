"""The optimizer settings of all backends: clipping by global norm, then AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch


NO_MOMENTS: Final = "%s has no optimizer state: AdamW starts anew, with moments of 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Settings of low-rank adapters (lora.py).

    rank           inner dimension of an adapter
    modules        names such as q_proj, or all-linear
    is_merged      whether exports are the whole model with the adapters merged, or the adapters alone
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]
    is_merged: bool = True

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW, arXiv:1711.05101. Norms and biases have no weight decay (``has_weight_decay``).

    freeze, train_only  select the parameters that are updated (frozen.py)
    lora                updates adapters instead of the parameters; None for no adapters
    is_stateless        every update starts from moments of zero, and none are kept
    is_saved            whether checkpoints have the moments
    """

    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()
    lora: Lora | None = None
    is_stateless: bool = False
    is_saved: bool = True


def has_weight_decay(name: str, *, ndim: int) -> bool:
    """Return whether a weight decays: not if it has one dimension, nor if it stacks the biases of all experts.

    name: in the model's files, or in Megatron
    """
    return ndim > 1 and not name.endswith("bias")


def is_trainable(loss: float, grad_norm: float) -> bool:
    """Return whether loss and gradients are finite; a step with NaN would ruin every weight."""
    return math.isfinite(loss) and math.isfinite(grad_norm)


def step_metrics(
    of_objective: Mapping[str, float], *, model: str, grad_norm: float, learning_rate: float, is_skipped: bool
) -> dict[str, float]:
    """Return the metrics of one optimizer step. Metrics of a ``model`` other than the policy have its name as prefix.

    grad_norm      norm of the summed gradients, before clipping
    learner/skipped_steps  1 if loss or gradients were not finite and the weights were left unchanged
    """
    is_policy = model == "policy"
    learner = "learner" if is_policy else model
    return {
        **of_objective,
        "grad_norm" if is_policy else f"{model}/grad_norm": grad_norm,
        f"{learner}/learning_rate": learning_rate,
        f"{learner}/skipped_steps": float(is_skipped),
    }


def reshape_moments(moments: dict[str, torch.Tensor], like: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return moments in the shape and on the device of their tensor. Fused AdamW needs its step count there as well."""
    return {
        kind: value.to(like.device, copy=True).reshape(() if kind == "step" else like.shape)
        for kind, value in moments.items()
    }
