"""Messages between the learner and the workers for evaluating a version while training goes on.

Prompts of an evaluation are PromptGroups. Their group ids start at FIRST_GROUP_ID, so no training group has the same
id, on any topic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from asyncrl.messages.control import WeightVersion
from asyncrl.messages.rollout import FINISH_REASONS, TrajectoryGroup, VersionSpan
from asyncrl.messages.validation import check_counts, require

FIRST_GROUP_ID: Final = 2**52
MOST_PROMPTS: Final = 2**20
"""Most prompts of one evaluation, over all data sets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The newest evaluation and its version.  Topic ``evaluation``: learner -> rollout workers, observers.

    number       number of the evaluation in the run, from 0
    weights      the version; it samples every token of every answer
    num_prompts  number of prompts
    questions    digest of the prompts and of how they are judged (policies/evaluation/questions.py); empty: unknown
    num_pinned   for place = "shared": number of rollout workers that may keep the version; 0: only dedicated workers
                 answer
    after        sequence after which the log of answers is read
    is_over      no more answers are needed, and no worker needs to keep the version
    """

    number: int
    weights: WeightVersion
    num_prompts: int
    questions: str = ""
    num_pinned: int = 0
    after: int = 0
    is_over: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "number", "num_prompts", "num_pinned", "after")

    def group_id(self, index: int) -> int:
        """Group id of prompt ``index``, 0 <= index < num_prompts."""
        return FIRST_GROUP_ID + self.number * MOST_PROMPTS + index

    def index(self, group_id: int) -> int | None:
        """Return the prompt of a group id; None if the group is not in this evaluation."""
        index = group_id - self.group_id(0)
        return index if 0 <= index < self.num_prompts else None

    def has_sampled(self, spans: Iterable[VersionSpan]) -> bool:
        """Whether this version sampled every token. Tokens of an environment must have this version as well."""
        return all((span.incarnation, span.policy_version) == self.weights.version for span in spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer as an evaluation counts it, without tokens, because a log of all tokens would take gigabytes.

    Only the answers to a few recorded prompts are sent in full (EvaluationAnswers.group).

    length         tokens of all parts
    version_spans  spans of all parts, as in a trajectory
    vote           the answer's result for majority voting; equal votes agree; "" abstains
    """

    reward: float
    length: int
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str = "stop"
    vote: str = ""

    def __post_init__(self) -> None:
        check_counts(self, "length")
        require(bool(self.version_spans), "an answer has no version_spans")
        require(self.finish_reason in FINISH_REASONS, f"finish_reason {self.finish_reason!r} is unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAnswers:
    """The answers to one prompt of an evaluation.  Topic ``evaluation_answers``: workers -> learner.

    number    number of the evaluation
    group_id  group of the prompt; None: this worker cannot answer any prompt of the evaluation
    dataset   data set of the prompt
    answers   one per sample
    error     why there are no answers
    worker    worker that made the answers
    pinned_seconds  how long the worker has had the evaluated version
    group         the full answers to a recorded prompt, unless they are too large for the bus
    place         PromptGroup.recorded_place of that prompt
    label         ``label_text`` of that prompt
    """

    number: int
    group_id: int | None
    dataset: str = ""
    answers: tuple[Answer, ...] = ()
    error: str = ""
    worker: str = ""
    pinned_seconds: float = 0.0
    group: TrajectoryGroup | None = None
    place: int = 0
    label: str = ""

    def __post_init__(self) -> None:
        check_counts(self, "number", "place")
        of_evaluation = self.group_id is None or FIRST_GROUP_ID <= self.group_id < 2**53
        require(of_evaluation, f"group {self.group_id} does not belong to an evaluation")
        require(bool(self.answers) != bool(self.error), "an evaluated prompt has either answers or an error")
        require(self.group_id is not None or bool(self.error), "answers need a group_id")
        require(
            0 <= self.pinned_seconds < math.inf, f"pinned_seconds must be >= 0 and finite, got {self.pinned_seconds}"
        )
        require(self.group is None or self._is_of(self.group), "what is recorded is not what is counted")

    def _is_of(self, group: TrajectoryGroup) -> bool:
        """Whether ``answers`` are those of the group, and its tokens are valid."""
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
