"""Where a step's metrics go: metrics.jsonl and the console. W&B is beside, in wandb.py."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from asyncrl.config import RunConfig
from asyncrl.policies.batch import Histogram, Metric


class Sink(Protocol):
    def write(self, step: int, metrics: Mapping[str, Metric]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """One object a line: step and every metric, null where it is not finite. Flushed each step."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        row: dict[str, Any] = {"step": step}
        row |= {name: _as_json(value) for name, value in metrics.items()}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _as_json(value: Metric) -> Any:
    if isinstance(value, Histogram):
        return dataclasses.asdict(value)
    return value if math.isfinite(value) else None


class Console:
    """One line a step: what a person watches."""

    def __init__(self, steps: int, out: TextIO | None = None) -> None:
        self._width = len(str(steps))
        self._steps = steps
        self._out = out or sys.stdout

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        def number(name: str) -> float:
            value = metrics.get(name, 0.0)
            return value if isinstance(value, float | int) else 0.0

        print(
            f"step {step:{self._width}d}/{self._steps}"
            f"  reward {number('reward/mean'):6.3f}"
            f"  loss {number('loss'):+8.4f}"
            f"  staleness {number('staleness/mean'):4.1f} (max {number('staleness/max'):.0f})"
            f"  {number('learner/tokens_per_second'):8,.0f} tok/s"
            f"  wait {number('learner/wait_seconds'):5.2f} s"
            f"  train {number('learner/step_seconds'):5.2f} s"
            f"  dropped {number('staleness/dropped_groups'):.0f}"
            + (f"  MISMATCH {number('mismatch/fresh_mean'):.3f}" if number("mismatch/alarm") else ""),
            file=self._out,
            flush=True,
        )

    def close(self) -> None:
        pass


def open_sinks(run: RunConfig, *, resume: bool) -> list[Sink]:
    """Those that the run file asks for. A resumed run goes on with its file and its W&B run."""
    made: list[Sink] = [JsonLines(run.run_directory / "metrics.jsonl")]
    if run.metrics.console:
        made.append(Console(run.run.steps))
    if run.metrics.wandb:
        from asyncrl.metrics.wandb import WandB

        settings = json.loads(json.dumps(dataclasses.asdict(run), default=str))
        settings["bus"] = {key: value for key, value in settings["bus"].items() if key not in ("token", "url")}
        made.append(
            WandB(
                project=run.metrics.wandb_project,
                name=run.run.name,
                directory=run.run_directory,
                config=settings,
                resume=resume,
            )
        )
    return made
