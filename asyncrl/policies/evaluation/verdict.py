"""Which answers of an evaluation count: one rule for the learner that reports and the audit that checks. Pure.

Told of each record in the order of the log. The first one that is an error or good settles its prompt; mixed and
malformed ones settle nothing.
"""

from __future__ import annotations

import math
from typing import Literal

from asyncrl.messages.evaluation import Evaluation, EvaluationAnswers

Verdict = Literal["good", "failed", "mixed", "malformed", "unable", "passed"]
"""
good       they count
failed     nobody can answer the prompt
mixed      another version sampled a part of them
malformed  not what was asked for
unable     the worker can answer no prompt of the evaluation
passed     of another evaluation, or of a prompt that is settled
"""


def verdict(
    answers: EvaluationAnswers, evaluation: Evaluation, *, is_settled: bool, num_samples: int
) -> tuple[Verdict, str]:
    """What becomes of ``answers``, and why; "" where nothing is wrong.

    is_settled   an earlier record settled their prompt
    num_samples  that were asked for; 0: their data set is not known
    """
    if answers.number != evaluation.number:
        return "passed", ""
    if answers.group_id is None:
        return "unable", answers.error
    if is_settled or evaluation.index(answers.group_id) is None:
        return "passed", ""
    if answers.error:
        return "failed", answers.error
    if not all(evaluation.has_sampled(one.version_spans) for one in answers.answers):
        return "mixed", f"not all of version {evaluation.weights.policy_version}"
    if len(answers.answers) != num_samples:
        return "malformed", f"{len(answers.answers)} answers, {num_samples} were asked for"
    if not all(math.isfinite(one.reward) for one in answers.answers):
        return "malformed", "a reward is no number"
    return "good", ""
