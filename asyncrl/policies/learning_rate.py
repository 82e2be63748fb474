"""The learning rate of each step: a linear warm-up, then constant or falling to a floor. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """peak: after ``warmup_steps``; floor: what it has fallen to after ``steps`` steps, warm-up included."""

    kind: Kind = "constant"
    peak: float
    floor: float = 0.0
    warmup_steps: int = 0
    steps: int = 0

    def at(self, step: int) -> float:
        """Of step ``step``, from 1.

        The warm-up reaches the peak with its last step, and the step after it has the peak too. Step ``steps`` is the
        last above the floor, unless they are equal: no step of the run is lost to a rate of 0.
        """
        if step <= self.warmup_steps or self.kind == "constant":
            return self.peak * min(1.0, step / max(self.warmup_steps, 1))
        share = min(1.0, (step - 1 - self.warmup_steps) / max(self.steps - self.warmup_steps, 1))
        height = 1.0 - share if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
        return self.floor + (self.peak - self.floor) * height
