"""Log handlers of a process: everything goes to its own file; warnings and errors also go to stderr.

Also prints the lines of a run, which does not end because its output cannot be written.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Final, TextIO

from asyncrl.errors import ConfigError, disk_problem
from asyncrl.os_process import own_command

REASON = "reason"
"""Messages logged with ``extra={REASON: "..."}`` and the same reason are throttled on stderr (``Stderr``)."""


class Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Shows the first, tenth, hundredth, ... message that one logger logs for the same reason."""

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

    def format(self, record: logging.LogRecord) -> str:
        return as_typed(super().format(record))


class LineFormatter(logging.Formatter):
    """Makes one line of a message, which may quote a server or another machine; a traceback follows in its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = in_a_line(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return printable_text(super().format(record))


def print_line(text: str, *, out: TextIO | None = None) -> bool:
    """Print a line on which nothing depends, without letters that control a terminal.

    Return False if nobody gets it: the reader is gone, or a disk is full.

    out  default: stdout
    """
    try:
        print(as_typed(printable_text(text).replace("\n", " ")), file=out or sys.stdout, flush=True)
    except BrokenPipeError:  # as after `| head`, or when `| tee` has ended
        return False
    except OSError as error:
        if disk_problem(error) is None:
            raise
        return False
    return True


def log_to(path: Path) -> None:
    """Log everything from info up to a file of this process, and warnings and errors also to stderr.

    Raises ConfigError if the file cannot be written.
    """
    to_file, to_stderr = _handlers(path)
    logging.raiseExceptions = False  # with a full disk, tracebacks of log calls must not bury the actual error
    logging.getLogger().handlers = [to_file]
    ours = logging.getLogger("asyncrl")
    ours.setLevel(logging.INFO)
    ours.handlers = [to_stderr]


@contextlib.contextmanager
def logging_to(path: Path) -> Iterator[None]:
    """Like ``log_to``, but only for asyncrl's own messages and only while open: the process belongs to the caller."""
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
    """Return handlers for the file and stderr. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        to_file = WatchedFileHandler(path, errors="replace")  # begins again where somebody removed the file
    except OSError as error:
        raise ConfigError(f"run.directory: cannot write {path}: {error.strerror}") from None
    to_file.setFormatter(LineFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    to_stderr = Stderr()
    to_stderr.setLevel(logging.WARNING)
    to_stderr.setFormatter(LineFormatter("%(name)s: %(message)s"))
    return to_file, to_stderr


# -- text for a terminal -----------------------------------------------------------------------------------------------


def as_typed(text: str) -> str:
    """Return ``text`` with its commands (`asyncrl top ...`, in backticks) as they work where the user stands."""
    return text.replace("`asyncrl ", f"`{own_command()} ") if "`asyncrl " in text else text


def in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else f"{max(seconds, 0.1):.1f} s"


def in_a_line(text: str) -> str:
    """Join the lines of a text that may quote others, so that it can neither forge a line nor control a terminal."""
    return printable(" ".join(filter(None, (line.strip() for line in text.splitlines()))))


def printable(text: str) -> str:
    """Replace unprintable characters: text from an actor is not trusted and must not control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def printable_text(text: str) -> str:
    """Replace characters in the text of a model that would control a terminal or reorder the text after them."""
    return "".join(letter if _is_text(letter) else "?" for letter in text)


_REORDERING: Final = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")
"""Unicode's classes of characters that reorder the text after them."""


def _is_text(letter: str) -> bool:
    """Whether the letter is shown: printable, a newline or tab, or a space or joiner of another script."""
    return (
        letter.isprintable()
        or letter in "\n\t"
        or (unicodedata.category(letter) in ("Zs", "Cf") and unicodedata.bidirectional(letter) not in _REORDERING)
    )
