"""What a checkpoint keeps of a learner besides its backend: plain numbers, as stored in learner.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptState:
    """The position of the prompt source.

    next_group_id  id of the next group to publish
    position       rows of the endless shuffled data read so far, including overlong ones
    overlong       overlong rows among them
    outstanding    group id -> position of each group that is published and not done; published again if the bus lost it
    oldest_start   group id -> oldest policy version that may sample it
    """

    next_group_id: int = 0
    position: int = 0
    overlong: int = 0
    outstanding: dict[int, int] = field(default_factory=dict)
    oldest_start: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """The saved group table.

    groups, consumed  ids of done groups, and sequences of done log records, as ``Ledger.as_json``
    history           length of history.jsonl in bytes
    log               identity of the trajectory log, and sequence and time of the last record read; {} if none was
    """

    incarnation: int
    step: int
    policy_version: int
    groups: dict[str, Any]
    consumed: dict[str, Any]
    prompts: PromptState
    groups_trained: int = 0
    groups_dropped: int = 0
    groups_failed: int = 0
    groups_filtered: int = 0
    groups_per_batch: int = 0
    resume_points: dict[int, int] = field(default_factory=dict)
    history: int = 0
    log: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def fresh(cls) -> LearnerState:
        """Return the state of a run that has not begun."""
        return cls(
            incarnation=0,
            step=0,
            policy_version=0,
            groups={"watermark": 0, "beyond": []},
            consumed={"watermark": 1, "beyond": []},
            prompts=PromptState(),
        )
