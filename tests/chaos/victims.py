"""Which processes are struck, how, and when: moments at which unfinished work is at risk.

A storm goes through all its kinds in random order, so that each is equally frequent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from asyncrl.config import LearnerSection

Role = Literal[
    "learner", "rollout-worker", "nats-server", "run", "everybody", "rank", "machine", "run's disk", "server's disk"
]
Deed = Literal["kill", "stop", "kill twice", "no disk", "no descriptors", "no memory", "clock set back", "full"]
Moment = Literal[
    "any time", "after a step", "writing a checkpoint", "renaming a checkpoint", "writing weights", "starting",
    "after its publish",
]  # fmt: skip

MOST_STOPPED_SECONDS: Final = 40.0
LEAST_STOPPED_SECONDS: Final = 5.0
MOST_SHORT_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class Kind:
    """count: number of processes of the role struck at once.

    A disk is a small file system: the run's has its whole folder but the store of nats-server, which has the server's.
    A rank is one of the learner's besides the first; a machine is all ranks of one of its groups (learner.machines).

    kill is SIGKILL; stop is SIGSTOP for 5 to 40 s, then SIGCONT to those that are still there; kill twice kills what
    was started in its place as soon as it is up. The others last for 5 to 15 s: no file of the process may grow, it
    can open nothing, it gets no more memory, its clock is an hour behind; the disk has no byte left.
    """

    role: Role
    moment: Moment
    count: int = 1
    deed: Deed = "kill"

    @property
    def is_deadly(self) -> bool:
        """Whether its victim must be another process afterwards."""
        return self.deed in ("kill", "kill twice")

    def victims(self, random: Random, *, workers: Sequence[str], learner: LearnerSection) -> list[str]:
        """Names of processes; of a disk, whose it is."""
        if self.role == "rollout-worker":
            return random.sample(workers, self.count)
        if self.role == "everybody":  # the launcher first: it would say what became of the others
            return ["run", "nats-server", "learner", *workers]
        ranks = ["learner", *(f"learner-{rank}" for rank in range(1, learner.ranks))]
        if self.role == "rank":
            return random.sample(ranks[1:], self.count)
        if self.role == "machine":
            each = learner.ranks // learner.machines
            first = random.randrange(learner.machines) * each
            return ranks[first : first + each]
        return [{"run's disk": "learner", "server's disk": "nats-server"}.get(self.role, self.role)]

    def __str__(self) -> str:
        who = self.role if self.count == 1 else f"{self.count} {self.role}s"
        return f"{who}, {self.moment}" + ("" if self.deed == "kill" else f", {self.deed}")


KILLS: Final = (
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
OTHERS: Final = (
    Kind("learner", "any time", deed="stop"),
    Kind("rollout-worker", "any time", deed="stop"),
    Kind("rollout-worker", "any time", 3, deed="stop"),
    Kind("nats-server", "any time", deed="stop"),
    Kind("run", "any time", deed="stop"),
    Kind("learner", "renaming a checkpoint"),
    Kind("learner", "writing weights"),
    Kind("learner", "after a step", deed="kill twice"),
    Kind("nats-server", "any time", deed="kill twice"),
    Kind("everybody", "any time"),
    Kind("everybody", "writing a checkpoint"),
)
RESOURCES: Final = (
    Kind("learner", "any time", deed="no disk"),
    Kind("nats-server", "any time", deed="no disk"),
    Kind("run", "any time", deed="no disk"),
    Kind("learner", "any time", deed="no descriptors"),
    Kind("rollout-worker", "any time", deed="no descriptors"),
    Kind("nats-server", "any time", deed="no descriptors"),
    Kind("learner", "any time", deed="no memory"),
    Kind("rollout-worker", "any time", deed="no memory"),
    Kind("nats-server", "any time", deed="no memory"),
    Kind("rollout-worker", "any time", 3, deed="clock set back"),
    Kind("learner", "any time", deed="clock set back"),
)
DISKS: Final = (
    Kind("run's disk", "any time", deed="full"),
    Kind("server's disk", "any time", deed="full"),
)
RANKS: Final = (
    Kind("rank", "any time"),
    Kind("rank", "any time", 2),
    Kind("rank", "after a step"),
    Kind("rank", "writing a checkpoint"),
    Kind("rank", "any time", deed="kill twice"),
    Kind("rank", "any time", deed="stop"),
    Kind("machine", "any time"),
    Kind("machine", "writing a checkpoint"),
    Kind("learner", "any time"),
    Kind("learner", "starting"),
)
VICTIMS: Final = (
    Kind("learner", "any time"),
    Kind("rollout-worker", "any time"),
    Kind("nats-server", "any time"),
    Kind("run", "any time"),
)
FAULTS: Final[Mapping[str, tuple[Kind, ...]]] = {
    "kills": KILLS,
    "victims": VICTIMS,
    "others": OTHERS,
    "resources": RESOURCES,
    "disks": DISKS,
    "all": KILLS + OTHERS + RESOURCES,
    "ranks": RANKS,
}
"""What a storm may be made of; "disks" needs the right to mount, "ranks" a learner of several (run_files.py)."""


def deal(seed: int, kinds: tuple[Kind, ...] = KILLS) -> Iterator[Kind]:
    """All kinds, in a new random order each round, endlessly."""
    generator = Random(seed)
    while True:
        yield from generator.sample(kinds, len(kinds))
