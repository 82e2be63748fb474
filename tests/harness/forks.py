"""Starts `asyncrl ...` by fork, from a process that has already imported everything.

    python -m tests.harness.forks SOCKET OWNER MODULE ...

Imports are most of the cost of a tiny process. A forked process is otherwise a normal one: it has its own session,
environment, directory and connections, and SIGKILL ends it. A client that connects to SOCKET owns the processes it asks
for: they are killed when its connection ends for any reason. The server ends with the process OWNER, or with its parent
if OWNER is 0.

A fork loses its parent's threads. If an import has started a thread (torch for CUDA does, in some versions), each
process is a new Python instead: equivalent, but slow.

Messages are one line of JSON each way:
    {"name": ..., "arguments": [...], "environment": {...}, "directory": PATH, "output": [STDOUT, STDERR]}
        ->  {"pid": N}; with "module": MODULE it is MODULE.main(arguments) instead of asyncrl
    when a process ends, to its owner:  {"pid": N, "code": exit code, or minus the signal}
    {"owner": PID}  ->  {NAME: pid, ...}, the processes of the owner with that pid: learner, w0, ...
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from asyncrl import os_process
from asyncrl.cli import main as cli
from tests.harness import forked_ranks

_PR_SET_NAME: Final = 15
_BECOME: Final = "--become"


@dataclass(slots=True)
class Owner:
    """A connection. ``children``: names of its processes by pid."""

    connection: socket.socket
    unread: bytes = b""
    children: dict[int, str] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        credentials = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", credentials)[0])

    def say(self, message: dict[str, int]) -> None:
        with contextlib.suppress(OSError):  # the owner is gone; its children will be killed
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class Server:
    """Uses a single thread and no event loop, so that forking is safe."""

    def __init__(self, path: Path, owner: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._owner = os.pidfd_open(owner) if owner else -1
        if owner:
            self._selector.register(self._owner, selectors.EVENT_READ)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._ended, wakeup = socket.socketpair()
        for end in (self._ended, wakeup):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wakeup is written
        signal.set_wakeup_fd(wakeup.fileno())
        self._wakeup = wakeup
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._owners: dict[socket.socket, Owner] = {}

    def serve(self) -> NoReturn:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj == self._owner:
                    sys.exit()
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._owners[connection] = Owner(connection)
                    self._selector.register(connection, selectors.EVENT_READ)
                elif key.fileobj is self._ended:
                    self._ended.recv(4096)
                    self._reap()
                elif isinstance(key.fileobj, socket.socket):
                    self._read(self._owners[key.fileobj])

    def _read(self, owner: Owner) -> None:
        try:
            data = owner.connection.recv(2**20)
        except OSError:
            data = b""
        if not data:
            self._end(owner)
            return
        *lines, owner.unread = (owner.unread + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if "owner" in request:
                owner.say(self._children_of(request["owner"]))
            else:
                pid = self._start(request)
                owner.children[pid] = request["name"] or name_of(request["arguments"])
                owner.say({"pid": pid})

    def _end(self, owner: Owner) -> None:
        self._selector.unregister(owner.connection)
        owner.connection.close()
        del self._owners[owner.connection]
        for pid in owner.children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _children_of(self, pid: int) -> dict[str, int]:
        owners = [owner for owner in self._owners.values() if owner.children and owner.pid == pid]
        return {name: child for owner in owners for child, name in owner.children.items()}

    def _start(self, request: dict[str, Any]) -> int:
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            return spawn(request)
        pid = os.fork()
        if pid == 0:
            self._leave()
            become(request)
        return pid

    def _leave(self) -> None:
        """Drop the server's resources in the child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._listener, self._ended, self._wakeup, *self._owners):
            end.close()
        if self._owner >= 0:
            os.close(self._owner)
        self._selector.close()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for owner in self._owners.values():
                if owner.children.pop(pid, None) is not None:
                    owner.say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def become(request: dict[str, Any]) -> NoReturn:
    """Run ``asyncrl ARGUMENTS`` in this process. The process ends with the command or with its parent."""
    code = 1
    try:
        os_process.signal_on_parent_death(signal.SIGKILL)
        os.setsid()
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["directory"])
        given = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [request["directory"], *(path for path in given if path and path not in sys.path)]
        for number, path in enumerate((os.devnull, *request["output"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), number)
        sys.argv = ["asyncrl", *request["arguments"]]
        name = request["name"] or name_of(request["arguments"])
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
        if request["arguments"][:1] == ["learner"] and any("learner.ranks=" in word for word in request["arguments"]):
            forked_ranks.serve()
        program = importlib.import_module(request["module"]) if request.get("module") else cli
        code = program.main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def spawn(request: dict[str, Any]) -> int:
    """Start a new Python for ``become`` and return its pid."""
    command = [sys.executable, "-m", "tests.harness.forks", _BECOME, json.dumps(request)]
    return os.posix_spawn(sys.executable, command, request["environment"])


def name_of(arguments: list[str]) -> str:
    """Return run, learner, w0, ...; also the process title, since a fork keeps its parent's command line."""
    return arguments[arguments.index("--name") + 1] if "--name" in arguments else arguments[0]


if __name__ == "__main__":
    if sys.argv[1] == _BECOME:
        become(json.loads(sys.argv[2]))
    if (its_owner := int(sys.argv[2])) == 0:
        os_process.signal_on_parent_death(signal.SIGKILL)
    for module in sys.argv[3:]:
        importlib.import_module(module)
    gc.freeze()  # otherwise a collection in a fork would copy every page
    try:
        Server(Path(sys.argv[1]), its_owner).serve()
    except ProcessLookupError:
        sys.exit()  # the owner ended before we could watch it
