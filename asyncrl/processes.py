"""Processes that die together: no orphan outlives whoever started it, not even after SIGKILL. A no-op off Linux."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PARENT = "ASYNCRL_PARENT_PID"
"""Set for children by whoever wants them to end with it; its value is that process's id."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """End at once when our parent is gone, if it asked for that in the environment.

    By SIGKILL: a drain could wait for ever for a bus that went with the same parent, and being killed loses nothing.
    """
    parent = os.environ.pop(PARENT, "")
    if not parent or not sys.platform.startswith("linux"):
        return
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before we asked
        os.kill(os.getpid(), signal.SIGKILL)


def signal_on_parent_death(number: int) -> None:
    """Have the kernel send us ``number`` when the thread that started us ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def exit_within(seconds: float, code: int) -> None:
    """End with ``code`` if this process is still there then: a thread in a call that never returns would keep it."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


def age_seconds() -> float:
    """Seconds since this process was started, its imports included; off Linux, since it began to count CPU time."""
    if not sys.platform.startswith("linux"):
        return time.process_time()
    started = int(_stat(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What processes have done since they began. read_bytes: from files, caches of the system included."""

    cpu_seconds: float
    read_bytes: int


def work() -> Work | None:
    """Of this process and all below it that live; None where the system does not tell."""
    if not sys.platform.startswith("linux"):
        return None
    cpu_seconds, read_bytes = 0.0, 0
    for pid in _with_descendants(os.getpid()):
        try:
            fields = _stat(pid)
            counts = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        except OSError:  # it has just ended, or is not ours to look at
            continue
        cpu_seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        read_bytes += max(int(counts["rchar"]), int(counts["read_bytes"]))
    return Work(cpu_seconds=cpu_seconds, read_bytes=read_bytes)


def _with_descendants(pid: int) -> Iterator[int]:
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:  # the thread has just ended
            continue
        for child in children:
            yield from _with_descendants(int(child))


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the name, which may hold blanks: the state is the first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
