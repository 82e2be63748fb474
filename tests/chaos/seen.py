"""What can be seen of a run from outside: its bus, read as `asyncrl tap` would."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.protocols import Bus
from asyncrl.topics import PROGRESS, TRAJECTORIES


@dataclass(slots=True)
class Seen:
    """By an observer of the bus.

    step       (run epoch, steps done) of the newest progress;  first  at which step each run epoch began
    published  groups by worker
    groups     ids of the groups on the log
    tokens     response tokens of these, of each group its first record: what was not generated for nothing
    sequence   of the newest log record
    """

    step: tuple[int, int] = (-1, -1)
    first: dict[int, int] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)
    groups: set[int] = field(default_factory=set)
    tokens: int = 0
    sequence: int = 0

    def has_trained_since(self, run_epoch: int) -> bool:
        """Whether a later life of the learner has done a step."""
        return self.step[0] > run_epoch and self.step[1] > self.first[self.step[0]]

    async def watch_steps(self, bus: Bus) -> None:
        async with bus.watch(PROGRESS) as states:
            async for progress in states:
                self.first.setdefault(progress.run_epoch, progress.step)
                self.step = max(self.step, (progress.run_epoch, progress.step))

    async def read_groups(self, bus: Bus) -> None:
        async with bus.read(TRAJECTORIES, after=self.sequence) as records:
            async for record in records:
                self.sequence = record.sequence
                group = record.message
                if group is None:
                    continue
                self.published[group.worker] = self.published.get(group.worker, 0) + 1
                if group.group_id not in self.groups:
                    self.groups.add(group.group_id)
                    self.tokens += sum(int(trajectory.response_mask.sum()) for trajectory in group.trajectories)
