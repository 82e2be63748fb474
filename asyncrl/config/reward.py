"""[reward] of the run file, and the reward of an evaluation data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from asyncrl.config.checks import Positive, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    kind: str = ""
    """Judges answers: a name, or "package.module:function" of your own. "none": the reward that the rollout function
    set."""
    weight: float = 1.0
    """Weight of the part: the reward is the sum of weight times part. 0: the part is only a metric."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of this part's reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSection:
    kind: str = "math"
    """Judges answers: a name, or "package.module:function" of your own."""
    timeout_seconds: Positive[float] = 30.0
    """Time limit for the reward of one group. A group that takes longer fails. math, deepscaler, json_schema and code
    count from when they begin to judge the group, and give 0 to the answers that need more than their share of it."""
    largest: Annotated[float, Range(low=0, high=1e12, is_open=True)] = 1e6
    """Maximum magnitude of a reward and of each of its parts. A group with a larger value fails: advantages, and the
    squares that metrics sum up, must stay far below the limit of float32."""
    keep_special_tokens: bool = True
    """Whether sample.completion has the special tokens that the model sampled, such as <think> or <|channel|>, except
    those that end an answer. false: none. Built-in rewards judge what follows the thought, which these marks end."""
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold secrets
    """Options of the reward."""
    rows: Mapping[str, str] = field(default_factory=dict)
    """Rewards that single rows choose with data.reward_key, by name: {code = "package.module:function"}. They take no
    options. Built-in rewards that need no options can be chosen without an entry here."""
    parts: Mapping[str, RewardPart] = field(default_factory=dict)
    """With kind = "parts": the parts of the weighted sum, by name. Each part is reported as the metric reward/NAME."""

    @property
    def judges(self) -> bool:
        """False if the reward set by the rollout function is kept."""
        return self.kind != "none"

    @property
    def takes_given(self) -> bool:
        """Whether the reward set by the rollout function counts."""
        return "none" in (self.kind, *(part.kind for part in self.parts.values()))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all rewards that may judge an answer: its own, and those of rows and of parts."""
        return (self.kind, *self.rows.values(), *(part.kind for part in self.parts.values()))

    @property
    def part_sections(self) -> dict[str, RewardSection]:
        """Each part as if it were the only reward of the run."""
        return {
            name: replace(self, kind=part.kind, options=part.options, rows={}, parts={})
            for name, part in self.parts.items()
        }
