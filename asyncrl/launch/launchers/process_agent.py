"""Runs one process on this machine for a launcher on another machine.

The agent starts Python with the arguments of a request, passes on its output, forwards signals, and reports how it
ended. None of the run's data goes through the agent. The process ends when the agent's own process ends, however that
happens (os_process.py). The agent does not know what transports its calls: launch/launchers/ray.py makes it a Ray
actor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Literal

from asyncrl import os_process
from asyncrl.version import VERSION

MARK: Final = ".launcher"
"""Name of a file that the launcher leaves in a shared folder. A machine that can read it there sees the same folder."""
MAX_LINES: Final = 10_000
"""Most lines kept until the launcher asks for them. The oldest are dropped first."""
_LINES_AT_ONCE: Final = 1_000
_LAST_WORDS_SECONDS: Final = 1.0
"""Timeout for pipes that a grandchild holds open."""
_LOG_SECONDS: Final = 1.0

Stream = Literal["stdout", "stderr", "log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """Describes the process to start.

    arguments      of Python
    directory      working directory: that of the launcher; "": the agent's, which Ray's runtime environment has made
    environment    added to the agent's own environment; may hold secrets
    mark           content of the file MARK in the launcher's folder of logs
    log            log file of the process; passed on line by line unless its folder is the launcher's own
    shares_folder  whether the folder of logs, in the run's folder, must be the launcher's own
    version        version of asyncrl
    """

    arguments: tuple[str, ...]
    directory: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    mark: str
    log: str
    shares_folder: bool = False
    version: str = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class StartResult:
    """problem: what this machine lacks, in one line; empty if the process was started"""

    pid: int = 0
    host: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """lines: new lines, up to number ``last``;  code: exit code of the process, with the last chunk"""

    lines: tuple[tuple[Stream, str], ...]
    last: int
    code: int | None


class ProcessAgent:
    """Runs one process, started once. Its methods run in one event loop, whose thread lives as long as the agent."""

    def __init__(self) -> None:
        self._lines: deque[tuple[Stream, str]] = deque()
        self._last = 0
        self._code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._news = asyncio.Event()

    async def start(self, request: LaunchRequest) -> StartResult:
        """Start the process, or return what this machine lacks for it. Raises OSError if the start fails."""
        if problem := missing_requirements(request):
            return StartResult(problem=problem)
        log_bytes = _size(request.log)  # written by earlier lives
        self._process = process = self._popen(request)
        loop = asyncio.get_running_loop()
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(loop, "stdout", process.stdout), daemon=True),
            threading.Thread(target=self._read, args=(loop, "stderr", process.stderr), daemon=True),
        ]
        if not sees(Path(request.log).parent, request.mark):
            readers.append(
                threading.Thread(target=self._follow, args=(loop, process, request.log, log_bytes), daemon=True)
            )
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(loop, process, readers), daemon=True).start()
        return StartResult(pid=process.pid, host=socket.gethostname())

    async def news(self, after: int) -> OutputChunk:
        """Wait for lines after number ``after``, or for the end. Call again with the returned ``last``."""
        while self._lines and self._last - len(self._lines) < after:
            self._lines.popleft()
        while not self._lines and self._code is None:
            self._news.clear()
            await self._news.wait()
        first = self._last - len(self._lines)
        lines = tuple(self._lines)[:_LINES_AT_ONCE]
        lost: tuple[tuple[Stream, str], ...] = (("stderr", f"({first - after} lines lost)"),) if first > after else ()
        is_all = len(lines) == len(self._lines)
        return OutputChunk(lines=lost + lines, last=first + len(lines), code=self._code if is_all else None)

    async def signal(self, number: int) -> None:
        if self._process is not None and self._code is None:
            self._process.send_signal(number)

    def _popen(self, request: LaunchRequest) -> subprocess.Popen[bytes]:
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a child inherits blocked signals
        try:
            return subprocess.Popen(
                [sys.executable, *request.arguments],
                cwd=request.directory or None,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os_process.environment_of_child({"PYTHONUNBUFFERED": "1"} | dict(request.environment))
                | {os_process.PARENT: str(os.getpid())},
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # -- threads, which call into the event loop -----------------------------------------------------------------------

    def _read(self, loop: asyncio.AbstractEventLoop, stream: Stream, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                loop.call_soon_threadsafe(self._add, stream, line.decode(errors="replace").rstrip("\n"))

    def _follow(
        self, loop: asyncio.AbstractEventLoop, process: subprocess.Popen[bytes], path: str, position: int
    ) -> None:
        """Pass on the log file's lines after a position, until the process has ended and everything is read."""
        is_last = False
        while not is_last:
            is_last = process.poll() is not None
            with contextlib.suppress(OSError), open(path, "rb") as file:
                file.seek(position)
                for line in file:
                    if not line.endswith(b"\n") and not is_last:
                        break
                    position += len(line)
                    loop.call_soon_threadsafe(self._add, "log", line.decode(errors="replace").rstrip("\n"))
            time.sleep(0.0 if is_last else _LOG_SECONDS)

    def _wait(
        self, loop: asyncio.AbstractEventLoop, process: subprocess.Popen[bytes], readers: list[threading.Thread]
    ) -> None:
        code = process.wait()
        for reader in readers:
            reader.join(_LAST_WORDS_SECONDS + _LOG_SECONDS)
        loop.call_soon_threadsafe(self._end, code)

    def _add(self, stream: Stream, line: str) -> None:
        self._lines.append((stream, line))
        self._last += 1
        if len(self._lines) > MAX_LINES:
            self._lines.popleft()
        self._news.set()

    def _end(self, code: int) -> None:
        self._code = code
        self._news.set()


def missing_requirements(request: LaunchRequest) -> str:
    """What this machine lacks to start the process, in one line; empty if nothing is known to be missing."""
    if request.version != VERSION:
        return f"asyncrl {VERSION} is installed there, {request.version} here; install the same on every machine"
    if request.directory and not os.path.isdir(request.directory):
        return (
            f"the folder {request.directory}, in which `asyncrl run` was started, is not there; every machine needs it"
        )
    folder = Path(request.directory, request.log).parent
    if request.shares_folder and not sees(folder, request.mark):
        return f"run.directory: {folder.parent} is not the folder that `asyncrl run` sees; it must be shared"
    return ""


def sees(folder: Path, mark: str) -> bool:
    """Whether the launcher left its ``mark`` in this folder."""
    try:
        return (folder / MARK).read_text() == mark
    except OSError:
        return False


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
