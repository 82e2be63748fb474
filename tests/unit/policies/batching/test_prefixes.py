"""Tokens that sequences of a row share are found, and rows are packed by the tokens that are computed."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import codec
from asyncrl.policies.batching import prefixes
from asyncrl.policies.batching.packing import MicroBatch, TrainingSequence, cost, pack_for_ranks, sequence_slices
from asyncrl.policies.batching.prefixes import MOST_COPIES, DistinctTokens, bundles
from tests.harness.prefixes import Tokens, random_tree, trained, trees

SEEDS = st.integers(0, 10_000)


def packed(sequences: list[TrainingSequence], *, max_tokens: int = 1000, ranks: int = 1) -> list[list[MicroBatch]]:
    return pack_for_ranks(sequences, ranks=ranks, max_tokens=max_tokens, shares_prefixes=True)


def samples(prompt_tokens: int, answers: tuple[int, ...], *, seed: int = 0) -> list[Tokens]:
    """Answers that differ from their first token on."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, 1000, prompt_tokens)
    return [
        np.concatenate([prompt, [1000 + i], random.integers(0, 1000, n - 1)]).astype(np.int32)
        for i, n in enumerate(answers)
    ]


def distinct(row: MicroBatch) -> DistinctTokens:
    return DistinctTokens.from_row(row.boundaries, row.shared if len(row.shared) else np.zeros_like(row.boundaries[1:]))


@given(SEEDS, st.integers(1, 30), st.integers(1, 4), st.integers(10, 60))
def test_every_sequence_is_packed_once_and_whole(seed: int, number: int, ranks: int, budget: int) -> None:
    sequences = trees(seed, num_sequences=number)
    shares = packed(sequences, max_tokens=budget, ranks=ranks)
    assert len({len(share) for share in shares}) == 1
    rows = [row for share in shares for row in share if not row.is_filler]
    assert sorted(i for row in rows for i in row.sequences.tolist()) == list(range(number))
    for row in rows:
        assert row.num_computed <= budget or len(row.sequences) == 1
        assert row.num_tokens <= MOST_COPIES * budget or len(row.sequences) == 1
        for i, where in zip(row.sequences.tolist(), sequence_slices(row), strict=True):
            for name in ("tokens", "response_mask", "behavior_logprobs", "advantages", "loss_weights", "staleness"):
                np.testing.assert_array_equal(getattr(row, name)[where], getattr(sequences[i], name))


@given(SEEDS, st.integers(1, 30), st.integers(1, 3))
def test_a_row_computes_each_prefix_once(seed: int, number: int, ranks: int) -> None:
    """A computed token is a prefix of one of the row's sequences: a node of their tree."""
    for row in (row for share in packed(trees(seed, num_sequences=number), ranks=ranks) for row in share):
        sequences = [row.tokens[where].tolist() for where in sequence_slices(row)]
        if len(row.shared):  # otherwise what could be shared was not worth it
            assert row.num_computed == len({tuple(one[: n + 1]) for one in sequences for n in range(len(one))})
        tokens = distinct(row)
        assert len(tokens.first) == row.num_computed
        np.testing.assert_array_equal(row.tokens[tokens.first][tokens.of], row.tokens)
        np.testing.assert_array_equal(row.positions[tokens.first][tokens.of], row.positions)
        inner = np.flatnonzero(row.positions)  # the token before it is the same one in every copy
        np.testing.assert_array_equal(tokens.of[tokens.first[tokens.of[inner]] - 1], tokens.of[inner - 1])
        assert tokens.num_copies.sum() == row.num_tokens


@given(SEEDS, st.integers(1, 30), st.integers(1, 4), st.integers(10, 60))
def test_sharing_never_costs_the_slowest_rank_more(seed: int, number: int, ranks: int, budget: int) -> None:
    sequences = trees(seed, num_sequences=number)

    def slowest(shares: list[list[MicroBatch]]) -> float:
        return max(
            sum(cost(int(n)) for row in share if not row.is_filler for n in np.diff(row.boundaries))
            - sum(cost(int(n)) for row in share for n in row.shared)
            for share in shares
        )

    whole = pack_for_ranks(sequences, ranks=ranks, max_tokens=budget)
    assert slowest(packed(sequences, ranks=ranks, max_tokens=budget)) <= slowest(whole)


def test_sequences_that_share_next_to_nothing_are_packed_as_without_sharing() -> None:
    alone = [one for i in range(6) for one in samples(3, (200 + i,), seed=i)]
    sequences = trained([np.concatenate([[7, 8], one]).astype(np.int32) for one in alone])
    for with_sharing, without in zip(
        packed(sequences, max_tokens=500)[0], pack_for_ranks(sequences, ranks=1, max_tokens=500)[0], strict=True
    ):
        assert len(with_sharing.shared) == 0
        np.testing.assert_array_equal(with_sharing.tokens, without.tokens)


def test_groups_are_cut_apart_before_their_samples_and_samples_in_the_middle() -> None:
    """Two groups of four samples of 10 + 5 tokens, which both begin with the same 4 tokens."""
    lengths, shared = np.full(8, 15), np.array([0, 10, 10, 10, 4, 10, 10, 10])
    assert bundles(lengths, shared, max_tokens=60) == [range(8)]  # 4 + 2 (6 + 20) are computed
    assert bundles(lengths, shared, max_tokens=50) == [range(4), range(4, 8)]  # 10 + 20
    assert bundles(lengths, shared, max_tokens=20) == [range(i, i + 2) for i in (0, 2, 4, 6)]  # 10 + 10
    assert bundles(lengths, shared, max_tokens=10) == [range(i, i + 1) for i in range(8)]


def test_ranks_share_the_computed_tokens() -> None:
    """Four groups of eight samples compute 800 + 8 x 50 tokens each, and have 8 x 850."""
    groups = [one for i in range(4) for one in samples(800, (50,) * 8, seed=i)]
    shares = packed(trained(groups), max_tokens=2400, ranks=2)
    assert [[row.num_computed for row in share] for share in shares] == [[2400], [2400]]
    assert shares[0][0].num_tokens == 2 * 8 * 850


def test_a_prompt_is_computed_on_several_ranks_if_one_would_be_slower() -> None:
    """One rank would compute 300 + 8 x 500 tokens and the other none; now both compute the prompt and four samples."""
    shares = packed(trained(samples(300, (500,) * 8)), max_tokens=16_000, ranks=2)
    assert [[row.num_computed for row in share] for share in shares] == [[2300], [2300]]


def test_short_prompts_are_not_shared() -> None:
    """Copies of keys and values cost more than 14 % of the tokens, as measured (docs/results/gpu/prefixes.jsonl)."""
    ((row,),) = packed(trained(samples(100, (500,) * 8)), max_tokens=16_000, ranks=1)
    assert row.num_computed == row.num_tokens == 8 * 600


def test_tokens_of_other_experts_are_not_shared() -> None:
    """The engine routed the third token of the last sample to another expert."""
    made = trained(samples(6, (2, 2, 2)))
    experts = np.zeros((8, 2, 1), np.uint8)
    other = experts.copy()
    other[2, 1, 0] = 3
    routed = [dataclasses.replace(one, experts=of) for one, of in zip(made, (experts, experts, other), strict=True)]
    ((row,),) = packed(routed)
    assert sorted(row.shared.tolist()) == [0, 2, 6]
    assert sorted(packed(made)[0][0].shared.tolist()) == [0, 6, 6]


@given(SEEDS, st.sampled_from([(1, 1), (5, 3), (4, 2)]), st.sampled_from([np.uint8, np.uint16]))
def test_a_token_is_shared_by_all_that_were_routed_as_it_was_up_to_there(
    seed: int, shape: tuple[int, int], dtype: type[np.unsignedinteger[Any]]
) -> None:
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 2, random.integers(1, 6)).astype(np.int32) for _ in range(12)]
    experts = [np.zeros((len(one), *shape), dtype) for one in tokens]
    for one in experts:  # at most one token goes to other experts
        one[random.integers(len(one)), ..., -1] = random.choice([0, 1, 200])
    order, shared = prefixes.sort(tokens, experts)
    ways = [
        tuple((token, tuple(of.ravel().tolist())) for token, of in zip(*one, strict=True))
        for one in zip(tokens, experts, strict=True)
    ]
    assert sorted(order) == list(range(12))
    for count, (before, own) in zip(shared[1:], pairwise(order), strict=True):
        assert ways[own][:count] == ways[before][:count]
        assert ways[own][: count + 1] != ways[before][: count + 1] or count == len(ways[own])
    every = {way[: n + 1] for way in ways for n in range(len(way))}
    assert sum(map(len, tokens)) - shared.sum() == len(every)


def test_packing_is_the_same_again_and_travels_to_other_ranks() -> None:
    first, second = (packed(trees(3), max_tokens=60, ranks=2) for _ in range(2))
    for one, other in zip((r for s in first for r in s), (r for s in second for r in s), strict=True):
        assert codec.encode(one) == codec.encode(other)
        np.testing.assert_array_equal(codec.decode(codec.encode(one), MicroBatch).shared, one.shared)


def test_the_tree_of_the_tests_has_every_kind_of_branch() -> None:
    found = [{tuple(one) for one in random_tree(seed, num_sequences=12)} for seed in range(20)]
    copies = sum(12 - len(one) for one in found)
    beginnings = sum(any(b[: len(a)] == a for a, b in pairwise(sorted(one))) for one in found)
    assert copies > 10
    assert beginnings > 10
