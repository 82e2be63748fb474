"""How a backend turns gradients into new weights: AdamW after a clip by the global norm, the same in every backend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from asyncrl.policies import diagnostics


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
    totals: diagnostics.Sums, *, grad_norm: float, learning_rate: float, is_skipped: bool
) -> Mapping[str, float]:
    """The metrics of one optimizer step from the sums over the whole batch.

    grad_norm      of the summed gradients, before the clip
    learner/skipped_steps  1 when loss or gradients were not finite and the weights were left as they were
    """
    return diagnostics.metrics(totals) | {
        "grad_norm": grad_norm,
        "learner/learning_rate": learning_rate,
        "learner/skipped_steps": float(is_skipped),
    }
