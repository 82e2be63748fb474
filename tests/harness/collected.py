"""Starts xdist's processes by fork, from a process that has already collected the tests.

    python -m tests.harness.collected LISTENER PYTEST_ARGUMENT ...

LISTENER is the descriptor of a listening socket. Importing the modules of all tests takes 15 s of CPU; a fork collects
again in 3 s. pytest-xdist starts collected_client.py, which requests the fork and stands in for it.

A fork loses its parent's threads. If an import has started a thread, this process starts no forks, and each client
becomes a Python of its own.
"""

from __future__ import annotations

import array
import gc
import importlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from asyncrl import os_process
from tests.harness import forked_ranks
from tests.harness.forked import MODELS

_HARMLESS: Final = "jemalloc_bg_thd"
"""Name of a thread that is safe to lose: pyarrow's allocator starts it again in a fork."""


class Collected:
    """The process that forks; ``python`` is the interpreter for a spec of pytest-xdist. Ends with ``close`` or with its
    owner."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """arguments: of pytest"""
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / "collected.socket"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.harness.collected", str(listener.fileno()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )
        client = Path(__file__).with_name("collected_client.py")
        self.python = shlex.join([sys.executable, "-I", "-S", str(client), str(path)])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def main() -> None:
    os_process.signal_on_parent_death(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the processes that run tests
    listener = socket.socket(fileno=int(sys.argv[1]))
    pytest.main([*sys.argv[2:], "-n", "0", "--collect-only", "-qq"])
    # Once for all forks. What a test imports first would also be searched whenever a Megatron backend closes.
    for module in MODELS:
        importlib.import_module(module)
    _find_constants()
    if not _is_alone():
        return
    gc.collect()
    gc.freeze()  # otherwise a collection in a fork would copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the forks
    while True:
        connection, _ = listener.accept()
        request, descriptors = _received(connection)
        if os.fork() == 0:
            connection.sendall(f"{os.getpid()}\n".encode())
            connection.close()
            listener.close()
            _become(json.loads(request), descriptors)
            return
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)


def _find_constants() -> None:
    """Let hypothesis read the constants of all modules, which takes three seconds before its first example."""
    import hypothesis  # pytest refuses it when it is imported first

    hypothesis.find(hypothesis.strategies.text(), lambda _: True)


def _is_alone() -> bool:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return len([name for name in names if name != _HARMLESS]) == 1


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return one line, and the descriptors that came with its first part."""
    line, descriptors = b"", array.array("i")
    while not line.endswith(b"\n"):
        part, found, _, _ = socket.recv_fds(connection, 2**16, 3)
        if not part:
            raise EOFError("a client left before it had asked")
        line += part
        descriptors.extend(found)
    return line, list(descriptors)


def _become(request: dict[str, object], descriptors: list[int]) -> None:
    """Run ``python -c PROGRAM`` in this process."""
    os_process.signal_on_parent_death(signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.chdir(str(request["directory"]))
    forked_ranks.serve(is_silent=True)  # pytest-xdist speaks through what is this process's output now
    sys.argv = ["-c"]
    # otherwise multiprocessing would import this module
    sys.modules["__main__"] = program = types.ModuleType("__main__")
    exec(str(request["program"]), program.__dict__)


if __name__ == "__main__":
    main()
