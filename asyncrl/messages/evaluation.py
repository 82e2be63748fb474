"""What the learner and the workers tell each other when a version is evaluated while training goes on.

Prompts of an evaluation are PromptGroups with group ids of their own, from FIRST_GROUP_ID on: no training group has
one of them, whatever topic it is on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from asyncrl.messages.control import WeightVersion
from asyncrl.messages.rollout import TrajectoryGroup
from asyncrl.messages.validation import counts, require

FIRST_GROUP_ID: Final = 2**52
MOST_PROMPTS: Final = 2**20
"""Of one evaluation, all data sets together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The newest evaluation: which version answers.  Topic ``evaluation``: learner -> rollout workers, observers.

    number       of the evaluation in the run, from 0
    weights      the version; every token of every answer is sampled by it
    num_prompts  that are asked
    num_held     place = "shared": rollout workers that may keep the version; 0: workers of its own alone answer
    after        the log of answers is read from this sequence on
    is_over      no more answers are needed, and nobody need keep the version
    """

    number: int
    weights: WeightVersion
    num_prompts: int
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

    def is_of(self, group: TrajectoryGroup) -> bool:
        """Whether every token of every answer was sampled by this version. Tokens of an environment count too."""
        order = self.weights.order
        return all(
            (span.incarnation, span.policy_version) == order
            for trajectory in group.trajectories
            for span in trajectory.version_spans
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAnswers:
    """The answers to one prompt of an evaluation.  Topic ``evaluation_answers``: workers -> learner.

    dataset  that the prompt is of
    votes    what each answer comes down to, for a majority; "" for one that says nothing
    worker   that made them
    """

    number: int
    dataset: str
    group: TrajectoryGroup
    votes: tuple[str, ...] = ()
    worker: str = ""

    def __post_init__(self) -> None:
        counts(self, "number")
        require(self.group.group_id >= FIRST_GROUP_ID, f"group {self.group.group_id} is none of an evaluation")
        count = len(self.group.trajectories)
        require(len(self.votes) == count, f"votes has {len(self.votes)} of {count} answers")
