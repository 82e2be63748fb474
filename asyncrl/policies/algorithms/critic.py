"""The objective of a critic: the loss of its values, and how well they explain the returns.

A critic takes one step per batch, so its old values equal its values while it trains, and the clip has no effect. The
clip is for backends that take several steps. Test: tests/unit/policies/algorithms/test_objective.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from asyncrl.policies.algorithms.objective import ValueInputs
from asyncrl.policies.corrections.diagnostics import Sums
from asyncrl.policies.losses.aggregation import total
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


SUMS: Final = ("loss", "tokens", "clipped", "moved", "values", "returns", "returns_squared", "errors", "errors_squared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The options of ``value_loss``; a ``clip`` of 0 turns the clip off."""

    kind: Literal["mse", "huber"] = "mse"
    clip: float = 0.5
    scale: float = 0.5
    huber_delta: float = 10.0

    @property
    def needs_logits(self) -> bool:
        return False

    def zero(self, device: torch.device) -> Sums:
        return Sums(sums=torch.zeros(len(SUMS), dtype=torch.float64, device=device), maxima=_no_maximum(device))

    def objective(self, inputs: ValueInputs) -> tuple[torch.Tensor, Sums]:
        """Return this micro-batch's part of the batch's value loss, weighted like the policy loss, and its sums."""
        loss, clipped = value_loss(
            inputs.values,
            inputs.old_values,
            inputs.returns,
            clip=self.clip or None,
            kind=self.kind,
            scale=self.scale,
            huber_delta=self.huber_delta,
        )
        objective = total(loss, inputs.loss_weights)
        values, returns = inputs.values.detach().double(), inputs.returns.double()
        errors = returns - values
        moved = has_moved(inputs.values, inputs.old_values, clip=self.clip)
        columns = (clipped.double(), moved.double(), values, returns, returns.square(), errors, errors.square())
        sums = [objective.detach().double(), torch.ones_like(values).sum(), *(column.sum() for column in columns)]
        return objective, Sums(sums=torch.stack(sums), maxima=_no_maximum(values.device))

    def gradient_scale(self, totals: Sums) -> float | None:
        return None

    def learning_rate_share(self, totals: Sums) -> float:
        return 1.0

    def metrics(self, totals: Sums) -> Mapping[str, float]:
        """Return the metrics of the batch.

        critic/explained_variance is 1 - Var(returns - values) / Var(returns), at most 1; omitted for equal returns.
        """
        of = dict(zip(SUMS, totals.sums.tolist(), strict=True))
        tokens = max(of["tokens"], 1.0)
        metrics = {
            "critic/loss": of["loss"],
            "critic/clip_fraction": of["clipped"] / tokens,
            "critic/moved_fraction": of["moved"] / tokens,
            "critic/value_mean": of["values"] / tokens,
            "critic/return_mean": of["returns"] / tokens,
        }
        spread = of["returns_squared"] / tokens - (of["returns"] / tokens) ** 2
        if spread > 1e-12:
            unexplained = of["errors_squared"] / tokens - (of["errors"] / tokens) ** 2
            metrics["critic/explained_variance"] = 1.0 - unexplained / spread
        return metrics


def _no_maximum(device: torch.device) -> torch.Tensor:
    """Return one zero, so that ranks have something to reduce."""
    return torch.zeros(1, dtype=torch.float64, device=device)
