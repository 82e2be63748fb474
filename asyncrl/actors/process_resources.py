"""How much of its machine's limits this process has used. Linux only; empty elsewhere."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Final

_CGROUP: Final = Path("/sys/fs/cgroup")
_UNLIMITED: Final = 2**60


def used_shares(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> dict[str, float]:
    """Return used shares in [0, 1] for a heartbeat; resources without a limit are left out.

    memory       of the container's limit, counting all its processes; without a limit, the part of the machine's memory
                 that is not available
    descriptors  of RLIMIT_NOFILE
    threads      of the container's limit of processes
    """
    found = {
        "process/memory": _memory(proc, cgroup),
        "process/descriptors": _descriptors(proc),
        "process/threads": _share(_number(cgroup / "pids.current"), _number(cgroup / "pids.max")),
    }
    return {name: share for name, share in found.items() if share is not None}


def _memory(proc: Path, cgroup: Path) -> float | None:
    limit = _number(cgroup / "memory.max")
    if limit is not None and (current := _number(cgroup / "memory.current")) is not None:
        cache = _fields(cgroup / "memory.stat").get("inactive_file", 0)  # reclaimed before anything is killed
        return _share(current - cache, limit)
    machine = _fields(proc / "meminfo")
    total, available = machine.get("MemTotal:"), machine.get("MemAvailable:")
    return None if total is None or available is None else _share(total - available, total)


def _descriptors(proc: Path) -> float | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        return _share(len(os.listdir(proc / "self" / "fd")), limit)
    except OSError as error:  # listing needs a descriptor, and none is left
        return 1.0 if error.errno in (errno.EMFILE, errno.ENFILE) else None


def _share(used: int | None, limit: int | None) -> float | None:
    return None if used is None or limit is None or not 0 < limit < _UNLIMITED else used / limit


def _number(path: Path) -> int | None:
    """Return the number in a file; None for "max" or a missing file."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _fields(path: Path) -> dict[str, int]:
    """Map names to numbers from lines such as "MemTotal: 24 kB"."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}
