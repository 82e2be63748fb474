"""Sparse attention: the keys with the highest scores are chosen, and attention is dense attention to these alone."""

from __future__ import annotations

import pytest
import torch

from asyncrl.backends.kernels import indexer
from asyncrl.backends.kernels.indexer import choose
from asyncrl.backends.megatron import packed_attention
from asyncrl.backends.megatron import sparse_attention as module
from asyncrl.backends.megatron.packed_attention import Piece, Pieces
from asyncrl.backends.megatron.sparse_attention import attend, choose_keys, sparse_attention
from asyncrl.backends.micro_batches import Rectangles

HEADS, SIZE, INDEX_HEADS, INDEX_SIZE, MOST = 2, 8, 8, 4, 3
RUNS = ((0, 9, 9), (9, 11, 2), (11, 16, 7))
"""First and last query of each run, and its keys: the last one sees two more before it, a context-parallel rank's."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def expected_choice(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> list[set[int]]:
    """The keys of each query of one run, query by query: all that it sees, or those with the highest scores."""
    found = []
    for number, (query, weight) in enumerate(zip(queries, weights, strict=True)):
        seen = len(keys) - len(queries) + number + 1
        scores = [float(sum(weight[h] * (query[h] @ key).relu() for h in range(INDEX_HEADS))) for key in keys[:seen]]
        found.append(set(sorted(range(seen), key=lambda one: -scores[one])[:MOST]))
    return found


def expected_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: list[set[int]]
) -> torch.Tensor:
    """One run, query by query: [n, heads, d]"""
    rows = []
    for number, numbers in enumerate(map(sorted, chosen)):
        scores = torch.einsum("hd,khd->hk", query[number], key[numbers]) / query.shape[-1] ** 0.5
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), value[numbers]))
    return torch.stack(rows)


def pieces() -> Pieces:
    queries, keys = [0, *(run[1] for run in RUNS)], [0, 9, 11, 18]
    runs = [(slice(*queries[n : n + 2]), slice(*keys[n : n + 2])) for n in range(len(RUNS))]
    whole = Piece(
        queries=slice(0, 16),
        keys=slice(0, 18),
        query_boundaries=torch.tensor(queries, dtype=torch.int32),
        key_boundaries=torch.tensor(keys, dtype=torch.int32),
        longest_query=9,
        longest_key=9,
        runs=runs,
    )
    return Pieces(pieces=[whole])


def rectangles() -> Rectangles:
    """The same runs, one rectangle each."""
    (piece,) = pieces().pieces
    return Rectangles(
        indices=tuple(torch.arange(16)[run][None] for run, _ in piece.runs),
        keys=tuple(torch.arange(18)[run][None] for _, run in piece.runs),
        order=torch.arange(16),
    )


@pytest.mark.parametrize(
    ("how", "is_on_gpu"),
    [(pieces(), False), (pieces(), True), (rectangles(), False)],
    ids=["pieces", "pieces, as on a GPU", "rectangles"],
)
@pytest.mark.parametrize("step", [1, 10**9], ids=["query by query", "at once"])
def test_a_query_attends_to_the_keys_of_its_own_sequence_with_the_highest_scores(
    how: Pieces | Rectangles, is_on_gpu: bool, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In values and in the gradients of query, key and value."""
    for of in (indexer, module):
        monkeypatch.setattr(of, "_NUMBERS", step)
    monkeypatch.setattr(module, "_LEAST_QUERIES", 1)
    monkeypatch.setattr(packed_attention, "uses_varlen", lambda *_: is_on_gpu)
    queries, weights = random(16, INDEX_HEADS, INDEX_SIZE), random(16, INDEX_HEADS, seed=1)
    keys = random(18, INDEX_SIZE)
    inputs = [random(n, HEADS, SIZE, seed=n).requires_grad_() for n in (16, 18, 18)]
    choice = choose_keys(queries, weights, keys, how, most=MOST)
    attended = sparse_attention(*inputs, choice, how)
    (piece,) = pieces().pieces
    parts = []
    for run, seen in piece.runs:
        chosen = expected_choice(queries[run], weights[run], keys[seen])
        parts.append(expected_attention(inputs[0][run], inputs[1][seen], inputs[2][seen], chosen))
    wanted = torch.cat(parts)
    torch.testing.assert_close(attended, wanted)
    towards = random(*attended.shape, seed=5)
    torch.testing.assert_close(
        torch.autograd.grad(attended, inputs, towards), torch.autograd.grad(wanted, inputs, towards)
    )


def test_only_queries_that_could_see_more_keys_than_are_chosen_have_a_choice() -> None:
    queries, weights, keys = random(2, 9, 4, 4), random(2, 9, 4, seed=1), random(2, 9, 4, seed=2)
    assert choose(queries, weights, keys, most=5).shape == (2, 4, 5)
    assert choose(queries, weights, keys, most=9).shape == (2, 0, 9)
    assert choose(queries[:, 6:], weights[:, 6:], keys, most=5).shape == (2, 3, 5)


def test_gradients_of_attention_to_chosen_keys_are_those_of_finite_differences() -> None:
    inputs = [random(1, HEADS, 6, 4, seed=n, dtype=torch.float64).requires_grad_() for n in range(3)]
    chosen = choose(random(1, 6, 4, 4), random(1, 6, 4, seed=1), random(1, 6, 4, seed=2), most=3)
    torch.autograd.gradcheck(lambda *some: attend(*some, chosen), inputs, fast_mode=True)
