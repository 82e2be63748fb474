"""[curriculum] of the run file: which rows rest, because the policy solves them nearly always, or hardly ever."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.config.checks import require


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSection:
    low: float = 0.0
    """A row rests if a smaller share of the samples of its newest group were solved; 0 lets no row rest for that."""
    high: float = 1.0
    """A row rests if a larger share of them were solved, such as 0.9; 1 lets no row rest for that."""
    rest: int = 1
    """Passes over the data in which a row that rests is passed over; then it is asked again."""
    solved_at: float = 1.0
    """A sample is solved with at least this reward."""

    @property
    def is_on(self) -> bool:
        return self.low > 0 or self.high < 1

    def __post_init__(self) -> None:
        require(0 <= self.low <= self.high <= 1, f"0 <= low <= high <= 1 must hold, got {self.low:g} and {self.high:g}")
        require(self.rest >= 1, f"rest must be >= 1, got {self.rest}")
