"""The account of evaluations: results against the answers that they are made of."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan, WeightVersion
from asyncrl.messages.evaluation import FIRST_GROUP_ID, Evaluation, EvaluationAnswers
from asyncrl.policies.audit.evaluations import account_of_evaluations

NEWEST = Evaluation(number=1, weights=WeightVersion(incarnation=0, policy_version=20), num_prompts=2, is_over=True)


def answers(index: int, *rewards: float, version: int = 20, number: int = 1) -> EvaluationAnswers:
    trajectories = tuple(
        Trajectory(
            tokens=[3, 4],
            response_mask=[True, True],
            behavior_logprobs=[-0.1, -0.2],
            version_spans=(VersionSpan(start=0, incarnation=0, policy_version=version),),
            reward=reward,
        )
        for reward in rewards
    )
    group = TrajectoryGroup(group_id=NEWEST.group_id(index), prompt_tokens=[1], trajectories=trajectories)
    return EvaluationAnswers(number=number, dataset="sums", group=group, votes=("",) * len(rewards))


def row(mean: float, *, complete: float = 1.0) -> dict[str, Any]:
    return {"evaluation/complete": complete, "evaluation/sums/mean@2": mean}


def test_a_result_is_what_its_first_whole_answers_say() -> None:
    log = [
        answers(0, 9.0, 9.0, version=21),  # mixed: in no result
        answers(0, 1.0, 0.0),
        answers(0, 0.0, 0.0),  # made twice: the first counts
        answers(1, 1.0, 1.0),
        answers(1, 5.0, 5.0, number=0),
    ]
    made = account_of_evaluations({(0, 0): row(0.1), (0, 20): row(0.75)}, newest=NEWEST, answers=log)
    assert (made.evaluations, made.incomplete, made.answers, made.mixed) == (2, 0, 4, 1)
    assert made.problems == ()


def test_a_wrong_result_is_named() -> None:
    made = account_of_evaluations({(0, 20): row(0.9)}, newest=NEWEST, answers=[answers(0, 1.0, 0.0)])
    assert made.problems == ("step 20: evaluation/sums/mean@2 is 0.9, by its answers 0.5",)


@pytest.mark.parametrize("rows", [{}, {(0, 10): row(0.3, complete=0.0)}])
def test_what_is_not_reported_is_not_compared(rows: dict[tuple[int, int], dict[str, Any]]) -> None:
    made = account_of_evaluations(rows, newest=NEWEST, answers=[answers(0, 1.0, 0.0)])
    assert made.problems == ()
    assert made.incomplete == len(rows)


def test_no_group_of_an_evaluation_is_among_those_of_training() -> None:
    made = account_of_evaluations({}, training_groups=[0, 1, FIRST_GROUP_ID + 3])
    assert made.problems == (f"group {FIRST_GROUP_ID + 3} of an evaluation is on the trajectory log",)
