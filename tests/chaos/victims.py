"""Who is killed, and when: the moments at which a process owes somebody something.

A storm deals the kinds in turn, in an order of its own, so that each comes equally often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Role = Literal["learner", "rollout-worker", "nats-server", "run"]
Moment = Literal["any time", "after a step", "writing a checkpoint", "starting", "after its publish"]


@dataclass(frozen=True, slots=True)
class Kind:
    """count: so many processes of the role die at once."""

    role: Role
    moment: Moment
    count: int = 1

    def __str__(self) -> str:
        return f"{self.role if self.count == 1 else f'{self.count} {self.role}s'}, {self.moment}"


KINDS: Final = (
    Kind("learner", "any time"),
    Kind("learner", "after a step"),
    Kind("learner", "writing a checkpoint"),
    Kind("learner", "starting"),
    Kind("rollout-worker", "any time"),
    Kind("rollout-worker", "after its publish"),
    Kind("rollout-worker", "any time", 2),
    Kind("nats-server", "any time"),
    Kind("run", "any time"),
)


def deal(seed: int) -> Iterator[Kind]:
    """All kinds in an order drawn anew each round, without end."""
    generator = random.Random(seed)
    while True:
        yield from generator.sample(KINDS, len(KINDS))


def processes_below(pid: int) -> dict[str, int]:
    """A run's own processes by name ("learner", "w0", "nats-server"): children of ``asyncrl run``, or of forks.py."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_text().split("\0")
            title = (folder / "comm").read_text().strip()
        except (OSError, ValueError, IndexError):  # it has just ended
            continue
        if parent == pid and (name := _name(words, title)):
            found[name] = int(folder.name)
    return found


def _name(words: list[str], title: str) -> str:
    if "tests.chaos.forks" in words:
        return title
    if words[0].endswith("nats-server"):
        return "nats-server"
    if "asyncrl" not in words:
        return ""
    verb = words[words.index("asyncrl") + 1]
    return words[words.index("--name") + 1] if verb == "rollout-worker" else verb
