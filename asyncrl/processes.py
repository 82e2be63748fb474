"""Processes that die together: no orphan outlives whoever started it, not even after SIGKILL. A no-op off Linux."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
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


def age_seconds() -> float:
    """Seconds since this process was started, its imports included; off Linux, since it began to count CPU time."""
    if not sys.platform.startswith("linux"):
        return time.process_time()
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
