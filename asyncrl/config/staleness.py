"""[staleness] of the run file: how old a token may be, what happens to those that would be older, what age changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from asyncrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    max_staleness: int = 4
    """No token older than this many policy versions is trained. 0 is synchronous RL."""
    eviction: Literal["drop", "wait"] = "drop"
    """What happens to a group that would get too old: drop it, or hold the learner until stragglers arrive."""
    order: Literal["oldest_first", "freshest_first", "in_order"] = "oldest_first"
    """Which of the groups that are here go first. freshest_first: least staleness, but it drops what took long.
    in_order: as the prompts were published, so one straggler holds everybody up."""
    stragglers: Literal["wait_whole", "partial"] = "wait_whole"
    """partial, async only: when the next batch is the last that may train a group, those of its answers that are done
    are trained, ``min_group`` or more, and the others, the longest, are cancelled and counted."""
    min_group: int = 2
    weight: Literal["", "exponential", "inverse", "linear"] = ""
    """What a token s versions old counts in the loss: exp(-weight_rate s), 1 / (1 + s), 1 - s / (max_staleness + 1).
    It makes old tokens count less; it corrects nothing (algorithm.correction does)."""
    weight_rate: float = 0.2
    learning_rate: Literal["", "ess_sqrt", "ess_linear"] = ""
    """VCPO: each step's learning rate times the effective sample size (ESS) of its batch, or times its root. The ESS
    is offpolicy/sequence_ess, of the untruncated sequence ratios, as a share of the answers."""
    adaptive: bool = False
    """async only: the window is (bound + 1) batches, and the bound follows the ESS, smallest <= bound <= max_staleness.
    max_staleness stays the limit of what is trained."""
    smallest: int = 1
    """The adaptive bound does not fall below."""
    ess_low: float = 0.5
    """A batch whose ESS is below halves the adaptive bound. Ratios of long answers are extreme: lower it for them."""
    ess_high: float = 0.9
    """``patience`` batches in a row above raise it by one."""
    patience: int = 4

    def __post_init__(self) -> None:
        _require(self.max_staleness >= 0, f"max_staleness must be >= 0 (0 trains on-policy), got {self.max_staleness}")
        _require(
            self.order != "freshest_first" or self.eviction == "drop",
            'order = "freshest_first" passes over the old groups that eviction = "wait" waits for; use "drop"',
        )
        _require(
            self.min_group >= 2,
            f"min_group must be >= 2 (one answer has nothing to compare with), got {self.min_group}",
        )
        _require(self.weight_rate > 0, f"weight_rate must be > 0, got {self.weight_rate}")
        _require(self.smallest >= 0, f"smallest must be >= 0, got {self.smallest}")
        _require(
            not self.adaptive or self.smallest <= self.max_staleness,
            f"adaptive moves the bound between smallest and max_staleness; got {self.smallest} > {self.max_staleness}",
        )
        _require(
            0 <= self.ess_low <= self.ess_high <= 1,
            f"0 <= ess_low <= ess_high <= 1 must hold, got {self.ess_low} and {self.ess_high}",
        )
        _require(self.patience > 0, f"patience must be > 0, got {self.patience}")

    def check(self, *, mode: str, group_size: int) -> None:
        """What depends on other sections. Raises ConfigError."""
        _require(
            mode == "async" or not self.adaptive,
            f'staleness: adaptive needs run.mode = "async"; {mode} has a bound of its own',
        )
        if self.stragglers == "partial":
            _require(
                mode == "async" and self.max_staleness >= 2,
                'staleness: stragglers = "partial" needs run.mode = "async" and max_staleness >= 2: else every batch '
                "is the last that may train its groups",
            )
            _require(
                self.min_group <= group_size,
                f"staleness: min_group {self.min_group} is more than rollout.group_size {group_size}",
            )


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ConfigError(problem)
