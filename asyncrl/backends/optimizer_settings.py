"""How a backend turns gradients into new weights: AdamW after a clip by the global norm, the same in every backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW, arXiv:1711.05101. Weight decay spares what has one dimension: norms and biases."""

    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float = 1.0


def is_trainable(loss: float, grad_norm: float) -> bool:
    """Whether a step may be taken: one NaN would be in every weight for ever."""
    return math.isfinite(loss) and math.isfinite(grad_norm)


def step_metrics(
    of_objective: Mapping[str, float], *, model: str, grad_norm: float, learning_rate: float, is_skipped: bool
) -> Mapping[str, float]:
    """The metrics of one optimizer step of the policy; of another ``model`` they are all under its name.

    grad_norm      of the summed gradients, before the clip
    learner/skipped_steps  1 when loss or gradients were not finite and the weights were left as they were
    """
    is_policy = model == "policy"
    learner = "learner" if is_policy else model
    return {
        **of_objective,
        "grad_norm" if is_policy else f"{model}/grad_norm": grad_norm,
        f"{learner}/learning_rate": learning_rate,
        f"{learner}/skipped_steps": float(is_skipped),
    }
