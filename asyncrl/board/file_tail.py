"""Reads lines that another process appends to a file, such as metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from asyncrl.audit.metric_rows import Row, parse

MOST_BYTES: Final = 4 * 2**20
"""Maximum number of bytes per read."""


class FileTail:
    """Returns complete lines, each once. A file that was truncated or replaced is read again from the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self.inode = 0
        """Inode of the file of the last lines."""
        self.is_replaced = False
        """Whether the last lines are the first ones of a truncated or replaced file."""

    def read(self) -> tuple[list[tuple[int, bytes]], bool]:
        """Return ([(position, line without its end)], whether more can be read immediately).

        Blocks. Empty if there is no file.
        """
        self.is_replaced = False
        try:
            with self._path.open("rb") as file:
                there = self._path.stat()
                if there.st_size < self._position or there.st_ino != self.inode:
                    self.is_replaced = self.inode != 0
                    self._position, self.inode = 0, there.st_ino
                file.seek(self._position)
                found = file.read(MOST_BYTES)
        except OSError:  # does not exist yet, or may not be read
            return [], False
        begin = self._position
        whole, newline, _ = found.rpartition(b"\n")
        self._position += len(whole) + len(newline)
        if not newline and len(found) == MOST_BYTES:  # no valid line is this long
            self._position += len(found)
        lines = []
        for line in whole.split(b"\n") if newline else ():
            lines.append((begin, line))
            begin += len(line) + 1
        return lines, len(found) == MOST_BYTES


class RowTail:
    """Rows of metrics.jsonl. A resumed learner may truncate the file; rewritten rows are then read again."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path)

    def read(self) -> tuple[list[Row], bool]:
        """Return (rows, whether more can be read immediately). Invalid lines are left out. Blocks."""
        lines, has_more = self._tail.read()
        return [row for _, line in lines if (row := parse(line)) is not None], has_more
