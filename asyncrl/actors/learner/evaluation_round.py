"""State of one evaluation: which prompts are answered, and which must be asked again. It never waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from asyncrl.actors.learner.answer_recorder import AnswerRecorder
from asyncrl.errors import ConfigError
from asyncrl.messages import PromptGroup
from asyncrl.messages.evaluation import MOST_PROMPTS, Evaluation, EvaluationAnswers
from asyncrl.policies.evaluation.questions import EvaluationSet
from asyncrl.policies.evaluation.results import Answered, metrics
from asyncrl.policies.evaluation.verdict import MOST_REFUSED, Verdicts


class EvaluationRound:
    """The prompts of all data sets, numbered consecutively, and what is known of their answers."""

    def __init__(
        self, evaluation: Evaluation, sets: Sequence[EvaluationSet], *, recorder: AnswerRecorder | None = None
    ) -> None:
        self.evaluation = evaluation
        self._recorder = recorder
        self._recorded = {its.name: recorder.picks(its) for its in sets} if recorder is not None else {}
        self._sets = tuple(sets)
        self._places = prompts_of(sets)
        self._verdicts = Verdicts(evaluation)
        self.answered: dict[int, Answered] = {}
        self.failed: dict[int, str] = {}
        """Prompts that no worker can answer, and why."""
        self.num_mixed = 0
        """Groups of answers that were not sampled entirely by the evaluated version."""
        self.num_tokens = 0
        self.workers: set[str] = set()
        self.unable: dict[str, str] = {}
        """Workers that cannot answer any of the prompts, and why."""

    @property
    def missing(self) -> list[int]:
        """Prompts that have no answer and may still get one."""
        return [index for index in range(len(self._places)) if not self.is_settled(index)]

    def is_settled(self, index: int) -> bool:
        return index in self.answered or index in self.failed

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
            messages=asked.messages,
            recorded_place=place if place in self._recorded.get(its.name, ()) else -1,
        )

    def take(self, answers: EvaluationAnswers) -> tuple[int | None, str]:
        """Take in answers, in the log's order. Return (prompt to ask again, why), or (None, "")."""
        index = None if answers.group_id is None else self.evaluation.index(answers.group_id)
        its, place = (None, 0) if index is None else self._places[index]
        found, why = self._verdicts.of(answers, num_samples=0 if its is None else its.measured.num_samples)
        if found == "unable":
            self.unable[answers.worker] = why
        if found in ("unable", "passed") or index is None or its is None:
            return None, ""
        if found == "failed":
            self.failed[index] = why
            return None, ""
        if found != "good":
            self.num_mixed += found == "mixed"
            why = f"from {answers.worker}: {why}"
            if not self._verdicts.is_settled(self.evaluation.group_id(index)):
                return index, why
            self.failed[index] = f"given up after {MOST_REFUSED} rejected answers, the last {why}"
            return None, ""
        self.workers.add(answers.worker)
        self.num_tokens += sum(one.length for one in answers.answers)
        self.answered[index] = Answered(
            rewards=tuple(one.reward for one in answers.answers),
            votes=tuple(one.vote for one in answers.answers),
            lengths=tuple(one.length for one in answers.answers),
            truncated=tuple(one.finish_reason == "length" for one in answers.answers),
            tags=its.questions[place].tags,
        )
        if self._recorder is not None and place in self._recorded[its.name]:
            self._recorder.note(answers.group, its, place, weights=self.evaluation.weights)
        return None, ""

    def metrics(self, *, seed: int) -> dict[str, float]:
        """Return the metrics of each data set, under evaluation/. Takes a while because of the bootstrap."""
        found: dict[str, float] = {}
        for its in self._sets:
            ours = [self.answered[i] for i, (one, _) in enumerate(self._places) if one is its and i in self.answered]
            found |= metrics(f"evaluation/{its.name}", its.measured, ours, seed=seed)
        return found


def prompts_of(sets: Iterable[EvaluationSet]) -> list[tuple[EvaluationSet, int]]:
    """Return (data set, place in it) for every prompt. Raises ConfigError if there are too many."""
    places = [(its, place) for its in sets for place in range(len(its.questions))]
    if len(places) > MOST_PROMPTS:
        raise ConfigError(
            f"evaluation.datasets: {len(places):,} prompts in all, and one evaluation may have {MOST_PROMPTS:,}; set "
            "limit"
        )
    return places
