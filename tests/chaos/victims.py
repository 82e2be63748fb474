"""Which processes are struck, how, and when; the moments are those at which unfinished work is at risk.

A storm goes through all its kinds in random order, so that each is equally frequent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

from asyncrl.config import LearnerSection

Role = Literal[
    "learner", "rollout-worker", "nats-server", "run", "everybody", "rank", "machine", "run's disk", "server's disk",
    "new learner", "shadow", "command", "nobody",
]  # fmt: skip
Deed = Literal["kill", "stop", "kill twice", "no disk", "no descriptors", "no memory", "clock set back", "full"]
Moment = Literal[
    "any time", "after a step", "writing a checkpoint", "renaming a checkpoint", "writing weights", "starting",
    "after its publish", "swap starting", "swap draining", "swap done", "promotion starting", "promotion draining",
    "promotion done",
]  # fmt: skip

MOST_STOPPED_SECONDS: Final = 40.0
LEAST_STOPPED_SECONDS: Final = 5.0
MOST_SHORT_SECONDS: Final = 15.0


@dataclass(frozen=True, slots=True)
class Kind:
    """count: number of processes of the role struck at once.

    Roles: a disk is a small file system. The run's disk holds its whole folder except the store of nats-server,
    which is on the server's disk. A rank is any rank of the learner except the first. A machine is all ranks of one of
    the learner's groups (learner.machines). A new learner waits to take over, in a swap or a promotion; the command is
    `asyncrl swap` or `promote`, and nobody is a hand-over without a victim.

    Deeds: kill is SIGKILL. stop is SIGSTOP for 5 to 40 s, then SIGCONT to the processes that still exist. "kill twice"
    also kills the replacement as soon as it is up. All other deeds last 5 to 15 s: no file of the process may grow, it
    can open no descriptor, it gets no more memory, its clock is an hour behind, or the disk has no free byte.
    """

    role: Role
    moment: Moment
    count: int = 1
    deed: Deed = "kill"

    @property
    def hand_over(self) -> str:
        """ "swap" or "promotion" if the learner changes at the kind's moment; else empty."""
        word = self.moment.partition(" ")[0]
        return word if word in ("swap", "promotion") else ""

    @property
    def is_deadly(self) -> bool:
        """Whether a different process must replace the victim afterwards."""
        return self.deed in ("kill", "kill twice")

    def victims(self, random: Random, *, workers: Sequence[str], learner: LearnerSection) -> list[str]:
        """Return names of processes; for a disk, the name of its owner."""
        if self.role == "rollout-worker":
            return random.sample(workers, self.count)
        if self.role == "nobody":
            return []
        if self.role == "everybody":  # the launcher first: it would report what happened to the other processes
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
SWAPS: Final = (
    Kind("learner", "swap starting"),
    Kind("learner", "swap draining"),
    Kind("new learner", "swap starting"),
    Kind("new learner", "swap draining"),
    Kind("new learner", "swap done"),
    Kind("rollout-worker", "swap draining"),
    Kind("nats-server", "swap starting"),
    Kind("nats-server", "swap draining"),
    Kind("run", "swap draining"),
    Kind("command", "swap draining"),
)
PROMOTIONS: Final = (
    Kind("learner", "promotion starting"),
    Kind("learner", "promotion draining"),
    Kind("new learner", "promotion draining"),
    Kind("new learner", "promotion done"),
    Kind("shadow", "promotion starting"),
    Kind("shadow", "promotion draining"),
    Kind("rollout-worker", "promotion draining"),
    Kind("nats-server", "promotion draining"),
    Kind("run", "promotion draining"),
    Kind("command", "promotion draining"),
)
CALM: Final = (Kind("nobody", "swap done"), Kind("nobody", "promotion done"))
FAULTS: Final[Mapping[str, tuple[Kind, ...]]] = {
    "kills": KILLS,
    "victims": VICTIMS,
    "others": OTHERS,
    "resources": RESOURCES,
    "disks": DISKS,
    "all": KILLS + OTHERS + RESOURCES,
    "ranks": RANKS,
    "swaps": SWAPS,
    "promotions": PROMOTIONS,
    "calm": CALM,
}
"""Sets of faults. "disks" needs the right to mount; "ranks" needs a learner of several ranks (run_files.py).
"calm" has no victims: it measures what swaps and promotions cost by themselves."""


def deal(seed: int, kinds: tuple[Kind, ...] = KILLS) -> Iterator[Kind]:
    """Yield all kinds endlessly, in a new random order each round."""
    generator = Random(seed)
    while True:
        yield from generator.sample(kinds, len(kinds))
