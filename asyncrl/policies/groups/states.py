"""The states of a prompt group (table.py), and the effects when it leaves one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.groups.validation import PromptSpec

Fate = Literal["trained", "dropped", "failed", "filtered"]
FATES: Final[tuple[Fate, ...]] = ("trained", "dropped", "failed", "filtered")
Arrived = Literal["buffered", "failed", "duplicate", "rejected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPrompt:
    """The prompt of a group that is not done.

    position      row of the endless shuffled data
    oldest_start  oldest policy version that may sample it; None if unknown, because a rolled-back incarnation published
                  it
    asked         what the prompt asks for; None if an earlier incarnation published it
    published     Unix seconds when this incarnation published it; 0 if an earlier one did
    """

    position: int
    oldest_start: int | None = None
    asked: PromptSpec | None = None
    published: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedGroup:
    """A group that waits to be trained.

    sequence                   of its log record
    oldest_version             effective version of its oldest token
    newest_trajectory_version  that of the oldest token of its freshest trajectory
    newest_version             that of its newest sampled token
    copies                     sequences of further log records of the group, which replace the first one if it is
                               deleted
    """

    sequence: int
    group: TrajectoryGroup
    prompt: PublishedPrompt
    oldest_version: int
    newest_trajectory_version: int
    newest_version: int
    num_tokens: int
    arrived: float
    copies: tuple[int, ...] = ()

    @property
    def group_id(self) -> int:
        return self.group.group_id

    @property
    def key(self) -> tuple[int, int]:
        """The sort key of selection.py."""
        return (self.oldest_version, self.group_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Effect: groups left the window.

    step           "trained": number of the step; other fates: steps done so far
    sequences      "trained": log record of each group
    max_staleness  "trained": versions between the oldest token of the batch and the step
    old_trajectories      "trained": trajectories that trained nothing because they were too old
    old_tokens     "trained": tokens that trained nothing because they were too old, if each is judged alone
    events         other fates: what to announce about each group
    groups         the groups that are known, in the order of ``group_ids``; may be empty for a failed group
    """

    fate: Fate
    group_ids: tuple[int, ...]
    step: int
    sequences: tuple[int, ...] = ()
    max_staleness: int = 0
    old_trajectories: int = 0
    old_tokens: int = 0
    events: tuple[Mapping[str, object], ...] = ()
    groups: tuple[TrajectoryGroup, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Effect of a log record.  duplicate: its group arrived before;  rejected: this run did not ask for the group"""

    became: Arrived
    outcome: Outcome | None = None
