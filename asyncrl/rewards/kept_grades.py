"""A cache of a judge's grades: in memory, and optionally in a file that other workers and later runs read.

The file is an SQLite database, so any number of processes on a machine may share it. If the file fails during the run
(for example because the disk is full), a warning is logged once and only the cache in memory remains. Questions may
then be asked again, but no group fails.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from asyncrl.errors import ConfigError

_TABLE: Final = "CREATE TABLE IF NOT EXISTS grades (question BLOB PRIMARY KEY, grade REAL NOT NULL) WITHOUT ROWID"
_BUSY_SECONDS: Final = 5.0
"""Time that a process waits for another process's write."""

log = logging.getLogger("asyncrl.rewards")


class KeptGrades:
    """Grades by the digest of the question and everything else that the grade depends on."""

    def __init__(self, *, in_memory: int, file: str = "") -> None:
        """
        in_memory  number of grades in memory; the least recently used go first
        file       path of the database; empty: none on disk
        """
        self._in_memory = in_memory
        self._file = Path(file) if file else None
        self._grades: collections.OrderedDict[bytes, float] = collections.OrderedDict()

    def check(self) -> None:
        """Raise ConfigError if the file is not a database or cannot be written."""
        if self._file is None:
            return
        try:
            with self._opened(self._file) as grades:
                grades.execute("BEGIN IMMEDIATE")  # fails if the file is not writable
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"cache_file: {self._file}: {error}; name a file that this machine may write") from None

    async def find(self, question: bytes) -> float | None:
        if question in self._grades:
            self._grades.move_to_end(question)
            return self._grades[question]
        found = await self._of_file("SELECT grade FROM grades WHERE question = ?", question)
        if found is not None:
            self._remember(question, found)
        return found

    async def keep(self, question: bytes, grade: float) -> None:
        self._remember(question, grade)
        await self._of_file("INSERT OR REPLACE INTO grades VALUES (?, ?)", question, grade)

    def _remember(self, question: bytes, grade: float) -> None:
        self._grades[question] = grade
        while len(self._grades) > self._in_memory:
            self._grades.popitem(last=False)

    async def _of_file(self, command: str, *values: bytes | float) -> float | None:
        if (file := self._file) is None:
            return None

        def execute() -> float | None:
            with self._opened(file) as grades:
                row = grades.execute(command, values).fetchone()
            return None if row is None else float(row[0])

        try:
            return await asyncio.to_thread(execute)
        except (sqlite3.Error, OSError) as error:
            log.warning("reward llm_judge: cache_file %s: %s; grades are kept in memory only from here on", file, error)
            self._file = None
            return None

    @staticmethod
    @contextlib.contextmanager
    def _opened(file: Path) -> Iterator[sqlite3.Connection]:
        """Open the database. Commits at the end of the context."""
        with contextlib.closing(sqlite3.connect(file, timeout=_BUSY_SECONDS)) as grades, grades:
            grades.execute(_TABLE)
            yield grades
