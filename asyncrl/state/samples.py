"""Prompt groups that the learner writes down for a person to read: decoded, with rewards and what became of them.

    RUN_DIR/samples.jsonl, and samples.1.jsonl, which is older
    {"group_id": 12, "fate": "trained", "step": 7, "prompt": "7+5=", "answers": [{"reward": 1.0, "turns": [...]}], ...}

Bounded: when samples.jsonl has half of metrics.samples_max_bytes it becomes samples.1.jsonl, in the place of the one
before. It is no record that anything counts on: a line that the disk does not take is left out.
A file that somebody removes while it is in use is begun anew, and said to be.

Tests: tests/unit/state/test_samples.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final

from asyncrl.policies.groups.sample import GroupSample

SAMPLES_FILE: Final = "samples.jsonl"
OLDER_FILE: Final = "samples.1.jsonl"
EVALUATION_FILE: Final = "evaluation_samples.jsonl"
OLDER_EVALUATION_FILE: Final = "evaluation_samples.1.jsonl"
"""The same of evaluations."""
FILES: Final = (SAMPLES_FILE, OLDER_FILE, EVALUATION_FILE, OLDER_EVALUATION_FILE)

log = logging.getLogger("asyncrl.files")


class RotatedLines:
    """Appends lines to ``path``, of which at most ``most_bytes`` are kept in it and in ``older``. One writer."""

    def __init__(self, path: Path, *, older: Path, most_bytes: int) -> None:
        self._path, self._older, self._half = path, older, most_bytes // 2
        self._is_begun = False  # a line of ours is in the file, unless somebody else removed it

    def write(self, line: str) -> None:
        """Raises OSError when the line was not written."""
        data = line.encode("utf-8", errors="replace") + b"\n"
        self._path.parent.mkdir(exist_ok=True)
        with contextlib.ExitStack() as files:
            file = files.enter_context(self._open())
            if (size := file.seek(0, os.SEEK_END)) and size + len(data) > self._half:
                os.replace(self._path, self._older)
                self._is_begun = False
                file, size = files.enter_context(self._open()), 0
            if self._is_begun and not size:
                log.warning("%s: was removed while it is in use; what was in it is gone, a new one begun", self._path)
            if size and _last_byte(file) != b"\n":  # a kill or a full disk cut the last line short
                data = b"\n" + data
            if file.write(data) != len(data):
                raise OSError(f"{self._path}: written in part")
            self._is_begun = True

    def _open(self) -> FileIO:
        """At each line: somebody may remove the file between two."""
        return self._path.open("a+b", buffering=0)


class SampleFile:
    """Of the run in ``directory``: what was trained or lost, or what evaluations were answered."""

    def __init__(self, directory: Path, *, most_bytes: int, is_of_evaluations: bool = False) -> None:
        older, newer = _names(is_of_evaluations)
        self.name = newer
        self._lines = RotatedLines(directory / newer, older=directory / older, most_bytes=most_bytes)

    @classmethod
    def at(cls, path: Path) -> SampleFile:
        """A file of its own, without bound."""
        made = cls(path.parent, most_bytes=sys.maxsize)
        made.name, made._lines = path.name, RotatedLines(path, older=path, most_bytes=sys.maxsize)
        return made

    def write(self, sample: GroupSample) -> None:
        """Raises OSError when it was not written."""
        self._lines.write(json.dumps(sample.as_json(), ensure_ascii=False, allow_nan=False))


def read(directory: Path, *, is_of_evaluations: bool = False) -> Iterator[GroupSample]:
    """The oldest first; none without files that can be read. Lines that cannot are left out."""
    for name in _names(is_of_evaluations):
        with contextlib.suppress(OSError), (directory / name).open("rb") as file:
            for line in file:
                if (sample := parsed(line)) is not None:
                    yield sample


def parsed(line: bytes) -> GroupSample | None:
    """None for a line that is not whole."""
    try:
        return GroupSample.from_json(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _names(is_of_evaluations: bool) -> tuple[str, str]:
    """(the older file, the newer one)"""
    return (OLDER_EVALUATION_FILE, EVALUATION_FILE) if is_of_evaluations else (OLDER_FILE, SAMPLES_FILE)


def _last_byte(file: FileIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)
