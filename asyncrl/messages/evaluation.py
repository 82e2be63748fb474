"""What the learner and the workers tell each other when a version is evaluated while training goes on.

Prompts of an evaluation are PromptGroups with group ids of their own, from FIRST_GROUP_ID on: no training group has
one of them, whatever topic it is on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from asyncrl.messages.control import WeightVersion
from asyncrl.messages.rollout import FINISH_REASONS, TrajectoryGroup, VersionSpan
from asyncrl.messages.validation import counts, require

FIRST_GROUP_ID: Final = 2**52
MOST_PROMPTS: Final = 2**20
"""Of one evaluation, all data sets together."""
LONGEST_LABEL: Final = 2000
"""Characters: tests of a program may be long."""


def label_text(label: Any) -> str:
    """What is right, for a person to read; "" where nothing is known."""
    return "" if label is None else str(label)[:LONGEST_LABEL]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The newest evaluation: which version answers.  Topic ``evaluation``: learner -> rollout workers, observers.

    number       of the evaluation in the run, from 0
    weights      the version; every token of every answer is sampled by it
    num_prompts  that are asked
    questions    digest of what is asked and how it is judged (policies/evaluation/questions.py); empty: unknown
    num_held     place = "shared": rollout workers that may keep the version; 0: workers of its own alone answer
    after        the log of answers is read from this sequence on
    is_over      no more answers are needed, and nobody need keep the version
    """

    number: int
    weights: WeightVersion
    num_prompts: int
    questions: str = ""
    num_held: int = 0
    after: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        counts(self, "number", "num_prompts", "num_held", "after")

    def group_id(self, index: int) -> int:
        """Of prompt ``index``, 0 <= index < num_prompts."""
        return FIRST_GROUP_ID + self.number * MOST_PROMPTS + index

    def index(self, group_id: int) -> int | None:
        """The prompt that a group id names; None if it is not of this evaluation."""
        index = group_id - self.group_id(0)
        return index if 0 <= index < self.num_prompts else None

    def has_sampled(self, spans: Iterable[VersionSpan]) -> bool:
        """Whether this version sampled every token. Tokens of an environment count too."""
        return all((span.incarnation, span.policy_version) == self.weights.order for span in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer as an evaluation counts it. Its tokens stay with the worker, except of the few prompts whose answers
    are recorded (EvaluationAnswers.group): a log of all of them would be gigabytes.

    length         in tokens, of all its parts
    version_spans  as of a trajectory: what sampled them; of each part, where the answer has several
    vote           what it comes down to, for a majority: equal ones agree; "" says nothing
    """

    reward: float
    length: int
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str = "stop"
    vote: str = ""

    def __post_init__(self) -> None:
        counts(self, "length")
        require(bool(self.version_spans), "an answer has no version_spans")
        require(self.finish_reason in FINISH_REASONS, f"finish_reason {self.finish_reason!r} is unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAnswers:
    """The answers to one prompt of an evaluation.  Topic ``evaluation_answers``: workers -> learner.

    number    of the evaluation
    group_id  of the prompt; None: of all of them, which this worker cannot answer
    dataset   that the prompt is of
    answers   one for each sample
    error     why there are no answers
    worker    that made them
    held_seconds  how long the worker has had the evaluated version
    group         the whole answers to a prompt that is recorded, unless they are too large for the bus
    place, label  of that prompt: PromptGroup.recorded_place, and ``label_text``
    """

    number: int
    group_id: int | None
    dataset: str = ""
    answers: tuple[Answer, ...] = ()
    error: str = ""
    worker: str = ""
    held_seconds: float = 0.0
    group: TrajectoryGroup | None = None
    place: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        counts(self, "number", "place")
        of_evaluation = self.group_id is None or FIRST_GROUP_ID <= self.group_id < 2**53
        require(of_evaluation, f"group {self.group_id} is none of an evaluation")
        require(bool(self.answers) != bool(self.error), "there are either answers or an error")
        require(self.group_id is not None or bool(self.error), "answers are of one prompt")
        require(0 <= self.held_seconds < math.inf, f"held_seconds must be >= 0 and finite, got {self.held_seconds}")
        require(self.group is None or self._is_of(self.group), "what is recorded is not what is counted")

    def _is_of(self, group: TrajectoryGroup) -> bool:
        """Whether ``answers`` are those of the group, and its tokens are such as can be."""
        whole = [
            (sum(len(one.tokens) for one in parts), tuple(span for one in parts for span in one.version_spans))
            for parts in group.rollouts
        ]
        return (
            group.group_id == self.group_id
            and group.worker in ("", self.worker)
            and whole == [(one.length, one.version_spans) for one in self.answers]
            and np.array_equal(group.rewards, [one.reward for one in self.answers], equal_nan=True)
            and all((one.tokens >= 0).all() and (one.prompt_tokens >= 0).all() for one in group.trajectories)
            and bool((group.prompt_tokens >= 0).all())
        )
