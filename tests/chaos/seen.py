"""Observes a run from outside, through its bus."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncrl.bus.port import Bus
from asyncrl.messages.topics import PROGRESS, TRAJECTORIES, group_id_of


@dataclass(slots=True)
class Seen:
    """What an observer of the bus has seen.

    step       (incarnation, steps done) of the newest progress message
    first      steps already done when each incarnation began
    published  groups by worker
    groups     ids of the groups in the log
    tokens     response tokens of these groups; counts only each group's first record, so duplicates do not count
    sequence   position of the newest log record
    keys       keys of the log's records with what they answer, including records that do not decode
    honest     ids of groups whose first answer is from one of the run's own workers and is the first record of its key
    """

    step: tuple[int, int] = (-1, -1)
    first: dict[int, int] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)
    groups: set[int] = field(default_factory=set)
    tokens: int = 0
    sequence: int = 0
    keys: set[str] = field(default_factory=set)
    honest: set[int] = field(default_factory=set)

    def has_trained_since(self, incarnation: int) -> bool:
        """Return whether a later incarnation of the learner has finished a step."""
        return self.step[0] > incarnation and self.step[1] > self.first[self.step[0]]

    async def watch_steps(self, bus: Bus) -> None:
        async with bus.watch(PROGRESS) as states:
            async for progress in states:
                self.first.setdefault(progress.incarnation, progress.step)
                self.step = max(self.step, (progress.incarnation, progress.step))

    async def read_groups(self, bus: Bus) -> None:
        async with bus.read(TRAJECTORIES, after=self.sequence) as records:
            async for record in records:
                self.sequence = record.sequence
                key = record.key.partition("/")[2]  # of the group, whoever answered it
                group, is_first = record.message, key not in self.keys
                self.keys.add(key)
                if group is None:
                    continue
                self.published[group.worker] = self.published.get(group.worker, 0) + 1
                if group_id_of(record.key) != group.group_id:
                    continue
                if group.group_id not in self.groups:
                    if is_first and group.trajectories and group.worker in ("w0", "w1", "w2"):
                        self.honest.add(group.group_id)
                    self.groups.add(group.group_id)
                    self.tokens += sum(int(trajectory.response_mask.sum()) for trajectory in group.trajectories)
