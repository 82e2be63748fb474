"""Run one program as a process: feed its input, read its output, watch its limits, and end it with all its descendants.

These limits apply in every sandbox: time, size of the output, number of processes in the tree and their memory
together, and rlimits. The kernel's limit on processes (RLIMIT_NPROC) is not used, because it does not apply to root and
counts all processes of the user.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Literal

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
_MOST_ROUNDS: Final = 100
"""Limit of rounds to kill a tree that keeps starting processes."""
_MOST_FILES: Final = 256
"""Open files of a process: the kernel's buffers of sockets and pipes are memory that no limit counts."""
_WITH_LIMITS: Final = (
    'ulimit -t "$1" && ulimit -v "$2" && ulimit -f "$3" && ulimit -c 0 || exit 125; '
    f'ulimit -n {_MOST_FILES} 2>/dev/null; shift 3; exec "$@"'  # fails where it is lower already
)
"""Script for /bin/sh. A Python function between fork and exec (preexec_fn) could hang in a process with threads."""


def wrap_with_limits(command: Sequence[str], limits: Limits) -> list[str]:
    """Wrap ``command`` so that it runs under rlimits for CPU time, address space, size and number of files, core files
    (none)."""
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
    most = limits.output_kib * 1024
    # Output goes to files, so that a process that outlives the program holds up nobody. Input comes from a pipe, which
    # can be read only once: it may hold a secret of the tests after the program.
    with _file() as stdout, _file() as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            cwd=folder,
            env=dict(environment),
            pass_fds=inherited,
            start_new_session=True,
        )
        threading.Thread(target=_feed, args=(process.stdin, stdin), name="sandbox-input", daemon=True).start()
        try:
            stopped = _until_end(process.pid, limits, deadline=began + limits.seconds, outputs=(stdout, stderr))
        finally:
            _end(process)
        if not stopped and _is_longer((stdout, stderr), most):
            stopped = "output"
        return Outcome(
            code=process.returncode,
            stdout=os.pread(stdout, most, 0),
            stderr=os.pread(stderr, most, 0),
            stopped=stopped,
            seconds=time.monotonic() - began,
        )


@contextlib.contextmanager
def _file() -> Iterator[int]:
    """Yield an empty file in memory."""
    with open(os.memfd_create("asyncrl-sandbox"), "w+b", buffering=0) as file:
        yield file.fileno()


def _feed(pipe: IO[bytes], data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), pipe:  # the program may close its input, or end
        pipe.write(data)


def _is_longer(outputs: Iterable[int], most: int) -> bool:
    return any(os.fstat(output).st_size > most for output in outputs)


def _until_end(pid: int, limits: Limits, *, deadline: float, outputs: Sequence[int]) -> Stopped:
    """Wait until the process ends by itself (returns "") or exceeds a limit (returns its name). Does not reap it."""
    ended, poll = os.pidfd_open(pid), select.poll()
    poll.register(ended, select.POLLIN)
    try:
        while (left := deadline - time.monotonic()) > 0:
            if poll.poll(1000 * min(left, WATCH_SECONDS)):
                return ""
            if _is_longer(outputs, limits.output_kib * 1024):
                return "output"
            if excess := _find_excess(pid, limits):
                return excess
        return "time"
    finally:
        os.close(ended)


def _find_excess(pid: int, limits: Limits) -> Stopped:
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
