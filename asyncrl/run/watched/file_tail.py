"""Reads the lines that a file gets while somebody else writes it. Tests: tests/unit/run/watched/test_watched_run.py."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MOST_BYTES: Final = 4 * 2**20
"""Read at a time."""


class FileTail:
    """Whole lines, each once. A file that was cut or replaced is read again from its begin."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.inode = 0
        """Of the file that the last lines are of."""
        self.is_anew = False
        """Whether the last lines are the first of a file that was cut or replaced."""

    def read(self) -> tuple[list[tuple[int, bytes]], bool]:
        """([(position, line without its end)], whether there may be more at once). Blocks. Nothing of no file."""
        self.is_anew = False
        try:
            with self._path.open("rb") as file:
                there = self._path.stat()
                if there.st_size < self._position or there.st_ino != self.inode:
                    self.is_anew = self.inode != 0
                    self._position, self.inode = 0, there.st_ino
                file.seek(self._position)
                found = file.read(MOST_BYTES)
        except OSError:  # not there yet, or not for us
            return [], False
        begin = self._position
        whole, newline, _ = found.rpartition(b"\n")
        self._position += len(whole) + len(newline)
        if not newline and len(found) == MOST_BYTES:  # no line is so long
            self._position += len(found)
        lines = []
        for line in whole.split(b"\n") if newline else ():
            lines.append((begin, line))
            begin += len(line) + 1
        return lines, len(found) == MOST_BYTES
