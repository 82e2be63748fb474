"""Clients of forks.py: a run whose learner and workers start by fork costs a fraction of the CPU time.

``with_forks(server)`` gives the override and the environment for any kind of `asyncrl run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from asyncrl.launch.launchers.adapter import LauncherAdapter
from asyncrl.launch.launchers.local import LOOPBACK
from asyncrl.launch.port import ProcessSpec
from tests import ROOT

LAUNCHER: Final = 'launcher.kind="tests.harness.forked:ForkingLauncher"'
"""Override for a run that starts its processes by fork."""
SOCKET: Final = "ASYNCRL_TEST_FORKS"
"""Environment variable that tells ForkingLauncher the path of the server."""
_START_SECONDS: Final = 900.0
_IMPORTED: Final = (
    "asyncrl.bus.jetstream.bus",
    "asyncrl.bus.nats_server.adapter",
    "asyncrl.cli.audit",
    "asyncrl.cli.check",
    "asyncrl.cli.learner",
    "asyncrl.cli.rollout_worker",
    "asyncrl.cli.run",
    "asyncrl.launch.launchers.local",
    "asyncrl.policies.algorithms.critic",
    "asyncrl.policies.algorithms.table",
    "asyncrl.environments.builtin",
    "asyncrl.launch.assembly.build_learner",
    "asyncrl.launch.assembly.build_worker",
    "asyncrl.launch.assembly.training",
    "asyncrl.audit.account",
    "asyncrl.adapters.registry",
    "asyncrl.weights.files",
    "numpy.ctypeslib",
    "numpy.ma",
    "tests.harness.forked",
    "torch._dynamo",
    "transformers.models.auto.tokenization_auto",
    "uvloop",
)
"""Modules that every run imports, including late imports. A module missing here is imported again by every process."""
MODELS: Final = (
    "asyncrl.backends.megatron.backend",
    "asyncrl.backends.megatron.rank",
    "asyncrl.backends.reference",
    "asyncrl.data.demo_task",
    "asyncrl.engines.inprocess.engine",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen3.modeling_qwen3",
)
"""Additional modules that runs of Hugging Face models import, on either backend."""


_OUTLIVE_US: Final[list[subprocess.Popen[bytes]]] = []
"""Kept alive, because Python warns when the handle of a running process is dropped."""


class ForkServer:
    """A fork server. It ends, with everything it forked, by ``close`` or with its owner.

    modules    additional modules to import
    imported   modules to import in any case
    environment  variables with which they are imported, besides this process's
    owner      id of the owning process; 0: this one. With another owner, the first caller for a folder starts the
               server, later callers share it, and ``close`` does not end it
    """

    def __init__(
        self,
        folder: Path,
        modules: Sequence[str] = (),
        *,
        imported: Sequence[str] = _IMPORTED,
        owner: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.path = folder / "forks.socket"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_shared = owner != 0
        if self._is_shared:
            try:
                folder.mkdir()
            except FileExistsError:
                return
        self.path.unlink(missing_ok=True)
        own = {
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **(environment or {}),
        }
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [own.get("PYTHONPATH", ""), _python_path()]))
        command = [sys.executable, "-m", "tests.harness.forks", str(self.path), str(owner), *imported, *modules]
        self._process = subprocess.Popen(command, cwd=ROOT, env=os.environ | own, stdin=subprocess.DEVNULL)

    @property
    def environment(self) -> dict[str, str]:
        """Environment that an `asyncrl run` with the override LAUNCHER needs."""
        return {SOCKET: str(self.path), "PYTHONPATH": _python_path()}

    def run(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: Path,
        directory: Path = ROOT,
        module: str = "",
    ) -> ForkedCommand:
        """Start `asyncrl ARGUMENTS`, or ``module``.main(ARGUMENTS)."""
        return ForkedCommand(
            self.connect(), arguments, environment=environment, output=output, directory=directory, module=module
        )

    def call(self, *arguments: str, environment: Mapping[str, str] | None = None, module: str = "") -> tuple[int, str]:
        """Run `asyncrl ARGUMENTS` (or ``module``.main) to its end. Return its exit code, and stdout and stderr as one
        text."""
        output = self.path.parent / uuid.uuid4().hex
        process = self.run(arguments, environment=os.environ | (environment or {}), output=output, module=module)
        return process.wait(), output.read_text()

    def children_of(self, pid: int) -> dict[str, int]:
        """Return the pids of the processes that this server forked for the run with this pid, by name: learner,
        learner-1, w0, ..."""
        with self.connect() as connection, connection.makefile("rb") as answers:
            connection.sendall(json.dumps({"owner": pid}).encode() + b"\n")
            found: dict[str, int] = json.loads(answers.readline())
            return found

    def connect(self) -> socket.socket:
        """Connect; waits until the server has imported everything."""
        deadline = time.monotonic() + _START_SECONDS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self.path))
                return connection
            except OSError:
                connection.close()
                assert self._process is None or self._process.poll() is None, "the fork server ended"
                assert time.monotonic() < deadline, "the fork server does not come up"
                time.sleep(0.05)

    def close(self) -> None:
        if self._process is not None and self._is_shared:
            _OUTLIVE_US.append(self._process)
        elif self._process is not None:
            self._process.kill()
            self._process.wait()


class ForkedCommand:
    """A forked `asyncrl ARGUMENTS` with the part of subprocess.Popen's interface that tests need."""

    def __init__(
        self,
        connection: socket.socket,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: Path,
        directory: Path,
        module: str = "",
    ) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # one thread may wait while another polls
        self._unread = b""
        self._code: int | None = None
        self._connection.sendall(_request(arguments, environment, directory, [str(output)] * 2, module=module))
        while (started := self._heard()) is None:
            time.sleep(0.001)
        self.pid = int(started["pid"])

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        with self._lock:
            if self._code is None and (ended := self._heard()) is not None:
                self._code = int(ended["code"])
                self._connection.close()
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("asyncrl", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _heard(self) -> dict[str, Any] | None:
        with contextlib.suppress(BlockingIOError):
            new = self._connection.recv(4096, socket.MSG_DONTWAIT)
            assert new, "the fork server ended"
            self._unread += new
        line, end, rest = self._unread.partition(b"\n")
        if not end:
            return None
        self._unread = rest
        found: dict[str, Any] = json.loads(line)
        return found


class ForkedProcess:
    """A launched process (launch/port.py)."""

    def __init__(self, pid: int, code: asyncio.Future[int]) -> None:
        self.pid = pid
        self.node = socket.gethostname()
        self._code = code

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def signal(self, number: int) -> None:
        if not self._code.done():
            with contextlib.suppress(ProcessLookupError):  # its end is known to the server, and not yet here
                os.kill(self.pid, number)


class ForkingLauncher(LauncherAdapter):
    """A launcher that lets the server named in the environment fork its processes. They share this process's stdout and
    stderr."""

    def __init__(self, *, run_name: str, log_directory: Path, options: None = None) -> None:
        self._codes: dict[int, asyncio.Future[int]] = {}
        self._started: asyncio.Queue[int] = asyncio.Queue()
        self._turn = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    def connect(self) -> str:
        return LOOPBACK

    def check_room(self, specs: Sequence[ProcessSpec]) -> None:
        """Accept everything: all processes compute on the CPU."""

    async def start(self, spec: ProcessSpec) -> ForkedProcess:
        async with self._turn:  # answers arrive in the order of the requests
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(os.environ[SOCKET])
                self._reading = asyncio.create_task(self._read(reader))
            output = [f"/proc/{os.getpid()}/fd/{number}" for number in (1, 2)]
            environment = os.environ | spec.environment
            self._writer.write(_request(spec.arguments, environment, Path.cwd(), output, name=spec.name))
            started = asyncio.ensure_future(self._started.get())
            try:
                pid = await asyncio.shield(started)
            except asyncio.CancelledError:  # it is started all the same, and the next answer is of the next request
                started.add_done_callback(_end_started)
                raise
            return ForkedProcess(pid, self._codes[pid])

    async def release(self, name: str) -> None:
        """Do nothing: no resources are reserved."""

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()  # closing kills the remaining processes
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


def _end_started(started: asyncio.Future[int]) -> None:
    if not started.cancelled():
        with contextlib.suppress(ProcessLookupError):
            os.kill(started.result(), signal.SIGKILL)


def _request(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    output: Sequence[str],
    *,
    name: str = "",
    module: str = "",
) -> bytes:
    """name: name of the process; empty derives it from the arguments.  module: its main is called; empty: asyncrl's"""
    request = {
        "name": name,
        "module": module,
        "arguments": [*arguments],
        "environment": dict(environment),
        "directory": str(directory.absolute()),
        "output": output,
    }
    return json.dumps(request).encode() + b"\n"


def _python_path() -> str:
    """Return this process's PYTHONPATH with the repository in front, so that `tests` is found from any directory."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
