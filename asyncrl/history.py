"""The run's history: a line for everything that became of a group, written by the learner when it happens.

    RUN_DIR/history.jsonl
    {"kind": "begun", "run_epoch": 0, "step": 0, "kept": 0, "max_staleness": 4, "settings": {...}}
    {"kind": "trained", "run_epoch": 0, "step": 1, "groups": [0, 2, 1, 3], "max_staleness": 0}
    {"kind": "dropped", "run_epoch": 0, "step": 1, "groups": [5]}

Invariants (tests/test_history.py):
  H1 a checkpoint holds the file's length at the instant of its ledgers, and the file is on disk up to there before the
     checkpoint is visible: what the ledgers call done has a line.
  H2 a line is written before anybody can see what it tells of (the weights of a step, an event, progress): no sample
     of a version is on the bus without the line of its step.
  H3 nothing is taken back: a resumed learner says in its first line from where on the file is a lost history.

``asyncrl audit`` counts by it and ``asyncrl replay`` trains by it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from asyncrl.errors import ConfigError
from asyncrl.policies.accounting import BEGUN, Entry

HISTORY_FILE: Final = "history.jsonl"


class History:
    """Appends to one run's history. One writer: the learner that holds the run's lock."""

    def __init__(self, path: Path, *, run_epoch: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._run_epoch = run_epoch
        self._file = path.open("a+b")
        self._drop_torn_line()

    @property
    def position(self) -> int:
        """Bytes written so far; a checkpoint keeps it."""
        return self._file.tell()

    def begin(self, *, step: int, kept: int, max_staleness: int, settings: Mapping[str, Any]) -> None:
        """A life of the learner begins at ``step``, on a checkpoint that was made when the file had ``kept`` bytes."""
        self._write(BEGUN, step=step, kept=kept, max_staleness=max_staleness, settings=settings)

    def trained(self, groups: Collection[int], *, step: int, max_staleness: int) -> None:
        self._write("trained", step=step, groups=list(groups), max_staleness=max_staleness)

    def lost(self, fate: str, groups: Collection[int], *, step: int) -> None:
        """``groups`` left the window untrained: "dropped", "buried" or "filtered"."""
        self._write(fate, step=step, groups=list(groups))

    def sync(self) -> None:
        """What was written outlives the machine when this returns. Blocks."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"kind": kind, "run_epoch": self._run_epoch} | fields) + "\n"
        self._file.write(line.encode())
        self._file.flush()

    def _drop_torn_line(self) -> None:
        """A full disk or a lost machine may have cut the last line short; no checkpoint counts on that one (H1)."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            end += len(line) if line.endswith(b"\n") else 0
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)


def read(path: Path) -> list[Entry]:
    """Every line of a history, also those of lost histories (``accounting.present``). Raises ConfigError."""
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError:
        raise ConfigError(
            f"{path.parent}: holds no run ({path.name} is not there); give the folder that a learner wrote to, "
            "run.directory/run.name"
        ) from None
    entries, position = [], 0
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):  # else it is being written just now
            try:
                fields = json.loads(line)
                fields["groups"] = tuple(fields.get("groups", ()))
                entries.append(Entry(position=position, **fields))
            except (ValueError, TypeError) as error:
                raise ConfigError(f"{path}: line {number} is not one of a history: {error}") from None
        position += len(line)
    return entries
