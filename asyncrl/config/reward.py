"""[reward] of the run file, and the reward of a data set that an evaluation asks about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from asyncrl.config.checks import positive, require


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    kind: str = ""
    """Judges answers: a name, or "package.module:function" of your own; "none" is what the rollout function set."""
    weight: float = 1.0
    """How much the part counts: the reward is the sum of weight times part. 0: it is a metric only."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of its reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection:
    kind: str = "math"
    """Judges answers: a name, or "package.module:function" of your own."""
    timeout_seconds: float = 30.0
    """Limit for one group. A group whose reward takes longer fails."""
    largest: float = 1e6
    """Largest magnitude of a reward, and of each of its parts. A group with a larger one fails: advantages, and the
    squares of them that metrics sum up, must stay far from the end of float32."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the reward."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Rewards of single rows by the name that data.reward_key gives: {code = "package.module:function"}. They have no
    options; built-in ones that need none need no entry either."""
    parts: Mapping[str, RewardPart] = field(default_factory=dict)
    """With kind = "parts": what it is the weighted sum of, by name; each is the metric reward/NAME."""
    workers: int = 0
    """Reward workers that `asyncrl run` starts. With 1 or more, reward workers grade what is trained, also those that
    joined by themselves. 0: rollout workers grade it. Evaluations are graded by who answers them."""
    at_once: int = 16
    """Groups that a reward worker grades at the same time."""
    max_ungraded: int = 256
    """While a rollout worker has so many generated groups that are not graded, it begins no other; with and without
    reward workers."""

    @property
    def judges(self) -> bool:
        """False: the reward that the rollout function sets stands."""
        return self.kind != "none"

    @property
    def takes_given(self) -> bool:
        """Whether the reward that the rollout function sets counts."""
        return "none" in (self.kind, *(part.kind for part in self.parts.values()))

    @property
    def part_sections(self) -> dict[str, RewardSection]:
        """What each part would be as the run's only reward."""
        return {
            name: replace(self, kind=part.kind, options=part.options, rows={}, parts={})
            for name, part in self.parts.items()
        }

    def __post_init__(self) -> None:
        positive(self, "timeout_seconds", "largest", "at_once", "max_ungraded")
        require(self.workers >= 0, f"workers must be >= 0, got {self.workers}")
        require(self.largest <= 1e12, f"largest must be <= 1e12, got {self.largest:g}")
