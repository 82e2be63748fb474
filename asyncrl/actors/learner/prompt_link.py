"""Messages between the prompt source and the learner of one process, besides progress on the bus.

These are only queues: neither side holds a reference to the other. The prompt source reports each group before its
prompt is on the bus. So a reader that handles all reports before a log record knows every group the record can answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.policies.trust.validation import Asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A prompt is about to be published.

    overlong         rows skipped so far because their prompt is too long
    can_be_answered  False if the group's place in the log was taken by someone else; its prompt is not published
    asked            what the prompt asks for; None if an earlier incarnation may have published it with other settings
    time             Unix seconds
    """

    group_id: int
    position: int
    oldest_start: int | None
    overlong: int
    can_be_answered: bool = True
    asked: Asked | None = None
    time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """All groups that were ever published have been reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhausted:
    """The data has ended: no more groups will be published."""

    position: int
    overlong: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverduePrompt:
    """A prompt to reissue unchanged. position: in the data;  oldest_start: as in Published"""

    group_id: int
    position: int
    oldest_start: int | None


PromptReport = Published | Reconciled | Exhausted


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLink:
    """Queues between the prompt source and the learner.

    reports   prompt source -> learner
    taken     learner -> prompt source: unpublished groups whose place in the log was taken by someone else
    overdue   learner -> prompt source: prompts that were not answered
    """

    reports: asyncio.Queue[PromptReport] = field(default_factory=asyncio.Queue)
    taken: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    overdue: asyncio.Queue[Sequence[OverduePrompt]] = field(default_factory=asyncio.Queue)
