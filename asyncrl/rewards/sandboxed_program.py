"""Run one program as a process: feed its input, read its output, watch its limits, and end it with all its descendants.

These limits apply in every sandbox: time, size of the output, number of processes in the tree and their memory
together, and rlimits. The kernel's limit on processes (RLIMIT_NPROC) is not used, because it does not apply to root and
counts all processes of the user.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from asyncrl.errors import ConfigError

MIB: Final = 2**20

Stopped = Literal["", "time", "output", "processes", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one program. A program that exceeds one is ended with all its descendants.

    seconds     wall-clock time from start to end
    memory_mib  address space of each process, and resident memory of all processes together
    disk_mib    size of a file, and of all files together if the sandbox has its own disk
    output_kib  size of standard output, and again of standard error
    processes   number of concurrent processes, the program and its descendants
    """

    seconds: float = 10.0
    memory_mib: int = 512
    disk_mib: int = 64
    output_kib: int = 1024
    processes: int = 32

    def __post_init__(self) -> None:
        for name in ("seconds", "memory_mib", "disk_mib", "output_kib", "processes"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended.

    code     exit status; -N if signal N ended it
    stopped  the limit that it exceeded; empty: it ended by itself, or the kernel ended it
    """

    code: int
    stdout: bytes
    stderr: bytes
    stopped: Stopped
    seconds: float


WATCH_SECONDS: Final = 0.05
"""Interval between two checks of the process tree."""
ENVIRONMENT: Final[Mapping[str, str]] = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
"""The environment of every program; nothing is inherited."""
_CHUNK: Final = 65_536
_MOST_ROUNDS: Final = 100
"""Limit of rounds to kill a tree that keeps starting processes."""
_WITH_LIMITS: Final = (
    'ulimit -t "$1" && ulimit -v "$2" && ulimit -f "$3" && ulimit -c 0 || exit 125; shift 3; exec "$@"'
)
"""Script for /bin/sh. A Python function between fork and exec (preexec_fn) could hang in a process with threads."""


def limited(command: Sequence[str], limits: Limits) -> list[str]:
    """Wrap ``command`` so that it runs under rlimits for CPU time, address space, file size and core files (none)."""
    # The CPU limit is for processes that outlive the worker. Otherwise limits.seconds ends them first, except programs
    # with several threads.
    cpu_seconds = 4 * math.ceil(limits.seconds)
    blocks = limits.disk_mib * MIB // 512
    return ["/bin/sh", "-c", _WITH_LIMITS, "sh", str(cpu_seconds), str(limits.memory_mib * 1024), str(blocks), *command]


def run_program(
    command: Sequence[str],
    *,
    limits: Limits,
    stdin: bytes,
    environment: Mapping[str, str],
    folder: str | None = None,
    inherited: Sequence[int] = (),
) -> Outcome:
    """Run ``command`` to its end or to a limit. Blocks. Raises OSError if it cannot be started.

    inherited  file descriptors to pass on
    """
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=dict(environment),
        pass_fds=inherited,
        start_new_session=True,
    )
    pipes = _Pipes(process, stdin, most=limits.output_kib * 1024)
    try:
        stopped = _until_end(process, pipes, limits, deadline=began + limits.seconds)
    finally:
        _end(process)
        overflows = pipes.drain()
        pipes.close()
    if overflows and not stopped:
        stopped = "output"
    return Outcome(
        code=process.returncode,
        stdout=bytes(pipes.stdout),
        stderr=bytes(pipes.stderr),
        stopped=stopped,
        seconds=time.monotonic() - began,
    )


def _until_end(process: subprocess.Popen[bytes], pipes: _Pipes, limits: Limits, *, deadline: float) -> Stopped:
    """Wait until the process ends by itself (returns "") or exceeds a limit (returns its name)."""
    ended = os.pidfd_open(process.pid)
    look_at = time.monotonic() + WATCH_SECONDS
    try:
        pipes.selector.register(ended, selectors.EVENT_READ)
        while True:
            now = time.monotonic()
            if now >= deadline:
                return "time"
            if now >= look_at:
                if excess := _excess(process.pid, limits):
                    return excess
                look_at = time.monotonic() + WATCH_SECONDS
            for key, _ in pipes.selector.select(max(0.0, min(deadline, look_at) - now)):
                if key.fd == ended:
                    return ""
                if not pipes.move(key.fd):
                    return "output"
    finally:
        os.close(ended)


def _excess(pid: int, limits: Limits) -> Stopped:
    """Return the limit that the tree under ``pid`` exceeds; "" if none."""
    resident = 0
    for num_processes, one in enumerate(_tree(pid), 1):
        resident += _resident_bytes(one)
        if num_processes > limits.processes + 2:  # the sandbox itself has two
            return "processes"
        if resident > limits.memory_mib * MIB:
            return "memory"
    return ""


def _tree(pid: int) -> Iterator[int]:
    """Yield ``pid`` and its descendants. New ones may start during the iteration."""
    left = [pid]
    while left:
        yield (one := left.pop())
        with contextlib.suppress(OSError):  # the process or one of its threads has just ended
            for path in Path(f"/proc/{one}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    left.extend(map(int, path.read_text().split()))


def _is_dead(pid: int) -> bool:
    """Whether a process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # the process has just ended
        return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the descendants, even those in other sessions, while they are still below ``process``; then kill it."""
    for _ in range(_MOST_ROUNDS):
        below = [pid for pid in _tree(process.pid) if pid != process.pid]
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not below or all(_is_dead(pid) for pid in below):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the pid cannot have been reused
    process.wait()


class _Pipes:
    """The three pipes of a process. At most ``most`` bytes of each output are kept."""

    def __init__(self, process: subprocess.Popen[bytes], stdin: bytes, *, most: int) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.stdout, self.stderr = bytearray(), bytearray()
        self.selector = selectors.DefaultSelector()
        self._files = (process.stdin, process.stdout, process.stderr)
        self._in = process.stdin.fileno()
        self._outputs = {process.stdout.fileno(): self.stdout, process.stderr.fileno(): self.stderr}
        self._left = memoryview(stdin)
        self._most = most
        for file in self._files:
            os.set_blocking(file.fileno(), False)
        for descriptor in self._outputs:
            self.selector.register(descriptor, selectors.EVENT_READ)
        self.selector.register(self._in, selectors.EVENT_WRITE)

    def move(self, descriptor: int) -> bool:
        """Move the data that is ready at ``descriptor``. Return False if an output has become too long."""
        if descriptor == self._in:
            self._feed()
            return True
        return self._read(descriptor) <= self._most

    def drain(self) -> bool:
        """Read what is left in the pipes of an ended process. Return whether an output is too long.

        Does not wait for the end of the pipes, because processes left running may hold them open forever.
        """
        for descriptor, kept in self._outputs.items():
            length = -1
            while length != len(kept) and len(kept) <= self._most:
                length = len(kept)
                self._read(descriptor)
        return any(len(kept) > self._most for kept in self._outputs.values())

    def close(self) -> None:
        for kept in (self.stdout, self.stderr):
            del kept[self._most :]
        self.selector.close()
        for file in self._files:
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def _feed(self) -> None:
        try:
            self._left = self._left[os.write(self._in, self._left[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program closed its input
            self._left = self._left[:0]
        if not self._left:
            self.selector.unregister(self._in)
            self._files[0].close()

    def _read(self, descriptor: int) -> int:
        kept = self._outputs[descriptor]
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return len(kept)
        if not data:
            with contextlib.suppress(KeyError):  # already unregistered
                self.selector.unregister(descriptor)
        kept += data
        return len(kept)
