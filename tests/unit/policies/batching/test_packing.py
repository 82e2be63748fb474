"""From documents to micro-batches: every document once, within the budget, at about equal cost."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.batching.packing import Document, MicroBatch, cost, pack_for_ranks
from tests.harness.packing import pack


def document(length: int, fill: int = 1) -> Document:
    return Document(
        tokens=np.full(length, fill, np.int32),
        response_mask=np.ones(length, np.bool_),
        behavior_logprobs=np.zeros(length, np.float32),
        advantages=np.zeros(length, np.float32),
        loss_weights=np.zeros(length, np.float32),
        staleness=np.zeros(length, np.int32),
    )


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 4), st.integers(10, 60))
def test_packing_keeps_every_document_once_within_the_budget(lengths: list[int], ranks: int, budget: int) -> None:
    shares = pack_for_ranks([document(n, fill=i + 1) for i, n in enumerate(lengths)], ranks=ranks, max_tokens=budget)
    assert len({len(share) for share in shares}) == 1
    counts = np.zeros(len(lengths) + 1, int)
    for micro_batch in (m for share in shares for m in share):
        sizes = np.diff(micro_batch.boundaries)
        assert micro_batch.num_tokens <= budget or len(sizes) == 1
        counts += np.bincount(micro_batch.tokens, minlength=len(counts))
    assert counts[1:].tolist() == lengths


def sizes(micro_batches: list[MicroBatch]) -> list[list[int]]:
    return [np.diff(micro_batch.boundaries).tolist() for micro_batch in micro_batches]


def test_micro_batches_are_filled_evenly() -> None:
    """14 tokens in rows of at most 10 make two rows of 8 and 6; filling one row first would make 10 and 4."""
    assert sizes(pack([document(n) for n in (4, 4, 2, 4)], max_tokens=10)) == [[4, 4], [4, 2]]


def test_no_more_micro_batches_than_filling_one_after_the_other_needs() -> None:
    """Dealt evenly into rows of 6, they would be 3 2 | 3 2, with no room for the last 2."""
    assert sizes(pack([document(n) for n in (3, 3, 2, 2, 2)], max_tokens=6)) == [[3, 3], [2, 2, 2]]


def test_ranks_share_the_cost_and_not_the_tokens() -> None:
    """A document of 16384 tokens costs 32768, about as much as short documents of 32 x 992 tokens in total."""
    batch = [document(16_384), *(document(496) for _ in range(64))]
    shares = pack_for_ranks(batch, ranks=2, max_tokens=40_000)
    (long,), (short,) = shares
    assert long.num_tokens < 18_000
    assert short.num_tokens > 30_000
    totals = [sum(cost(n) for n in sizes(share)[0]) for share in shares]
    assert totals[0] == pytest.approx(totals[1], rel=0.02)


def test_positions_start_anew_in_every_document() -> None:
    (micro_batch,) = pack([document(3), document(2)], max_tokens=10)
    assert micro_batch.positions.tolist() == [0, 1, 2, 0, 1]


def test_only_documents_sampled_wholly_by_the_trained_version_are_fresh() -> None:
    mixed = dataclasses.replace(document(3), staleness=np.array([1, 1, 0], np.int32))
    (micro_batch,) = pack([document(2), mixed], max_tokens=10)
    assert micro_batch.is_fresh.tolist() == [True, True, False, False, False]
