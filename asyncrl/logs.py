"""Where a process writes what it logs: all of it to a file of its own, what a person should see to stderr as well."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from pathlib import Path

from asyncrl.errors import ConfigError

REASON = "reason"
"""A message logged with ``extra={REASON: "..."}`` is one of many for the same reason."""


class Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Of the messages for one reason it shows the first, the tenth, the hundredth, and so on."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if reason := getattr(record, REASON, ""):
            self._counts[reason] += 1
            count = self._counts[reason]
            if count > 1:
                if str(count).strip("0") != "1":
                    return
                record = copy.copy(record)
                record.msg, record.args = f"{record.getMessage()} ({count} for this reason; the log has all)", ()
        super().emit(record)


def log_to(path: Path) -> None:
    """Everything from info up to a file of this process; warnings and errors to stderr as well. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        to_file = logging.FileHandler(path)
    except OSError as error:
        raise ConfigError(f"run.directory: cannot write {path}: {error.strerror}") from None
    logging.raiseExceptions = False  # a full disk must not bury the reason under tracebacks of its own log lines
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    to_stderr = Stderr()
    to_stderr.setLevel(logging.WARNING)
    to_stderr.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [to_file]
    ours = logging.getLogger("asyncrl")
    ours.setLevel(logging.INFO)
    ours.addHandler(to_stderr)
