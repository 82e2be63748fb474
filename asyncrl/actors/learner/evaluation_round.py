"""One evaluation as the learner asks for it: which prompts are answered, and which must be asked again. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from asyncrl.errors import ConfigError
from asyncrl.messages import PromptGroup
from asyncrl.messages.evaluation import MOST_PROMPTS, Evaluation, EvaluationAnswers
from asyncrl.policies.evaluation.questions import EvaluationSet
from asyncrl.policies.evaluation.results import Answered, metrics


class EvaluationRound:
    """The prompts of all data sets, numbered one after the other, and what is known of their answers."""

    def __init__(self, evaluation: Evaluation, sets: Sequence[EvaluationSet]) -> None:
        self.evaluation = evaluation
        self._sets = tuple(sets)
        self._places = prompts_of(sets)
        self.answered: dict[int, Answered] = {}
        self.failed: dict[int, str] = {}
        """Prompts that nobody can answer, and why."""
        self.num_mixed = 0
        """Groups of answers that were not all sampled by the evaluated version."""
        self.num_tokens = 0
        self.workers: set[str] = set()

    @property
    def missing(self) -> list[int]:
        """Prompts without an answer that may still get one."""
        return [index for index in range(len(self._places)) if index not in self.answered and index not in self.failed]

    @property
    def is_done(self) -> bool:
        return len(self.answered) + len(self.failed) == len(self._places)

    @property
    def is_complete(self) -> bool:
        return len(self.answered) == len(self._places)

    def prompt(self, index: int) -> PromptGroup:
        its, place = self._places[index]
        asked, weights = its.questions[place], self.evaluation.weights
        return PromptGroup(
            group_id=self.evaluation.group_id(index),
            prompt_tokens=asked.tokens,
            group_size=its.measured.num_samples,
            sampling=its.sampling,
            prompt=asked.prompt,
            label=asked.label,
            metadata=asked.metadata,
            policy_version=weights.policy_version,
            incarnation=weights.incarnation,
            dataset=its.name,
        )

    def take(self, answers: EvaluationAnswers) -> tuple[int | None, str]:
        """(prompt to ask again, why); None if there is none, with "" if nothing is wrong.

        Answers to what is answered already are passed over: the first ones count.
        """
        group = answers.group
        index = self.evaluation.index(group.group_id)
        if answers.number != self.evaluation.number or index is None:
            return None, ""  # of an evaluation that is over
        if index in self.answered or index in self.failed:
            return None, ""
        its, place = self._places[index]
        if group.error:
            self.failed[index] = group.error
            return None, ""
        if not self.evaluation.is_of(group):
            self.num_mixed += 1
            return index, f"of {answers.worker}: not all of version {self.evaluation.weights.policy_version}"
        if problem := _problem(answers, its):
            return index, f"of {answers.worker}: {problem}"
        self.workers.add(answers.worker)
        self.num_tokens += sum(len(one.tokens) for one in group.trajectories)
        self.answered[index] = Answered(
            rewards=tuple(one.reward for one in group.trajectories),
            votes=answers.votes,
            lengths=tuple(len(one.tokens) for one in group.trajectories),
            truncated=tuple(one.finish_reason == "length" for one in group.trajectories),
            tags=its.questions[place].tags,
        )
        return None, ""

    def metrics(self, *, seed: int) -> dict[str, float]:
        """Of each data set, under evaluation/. Takes a while: the bootstrap."""
        found: dict[str, float] = {}
        for its in self._sets:
            ours = [self.answered[i] for i, (one, _) in enumerate(self._places) if one is its and i in self.answered]
            found |= metrics(f"evaluation/{its.name}", its.measured, ours, seed=seed)
        return found


def prompts_of(sets: Iterable[EvaluationSet]) -> list[tuple[EvaluationSet, int]]:
    """(data set, place in it) of every prompt. Raises ConfigError when there are too many."""
    places = [(its, place) for its in sets for place in range(len(its.questions))]
    if len(places) > MOST_PROMPTS:
        raise ConfigError(
            f"evaluation.datasets: {len(places):,} prompts in all, and one evaluation may have {MOST_PROMPTS:,}; set "
            "limit"
        )
    return places


def _problem(answers: EvaluationAnswers, its: EvaluationSet) -> str:
    """What is wrong with answers that a worker calls good."""
    rewards = [one.reward for one in answers.group.trajectories]
    if len(rewards) != its.measured.num_samples:
        return f"{len(rewards)} answers, {its.measured.num_samples} were asked for"
    if not all(map(math.isfinite, rewards)):
        return "a reward is no number"
    return ""
