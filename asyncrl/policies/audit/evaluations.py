"""What became of the evaluations of a run, by two witnesses: the results in metrics.jsonl, and the answers on the bus.

The answers of the newest evaluation are still there: its means are worked out anew from them.
Tests: tests/unit/policies/audit/test_evaluations.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asyncrl.messages.evaluation import FIRST_GROUP_ID, Evaluation, EvaluationAnswers

_CLOSE: Final = 1e-9


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
    answers: Iterable[EvaluationAnswers] = (),
    training_groups: Iterable[int] = (),
) -> EvaluationAccount:
    """
    rows             of metrics.jsonl by (incarnation, step)
    newest, answers  from the bus
    training_groups  ids on the trajectory log: none of them may be of an evaluation
    """
    results = {key: row for key, row in rows.items() if "evaluation/complete" in row}
    problems = [f"group {i} of an evaluation is on the trajectory log" for i in training_groups if i >= FIRST_GROUP_ID]
    first: dict[int, EvaluationAnswers] = {}
    num_answers = num_mixed = 0
    for one in answers:
        if newest is None or one.number != newest.number or newest.index(one.group.group_id) is None:
            continue
        num_answers += 1
        if not newest.is_of(one.group):
            num_mixed += 1
        elif not one.group.error:
            first.setdefault(one.group.group_id, one)
    if newest is not None and newest.is_over and first and (row := results.get(newest.weights.order)) is not None:
        problems += _differences(first.values(), row, step=newest.weights.policy_version)
    return EvaluationAccount(
        evaluations=len(results),
        incomplete=sum(not row["evaluation/complete"] for row in results.values()),
        answers=num_answers,
        mixed=num_mixed,
        problems=tuple(problems),
    )


def _differences(answers: Iterable[EvaluationAnswers], row: Mapping[str, Any], *, step: int) -> list[str]:
    rewards: defaultdict[str, list[list[float]]] = defaultdict(list)
    for one in answers:
        rewards[one.dataset].append([trajectory.reward for trajectory in one.group.trajectories])
    found = []
    for dataset, of_prompts in rewards.items():
        name = f"evaluation/{dataset}/mean@{len(of_prompts[0])}"
        mean = sum(sum(ours) / len(ours) for ours in of_prompts) / len(of_prompts)
        if not math.isclose(mean, row.get(name, math.nan), rel_tol=_CLOSE, abs_tol=_CLOSE):
            found.append(f"step {step}: {name} is {row.get(name)}, by its answers {mean}")
    return found
