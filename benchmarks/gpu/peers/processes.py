"""A command with all that it starts, wherever its children hide: they carry a variable of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

_VARIABLE: Final = "PEER_FAMILY"


class Family:
    """``with Family(...) as family``: the command runs; whatever of it is left at the end is killed."""

    def __init__(self, words: Sequence[str], *, environment: Mapping[str, str], cwd: Path, log: Path) -> None:
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        self._words, self._cwd, self._log = words, cwd, log
        self._environment = {**environment, _VARIABLE: self._mark}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Family:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._words,
                env=self._environment,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _ in range(5):  # one that was being born is found the next time
            members = self._members()
            for member in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            if self._process is not None:
                self._process.wait()
            if not members:
                return
            time.sleep(0.5)

    def _members(self) -> list[int]:
        sought = f"{_VARIABLE}={self._mark}".encode()
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    if sought in (folder / "environ").read_bytes().split(b"\0"):
                        found.append(int(folder.name))
        return found
