"""Python API of a run: what `asyncrl check` and `asyncrl run` do, as a library.

import asyncrl

run = asyncrl.Run.from_file("run.toml", overrides={"run.steps": 10})
print(run.check().num_prompts)
result = run.train_sync()                       # in a notebook: result = await run.train()
pandas.DataFrame(run.open().metrics())
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl import config
from asyncrl.audit.opened_run import OpenedRun, metric_rows, open_run
from asyncrl.audit.run_folder import RecordedRun, newest_model
from asyncrl.config import RunConfig
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launch.checks.run_file import check
from asyncrl.launch.processes.launch import launch
from asyncrl.launch.summary import Summary, summarize
from asyncrl.os_process import import_path

__all__ = ["AsyncRLError", "ConfigError", "OpenedRun", "Run", "RunResult", "Summary", "open_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How training ended.

    reason     "done", "interrupted", or the failure in one line
    exit_code  exit code that `asyncrl run` would have: 0 when done, 130 when interrupted
    steps      optimizer steps done, including earlier starts
    metrics    row of metrics.jsonl for the last step; empty if no step was done
    folder     folder with everything the run has written
    model      Hugging Face folder of the newest weights; None if the weight channel keeps none on disk
    """

    reason: str
    exit_code: int
    steps: int
    metrics: Mapping[str, Any]
    folder: Path
    model: Path | None


class Run:
    """A run file with overrides. ``settings`` holds the resulting value of every key."""

    def __init__(self, run_file: str | Path, *, overrides: Iterable[str] | Mapping[str, Any] = ()) -> None:
        """See ``from_file``."""
        self.run_file = Path(run_file)
        self.overrides = config.override_items(overrides)
        self.settings: RunConfig = config.load(self.run_file, self.overrides)

    @classmethod
    def from_file(cls, run_file: str | Path, *, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Run:
        """Read a run file.

        overrides  {"run.steps": 10}, or as on the command line: ["run.steps=10"]

        Raises ConfigError for an unknown key or an invalid value.
        """
        return cls(run_file, overrides=overrides)

    @property
    def folder(self) -> Path:
        """Folder for everything that the run writes."""
        return self.settings.run_directory

    def check(self) -> Summary:
        """Check the run file and return what `asyncrl check` prints.

        Raises ConfigError for settings that cannot work.
        """
        return summarize(self.settings)

    async def train(self, *, resume: bool = False, bus_token: str = "") -> RunResult:
        """Train to the end with the processes that `asyncrl run` would start. Cancel the task to drain them.

        resume     continue from the last checkpoint in ``folder``
        bus_token  token of the nats-server at bus.url, if it needs one that is not in the run file

        Raises ConfigError for settings that cannot work, or if the run is already up. Later failures are in the result.
        """
        await asyncio.to_thread(check, self.settings)
        outcome = await launch(
            self.settings,
            run_file=self.run_file,
            overrides=self.overrides,
            resume=resume,
            token=bus_token or self.settings.bus.token,
            import_path=import_path(),
        )
        rows = list(metric_rows(RecordedRun(self.folder)))
        return RunResult(
            reason=outcome.reason,
            exit_code=outcome.exit_code,
            steps=int(rows[-1]["step"]) if rows else 0,
            metrics=rows[-1] if rows else {},
            folder=self.folder,
            model=newest_model(self.settings),
        )

    def train_sync(self, *, resume: bool = False, bus_token: str = "") -> RunResult:
        """Same as ``train``, for a program without an event loop.

        Ctrl-C drains the run and raises KeyboardInterrupt.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.train(resume=resume, bus_token=bus_token))
        raise ConfigError("train_sync() would block the event loop that runs here, as in a notebook; use await train()")

    def open(self, *, bus_token: str = "") -> OpenedRun:
        """Open the run's metrics, groups and trajectories. Raises ConfigError if the run has not been started."""
        return open_run(self.folder, bus_token=bus_token or self.settings.bus.token)
