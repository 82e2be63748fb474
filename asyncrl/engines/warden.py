"""Runs a command and lets no process of it outlive its owner. Started as a script that needs the standard library only.

    python warden.py COMMAND...

The owner holds the other end of our standard input. It is closed when the owner closes the engine, and by the kernel
when the owner dies in whatever way, SIGKILL included. Then, or when the command ends by itself, every descendant is
killed: as their subreaper we inherit those whose parents are gone, also out of sessions of their own. Our exit status
is the command's.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.dup2(nothing, 0))  # as if the owner had closed it, however often
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # a fork of the owner may hold that open, and live on
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # Should even this process be killed, at least the command goes, and with it what watches its parent.
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    while child.poll() is None and not _is_closed(woken):
        pass
    _kill_descendants()
    return child.poll() or 0


def _is_closed(woken: int) -> bool:
    """Wait for a signal or for our standard input; True when the latter ended."""
    ready, _, _ = select.select([0, woken], [], [])
    if woken in ready:
        os.read(woken, 4096)
    return 0 in ready and not os.read(0, 4096)


def _kill_descendants() -> None:
    """Kill children until there are none: orphans of the killed become our children in turn."""
    while children := _children():
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # ours and not reaped yet, so the number is still theirs
        for pid in children:
            os.waitpid(pid, 0)


def _children() -> list[int]:
    """Processes whose parent is this one. (/proc/self/task/*/children would say it, but not every kernel has it.)"""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:  # gone meanwhile
            continue
        if int(parent) == os.getpid():
            found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
