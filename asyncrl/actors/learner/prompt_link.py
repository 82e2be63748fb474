"""What the prompt source and the learner of one process tell each other, besides progress on the bus.

Queues and nothing else: neither holds the other. The prompt source reports each group before its prompt is on the
bus, so whoever handles all reports before a log record knows every group that the record can be of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.policies.groups.pass_rates import RowKey
from asyncrl.policies.trust.validation import Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A prompt is about to be on the bus. overlong, rested: rows passed over so far because their prompt is too long,
    and because they rest.

    can_be_answered: False for a group whose place in the log somebody has taken; it is not put on the bus.
    asked: what its prompt asks for; None for one that an earlier incarnation may have published with other settings.
    time: Unix seconds.  row: what the data calls it.
    """

    group_id: int
    position: int
    oldest_start: int | None
    overlong: int
    rested: int = 0
    can_be_answered: bool = True
    asked: Asked | None = None
    time: float = 0.0
    row: RowKey | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """Every group that was ever published has been reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """The data has ended: no group will be published any more."""

    position: int
    overlong: int
    rested: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A group of this row came back, with these rewards."""

    row: RowKey
    epoch: int
    rewards: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverduePrompt:
    """A prompt to issue again as it was. position: in the data;  oldest_start: as in Published"""

    group_id: int
    position: int
    oldest_start: int | None


PromptReport = Published | Reconciled | Exhausted


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLink:
    """reports: prompt source -> learner.  answered: learner -> prompt source, where rows may rest.  taken: learner ->
    prompt source, groups that were not asked for yet and whose place in the log somebody has taken.  lost: learner ->
    prompt source, groups whose prompts the bus lost, each with its position in the data.  overdue: learner -> prompt
    source, prompts that nobody answers."""

    reports: asyncio.Queue[PromptReport] = field(default_factory=asyncio.Queue)
    answered: asyncio.Queue[Answered] = field(default_factory=asyncio.Queue)
    taken: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    lost: asyncio.Queue[dict[int, int]] = field(default_factory=asyncio.Queue)
    overdue: asyncio.Queue[Sequence[OverduePrompt]] = field(default_factory=asyncio.Queue)
