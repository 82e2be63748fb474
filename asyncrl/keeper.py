"""Run one program, and kill it together with every process that it started. Uses only the standard library.

    python -I -S keeper.py CONTROL MEMORY_MIB PROGRAM [ARGUMENT ...]

CONTROL is the file descriptor of a pipe's read end. When the write end closes, because its owner closed it or exited,
the keeper kills all its descendants. It does the same when the program ends, so no process outlives the program. On
Linux the keeper is a subreaper and adopts orphans, even those that started their own session. Elsewhere it kills only
the program's process group. The keeper exits with the program's exit code, or by the same signal. A MEMORY_MIB of 0
means no limit. A program that exceeds the limit is killed, and the exit code is OUT_OF_MEMORY. If the program cannot be
started, the exit code is NOT_STARTED and the reason is on stderr.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

OUT_OF_MEMORY = 125
NOT_STARTED = 126
LOOK_SECONDS = 0.5
GIVE_UP_SECONDS = 10.0
"""Limit for processes that do not die, for example because they belong to another user or wait for a disk."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    control, memory_mib, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    prctl = _prctl()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):  # not SIG_IGN: the program would inherit it
        signal.signal(number, lambda *_: None)
    try:
        program = subprocess.Popen(
            command, start_new_session=True, preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        sys.exit(NOT_STARTED)
    for stream in (0, 1):  # else the pipes stay open after the program closes them
        os.close(stream)
    code = wait(program, control, signals, memory_mib)
    end_all(program.pid)
    if code is not None and code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(1 if code is None else code)


def wait(program: subprocess.Popen[bytes], control: int, signals: int, memory_mib: int) -> int | None:
    """Return the program's exit code when it ends; None if its owner ends it; OUT_OF_MEMORY beyond the limit."""
    timeout = LOOK_SECONDS if memory_mib else None
    while True:
        ready, _, _ = select.select([control, signals], [], [], timeout)
        if signals in ready:
            os.read(signals, 4096)
            reap(program)
        if program.returncode is not None:
            return program.returncode
        if control in ready and not os.read(control, 4096):
            return None
        if memory_mib and resident_bytes() > memory_mib * 2**20:
            return OUT_OF_MEMORY


def reap(program: subprocess.Popen[bytes]) -> None:
    """Reap every child that has ended, including orphans."""
    if program.returncode is None:
        program.poll()
    if program.returncode is None:
        for pid in descendants(os.getpid()):
            if pid != program.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def end_all(group: int) -> None:
    """Kill all descendants. Stop them first, so that they cannot start new processes."""
    seen: set[int] = set()
    while new := set(descendants(os.getpid())) - seen:
        for pid in new:
            kill(pid, signal.SIGSTOP)
        seen |= new
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    pause, until = 0.001, time.monotonic() + GIVE_UP_SECONDS
    while (left := descendants(os.getpid())) and time.monotonic() < until:
        for pid in left:
            kill(pid, signal.SIGKILL)
        time.sleep(pause)  # no signal reports the end of a grandchild
        pause = min(2 * pause, 0.1)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of ``pid``; empty on systems without /proc."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found + [below for child in found for below in descendants(child)]


def resident_bytes() -> int:
    """Return the resident memory of all descendants. Shared pages count once per process."""
    total = 0
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/statm") as file:
            total += int(file.read().split()[1]) * resource.getpagesize()
    return total


def _prctl() -> Callable[[int, int], int]:
    if not sys.platform.startswith("linux"):
        return lambda *_: 0
    import ctypes

    function = ctypes.CDLL(None, use_errno=True).prctl
    return lambda option, value: int(function(option, value, 0, 0, 0))


if __name__ == "__main__":
    main()
