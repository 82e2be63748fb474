"""Which rows of the data rest because the policy nearly always, or hardly ever, solved them the last time.

A group of equal rewards teaches nothing. Filters find that out only after sampling; a row that rests is not sampled at
all. After ``rest`` passes over the data the row is used again, because the policy has changed by then.

Tests: tests/unit/policies/groups/test_pass_rates.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

RowKey = tuple[int, int]
"""File index and row index within the file; the same in every pass over the data."""


@dataclass(frozen=True, slots=True)
class PassRate:
    """share: solved fraction of the row's samples, in [0, 1];  epoch: pass over the data that asked for them"""

    share: float
    epoch: int


@dataclass(slots=True, kw_only=True)
class PassRates:
    """The newest pass rate of each row, and the rule that decides which rows rest.

    newest      pass rate of each row for which a group came back
    num_rested  rows that were passed over; a row counts each time

    low, high, rest, solved_at: see CurriculumSection
    """

    low: float = 0.0
    high: float = 1.0
    rest: int = 1
    solved_at: float = 1.0
    newest: dict[RowKey, PassRate] = field(default_factory=dict)
    num_rested: int = 0

    @property
    def is_on(self) -> bool:
        return self.low > 0 or self.high < 1

    def see(self, row: RowKey | None, *, epoch: int, rewards: Sequence[float]) -> None:
        """Record a group that came back. ``row`` is None if its row is unknown."""
        if self.is_on and row is not None and rewards:
            share = sum(reward >= self.solved_at for reward in rewards) / len(rewards)
            self.newest[row] = PassRate(share, epoch)

    def rests(self, row: RowKey, *, epoch: int) -> bool:
        """Return whether the row is passed over in pass ``epoch`` over the data."""
        newest = self.newest.get(row)
        return newest is not None and not self.low <= newest.share <= self.high and epoch - newest.epoch <= self.rest

    def metrics(self) -> dict[str, float]:
        """Return the curriculum metrics; empty until a row has been seen."""
        shares = [one.share for one in self.newest.values()]
        if not shares:
            return {}
        return {
            "curriculum/rows": float(len(shares)),
            "curriculum/pass_rate": math.fsum(shares) / len(shares),
            "curriculum/too_hard": sum(share < self.low for share in shares) / len(shares),
            "curriculum/too_easy": sum(share > self.high for share in shares) / len(shares),
            "curriculum/rested": float(self.num_rested),
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; the rest comes from the run file. Empty until a row has been seen."""
        if not self.newest:
            return {}
        rows = [[*row, one.share, one.epoch] for row, one in self.newest.items()]
        return {"rows": rows, "num_rested": self.num_rested}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; an empty ``state`` changes nothing."""
        rows = state.get("rows", []) if self.is_on else []
        self.newest = {(file, place): PassRate(share, epoch) for file, place, share, epoch in rows}
        self.num_rested = state.get("num_rested", 0)


def state_problem(state: Any) -> str:
    """Return why no PassRates can have saved ``state``, in words; empty if one can."""
    if state == {}:
        return ""
    if not isinstance(state, dict) or state.keys() != {"rows", "num_rested"} or not isinstance(state["rows"], list):
        return "pass_rates are none"
    for row in state["rows"]:
        if not isinstance(row, list) or [type(value) for value in row] not in ([int, int, float, int],):
            return f"pass_rates has the row {row!r}"
        if not 0 <= row[2] <= 1 or row[3] < 0:
            return f"pass_rates has the row {row!r}"
    return "" if type(state["num_rested"]) is int and state["num_rested"] >= 0 else "num_rested is not a count"
