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
"""The same of the run's evaluations."""
SAVED_MODELS_FILE: Final = "saved_model_samples.jsonl"
"""The same of `asyncrl evaluate`, which writes while the run's learner may be up: a file has one writer."""

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
    """A file of samples in ``directory``, and the one before it (``older``)."""

    def __init__(self, directory: Path, *, most_bytes: int = sys.maxsize, name: str = SAMPLES_FILE) -> None:
        self.name = name
        self.num_lost = 0
        """Samples that were not written."""
        self._lines = RotatedLines(directory / name, older=directory / older(name), most_bytes=most_bytes)

    def write(self, sample: GroupSample) -> None:
        """Raises OSError when it was not written."""
        self._lines.write(json.dumps(sample.as_json(), ensure_ascii=False, allow_nan=False))


def read(directory: Path, name: str = SAMPLES_FILE) -> Iterator[GroupSample]:
    """The oldest first. Lines that cannot be read are left out, and so are files, which is said of those that exist."""
    for path in (directory / older(name), directory / name):
        try:
            with path.open("rb") as file:
                for line in file:
                    if (sample := parsed(line)) is not None:
                        yield sample
        except FileNotFoundError:
            continue
        except OSError as error:
            log.warning("%s: cannot be read: %s", path, error.strerror)


def parsed(line: bytes) -> GroupSample | None:
    """None for a line that is not whole."""
    try:
        return GroupSample.from_json(json.loads(line))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def older(name: str) -> str:
    """What a file of this name becomes when it is full."""
    stem, suffix = os.path.splitext(name)
    return f"{stem}.1{suffix}"


def _last_byte(file: FileIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)
