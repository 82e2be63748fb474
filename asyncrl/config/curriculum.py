"""[curriculum] of the run file: skips rows that the policy nearly always or hardly ever solves."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import require


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSection:
    low: float = 0.0
    """A row rests if a smaller share of the samples of its newest group was solved; 0 disables this limit."""
    high: float = 1.0
    """A row rests if a larger share was solved, for example 0.9; 1 disables this limit."""
    rest: int = 1
    """Number of passes over the data for which a row rests; then it is used again."""
    solved_at: float = 1.0
    """A sample with at least this reward counts as solved."""

    @property
    def is_on(self) -> bool:
        return self.low > 0 or self.high < 1

    def __post_init__(self) -> None:
        require(0 <= self.low <= self.high <= 1, f"0 <= low <= high <= 1 must hold, got {self.low:g} and {self.high:g}")
        require(self.rest >= 1, f"rest must be >= 1, got {self.rest}")
