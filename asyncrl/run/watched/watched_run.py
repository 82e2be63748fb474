"""A run for somebody who looks on: where its folder and its bus are, and what is new there. Nothing is changed.

Rows of metrics.jsonl come from the folder; who has no folder gets the newest row from the bus. Heartbeats come from
the bus (run/watched/looker.py), and so do events.

Tests: tests/unit/run/watched/test_watched_run.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.messages import Event, StepMetrics
from asyncrl.messages.topics import EVENTS
from asyncrl.run import registry
from asyncrl.run.recorded import run_folder
from asyncrl.run.recorded.metric_rows import Row, parsed
from asyncrl.run.watched.file_tail import FileTail
from asyncrl.run.watched.group_index import GroupIndex
from asyncrl.run.watched.looker import Looker

METRICS_FILE: Final = "metrics.jsonl"
MOST_TIMELINE_BYTES: Final = 8 * 2**20


class WatchedRun:
    """directory: its folder; None where only its bus can be reached"""

    def __init__(self, where: Path | None, overrides: list[str], *, token: str, verb: str) -> None:
        """The run in a folder, or of a run file, or named by ``overrides`` alone. Raises ConfigError for no run."""
        self._where, self._overrides, self._verb = where, overrides, verb
        settings = self._recorded()
        self._token = token or settings.bus.token
        self._has_server = bool(settings.bus.url)
        self.directory = where if where is None or where.is_dir() else settings.run_directory
        self.name = self.directory.absolute().name if self.directory is not None else settings.run.name

    def _settings(self) -> RunConfig:
        """With its bus. Raises NoSuchRun for a folder that was renamed, while its run is not up."""
        return run_folder.run_at(self._where, self._overrides, verb=self._verb)

    def _recorded(self) -> RunConfig:
        """As they are recorded now."""
        return run_folder.run_at(self._where, self._overrides, verb=self._verb, needs_bus=False)

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
        return Looker(self._settings(), token=self._token)

    def is_up(self) -> bool:
        """Whether it may be: a server of its own has its bus, or its `asyncrl run` is up on this machine."""
        return self.directory is None or self._has_server or run_folder.launcher_pid(self.directory) != 0

    async def events(self, *, newest: int) -> AsyncGenerator[Event, None]:
        """The last ``newest`` events, then those to come. Raises AsyncRLError.

        waits for: an event    woken by: the bus
        """
        bus = await registry.observe(self._settings(), token=self._token)
        try:
            after = max(0, await bus.last_sequence(EVENTS) - newest)
            async with bus.read(EVENTS, after=after) as records:
                async for record in records:
                    if record.message is not None:
                        yield record.message
        finally:
            await bus.close()

    def groups(self) -> GroupIndex:
        """Its newest prompt groups; none before ``refresh``."""
        return GroupIndex(self._recorded, self.directory, token=self._token)

    def timeline(self) -> list[Row]:
        """The newest rows of its timeline.jsonl. Blocks."""
        # It imports torch, which a board of live runs can do without.
        from asyncrl.run.recorded.timeline import newest_rows

        return newest_rows(self.directory, most_bytes=MOST_TIMELINE_BYTES) if self.directory is not None else []

    def rows(self) -> RowTail | None:
        """Of its metrics.jsonl; None without a folder."""
        return RowTail(self.directory / METRICS_FILE) if self.directory is not None else None


class RowTail:
    """Rows of metrics.jsonl. A resumed learner may cut it: then what it lost is written again, and read again."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path)

    def read(self) -> tuple[list[Row], bool]:
        """(rows, whether there may be more at once). Lines that are no row are left out. Blocks."""
        lines, has_more = self._tail.read()
        return [row for _, line in lines if (row := parsed(line)) is not None], has_more


def row_of(metrics: StepMetrics) -> Row:
    """What the bus has of a step, as a row of metrics.jsonl: without histograms other than that of staleness."""
    counts = list(metrics.staleness)
    histogram = {"edges": list(range(len(counts) + 1)), "counts": counts}
    return {"step": metrics.step, **metrics.numbers, **({"staleness/histogram": histogram} if counts else {})}
