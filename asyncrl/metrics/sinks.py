"""Destinations of a step's metrics: metrics.jsonl, the console and user sinks.

W&B and TensorBoard have their own modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, TextIO

from asyncrl.config import RunConfig, plugins, secret_values
from asyncrl.errors import AsyncRLError, ConfigError, disk_problem
from asyncrl.logs import print_line
from asyncrl.metrics.background import BackgroundSink
from asyncrl.metrics.port import ShowsSamples, Sink, TakesAlarms
from asyncrl.policies.groups.sample import GroupSample
from asyncrl.policies.metric import Histogram, Metric

log = logging.getLogger("asyncrl.metrics")


class OwnSink:
    """A user's sink, made with the first call. What it raises names the sink in one line."""

    def __init__(self, run: RunConfig, name: str) -> None:
        self._run, self._name = run, name
        self._made: Any = None

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        self._call("write", step, dict(metrics))

    def write_samples(self, step: int, samples: Sequence[GroupSample]) -> None:
        if isinstance(self._sink, ShowsSamples):
            self._call("write_samples", step, samples)

    def alarm(self, step: int, name: str, text: str) -> None:
        if isinstance(self._sink, TakesAlarms):
            self._call("alarm", step, name, text)

    def close(self) -> None:
        if self._made is not None:
            self._call("close")

    @property
    def _sink(self) -> Any:
        if self._made is None:
            self._made = plugins.make(_own_class(self._name), self._run, where="metrics.sinks", name=self._name)
        return self._made

    def _call(self, method: str, *arguments: Any) -> None:
        try:
            with plugins.contain_exits():
                getattr(self._sink, method)(*arguments)
        except AsyncRLError:
            raise
        except Exception as error:  # a user's class may raise anything
            if disk_problem(error) is not None:
                raise
            problem = plugins.describe_raised(error)
            raise AsyncRLError(f"metrics.sinks: {self._name}.{method} raised {problem}") from error


def _own_class(name: str) -> Any:
    """Load the class of a sink. Raises ConfigError if it is not a sink."""
    kind = plugins.load(name, where="metrics.sinks", kind=type)
    for method in ("write", "close"):
        if not callable(getattr(kind, method, None)):
            raise ConfigError(f"metrics.sinks: {name!r} has no {method}(); a sink has write(step, metrics) and close()")
    return kind


class JsonLines:
    """Writes one JSON object per line: the step and every metric, null if it is not finite. Flushes after each row."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a+b", buffering=0)
        self._end = _end_of_rows(self._file)  # a partial row of a killed process may follow

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        row: dict[str, Any] = {"step": step}
        row |= {name: _as_json(value) for name, value in metrics.items()}
        left = json.dumps(row, allow_nan=False).encode() + b"\n"
        length = len(left)
        try:
            if self._file.seek(0, os.SEEK_END) != self._end:
                self._file.truncate(self._end)
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._end += length

    def close(self) -> None:
        self._file.close()


def _end_of_rows(file: BinaryIO) -> int:
    """Return the offset of the end of the last complete line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            return start + found + 1
        end = start
    return 0


def _as_json(value: Metric) -> Any:
    if isinstance(value, Histogram):
        return dataclasses.asdict(value)
    return value if math.isfinite(value) else None


class Console:
    """Prints one line per step, as long as somebody reads them. The run goes on without: metrics.jsonl has the rows."""

    def __init__(self, steps: int, out: TextIO | None = None) -> None:
        self._width = len(str(steps))
        self._steps = steps
        self._out = out or sys.stdout
        self._is_lost = False

    def write(self, step: int, metrics: Mapping[str, Metric]) -> None:
        if "evaluation/complete" in metrics:
            self._say(_evaluation_line(step, metrics))
            return

        def number(name: str) -> float:
            value = metrics.get(name, 0.0)
            return value if isinstance(value, float | int) else 0.0

        reward = f"  reward {number('reward/mean'):6.3f}" if "reward/mean" in metrics else ""
        ages = f"  staleness {number('staleness/mean'):4.1f} (max {number('staleness/max'):.0f})"
        text = (
            f"step {step:{self._width}d}/{self._steps}{reward}"
            f"  loss {number('loss'):+8.4f}{ages if 'staleness/mean' in metrics else ''}"
            f"  {number('learner/tokens_per_second'):8,.0f} tok/s"
            f"  {number('learner/elapsed_seconds'):6.2f} s"
            f" (wait {number('learner/wait_seconds'):.2f}, train {number('learner/step_seconds'):.2f})"
            f"  dropped {number('staleness/dropped_groups'):.0f}"
            + (f"  MISMATCH {number('mismatch/fresh_mean'):.3f}" if number("mismatch/alarm") else "")
        )
        self._say(text)

    def _say(self, text: str) -> None:
        if not print_line(text, out=self._out) and not self._is_lost:
            self._is_lost = True
            log.warning("stdout takes no more lines (its reader is gone, or its disk is full); metrics.jsonl has them")

    def close(self) -> None:
        pass


_MOST_SHOWN: Final = 8
"""Maximum number of data sets in a console line; metrics.jsonl has all of them."""


def _evaluation_line(step: int, metrics: Mapping[str, Metric]) -> str:
    """Return a line for the evaluation of version ``step``.

    Of each data set: the mean reward, then the share of prompts that are solved (``solved_at``), which may be lower.
    """
    parts: dict[str, dict[str, str]] = {}
    for name, value in metrics.items():
        dataset, _, metric = name.removeprefix("evaluation/").partition("/")
        what, at, _ = metric.partition("@")
        if not at or "/" in metric or "[" in dataset or isinstance(value, Histogram) or metric == "pass@1":
            continue
        low, high = (metrics.get(f"{name}/{bound}") for bound in ("low", "high"))
        is_spread = what == "mean" and isinstance(low, float) and isinstance(high, float)
        spread = f" ({low:.3f} to {high:.3f})" if is_spread else ""
        its = parts.setdefault(dataset, {})
        kind = "reward" if what == "mean" else "solved"
        its[what] = f"{kind} {metric} {value:.3f}{spread}"  # of pass@2, pass@4, ... only the last one is kept
    seconds, lag = metrics.get("evaluation/seconds", 0.0), metrics.get("evaluation/lag_steps", 0.0)
    shown = [f"{dataset} {', '.join(its.values())}" for dataset, its in list(parts.items())[:_MOST_SHOWN]]
    more = len(parts) - _MOST_SHOWN
    found = "; ".join([*shown, *([f"and {more} more data sets"] if more > 0 else [])]) or "no answers"
    whole = "" if metrics["evaluation/complete"] else "  INCOMPLETE"
    ago = "1 step" if lag == 1 else f"{lag:.0f} steps"
    return f"evaluation of step {step}: {found}  {seconds:.1f} s, {ago} ago{whole}"


def check_sinks(run: RunConfig) -> None:
    """Check that ``open_sinks`` can open the sinks of the run file, without opening them. Raises ConfigError."""
    for name in run.metrics.sinks:
        _own_class(name)
    if run.metrics.tensorboard:
        from asyncrl.metrics.tensorboard import writer_class

        writer_class()
    if run.metrics.wandb:
        from asyncrl.metrics.wandb import checked_wandb

        checked_wandb()


def check_logins(run: RunConfig) -> None:
    """Check that this machine has the logins of the run's sinks. Raises ConfigError."""
    if run.metrics.wandb:
        from asyncrl.metrics.wandb import check_login

        check_login()


def open_sinks(run: RunConfig, *, resume: bool, step: int = 0) -> list[Sink]:
    """Open the sinks of the run file. A resumed run continues its file and its W&B run.

    ``step`` is the last step that a resumed run keeps; TensorBoard hides what an earlier learner wrote after it. The
    file and the console are written synchronously. All other sinks are optional: they run in the background, and
    what fails in them never ends the run.
    """
    made: list[Sink] = [JsonLines(run.run_directory / "metrics.jsonl")]
    if run.metrics.console:
        made.append(Console(run.run.steps))
    if run.metrics.wandb:
        from asyncrl.metrics.wandb import WandB

        settings = secret_values.settings_without_secrets(run)
        settings["staleness"]["max_staleness"] = run.staleness_bound  # "auto" says little in a table of runs
        wandb = WandB(
            project=run.metrics.wandb_project,
            name=run.run.name,
            directory=run.run_directory,
            config=settings,
            resume=resume,
        )
        made.append(BackgroundSink(wandb, name="W&B"))
    if run.metrics.tensorboard:
        from asyncrl.metrics.tensorboard import TensorBoard

        events = TensorBoard(run.run_directory / "tensorboard", purge_step=step + 1 if resume else None)
        made.append(BackgroundSink(events, name="TensorBoard"))
    return [*made, *(BackgroundSink(OwnSink(run, name), name=name) for name in run.metrics.sinks)]
