"""Account for the evaluations of a run from two records: the results in metrics.jsonl and the answers on the bus.

The bus still holds the answers of the newest evaluation, so the means of that evaluation are recomputed from them.
Tests: tests/unit/policies/audit/test_evaluations.py.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.messages.evaluation import FIRST_GROUP_ID, Evaluation, EvaluationAnswers
from asyncrl.policies.evaluation.verdict import Verdict, Verdicts

_CLOSE: Final = 1e-9
_MEAN: Final = re.compile(r"evaluation/(?P<dataset>.+)/mean@(?P<count>[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAccount:
    """
    evaluations  results in metrics.jsonl; ``incomplete``: results that lack some prompts
    answers      records of the newest evaluation on the bus; ``mixed``: records that are not wholly of its version and
                 count in no result
    problems     a sentence for each result that differs from its answers
    """

    evaluations: int = 0
    incomplete: int = 0
    answers: int = 0
    mixed: int = 0
    problems: tuple[str, ...] = ()


def account_of_evaluations(
    rows: Mapping[tuple[int, int], Mapping[str, Any]],
    *,
    newest: Evaluation | None = None,
    answers: Iterable[EvaluationAnswers] = (),
    training_groups: Iterable[int] = (),
) -> EvaluationAccount:
    """
    rows             rows of metrics.jsonl by (incarnation, step)
    newest, answers  from the bus; answers are in the order of the log
    training_groups  ids on the trajectory log; none of them may belong to an evaluation
    """
    results = {key: row for key, row in rows.items() if "evaluation/complete" in row}
    problems = [f"group {i} of an evaluation is on the trajectory log" for i in training_groups if i >= FIRST_GROUP_ID]
    row = results.get(newest.weights.version, {}) if newest is not None else {}
    judged = [] if newest is None else list(_judged(answers, newest, _counts(row)))
    good = [one for one, found in judged if found == "good"]
    if newest is not None and newest.is_over and judged and row:
        problems += _differences(good, row, newest)
    found = Counter(found for _, found in judged)
    return EvaluationAccount(
        evaluations=len(results),
        incomplete=sum(not row["evaluation/complete"] for row in results.values()),
        answers=len(judged),
        mixed=found["mixed"],
        problems=tuple(problems),
    )


def _counts(row: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of answers per prompt, by data set."""
    return {found["dataset"]: int(found["count"]) for name in row if (found := _MEAN.fullmatch(name))}


def _judged(
    answers: Iterable[EvaluationAnswers], newest: Evaluation, counts: Mapping[str, int]
) -> Iterator[tuple[EvaluationAnswers, Verdict]]:
    """Yield the answers to prompts of the newest evaluation, each with the learner's verdict."""
    verdicts = Verdicts(newest)
    for one in answers:
        if one.number != newest.number or one.group_id is None or newest.index(one.group_id) is None:
            continue
        found, _ = verdicts.judge(one, num_samples=counts.get(one.dataset, 0))
        yield one, found


def _differences(good: Iterable[EvaluationAnswers], row: Mapping[str, Any], newest: Evaluation) -> list[str]:
    """Compare a complete result with its answers; an incomplete one may have ended before some of the answers came."""
    if not row["evaluation/complete"]:
        return []
    counts, of_prompts = _counts(row), defaultdict[str, list[float]](list)
    for one in good:
        of_prompts[one.dataset].append(sum(answer.reward for answer in one.answers) / len(one.answers))
    step, num_answered = newest.weights.policy_version, sum(map(len, of_prompts.values()))
    differences = []
    if num_answered != newest.num_prompts:
        differences.append(f"step {step}: complete, but {num_answered} of {newest.num_prompts} prompts have answers")
    for dataset, means in of_prompts.items():
        name = f"evaluation/{dataset}/mean@{counts[dataset]}"
        mean = sum(means) / len(means)
        if not math.isclose(mean, row[name], rel_tol=_CLOSE, abs_tol=_CLOSE):
            differences.append(f"step {step}: {name} is {row[name]}, by its answers {mean}")
    return differences
