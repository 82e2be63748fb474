"""Runs a command, and kills all its processes when the owner dies. The script uses only the standard library.

    python reaper.py COMMAND...

The owner holds the other end of our standard input. That end closes when the owner closes the engine, or when the owner
dies for any reason, SIGKILL included. Then, or when the command exits, we kill every descendant: as subreaper we
inherit orphans, even those in their own sessions. Our exit status is the command's.
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
        signal.signal(number, lambda *_: os.dup2(nothing, 0))  # as if the owner had closed it; safe to repeat
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # a fork of the owner may outlive it and keep our stdin open
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # If this process is killed, at least the command dies, and with it any process that watches its parent.
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    while child.poll() is None and not _is_closed(woken):
        pass
    _kill_descendants()
    return child.poll() or 0


def _is_closed(woken: int) -> bool:
    """Wait for a signal or for our standard input. Returns True if standard input was closed."""
    ready, _, _ = select.select([0, woken], [], [])
    if woken in ready:
        os.read(woken, 4096)
    return 0 in ready and not os.read(0, 4096)


def _kill_descendants() -> None:
    """Kill children until none are left. Orphans of killed children become our children."""
    while children := _children():
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # a child not reaped yet, so its pid cannot have been reused
        for pid in children:
            os.waitpid(pid, 0)


def _children() -> list[int]:
    """Return the pids of our children. Not every kernel has /proc/self/task/*/children."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
        except OSError:  # the process has exited
            continue
        if int(parent) == os.getpid():
            found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
