"""Which answers of an evaluation count. The learner that reports and the audit that checks share this rule. Pure.

The first record that is good or failed settles its prompt. Mixed and malformed records settle a prompt only once there
are MOST_REFUSED of them.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final, Literal

from asyncrl.messages.evaluation import Evaluation, EvaluationAnswers

MOST_REFUSED: Final = 16
"""Limit of mixed and malformed answers to one prompt. An engine may mix versions now and then, but after this many
another attempt will not help."""

Verdict = Literal["good", "failed", "mixed", "malformed", "unable", "passed"]
"""
good       the answers count
failed     the prompt cannot be answered
mixed      another version sampled part of the answers
malformed  not what was asked for
unable     the worker can answer no prompt of the evaluation
passed     belongs to another evaluation, or to a prompt that is settled
"""


class Verdicts:
    """The verdicts on the answers of one evaluation. Call ``judge`` for each record, in the order of the log."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._settled: set[int] = set()
        self._refused = Counter[int]()

    def is_settled(self, group_id: int) -> bool:
        return group_id in self._settled

    def judge(self, answers: EvaluationAnswers, *, num_samples: int) -> tuple[Verdict, str]:
        """Return the verdict on ``answers``, and the reason; "" if nothing is wrong.

        num_samples  number of samples that were asked for; 0 if the data set is unknown
        """
        group_id = answers.group_id
        if answers.number != self._evaluation.number:
            return "passed", ""
        if group_id is None:
            return "unable", answers.error
        if self.is_settled(group_id) or self._evaluation.index(group_id) is None:
            return "passed", ""
        found, why = _on_its_own(answers, self._evaluation, num_samples=num_samples)
        self._refused[group_id] += found in ("mixed", "malformed")
        if found in ("good", "failed") or self._refused[group_id] >= MOST_REFUSED:
            self._settled.add(group_id)
        return found, why


def _on_its_own(answers: EvaluationAnswers, evaluation: Evaluation, *, num_samples: int) -> tuple[Verdict, str]:
    if answers.error:
        return "failed", answers.error
    if not all(evaluation.has_sampled(one.version_spans) for one in answers.answers):
        return "mixed", f"not all of version {evaluation.weights.policy_version}"
    if len(answers.answers) != num_samples:
        return "malformed", f"{len(answers.answers)} answers, {num_samples} were asked for"
    if not all(math.isfinite(one.reward) for one in answers.answers):
        return "malformed", "a reward is not a number"
    return "good", ""
