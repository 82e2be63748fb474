"""What became of the evaluations of a run, by two witnesses: the results in metrics.jsonl, and the answers on the bus.

The answers of the newest evaluation are still there: its means are worked out anew from them.
Tests: tests/unit/policies/audit/test_evaluations.py.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.messages.evaluation import FIRST_GROUP_ID, Evaluation, EvaluationAnswers

_CLOSE: Final = 1e-9
_MEAN: Final = re.compile(r"evaluation/(?P<dataset>.+)/mean@(?P<count>[0-9]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAnswers:
    """A record of the log of answers without its tokens: a log of gigabytes has few of these bytes.

    versions  (incarnation, policy version) of every span
    rewards   of each answer
    is_error  whether the worker says that it cannot be answered
    """

    number: int
    group_id: int
    dataset: str
    versions: frozenset[tuple[int, int]]
    rewards: tuple[float, ...]
    is_error: bool


def logged_answers(answers: EvaluationAnswers) -> LoggedAnswers:
    trajectories = answers.group.trajectories
    return LoggedAnswers(
        number=answers.number,
        group_id=answers.group.group_id,
        dataset=answers.dataset,
        versions=frozenset(
            (span.incarnation, span.policy_version) for one in trajectories for span in one.version_spans
        ),
        rewards=tuple(one.reward for one in trajectories),
        is_error=bool(answers.group.error),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationAccount:
    """
    evaluations  results in metrics.jsonl; ``incomplete``: those that some prompts are missing in
    answers      records of the newest evaluation on the bus; ``mixed``: those not wholly of its version, which count
                 in no result
    problems     a sentence for every result that is not what its answers say
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
    answers: Iterable[LoggedAnswers] = (),
    training_groups: Iterable[int] = (),
) -> EvaluationAccount:
    """
    rows             of metrics.jsonl by (incarnation, step)
    newest, answers  from the bus
    training_groups  ids on the trajectory log: none of them may be of an evaluation
    """
    results = {key: row for key, row in rows.items() if "evaluation/complete" in row}
    problems = [f"group {i} of an evaluation is on the trajectory log" for i in training_groups if i >= FIRST_GROUP_ID]
    ours = [one for one in answers if newest and one.number == newest.number and newest.index(one.group_id) is not None]
    if newest is not None and newest.is_over and ours and (row := results.get(newest.weights.order)) is not None:
        problems += _differences(ours, row, newest)
    return EvaluationAccount(
        evaluations=len(results),
        incomplete=sum(not row["evaluation/complete"] for row in results.values()),
        answers=len(ours),
        mixed=sum(not _is_whole(one, newest) for one in ours) if newest is not None else 0,
        problems=tuple(problems),
    )


def _differences(answers: Iterable[LoggedAnswers], row: Mapping[str, Any], newest: Evaluation) -> list[str]:
    """Of a complete result: one that ended without all answers may have been ended before answers that are here."""
    if not row["evaluation/complete"]:
        return []
    counts = {found["dataset"]: int(found["count"]) for name in row if (found := _MEAN.fullmatch(name))}
    of_prompts: defaultdict[str, list[float]] = defaultdict(list)
    for one in _counted(answers, newest, counts):
        of_prompts[one.dataset].append(sum(one.rewards) / len(one.rewards))
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


def _counted(
    answers: Iterable[LoggedAnswers], newest: Evaluation, counts: Mapping[str, int]
) -> Iterable[LoggedAnswers]:
    """The answers that the learner counted, by the rule of its EvaluationRound.take.  counts: asked for, by data set

    The first record of a prompt that is an error or good answers settles it. Mixed or malformed ones settle nothing.
    """
    settled: set[int] = set()
    for one in answers:
        if one.group_id in settled:
            continue
        if one.is_error:
            settled.add(one.group_id)
        elif (
            _is_whole(one, newest)
            and len(one.rewards) == counts.get(one.dataset)
            and all(map(math.isfinite, one.rewards))
        ):
            settled.add(one.group_id)
            yield one


def _is_whole(answers: LoggedAnswers, newest: Evaluation) -> bool:
    return answers.versions <= {newest.weights.order}
