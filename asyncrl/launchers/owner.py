"""Owns one process on the machine where this object lives, for a launcher that is somewhere else.

It starts ``python -m asyncrl ...``, hands on what that prints, forwards signals and knows how it ended; none of the
run's data goes through it. The process ends with the owner's process, however that ends (processes.py). Knows nothing
of what carries its calls: launchers/ray.py makes it an actor.
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

from asyncrl import __version__, processes

MARK: Final = ".launcher"
"""A file in a folder that the launcher and a process both must see: whoever reads its own mark there sees it."""
MAX_LINES: Final = 10_000
"""Kept for a launcher that does not ask; the oldest go first."""
_LINES_AT_ONCE: Final = 1_000
_LAST_WORDS_SECONDS: Final = 1.0
"""For pipes that a grandchild holds open."""
_LOG_SECONDS: Final = 1.0

Stream = Literal["stdout", "stderr", "log"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to start.

    directory    to start it in, as the launcher was
    environment  on top of the owner's own; may hold secrets
    paths        key of the run file -> what must be there
    shared       key of the run file -> a folder that must be the launcher's own: it holds ``mark``
    log          its log file, handed on line by line where its folder is not the launcher's own
    version      of asyncrl
    """

    arguments: tuple[str, ...]
    directory: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    paths: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    mark: str
    log: str
    version: str = __version__


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """problem: what this machine lacks, in one line; nothing was started then"""

    pid: int = 0
    host: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """lines: behind those that were asked for, up to number ``last``;  code: of the process, once all is said"""

    lines: tuple[tuple[Stream, str], ...]
    last: int
    code: int | None


class Owner:
    """Of one process, once. Its methods run in one event loop, whose thread lives as long as the owner's process."""

    def __init__(self) -> None:
        self._lines: deque[tuple[Stream, str]] = deque()
        self._last = 0
        self._code: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._news = asyncio.Event()

    async def start(self, order: Order) -> Started:
        """Raises OSError when the process cannot be started."""
        if problem := lacking(order):
            return Started(problem=problem)
        log_bytes = _size(order.log)  # of earlier lives
        self._process = process = self._popen(order)
        loop = asyncio.get_running_loop()
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            threading.Thread(target=self._read, args=(loop, "stdout", process.stdout), daemon=True),
            threading.Thread(target=self._read, args=(loop, "stderr", process.stderr), daemon=True),
        ]
        if not sees(Path(order.log).parent, order.mark):
            readers.append(
                threading.Thread(target=self._follow, args=(loop, process, order.log, log_bytes), daemon=True)
            )
        for reader in readers:
            reader.start()
        threading.Thread(target=self._wait, args=(loop, process, readers), daemon=True).start()
        return Started(pid=process.pid, host=socket.gethostname())

    async def news(self, after: int) -> News:
        """Wait for lines behind number ``after``, or for the end. To be asked again with what came last."""
        while self._lines and self._last - len(self._lines) < after:
            self._lines.popleft()
        while not self._lines and self._code is None:
            self._news.clear()
            await self._news.wait()
        first = self._last - len(self._lines)
        lines = tuple(self._lines)[:_LINES_AT_ONCE]
        lost: tuple[tuple[Stream, str], ...] = (("stderr", f"({first - after} lines lost)"),) if first > after else ()
        is_all = len(lines) == len(self._lines)
        return News(lines=lost + lines, last=first + len(lines), code=self._code if is_all else None)

    async def signal(self, number: int) -> None:
        if self._process is not None and self._code is None:
            self._process.send_signal(number)

    def _popen(self, order: Order) -> subprocess.Popen[bytes]:
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a child inherits what its starter blocks
        try:
            return subprocess.Popen(
                [sys.executable, "-m", "asyncrl", *order.arguments],
                cwd=order.directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=os.environ
                | {"PYTHONUNBUFFERED": "1"}
                | dict(order.environment)
                | {processes.PARENT: str(os.getpid())},
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    # -- threads, which tell the event loop ----------------------------------------------------------------------------

    def _read(self, loop: asyncio.AbstractEventLoop, stream: Stream, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                loop.call_soon_threadsafe(self._add, stream, line.decode(errors="replace").rstrip("\n"))

    def _follow(
        self, loop: asyncio.AbstractEventLoop, process: subprocess.Popen[bytes], path: str, position: int
    ) -> None:
        """The log file's lines behind a position, until the process has ended and everything is read."""
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


def lacking(order: Order) -> str:
    """What this machine lacks for it, in one line; empty when nothing is known to."""
    if order.version != __version__:
        return f"asyncrl {__version__} is installed there, {order.version} here; install the same on every machine"
    if not os.path.isdir(order.directory):
        return f"the folder {order.directory}, in which `asyncrl run` was started, is not there; every machine needs it"
    for key, path in order.paths.items():
        if not os.path.exists(os.path.join(order.directory, path)):
            return f"{key}: {path} is not there"
    for key, folder in order.shared.items():
        if not sees(Path(order.directory, folder), order.mark):
            return f"{key}: {folder} is not the folder that `asyncrl run` sees; it must be shared"
    return ""


def sees(folder: Path, mark: str) -> bool:
    """Whether this is the folder in which a launcher left its ``mark``."""
    try:
        return (folder / MARK).read_text() == mark
    except OSError:
        return False


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
