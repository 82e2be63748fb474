"""A run of the table, and what names it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asyncrl import config
from asyncrl.errors import ConfigError
from benchmarks.old_tokens.guards import GUARDS

RUN_FILE: Final = Path("examples/demo.toml")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """staleness: of every token from step ``staleness`` on"""

    task: str
    rate: float
    staleness: int
    guard: str
    seed: int
    steps: int

    @classmethod
    def of(cls, row: Row) -> Cell:
        """Raises ConfigError for a row of something else."""
        if missing := [name for name in cls.__dataclass_fields__ if name not in row]:
            raise ConfigError(f"a row without {missing[0]!r} is no run of old_tokens: use another file")
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each cell, as it came last."""
    return list({Cell.of(row): row for row in rows}.values())


def configure(cell: Cell, settings: dict[str, Any]) -> config.RunConfig:
    """Return the demo's run file with the settings of the cell, of its guard, and others."""
    changes = {
        "run.mode": "async" if cell.staleness else "sync",
        "run.seed": cell.seed,
        "run.steps": cell.steps,
        "staleness.max_staleness": cell.staleness,
        "learner.learning_rate": cell.rate,
        "learner.min_learning_rate": 0.0,  # the demo's is larger than the rates of real models
        **settings,
        **GUARDS[cell.guard].settings,
    }
    return config.load(RUN_FILE, [f"{key}={_toml(value)}" for key, value in changes.items()])


def share_of_rate(cell: Cell, *, step: int, warm_up: int = 0) -> float:
    """Return the factor of the learning rate in a step: that of the warm-up, times min(1, safe_at / staleness) if the
    guard scales it."""
    risen = min(1.0, (step + 1) / max(warm_up, 1))
    age, safe_at = min(step, cell.staleness), GUARDS[cell.guard].safe_at
    return risen * min(1.0, safe_at / age) if safe_at and age else risen


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str | Path) else str(value)
