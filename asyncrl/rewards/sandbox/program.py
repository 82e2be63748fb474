"""One program as a process of its own: fed, listened to, watched, and ended with all that it has started.

What holds whatever the sandbox is: the time, how much output is kept, how many processes its tree has and how much
memory they have together, and rlimits. The kernel's limit on processes is none of them: it does not hold for root, and
counts what the user runs elsewhere.
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
from pathlib import Path
from typing import Final

from asyncrl.rewards.sandbox.sandbox import MIB, Limits, Outcome, Stopped

WATCH_SECONDS: Final = 0.05
"""Between two looks at the tree of processes."""
ENVIRONMENT: Final[Mapping[str, str]] = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
"""All that a program sees of ours."""
_CHUNK: Final = 65_536
_MOST_ROUNDS: Final = 100
"""Of ending what begins more meanwhile."""
_WITH_LIMITS: Final = (
    'ulimit -t "$1" && ulimit -v "$2" && ulimit -f "$3" && ulimit -c 0 || exit 125; shift 3; exec "$@"'
)
"""For /bin/sh: a function of ours between fork and exec (preexec_fn) could hang in a process with threads."""


def limited(command: Sequence[str], limits: Limits) -> list[str]:
    """``command`` under rlimits: CPU, addresses, size of a file, no core file."""
    cpu_seconds = 4 * math.ceil(limits.seconds)  # for what outlives us: the time ends it before, unless it has threads
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
    """Runs ``command`` to its end or to a limit. Blocks; raises OSError when it cannot be started.

    inherited: file descriptors that it gets
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
    """Empty when the process has ended by itself, whatever it left behind."""
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
    """What the tree under ``pid`` has too much of; empty: nothing."""
    resident = 0
    for num_processes, one in enumerate(_tree(pid), 1):
        resident += _resident_bytes(one)
        if num_processes > limits.processes + 2:  # the sandbox's own two
            return "processes"
        if resident > limits.memory_mib * MIB:
            return "memory"
    return ""


def _tree(pid: int) -> Iterator[int]:
    """``pid`` and all below it, which may become more meanwhile."""
    left = [pid]
    while left:
        yield (one := left.pop())
        with contextlib.suppress(OSError):  # it has just ended, or one of its threads has
            for path in Path(f"/proc/{one}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    left.extend(map(int, path.read_text().split()))


def _is_dead(pid: int) -> bool:
    """Gone, or ended and not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has just ended
        return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """All that it has started first: what is in a session of its own is still below it."""
    for _ in range(_MOST_ROUNDS):
        below = [pid for pid in _tree(process.pid) if pid != process.pid]
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not below or all(_is_dead(pid) for pid in below):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
    process.wait()


class _Pipes:
    """The three of a process; no more than ``most`` bytes of each output are kept."""

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
        """Moves what is ready there; False when an output has become too long."""
        if descriptor == self._in:
            self._feed()
            return True
        return self._read(descriptor) <= self._most

    def drain(self) -> bool:
        """What lies in the pipes of a process that has ended: what it left running may hold them open for ever.

        Whether an output is too long.
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
        except BrokenPipeError:  # it does not want more
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
            with contextlib.suppress(KeyError):  # it is at its end already
                self.selector.unregister(descriptor)
        kept += data
        return len(kept)
