"""Where a process writes what it logs: all of it to a file of its own, what a person should see to stderr as well."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from asyncrl.errors import DISK_ERRORS, ConfigError, DiskError

REASON = "reason"
"""A message logged with ``extra={REASON: "..."}`` is one of many for the same reason."""


class Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Of one logger's messages for one reason it shows the first, the tenth, the hundredth, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[str, str]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if reason := getattr(record, REASON, ""):
            self._counts[record.name, reason] += 1
            count = self._counts[record.name, reason]
            if count > 1:
                if str(count).strip("0") != "1":
                    return
                record = copy.copy(record)
                record.msg, record.args = f"{record.getMessage()} ({count} for this reason; the log has all)", ()
        super().emit(record)


class LogFile(logging.FileHandler):
    """A disk that cannot be written loses lines. They are counted: the next line that is written says how many."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lost = 0

    def _open(self) -> Any:
        return open(self.baseFilename, "ab", buffering=0)  # what is buffered would be tried again with every line

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record) + self.terminator
            if self._lost:
                line = f"{self._lost} lines of this log are lost: the disk took nothing{self.terminator}{line}"
            data = line.encode(errors="replace")
            file: Any = self.stream
            if not os.fstat(file.fileno()).st_nlink:  # somebody removed it
                file.close()
                self.stream = file = self._open()
            self._lost = 0 if file.write(data) == len(data) else self._lost + 1
        except OSError:
            self._lost += 1
        except Exception:
            self.handleError(record)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at its path."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def put_back(path: Path, file: FileIO) -> FileIO:
    """A file that somebody removed while it was open, or put another in the place of: copied there; open at its end.

    Raises OSError; ``file`` is then open still.
    """
    partial = path.with_name(f".{path.name}.partial")
    path.parent.mkdir(exist_ok=True)
    with partial.open("wb") as copied:
        file.seek(0)
        shutil.copyfileobj(file, copied)
        copied.flush()
        os.fsync(copied.fileno())
    partial.rename(path)
    file.close()
    logging.getLogger("asyncrl.files").warning("%s: was removed or replaced while it is in use; put back", path)
    return path.open("a+b", buffering=0)


def log_to(path: Path) -> None:
    """Everything from info up to a file of this process; warnings and errors to stderr as well.

    Raises ConfigError for a file that cannot be written, or DiskError if it was written before: that may be over soon.
    """
    to_file, to_stderr = _handlers(path)
    logging.raiseExceptions = False  # a full disk must not bury the reason under tracebacks of its own log lines
    logging.getLogger().handlers = [to_file]
    ours = logging.getLogger("asyncrl")
    ours.setLevel(logging.INFO)
    ours.handlers = [to_stderr]


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """The same of asyncrl's own messages alone, and while this is open: the process is somebody else's."""
    handlers = _handlers(path)
    ours = logging.getLogger("asyncrl")
    before = ours.level, ours.propagate, logging.raiseExceptions
    ours.setLevel(logging.INFO)
    ours.propagate = False  # the caller's own handlers would show every message again
    logging.raiseExceptions = False
    for handler in handlers:
        ours.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            ours.removeHandler(handler)
            handler.close()
        level, ours.propagate, logging.raiseExceptions = before
        ours.setLevel(level)  # which also empties the cache of what is enabled


def _handlers(path: Path) -> tuple[logging.Handler, logging.Handler]:
    """To the file, and to stderr. Raises ConfigError, or DiskError for a file that was there before."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        to_file = LogFile(path)
    except OSError as error:
        kind = DiskError if error.errno in DISK_ERRORS and _may_be_there(path) else ConfigError
        raise kind(f"run.directory: cannot write {path}: {error.strerror}") from None
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    to_stderr = Stderr()
    to_stderr.setLevel(logging.WARNING)
    to_stderr.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    return to_file, to_stderr


def _may_be_there(path: Path) -> bool:
    """Whether there is such a file, or nobody can tell."""
    try:
        return path.exists()
    except OSError:
        return True
