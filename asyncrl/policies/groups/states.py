"""What a prompt group is in each of its states (table.py), and what has to follow when it leaves one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from asyncrl.messages import TrajectoryGroup
from asyncrl.policies.groups.pass_rates import RowKey
from asyncrl.policies.trust.validation import Asked

Fate = Literal["trained", "dropped", "failed", "filtered"]
FATES: Final[tuple[Fate, ...]] = ("trained", "dropped", "failed", "filtered")
SET_ASIDE: Final = "set aside"
"""Why a group failed with which two incarnations ended (state/in_progress.py)."""
Arrived = Literal["buffered", "failed", "duplicate", "rejected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPrompt:
    """The prompt of a group that is not done.

    position      its row in the endless shuffled data
    oldest_start  oldest policy version that may sample it; None when only a lost history knows
    asked         what it asks for, if this incarnation published it; None for an earlier one's
    row           what the data calls it; None of an earlier incarnation's
    published     Unix seconds when this incarnation published it; 0: an earlier one did
    """

    position: int
    oldest_start: int | None = None
    asked: Asked | None = None
    published: float = 0.0
    row: RowKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferedGroup:
    """A group that waits to be trained. sequence: of its log record; oldest: effective version of its oldest token;
    youngest: the same of the trajectory whose oldest token is the newest; newest: of its newest sampled token; copies:
    sequences of further log records of it, which stand in for the first if that is deleted."""

    sequence: int
    group: TrajectoryGroup
    prompt: PublishedPrompt
    oldest: int
    youngest: int
    newest: int
    num_tokens: int
    arrived: float
    copies: tuple[int, ...] = ()

    @property
    def group_id(self) -> int:
        return self.group.group_id

    @property
    def key(self) -> tuple[int, int]:
        """What samplers.py orders by."""
        return (self.oldest, self.group_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Effect: groups left the window.

    step           of "trained" the step's number, else how many steps were done
    sequences      of "trained": the log record of each group
    max_staleness  of "trained": versions between the oldest token of the batch and the step
    old_parts      of "trained": trajectories that trained nothing because they were too old
    old_tokens     of "trained": the same of tokens, where each is judged alone
    replayed       of "trained": groups that the step trained again, with their log records (replays.py)
    events         of the others: what to announce of each group
    groups         as they are known, in the order of ``group_ids``; of one that could not be made perhaps nothing
    cause          of "failed": SET_ASIDE, or "" for any other
    """

    fate: Fate
    group_ids: tuple[int, ...]
    step: int
    sequences: tuple[int, ...] = ()
    max_staleness: int = 0
    old_parts: int = 0
    old_tokens: int = 0
    replayed: tuple[tuple[int, int], ...] = ()
    events: tuple[Mapping[str, object], ...] = ()
    cause: str = ""
    groups: tuple[TrajectoryGroup, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """Effect of a log record. duplicate: its group was here before; rejected: this run asked for no such group."""

    became: Arrived
    outcome: Outcome | None = None
