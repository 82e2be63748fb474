"""The table of algorithms: advantage + loss + correction + aggregation + defaults + paper, one row each.

``resolve`` turns the run file's [algorithm] into an ``Algorithm``; backends call ``objective`` on it and know nothing
else. A new algorithm is one row here, or "package.module:ALGORITHM" in the run file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from asyncrl.errors import ConfigError
from asyncrl.policies import advantages, aggregation, corrections, losses
from asyncrl.policies.diagnostics import Sums, token_sums

AdvantageFn = Callable[[ArrayLike], NDArray[np.float32]]
LossFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]
CorrectionFn = Callable[..., torch.Tensor]
AggregationFn = Callable[[Sequence[NDArray[np.bool_]]], list[NDArray[np.float32]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The response tokens of one micro-batch, M of them, prompt and observation tokens left out.

    logprobs           f32[M]  trainer logprobs at the sampling temperature, with gradient
    entropy            f32[M]  of the trainer's distribution, in nats
    behavior_logprobs, advantages, loss_weights  f32[M]
    is_fresh           bool[M]  the version being trained sampled the token and all before it
    staleness          i32[M]   version being trained - version that sampled the token
    sequence           i64[M]   which of the micro-batch's ``num_sequences`` documents the token belongs to, rising
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    is_fresh: torch.Tensor
    staleness: torch.Tensor
    sequence: torch.Tensor
    num_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row: pure functions, and the hyper-parameters they take from [algorithm.options] with their defaults."""

    name: str
    paper: str
    advantage: AdvantageFn
    loss: LossFn
    aggregate: AggregationFn
    correction: str
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    correction_options: Mapping[str, Any] = field(default_factory=dict)

    def advantages(self, rewards: ArrayLike) -> NDArray[np.float32]:
        """Advantage of each trajectory of one group.  [G] -> f32[G]"""
        return self.advantage(rewards, **self.advantage_options)

    def objective(self, inputs: LossInputs) -> tuple[torch.Tensor, Sums]:
        """What to call backward() on (this micro-batch's part of the batch's loss), and sums for the metrics.

        Decoupled PPO (arXiv:2110.00641, 2505.24298): the proximal policy is the learner at the start of the step, so
        the correction covers staleness and engine mismatch at once, and the clip is a trust region around the learner.
        """
        prox_logprobs = inputs.logprobs.detach()
        loss, clipped = self.loss(inputs.logprobs, prox_logprobs, inputs.advantages, **self.loss_options)
        log_ratio = prox_logprobs - inputs.behavior_logprobs
        weights = CORRECTIONS[self.correction](log_ratio, **self.correction_options)
        total = (loss * weights * inputs.loss_weights).sum()
        sums = token_sums(
            log_ratio=log_ratio,
            weights=weights,
            clipped=clipped,
            entropy=inputs.entropy.detach(),
            is_fresh=inputs.is_fresh,
            loss=total.detach(),
        )
        return total, sums


CORRECTIONS: dict[str, CorrectionFn] = {
    "none": corrections.none,
    "tis_token": corrections.tis_token,
}

_CORRECTION_DEFAULTS: dict[str, dict[str, Any]] = {"none": {}, "tis_token": {"cap": 2.0}}

ALGORITHMS: dict[str, Algorithm] = {
    row.name: row
    for row in (
        Algorithm(
            name="grpo",
            paper="arXiv:2402.03300, token mean of arXiv:2503.14476",
            advantage=advantages.grpo,
            loss=losses.ppo_clip,
            aggregate=aggregation.token_mean,
            correction="tis_token",
            advantage_options={"eps": 1e-6},
            loss_options={"clip_low": 0.2, "clip_high": 0.2},
            correction_options={"cap": 2.0},
        ),
    )
}


def resolve(row: Algorithm, *, correction: str = "", options: Mapping[str, Any] | None = None) -> Algorithm:
    """``row`` with another correction and other hyper-parameters. Raises ConfigError for names it does not have."""
    correction = correction or row.correction
    if correction not in CORRECTIONS:
        raise ConfigError(f"algorithm: correction must be one of {', '.join(CORRECTIONS)}, got {correction!r}")
    if correction != row.correction:
        row = replace(row, correction=correction, correction_options=_CORRECTION_DEFAULTS[correction])
    tables = [dict(row.advantage_options), dict(row.loss_options), dict(row.correction_options)]
    owner = {key: table for table in tables for key in table}
    for key, value in (options or {}).items():
        if key not in owner:
            raise ConfigError(f"algorithm.options: {row.name} has no option {key!r}; it has {', '.join(owner)}")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ConfigError(f"algorithm.options: {key} must be a number, got {value!r}")
        if not value >= 0:  # NaN neither
            raise ConfigError(f"algorithm.options: {key} must be >= 0, got {value!r}")
        owner[key][key] = float(value)
    return replace(row, advantage_options=tables[0], loss_options=tables[1], correction_options=tables[2])
