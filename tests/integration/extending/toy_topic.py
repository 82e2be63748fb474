"""A custom topic: a message, and the row that defines its handling."""

from __future__ import annotations

from dataclasses import dataclass

from asyncrl.messages.topics import Topic
from asyncrl.messages.validation import check_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What an evaluation found.  Topic ``notes``: evaluator -> whoever looks."""

    policy_version: int
    text: str

    def __post_init__(self) -> None:
        check_counts(self, "policy_version")


NOTES = Topic("notes", "log", Note, publishers=("rollout-worker",), readers=("learner",))
