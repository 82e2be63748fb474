"""Who asks forks.py for processes: the storm for `asyncrl run`, and that, by its launcher, for learner and workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.launchers.local import LOOPBACK
from asyncrl.launchers.port import ProcessSpec
from tests.chaos import forks

LAUNCHER: Final = 'launcher.kind="tests.chaos.forked:ForkingLauncher"'
_START_SECONDS: Final = 120.0
_IMPORTED: Final = (
    "asyncrl.commands.roles",
    "asyncrl.commands.launch",
    "transformers.models.auto.tokenization_auto",
    "uvloop",
)
"""By everybody."""


class ForkServer:
    """The server of one storm. It ends, with all it forked, with this process or by ``close``."""

    def __init__(self, folder: Path, modules: Sequence[str], *, directory: Path) -> None:
        """``directory``: all work in it."""
        self.path = folder / "forks.socket"
        self.path.unlink(missing_ok=True)
        one_thread = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-m", "tests.chaos.forks", str(self.path), *_IMPORTED, *modules]
        self._process = subprocess.Popen(command, cwd=directory, env=os.environ | one_thread)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, arguments: Sequence[str], *, environment: Mapping[str, str], output: Path) -> ForkedRun:
        """`asyncrl ARGUMENTS`, of a run that starts its processes here, too."""
        return ForkedRun(self, [*arguments, "--set", LAUNCHER], environment=environment, output=output)

    def connect(self) -> socket.socket:
        """Waits until it has imported everything."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self.path))
                return connection
            except OSError:
                connection.close()
                assert self._process.poll() is None, "the fork server ended"
                assert time.monotonic() < deadline, "the fork server does not come up"
                time.sleep(0.05)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class ForkedRun:
    """`asyncrl ARGUMENTS`, with what a storm needs of a subprocess.Popen."""

    def __init__(
        self, server: ForkServer, arguments: Sequence[str], *, environment: Mapping[str, str], output: Path
    ) -> None:
        self._connection = server.connect()
        self._unread = b""
        self._code: int | None = None
        own = {forks.SOCKET: str(server.path), forks.OUTPUT: str(output)}
        request = {"arguments": [*arguments], "environment": {**environment, **own}, "output": str(output)}
        self._connection.sendall(json.dumps(request).encode() + b"\n")
        while (started := self._heard()) is None:
            time.sleep(0.001)
        self.pid = int(started["pid"])

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self._code is None and (ended := self._heard()) is not None:
            self._code = int(ended["code"])
            self._connection.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("asyncrl run", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _heard(self) -> dict[str, Any] | None:
        self._connection.setblocking(False)
        try:
            self._unread += self._connection.recv(4096)
        except BlockingIOError:
            pass
        finally:
            self._connection.setblocking(True)
        line, end, rest = self._unread.partition(b"\n")
        if not end:
            return None
        self._unread = rest
        found: dict[str, Any] = json.loads(line)
        return found


class ForkedProcess:
    def __init__(self, pid: int, code: asyncio.Future[int]) -> None:
        self.pid = pid
        self.node = socket.gethostname()
        self._code = code

    async def ended(self) -> int:
        return await asyncio.shield(self._code)

    def signal(self, number: int) -> None:
        if not self._code.done():
            os.kill(self.pid, number)


class ForkingLauncher:
    """`asyncrl run`'s launcher in a storm."""

    places = False

    def __init__(self, *, run_name: str, log_directory: Path, options: None = None) -> None:
        self._running: dict[int, ForkedProcess] = {}
        self._codes: dict[int, asyncio.Future[int]] = {}
        self._started: asyncio.Queue[int] = asyncio.Queue()
        self._turn = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    def connect(self) -> str:
        return LOOPBACK

    def check_room(self, specs: Sequence[ProcessSpec]) -> None:
        """All compute on the CPU."""

    async def start(self, spec: ProcessSpec) -> ForkedProcess:
        async with self._turn:  # answers come in the order of the questions
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(os.environ[forks.SOCKET])
                self._reading = asyncio.create_task(self._read(reader))
            environment = dict(os.environ) | dict(spec.environment)
            request = {"arguments": spec.arguments, "environment": environment, "output": os.environ[forks.OUTPUT]}
            self._writer.write(json.dumps(request).encode() + b"\n")
            pid = await self._started.get()
            return ForkedProcess(pid, self._codes[pid])

    async def release(self, name: str) -> None:
        """Nothing is set aside."""

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()  # which kills what is left
            await asyncio.gather(*self._codes.values())

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            said = json.loads(line)
            if "code" in said:
                self._codes[said["pid"]].set_result(said["code"])
            else:
                self._codes[said["pid"]] = asyncio.get_running_loop().create_future()
                self._started.put_nowait(said["pid"])
        for code in self._codes.values():
            if not code.done():
                code.set_result(-signal.SIGKILL)
