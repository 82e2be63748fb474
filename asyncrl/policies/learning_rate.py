"""The learning rate of each step: a linear warm-up, then a constant rate or a decay to a floor. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate schedule of a run.

    peak   learning rate at the end of the first ``warmup_steps`` steps
    floor  learning rate that a linear or cosine schedule decays to after ``steps`` steps, including the warm-up
    """

    kind: Kind = "constant"
    peak: float
    floor: float = 0.0
    warmup_steps: int = 0
    steps: int = 0

    def at(self, step: int) -> float:
        """Return the learning rate of step ``step``, counted from 1.

        The last warm-up step and the step after it both use the peak. Step ``steps`` is the last step above the floor
        (unless floor and peak are equal), so no step of the run is wasted on a learning rate of 0.
        """
        if step <= self.warmup_steps or self.kind == "constant":
            return self.peak * min(1.0, step / max(self.warmup_steps, 1))
        share = min(1.0, (step - 1 - self.warmup_steps) / max(self.steps - self.warmup_steps, 1))
        height = 1.0 - share if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
        return self.floor + (self.peak - self.floor) * height


def vcpo_learning_rate(
    learning_rate: float, *, ess_fraction: float, base_ess_fraction: float = 1.0, rule: str = "sqrt"
) -> float:
    """Return the learning rate of a step whose batch has this ESS fraction, in (0, learning_rate].

    The result is learning_rate x share or, with rule "sqrt", learning_rate x sqrt(share), as noise scales for Adam;
    share = min(1, ess / base). It applies to this step only. Raises KeyError for any rule but "sqrt" and "linear".
    Source: VCPO, arXiv:2602.17616, with base 1 and unclipped sequence weights.
    """
    share = min(1.0, ess_fraction / base_ess_fraction)
    return float(learning_rate * share ** {"sqrt": 0.5, "linear": 1.0}[rule])
