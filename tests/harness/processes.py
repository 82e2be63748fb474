"""The processes of a run, as the system shows them."""

from __future__ import annotations

import contextlib
from pathlib import Path


def processes_below(pid: int) -> dict[str, int]:
    """Return the pids of a run's own processes by name: the children of `asyncrl run`, learner, w0, nats-server, ..."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_text().split("\0")
        except (OSError, ValueError, IndexError):  # the process has just ended
            continue
        if parent == pid and (name := _name(words)):
            found[name if name != "learner" else rank_name(_rank(folder))] = int(folder.name)
    return found


def rank_name(rank: str) -> str:
    """Return the name of the learner rank whose environment has RANK=``rank``; "" means unset."""
    return f"learner-{rank}" if rank not in ("", "0") else "learner"


def _rank(folder: Path) -> str:
    try:
        variables = (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    return next((one.removeprefix(b"RANK=").decode() for one in variables if one.startswith(b"RANK=")), "")


def _name(words: list[str]) -> str:
    if words[0].endswith("nats-server"):
        return "nats-server"
    if "asyncrl" not in words:
        return ""
    verb = words[words.index("asyncrl") + 1]
    named = {"rollout-worker": "--name", "learner": "--standby"}.get(verb, "")
    return words[words.index(named) + 1] if named in words else verb


def grandchildren(pid: int) -> list[int]:
    """Return the pids of a learner's other ranks, which a server forks."""
    parents = _parents()
    return [child for child, parent in parents.items() if parents.get(parent) == pid]


def spawned(pid: int) -> list[int]:
    """Return the pids of a learner's other ranks on GPUs, which it starts itself."""
    found = []
    for child, parent in _parents().items():
        with contextlib.suppress(OSError):
            if parent == pid and b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def _parents() -> dict[int, int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # the process has just ended
            continue
    return parents
