"""A run for observers: where its folder and its bus are, and their new contents. Nothing is changed.

Rows of metrics.jsonl come from the folder; without a folder, the newest row comes from the bus. Heartbeats
(audit/run_observer.py) and events come from the bus.

Tests: tests/unit/board/test_run_state.py.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Final

from asyncrl.adapters import bus_file, registry
from asyncrl.audit import run_folder
from asyncrl.audit.metric_rows import Row
from asyncrl.audit.run_observer import RunObserver
from asyncrl.board.file_tail import RowTail
from asyncrl.board.group_index import GroupIndex
from asyncrl.config import RunConfig
from asyncrl.errors import ConfigError
from asyncrl.messages import Event, StepMetrics
from asyncrl.messages.topics import EVENTS

METRICS_FILE: Final = "metrics.jsonl"
MOST_TIMELINE_BYTES: Final = 8 * 2**20


class WatchedRun:
    """directory: the run's folder; None if only its bus can be reached"""

    def __init__(self, where: Path | None, overrides: list[str], *, token: str, verb: str) -> None:
        """Find the run in a folder, of a run file, or named only by ``overrides``.

        Raises ConfigError if there is none.
        """
        self._where, self._overrides, self._verb = where, overrides, verb
        settings = self._recorded()
        self._token = token or settings.bus.token
        self._has_server = bool(settings.bus.url)
        self.directory = where if where is None or where.is_dir() else settings.run_directory
        self.name = _name(self.directory.absolute()) if self.directory is not None else settings.run.name

    def _settings(self) -> RunConfig:
        """Return the settings, including the bus.

        Raises NoSuchRun for a folder that was renamed while its run is not up.
        """
        return run_folder.run_at(self._where, self._overrides, verb=self._verb)

    def _recorded(self) -> RunConfig:
        """Return the settings as recorded now."""
        return run_folder.run_at(self._where, self._overrides, verb=self._verb, needs_bus=False)

    def steps(self) -> int:
        """Return the number of steps after which the run is done; 0 if it is not recorded yet. Blocks."""
        if self.directory is None:
            return 0
        try:
            return run_folder.RecordedRun(self.directory).newest_settings().run.steps
        except ConfigError:  # no learner has begun, or its line is damaged
            return 0

    def observer(self) -> RunObserver:
        """Return a observer. Raises ConfigError while the run is not up."""
        return RunObserver(self._settings(), token=self._token)

    def is_up(self) -> bool:
        """Whether the run may be up: `asyncrl run` is up here, the bus is at bus.url, or only the bus is reachable."""
        return self.directory is None or self._has_server or bus_file.launcher_pid(self.directory) != 0

    async def events(self, *, newest: int) -> AsyncGenerator[Event, None]:
        """Yield the last ``newest`` events, then new ones. Raises AsyncRLError.

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
        """Return the index of its newest prompt groups; empty before ``refresh``."""
        return GroupIndex(self._recorded, self.directory, token=self._token)

    def timeline(self) -> list[Row]:
        """Return the newest rows of timeline.jsonl. Blocks."""
        # Imports torch, which a board of live runs does not need.
        from asyncrl.audit.timeline import newest_rows

        return newest_rows(self.directory, most_bytes=MOST_TIMELINE_BYTES) if self.directory is not None else []

    def rows(self) -> RowTail | None:
        """Return a reader of its metrics.jsonl; None without a folder."""
        return RowTail(self.directory / METRICS_FILE) if self.directory is not None else None


def _name(directory: Path) -> str:
    """Return the name of a run's folder, or of RUN/shadows/NAME with the run's."""
    *_, run, folder, name = ("", "", *directory.parts)
    return f"{run}/{name}" if folder == "shadows" else name


def row_of(metrics: StepMetrics) -> Row:
    """Convert metrics of a step from the bus to a row of metrics.jsonl; staleness is its only histogram."""
    counts = list(metrics.staleness)
    histogram = {"edges": list(range(len(counts) + 1)), "counts": counts}
    return {"step": metrics.step, **metrics.numbers, **({"staleness/histogram": histogram} if counts else {})}
