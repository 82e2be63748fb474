"""Which answers are scored again, and who is quarantined for them."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.policies.packing import Document
from asyncrl.policies.rescoring import Rescoring


def document(*, age: int = 0, behavior: float = -1.0, tokens: int = 4) -> Document:
    """Two prompt tokens, then ``tokens`` sampled ones."""
    mask = np.arange(2 + tokens) >= 2
    return Document(
        tokens=np.ones(2 + tokens, np.int32),
        response_mask=mask,
        behavior_logprobs=np.where(mask, behavior, 0).astype(np.float32),
        advantages=np.zeros(2 + tokens, np.float32),
        loss_weights=np.zeros(2 + tokens, np.float32),
        staleness=np.where(mask, age, 0).astype(np.int32),
    )


def looked(
    rescoring: Rescoring, documents: list[Document], workers: list[str], *, step: int, trainer: float
) -> list[str]:
    """Who is quarantined by a look in which the trainer gives every token the logprob ``trainer``."""
    chosen = rescoring.choose(documents, workers, step=step)
    logprobs = {one.document: np.full(len(documents[one.document]), trainer, np.float32) for one in chosen}
    return rescoring.judge(chosen, documents, logprobs)[1]


def test_the_two_youngest_answers_of_each_worker_are_scored() -> None:
    documents = [document(age=age) for age in (3, 1, 2, 0)]
    chosen = Rescoring(bound=0.5, every=10).choose(documents, ["a", "a", "a", "b"], step=20)
    assert sorted((one.worker, one.age) for one in chosen) == [("a", 1), ("a", 2), ("b", 0)]


@pytest.mark.parametrize(("bound", "step"), [(0.5, 7), (0.0, 10)])
def test_nothing_is_scored_between_the_looks_or_when_it_is_off(bound: float, step: int) -> None:
    assert Rescoring(bound=bound, every=10).choose([document()], ["a"], step=step) == []


def test_a_worker_over_the_bound_twice_is_quarantined_and_the_others_are_not() -> None:
    rescoring = Rescoring(bound=0.5, every=10)
    documents = [document(behavior=-1.0), document(behavior=-3.0)]  # |trainer - behavior| is 0 and 2
    assert looked(rescoring, documents, ["good", "bad"], step=0, trainer=-1.0) == []
    assert looked(rescoring, documents, ["good", "bad"], step=1, trainer=-1.0) == [
        "bad"
    ]  # the suspect alone is looked at


def test_who_was_over_the_bound_once_and_is_not_again_goes_free() -> None:
    rescoring = Rescoring(bound=0.5, every=10)
    assert looked(rescoring, [document(behavior=-3.0)], ["w"], step=0, trainer=-1.0) == []
    assert looked(rescoring, [document()], ["w"], step=1, trainer=-1.0) == []
    assert looked(rescoring, [document(behavior=-3.0)], ["w"], step=10, trainer=-1.0) == []


def test_an_old_answer_may_differ_by_what_the_policy_moved() -> None:
    """2 nats off: too much for a fresh answer (0.5) and at 2 versions (1.5), not at 3 versions (2.0)."""
    for age, expected in ((0, ["w"]), (2, ["w"]), (3, [])):
        rescoring = Rescoring(bound=0.5, every=1)
        for step in (0, 1):
            guilty = looked(rescoring, [document(age=age, behavior=-3.0)], ["w"], step=step, trainer=-1.0)
        assert guilty == expected


def test_a_trainer_that_says_nan_agrees_with_nobody() -> None:
    rescoring = Rescoring(bound=0.5, every=1)
    for step in (0, 1):
        guilty = looked(rescoring, [document()], ["w"], step=step, trainer=float("nan"))
    assert guilty == ["w"]


def test_an_answer_without_sampled_tokens_says_nothing() -> None:
    assert Rescoring(bound=0.5, every=1).choose([document(tokens=0)], ["w"], step=0) == []
