"""The run's history: the fate of every group, in lines that the learner writes as the fates are decided.

    RUN_DIR/history.jsonl
    {"kind": "begun", "incarnation": 0, "step": 0, "kept": 0, "max_staleness": 4, "settings": {...}, "crc": "5d3a90c2"}
    {"kind": "trained", "incarnation": 0, "step": 1, "groups": [0, 2], "sequences": [1, 3], "max_staleness": 0, ...}
    {"kind": "dropped", "incarnation": 0, "step": 1, "groups": [5], "crc": "9ab2f310"}

Invariants (tests/unit/actors/learner/test_history.py):
  H1 a checkpoint holds the file's length at the instant of its ledgers, and the file is on disk up to there before the
     checkpoint becomes visible: everything that the ledgers call done has a line.
  H2 a line is written before its effect is visible (the weights of a step, an event, progress): no sample of a version
     is on the bus without the line of the step that made the version.
  H3 nothing is taken back: the first line of a resumed learner says from which position on the lines are rolled back.
  H4 positions mean the same for every checkpoint: a learner that finds the file shorter than its checkpoint recorded
     replaces the missing part with a blank line.
  H5 a damaged line becomes an entry that says so (policies/audit/entries.py), and the other lines are read. "crc" is
     the CRC-32 of the line without it.

``asyncrl audit`` counts from it and ``asyncrl replay`` trains from it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from asyncrl.errors import ConfigError, NoHistory
from asyncrl.policies.audit.entries import BEGUN, DAMAGED, FATES, HistoryEntry

log = logging.getLogger("asyncrl.learner")

HISTORY_FILE: Final = "history.jsonl"

_MALFORMED: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_SEALED: Final = re.compile(rb'(\{.*), "crc": "([0-9a-f]{8})"\}\n', re.DOTALL)


class History:
    """Appends to one run's history. One writer: the learner that holds the run's lock.

    A line that the disk does not take waits in memory, in order, until ``flush`` can write it.
    """

    def __init__(self, path: Path, *, incarnation: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._incarnation = incarnation
        self._file = path.open("a+b", buffering=0)
        self._drop_torn_line()
        self._pending = bytearray()
        self._position = self._file.tell()
        self._lock = threading.Lock()  # guards the file and pending lines

    @property
    def position(self) -> int:
        """Bytes so far, including lines that wait for the disk. Checkpoints record it."""
        return self._position

    @property
    def is_written(self) -> bool:
        """Whether every line is in the file."""
        return not self._pending

    def begin(
        self,
        *,
        step: int,
        kept: int,
        max_staleness: int,
        settings: Mapping[str, Any],
        data: Mapping[str, str] = MappingProxyType({}),
        host: str = "",
    ) -> None:
        """Note that an incarnation begins at ``step``, from a checkpoint made when the file had ``kept`` bytes.

        settings, data, host  as in HistoryEntry
        """
        if (gone := kept - self.position) > 0:
            self._append(b" " * (gone - 1) + b"\n")
        more: dict[str, Any] = {"data": dict(data)} if data else {}
        more |= {"host": host} if host else {}
        self._write(BEGUN, step=step, kept=kept, max_staleness=max_staleness, settings=settings, **more)

    def record_trained(
        self,
        groups: Collection[int],
        *,
        sequences: Collection[int] = (),
        step: int,
        max_staleness: int,
        old_trajectories: int = 0,
        old_tokens: int = 0,
    ) -> None:
        """
        sequences                         log record of each group
        old_trajectories, old_tokens   as in Outcome
        """
        fields: dict[str, Any] = {
            "step": step,
            "groups": list(groups),
            "sequences": list(sequences),
            "max_staleness": max_staleness,
        }
        left_out = {"old_trajectories": old_trajectories, "old_tokens": old_tokens}
        fields |= {name: count for name, count in left_out.items() if count}
        self._write("trained", **fields)

    def record_lost(self, fate: str, groups: Collection[int], *, step: int) -> None:
        """Note that ``groups`` left the window untrained: "dropped", "failed", "filtered"."""
        self._write(fate, step=step, groups=list(groups))

    def sync(self) -> None:
        """Flush and sync to disk, so that the lines survive a crash of the machine. Blocks. Raises OSError."""
        self.flush()
        os.fsync(self._file.fileno())

    def flush(self) -> None:
        """Write the waiting lines. Raises OSError if the disk does not take them."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Close the file. Lines that the disk does not take now are lost, which is logged."""
        try:
            self.flush()
        except OSError as error:
            log.error(
                "%s: %d bytes could not be written and are lost: %s", self._path, len(self._pending), error.strerror
            )
        self._file.close()

    def _write(self, kind: str, **fields: Any) -> None:
        self._append(seal({"kind": kind, "incarnation": self._incarnation} | fields))

    def _append(self, line: bytes) -> None:
        """Append a line. If another thread is waiting for the disk, the line waits for the next flush."""
        self._position += len(line)
        if not self._lock.acquire(blocking=False):
            self._pending += line
            return
        try:
            self._pending += line
            with contextlib.suppress(OSError):  # the next `flush` raises it
                self._flush()
        finally:
            self._lock.release()

    def _flush(self) -> None:
        try:
            while self._pending:
                count = self._file.write(bytes(self._pending)) or 0
                del self._pending[:count]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def _drop_torn_line(self) -> None:
        """Remove an incomplete last line, left by a full disk or a lost machine. No checkpoint counts on it (H1)."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            end += len(line) if line.endswith(b"\n") else 0
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)


def seal(fields: Mapping[str, Any]) -> bytes:
    """Format a line of a history, with its checksum."""
    text = json.dumps(fields)
    return f'{text[:-1]}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'.encode()


def read(path: Path) -> list[HistoryEntry]:
    """Read every line of a history, including those that were rolled back (``entries.present``). Raises ConfigError.

    An unreadable line becomes an entry of kind "damaged", with the incarnation and step of the entry before it.
    """
    return HistoryReader(path).read()


class HistoryReader:
    """Reads a history that grows: each line once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: list[HistoryEntry] = []
        self._position = 0

    def read(self) -> list[HistoryEntry]:
        """Return all lines so far, as ``read``."""
        for line in _lines(self._path, after=self._position):
            if not line.endswith(b"\n"):  # it is being written right now
                break
            self._entries.append(self._entry(line))
            self._position += len(line)
        return [*self._entries]

    def _entry(self, line: bytes) -> HistoryEntry:
        try:
            return _entry(_unseal(line), position=self._position)
        except _MALFORMED as error:
            last = self._entries[-1] if self._entries else None
            return HistoryEntry(
                kind=DAMAGED,
                incarnation=last.incarnation if last else 0,
                step=last.step if last else 0,
                position=self._position,
                problem=f"line {len(self._entries) + 1} cannot be read: {error}",
            )


def whole_bytes(path: Path) -> int:
    """Bytes up to the end of the last complete line; 0 if the file cannot be read."""
    try:
        return path.read_bytes().rfind(b"\n") + 1
    except OSError:
        return 0


def parse(line: bytes, *, position: int) -> HistoryEntry | None:
    """Parse one complete line, for readers that follow a growing history. None for a damaged line."""
    try:
        return _entry(_unseal(line), position=position)
    except _MALFORMED:
        return None


def last_incarnation(path: Path) -> int:
    """Incarnation of the learner that wrote last, even if that learner published nothing; -1 if there is none."""
    with contextlib.suppress(ConfigError):
        for line in reversed(_lines(path)):
            if line.endswith(b"\n") and (entry := parse(line, position=0)) is not None:
                return entry.incarnation
    return -1


def settings_of_incarnations(path: Path) -> list[Mapping[str, Any]]:
    """Run files of the incarnations so far, as far as the lines are readable; empty without a file."""
    try:
        lines = [line for line in _lines(path) if b'"settings"' in line]
    except ConfigError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(*_MALFORMED):
            found.append(_entry(_unseal(line), position=0).settings)
    return [settings for settings in found if settings]


def _lines(path: Path, *, after: int = 0) -> list[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(after)
            *whole, rest = file.read().split(b"\n")
    except FileNotFoundError:
        raise NoHistory(
            f"{path.parent}: holds no run ({path.name} is not there); give the folder that a learner wrote to, "
            "run.directory/run.name, or wait if it is just starting"
        ) from None
    except NotADirectoryError:
        raise ConfigError(f"{path.parent}: is a file; give the run's folder, run.directory/run.name") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return [line + b"\n" for line in whole] + ([rest] if rest else [])


def _unseal(line: bytes) -> dict[str, Any]:
    if not line.strip():
        raise ValueError(f"{len(line):,} bytes were gone when the learner was resumed")
    if (found := _SEALED.fullmatch(line)) is None:
        raise ValueError("it is not as it was written")
    text = found[1] + b"}"
    if zlib.crc32(text) != int(found[2], 16):
        raise ValueError("its checksum differs")
    return json.loads(text)  # type: ignore[no-any-return]


def _entry(fields: dict[str, Any], *, position: int) -> HistoryEntry:
    fields["groups"] = tuple(fields.get("groups", ()))
    fields["sequences"] = tuple(fields.get("sequences", ()))
    entry = HistoryEntry(position=position, **fields)
    numbers = (
        entry.incarnation,
        entry.step,
        entry.max_staleness,
        entry.old_trajectories,
        entry.old_tokens,
        entry.kept,
        *entry.groups,
        *entry.sequences,
    )
    if entry.kind not in (BEGUN, *FATES) or not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("it is not a line of a history")
    return entry
