"""Records the log entries that the learner is working on, so that later incarnations know what a dead one worked on.

    RUN_DIR/in_progress.json
    {"decoding": [[812, "805", "", 1]], "training": [[790, "783", "w3", 1], ...], "before": [...], "aside": [...], ...}

A process that is killed, stopped for being stuck, or ended by its backend cannot report its last work. So the learner
writes what it is about to decode or train, and what the previous incarnation worked on when it ended. If two
incarnations in a row ended while working on the same entry, the third sets it aside: its group is failed, and its bytes
are not decoded again. Incarnations also end for other reasons. So if the second incarnation has rehearsed the entry
alone and survived, only the fourth sets it aside.

The file has some hundred bytes and is written in place with one call, so a process that ends during the call leaves it
whole. It is not synced, because no entry causes the loss of a machine. A removed file is written again.

Tests: tests/unit/state/test_in_progress.py, tests/actors/learner/test_set_aside.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Final

from asyncrl.logs import is_at

IN_PROGRESS_FILE: Final = "in_progress.json"

log = logging.getLogger("asyncrl.learner")


@dataclass(frozen=True, slots=True, order=True)
class LogEntry:
    """An entry of the trajectory log.

    worker  worker that made it, if known
    deaths  incarnations in a row that ended with it

    ``worker`` and ``deaths`` are not part of its identity.
    """

    sequence: int
    key: str
    worker: str = ""
    deaths: int = 1

    @property
    def identity(self) -> tuple[int, str]:
        return (self.sequence, self.key)


class InProgress:
    """Notes of one incarnation. aside: entries not to decode or train; suspects: in progress when the last one ended"""

    def __init__(self, path: Path | None = None) -> None:
        """path: None writes nothing and reads nothing of earlier incarnations"""
        found = _read(path)
        ended_with = {one.identity: one for one in (*found["decoding"], *found["training"])}
        cleared = {one.identity for one in found["cleared"]}
        for one in found["before"]:
            if (here := ended_with.get(one.identity)) is not None:
                ended_with[one.identity] = replace(here, deaths=one.deaths + 1)
        again = [one for one in ended_with.values() if one.deaths >= (3 if one.identity in cleared else 2)]
        self.aside = {one.identity: one for one in (*found["aside"], *again)}
        self.suspects = set(ended_with) - set(self.aside)
        self._before = list(ended_with.values())
        self._decoding: Sequence[LogEntry] = ()
        self._training: Sequence[LogEntry] = ()
        self._cleared: list[LogEntry] = []
        self._path = path
        self._file = None if path is None else _opened(path)
        self._problem = ""
        self._write()
        if again:
            keys = ", ".join(sorted({one.key for one in again}))
            log.error("incarnations in a row ended with group %s in progress: set aside", keys)

    def decode(self, sequence: int, key: str) -> None:
        """Note that the entry is decoded next."""
        self._decoding = (LogEntry(sequence, key),)
        self._write()

    def decoded(self) -> None:
        self._decoding = ()
        self._write()

    def train(self, entries: Iterable[LogEntry]) -> None:
        """Note that these entries are prepared, scored, rehearsed or trained next."""
        self._training = tuple(entries)
        self._write()

    def trained(self) -> None:
        """Note that no entry is in progress. Also called at an end that no entry caused."""
        self.train(())

    def tried(self, entry: LogEntry, *, is_cleared: bool) -> None:
        """Note that the learner survived trying the entry alone. ``is_cleared``: the trial did all that a step does."""
        self.suspects.discard(entry.identity)
        if is_cleared:
            self._cleared.append(entry)

    def start_new_log(self) -> None:
        """Forget all entries: the log was replaced by a new one, which counts from 1 again."""
        self.aside, self.suspects, self._before = {}, set(), []
        self._write()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self) -> None:
        if self._path is None or self._file is None:
            return
        parts = {
            "decoding": self._decoding,
            "training": self._training,
            "before": self._before,
            "cleared": self._cleared,
            "aside": list(self.aside.values()),
        }
        table = {name: [astuple(one) for one in entries] for name, entries in parts.items()}
        text = json.dumps(table).encode()
        try:
            if not is_at(self._path, self._file):
                found = _opened(self._path)
                os.close(self._file)
                self._file = found
                log.warning("%s: was removed or replaced while it is in use; put back", self._path)
            length = max(len(text), os.fstat(self._file).st_size)
            os.pwrite(self._file, text.ljust(length), 0)
            self._problem = ""
        except OSError as error:  # a full disk must not end a step
            if self._problem != str(error):
                log.warning("%s: cannot be written: %s", self._path, error.strerror)
            self._problem = str(error)


def _opened(path: Path) -> int:
    """Open the file for writing in place. Create it if missing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)


def _read(path: Path | None) -> dict[str, list[LogEntry]]:
    """Read the file. Parts that are missing or malformed are empty."""
    table: Any = None
    with contextlib.suppress(OSError, ValueError):
        table = None if path is None else json.loads(path.read_text())
    found: dict[str, list[LogEntry]] = {}
    for name in ("decoding", "training", "before", "cleared", "aside"):
        rows = table.get(name) if isinstance(table, dict) else None
        found[name] = [LogEntry(*row) for row in rows if _is_entry(row)] if isinstance(rows, list) else []
    return found


def _is_entry(row: Any) -> bool:
    return isinstance(row, list) and [type(part) for part in row] == [int, str, str, int]
