"""The loss of a critic's value estimates."""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.policies.losses.segments import Array, as_floats


def value_loss(
    values: Array,
    old_values: Array,
    returns: Array,
    *,
    clip: float | None = 0.5,
    scale: float = 0.5,
    kind: Literal["mse", "huber"] = "mse",
    huber_delta: float = 10.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale x max(error(v), error(old + clip(v - old, -clip, clip))); the error is squared or Huber's.

    f32[M] x 3 -> loss f32[M], clipped bool[M] (True where the clipped error is larger, so that nothing is learned).
    ``old_values`` are the critic's values at the start of the step; with ``clip`` None they are not used. Huber's loss
    (``huber``: e^2 / 2 up to ``huber_delta``, linear beyond) already contains the factor 1/2 and is not scaled.
    Gradient only in ``values``.

    Source: the clip of PPO's reference implementation (arXiv:1707.06347 has none). scale is 0.5 in verl, NeMo-RL,
    OpenRLHF, SkyRL and AReaL, 1 in slime; clip is 0.5 in verl and AReaL, 0.2 in slime. AReaL offers Huber with delta
    10.
    """
    value, target = as_floats(values), as_floats(returns).detach()

    def error(estimate: torch.Tensor) -> torch.Tensor:
        if kind == "huber":
            return torch.nn.functional.huber_loss(estimate, target, reduction="none", delta=huber_delta)
        return scale * (estimate - target).square()

    unclipped = error(value)
    if clip is None:
        return unclipped, torch.zeros_like(unclipped, dtype=torch.bool)
    old = as_floats(old_values).detach()
    moved = value - old
    clipped = error(old + moved.clamp(-clip, clip))
    is_larger = (moved.abs() > clip) & (clipped > unclipped)  # within the clip they differ only by rounding
    return torch.maximum(unclipped, clipped), is_larger.detach()


def has_moved(values: Array, old_values: Array, *, clip: float = 0.5) -> torch.Tensor:
    """Mark values further than ``clip`` from the old values: slime's clip fraction.  f32[M] x 2 -> bool[M]

    verl instead counts where the clipped error is larger, which is the second result of ``value_loss``.
    """
    return (as_floats(values).detach() - as_floats(old_values).detach()).abs() > clip
