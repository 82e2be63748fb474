"""From groups to documents: the values of each token."""

from __future__ import annotations

import dataclasses

import pytest

from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching import batch
from tests.harness.groups import group


def test_a_batch_carries_prompt_zeros_and_the_staleness_of_every_token() -> None:
    made = batch.build(
        [group(0, version=3), group(1, version=5)],
        algorithm=resolve(ALGORITHMS["grpo"]),
        policy_version=5,
        max_staleness=4,
        forks={},
    )
    first = made.documents[0]
    assert first.response_mask.tolist() == [False, False, True, True, True]
    assert first.staleness.tolist() == [0, 0, 2, 2, 2]
    assert first.advantages[0] == 0
    assert first.advantages[2] < 0
    assert made.metrics["staleness/mean"] == 1.0
    assert made.metrics["staleness/histogram"].counts == (6, 0, 6, 0, 0)
    assert made.metrics["reward/mean"] == 0.5
    assert sum(float(d.loss_weights.sum()) for d in made.documents) == pytest.approx(1.0)


def test_a_token_over_the_bound_is_never_trained() -> None:
    with pytest.raises(AssertionError, match="stale"):
        batch.build(
            [group(0, version=0)], algorithm=resolve(ALGORITHMS["grpo"]), policy_version=5, max_staleness=4, forks={}
        )


def test_a_truncated_answer_that_is_masked_is_in_no_document_s_mask() -> None:
    """So its tokens count in no mean; its reward still counts in its group's baseline."""
    algorithm = dataclasses.replace(resolve(ALGORITHMS["grpo"]), masks_truncated=True)
    made = group(0, version=5)
    first, *others = made.trajectories
    cut = dataclasses.replace(made, trajectories=(dataclasses.replace(first, finish_reason="length"), *others))
    documents = batch.build([cut], algorithm=algorithm, policy_version=5, max_staleness=4, forks={}).documents
    assert not documents[0].response_mask.any()
    assert not documents[0].loss_weights.any()
    assert documents[1].response_mask.any()
