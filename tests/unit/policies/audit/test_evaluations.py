"""The account of evaluations compares results with the answers that they were computed from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from asyncrl.actors.learner.evaluation_round import EvaluationRound
from asyncrl.messages import VersionSpan, WeightVersion
from asyncrl.messages.evaluation import Answer, Evaluation, EvaluationAnswers
from asyncrl.policies.audit.evaluations import EvaluationAccount, account_of_evaluations
from asyncrl.policies.evaluation.verdict import MOST_REFUSED
from tests.harness.evaluation import sums

NEWEST = Evaluation(number=1, weights=WeightVersion(incarnation=0, policy_version=20), num_prompts=2, is_over=True)


def answers(index: int, *rewards: float, version: int = 20, number: int = 1) -> EvaluationAnswers:
    span = VersionSpan(start=0, incarnation=0, policy_version=version)
    made = tuple(Answer(reward=reward, length=2, version_spans=(span,)) for reward in rewards)
    return EvaluationAnswers(number=number, group_id=NEWEST.group_id(index), dataset="sums", answers=made)


def failed(index: int) -> EvaluationAnswers:
    return EvaluationAnswers(number=1, group_id=NEWEST.group_id(index), dataset="sums", error="cannot judge")


UNABLE = EvaluationAnswers(number=1, group_id=None, error="cannot load version 20", worker="w0")


def account(rows: Mapping[tuple[int, int], Mapping[str, Any]], log: Sequence[EvaluationAnswers]) -> EvaluationAccount:
    return account_of_evaluations(rows, newest=NEWEST, answers=log)


def row(mean: float, *, complete: float = 1.0) -> dict[str, Any]:
    return {"evaluation/complete": complete, "evaluation/sums/mean@2": mean}


def test_a_result_is_what_its_first_whole_answers_say() -> None:
    log = [
        answers(0, 9.0, 9.0, version=21),  # mixed versions: in no result
        answers(0, 1.0, 0.0),
        answers(0, 0.0, 0.0),  # generated twice: the first counts
        answers(1, 1.0, 1.0),
        answers(1, 5.0, 5.0, number=0),
    ]
    made = account({(0, 0): row(0.1), (0, 20): row(0.75)}, log)
    assert (made.evaluations, made.incomplete, made.answers, made.mixed) == (2, 0, 4, 1)
    assert made.problems == ()


def test_a_wrong_result_is_named() -> None:
    made = account({(0, 20): row(0.9)}, [answers(0, 1.0, 0.0), answers(1, 1.0, 0.0)])
    assert made.problems == ("step 20: evaluation/sums/mean@2 is 0.9, by its answers 0.5",)


def test_a_complete_result_without_all_answers_is_named() -> None:
    made = account({(0, 20): row(0.5)}, [answers(0, 1.0, 0.0), failed(1), answers(1, 1.0, 0.0)])
    assert made.problems == ("step 20: complete, but 1 of 2 prompts have answers",)


@pytest.mark.parametrize(
    "log",
    [
        pytest.param([answers(0, 1.0), answers(0, 1.0, 0.0), answers(1, 1.0, 1.0)], id="too few answers"),
        pytest.param([answers(0, math.nan, 1.0), answers(0, 1.0, 0.0), answers(1, 1.0, 1.0)], id="no number"),
        pytest.param([answers(0, 1.0, 0.0), answers(1, 1.0, 1.0), failed(1)], id="an error after good answers"),
        pytest.param([UNABLE, answers(0, 1.0, 0.0), answers(1, 1.0, 1.0)], id="a worker that cannot answer"),
        pytest.param(
            [answers(0, 9.0, 9.0, version=21)] * MOST_REFUSED + [answers(0, 1.0, 1.0), answers(1, 1.0, 1.0)],
            id="good answers after a prompt was given up",
        ),
        pytest.param([failed(0), answers(0, 9.0, 9.0), answers(1, 1.0, 1.0)], id="good answers after an error"),
    ],
)
def test_what_the_learner_reports_of_a_log_is_right(log: list[EvaluationAnswers]) -> None:
    """The learner and the account use the same rule for which answers count."""
    learner = EvaluationRound(NEWEST, [sums(2)])
    for one in log:
        learner.take(one)
    assert learner.is_done
    reported = learner.metrics(seed=0) | {"evaluation/complete": float(learner.is_complete)}
    assert account({(0, 20): reported}, log).problems == ()


def test_answers_that_came_after_a_timeout_make_no_problem() -> None:
    late = [answers(0, 1.0, 0.0), answers(1, 1.0, 1.0)]
    assert account({(0, 20): row(0.5, complete=0.0)}, late).problems == ()


@pytest.mark.parametrize("rows", [{}, {(0, 10): row(0.3, complete=0.0)}])
def test_what_is_not_reported_is_not_compared(rows: dict[tuple[int, int], dict[str, Any]]) -> None:
    made = account(rows, [answers(0, 1.0, 0.0)])
    assert made.problems == ()
    assert made.incomplete == len(rows)
