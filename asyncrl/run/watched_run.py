"""A run for somebody who looks on: where its folder and its bus are, and what is new there. Nothing is changed.

Rows of metrics.jsonl come from the folder; who has no folder gets the newest row from the bus. Heartbeats come from
the bus (run/looker.py), and so do events.

Tests: tests/unit/run/test_watched_run.py.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError, MessageError
from asyncrl.messages import Event, StepMetrics, upgrade
from asyncrl.messages.topics import EVENTS
from asyncrl.run import registry, run_folder
from asyncrl.run.looker import Looker

METRICS_FILE: Final = "metrics.jsonl"
MOST_BYTES: Final = 4 * 2**20
"""Of metrics.jsonl, read at a time."""

Row = dict[str, Any]


class WatchedRun:
    """directory: its folder; None where only its bus can be reached"""

    def __init__(self, settings: RunConfig, directory: Path | None, *, token: str) -> None:
        self._settings = settings
        self._token = token
        self.directory = directory
        self.name = directory.absolute().name if directory is not None else settings.run.name

    @classmethod
    def at(cls, where: Path | None, overrides: list[str], *, token: str, verb: str) -> WatchedRun:
        """The run in a folder, or of a run file, or named by ``overrides`` alone. Raises ConfigError for no run."""
        settings = run_folder.run_at(where, overrides, verb=verb)
        directory = where if where is None or where.is_dir() else settings.run_directory
        return cls(settings, directory, token=token or settings.bus.token)

    def steps(self) -> int:
        """The run is done after so many; 0 while nobody has written it down. Blocks."""
        if self.directory is None:
            return 0
        try:
            return run_folder.RecordedRun(self.directory).newest_settings().run.steps
        except ConfigError:  # no learner has begun, or its line is damaged
            return 0

    def looker(self) -> Looker:
        """Raises ConfigError while the run is not up."""
        return Looker(self._settings, token=self._token)

    def is_up(self) -> bool:
        """Whether its bus is not ours, or the `asyncrl run` that started it is up. Of another machine's: True."""
        if self.directory is None or self._settings.bus.url:
            return True
        return run_folder.launcher_pid(self.directory) != 0

    async def events(self, *, newest: int) -> AsyncGenerator[Event, None]:
        """The last ``newest`` events, then those to come. Raises AsyncRLError.

        waits for: an event    woken by: the bus
        """
        bus = await registry.observe(self._settings, token=self._token)
        try:
            after = max(0, await bus.last_sequence(EVENTS) - newest)
            async with bus.read(EVENTS, after=after) as records:
                async for record in records:
                    if record.message is not None:
                        yield record.message
        finally:
            await bus.close()

    def rows(self) -> RowTail | None:
        """Of its metrics.jsonl; None without a folder."""
        return RowTail(self.directory / METRICS_FILE) if self.directory is not None else None


class RowTail:
    """Reads what a file of rows gets, at most MOST_BYTES at a time. A resumed learner may cut it: then what it lost is
    written again, and read again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._inode = 0

    def read(self) -> tuple[list[Row], bool]:
        """(rows, whether there may be more at once). Lines that are no row are left out. Blocks."""
        try:
            with self._path.open("rb") as file:
                there = self._path.stat()
                if there.st_size < self._position or there.st_ino != self._inode:
                    self._position, self._inode = 0, there.st_ino
                file.seek(self._position)
                found = file.read(MOST_BYTES)
        except OSError:  # not there yet, or not for us
            return [], False
        whole, newline, _ = found.rpartition(b"\n")
        self._position += len(whole) + len(newline)
        if not newline and len(found) == MOST_BYTES:  # no row is so long
            self._position += len(found)
        rows = [row for line in whole.split(b"\n") if (row := _row(line)) is not None]
        return rows, len(found) == MOST_BYTES


def row_of(metrics: StepMetrics) -> Row:
    """What the bus has of a step, as a row of metrics.jsonl: without histograms other than that of staleness."""
    counts = list(metrics.staleness)
    histogram = {"edges": list(range(len(counts) + 1)), "counts": counts}
    return {"step": metrics.step, **metrics.numbers, **({"staleness/histogram": histogram} if counts else {})}


def _row(line: bytes) -> Row | None:
    try:
        row = upgrade.metrics(json.loads(line))
        return row if type(row["step"]) is int else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MessageError):
        return None
