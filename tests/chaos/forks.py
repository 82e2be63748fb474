"""Starts `asyncrl ...` by fork, out of a process that has imported everything: a start costs no imports.

    python -m tests.chaos.forks SOCKET MODULE ...

Imports are most of what a tiny process costs, and most of what a storm of a thousand kills does. What is forked is a
process like any other: own session, own environment, own connections; SIGKILL ends it. Whoever connects to SOCKET owns
what it asks for: its children are killed when its connection ends, however it ended.

A line of JSON each way:  {"arguments": [...], "environment": {...}, "output": PATH}  ->  {"pid": N}
                          and when a child ends, to its owner  {"pid": N, "code": exit code or minus the signal}
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from asyncrl import cli, processes

SOCKET: Final = "ASYNCRL_CHAOS_FORKS"
"""In the environment of those who ask: where the server is."""
OUTPUT: Final = "ASYNCRL_CHAOS_OUTPUT"
"""And where stdout and stderr of what they start go."""
_PR_SET_NAME: Final = 15


@dataclass(slots=True)
class Owner:
    connection: socket.socket
    unread: bytes = b""
    children: set[int] = field(default_factory=set)

    def say(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # it is gone; so are its children, soon
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class Server:
    """One thread, no event loop: nothing here may stand in the way of a fork."""

    def __init__(self, path: Path) -> None:
        self._selector = selectors.DefaultSelector()
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
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    self._owners[connection] = Owner(connection)
                    self._selector.register(connection, selectors.EVENT_READ)
                elif key.fileobj is self._ended:
                    self._ended.recv(4096)
                    self._reap()
                elif isinstance(key.fileobj, socket.socket):
                    self._hear(self._owners[key.fileobj])

    def _hear(self, owner: Owner) -> None:
        try:
            data = owner.connection.recv(2**20)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(owner.connection)
            owner.connection.close()
            del self._owners[owner.connection]
            for pid in owner.children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        *lines, owner.unread = (owner.unread + data).split(b"\n")
        for line in lines:
            pid = self._fork(json.loads(line))
            owner.children.add(pid)
            owner.say(pid=pid)

    def _fork(self, request: dict[str, Any]) -> int:
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would not live on in what is forked"
        pid = os.fork()
        if pid == 0:
            self._become(request)
        return pid

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for owner in self._owners.values():
                if pid in owner.children:
                    owner.children.remove(pid)
                    owner.say(pid=pid, code=os.waitstatus_to_exitcode(status))

    def _become(self, request: dict[str, Any]) -> NoReturn:
        """In the child: leave the server behind, and be ``asyncrl ARGUMENTS``."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            processes.signal_on_parent_death(signal.SIGKILL)
            for end in (self._listener, self._ended, self._wakeup, *self._owners):
                end.close()
            self._selector.close()
            os.setsid()
            os.environ.clear()
            os.environ.update(request["environment"])
            for number, path in enumerate((os.devnull, request["output"], request["output"])):
                os.dup2(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), number)
            sys.argv = ["asyncrl", *request["arguments"]]
            ctypes.CDLL(None).prctl(_PR_SET_NAME, name_of(request["arguments"]).encode(), 0, 0, 0)
            cli.main(request["arguments"])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def name_of(arguments: list[str]) -> str:
    """run, learner, w0, ...: in place of the command line, which a fork keeps."""
    return arguments[arguments.index("--name") + 1] if "--name" in arguments else arguments[0]


if __name__ == "__main__":
    processes.signal_on_parent_death(signal.SIGKILL)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    Server(Path(sys.argv[1])).serve()
