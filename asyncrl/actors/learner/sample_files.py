"""Prompt groups that the learner writes down for people to read: decoded, with rewards and fate.

    RUN_DIR/samples.jsonl, and samples.1.jsonl, which is older
    {"group_id": 12, "fate": "trained", "step": 7, "prompt": "7+5=", "answers": [{"reward": 1.0, "turns": [...]}], ...}

The files are bounded: when samples.jsonl reaches half of metrics.samples_max_bytes, it replaces samples.1.jsonl.
Nothing depends on these files: a line that the disk does not take is left out. If a file in use is removed, a new one
is started.

Tests: tests/unit/actors/learner/test_samples.py.
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

from asyncrl.messages import codec
from asyncrl.policies.groups.sample import GroupSample

SAMPLES_FILE: Final = "samples.jsonl"
OLDER_FILE: Final = "samples.1.jsonl"
EVALUATION_FILE: Final = "evaluation_samples.jsonl"
"""Samples of the run's evaluations."""
SAVED_MODELS_FILE: Final = "saved_model_samples.jsonl"
"""Samples of `asyncrl evaluate`. A file of its own, because the run's learner may be up and a file has one writer."""

log = logging.getLogger("asyncrl.files")


class RotatedLines:
    """Appends lines to ``path``. At most ``most_bytes`` are kept in ``path`` and ``older`` together. One writer."""

    def __init__(self, path: Path, *, older: Path, most_bytes: int) -> None:
        self._path = path
        self._older = older
        self._half = most_bytes // 2

    def write(self, line: str) -> None:
        """Append a line. Raises OSError if it was not written."""
        data = line.encode("utf-8", errors="replace") + b"\n"
        self._path.parent.mkdir(exist_ok=True)
        with contextlib.ExitStack() as files:
            file = files.enter_context(self._open())
            if (size := file.seek(0, os.SEEK_END)) and size + len(data) > self._half:
                os.replace(self._path, self._older)
                file, size = files.enter_context(self._open()), 0
            if size and _last_byte(file) != b"\n":  # a kill or a full disk cut the last line short
                data = b"\n" + data
            if file.write(data) != len(data):
                raise OSError(f"{self._path}: written in part")

    def _open(self) -> FileIO:
        """Open the file for one line, because it may be removed between two lines."""
        return self._path.open("a+b", buffering=0)


class SampleFile:
    """A file of samples in ``directory``, and the older file before it."""

    def __init__(self, directory: Path, *, most_bytes: int = sys.maxsize, name: str = SAMPLES_FILE) -> None:
        self.name = name
        self.num_lost = 0
        """Samples that were not written."""
        self._lines = RotatedLines(directory / name, older=directory / older_name(name), most_bytes=most_bytes)

    def write(self, sample: GroupSample) -> None:
        """Append a sample. Raises OSError if it was not written."""
        self._lines.write(json.dumps(sample.as_json(), ensure_ascii=False, allow_nan=False))


def read(directory: Path, name: str = SAMPLES_FILE) -> Iterator[GroupSample]:
    """Read samples, the oldest first. Unreadable lines are skipped. Unreadable files are skipped with a warning."""
    for path in (directory / older_name(name), directory / name):
        try:
            with path.open("rb") as file:
                for line in file:
                    if (sample := parse(line)) is not None:
                        yield sample
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%s: cannot be read: %s", path, error.strerror)


def parse(line: bytes) -> GroupSample | None:
    """Parse a line; None if it is malformed."""
    try:
        return codec.from_json(line, GroupSample)
    except (ValueError, RecursionError):
        return None


def older_name(name: str) -> str:
    """Name of the file that takes over the content of file ``name`` when that is full."""
    stem, suffix = os.path.splitext(name)
    return f"{stem}.1{suffix}"


def _last_byte(file: FileIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)
