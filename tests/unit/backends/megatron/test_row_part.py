"""A context-parallel rank's part of a packed row, and what the rank computes from it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.backends.megatron.packed_attention import Pieces, attention
from asyncrl.backends.megatron.row_part import RowPart, order, spans, tokens_of_rank
from asyncrl.backends.micro_batches import response_rows
from asyncrl.config.layout import Layout
from asyncrl.policies.batching.packing import MicroBatch
from tests.harness.backends import sequences
from tests.harness.packing import pack

CPU = torch.device("cpu")


def packed(*lengths: int) -> MicroBatch:
    (row,) = pack(sequences(lengths=lengths), max_tokens=1000)
    return row


def part(row: MicroBatch, rank: int, **sizes: int) -> RowPart:
    layout = Layout(ranks=8, **sizes)
    return RowPart.from_micro_batch(
        row, response_rows(row), layout=layout, context_rank=rank, device=CPU, dtype=torch.float32
    )


def test_context_parallel_pieces_balance_attention() -> None:
    """16 tokens on 2 ranks: 4 pieces of 4 tokens; the first rank has the first and the last piece."""
    assert spans(0, length=16, ranks=2) == [(0, 4), (12, 16)]
    assert spans(1, length=16, ranks=2) == [(4, 8), (8, 12)]
    gathered = np.concatenate([tokens_of_rank(rank, length=16, ranks=2) for rank in (0, 1)])
    np.testing.assert_array_equal(gathered[order(length=16, ranks=2)], np.arange(16))


def test_a_piece_has_the_keys_of_its_sequences_from_their_start() -> None:
    """Sequences of 6 and 8 tokens, and 2 tokens of padding; the second rank's pieces are [4, 8) and [8, 12)."""
    first, second = (piece for piece in part(packed(6, 8), 1, context=2).attention.pieces)  # type: ignore[union-attr]
    assert (first.queries, first.keys) == (slice(0, 4), slice(0, 8))
    assert first.query_boundaries.tolist() == [0, 2, 4]  # tokens 4 and 5 of the first sequence, 6 and 7 of the second
    assert first.key_boundaries.tolist() == [0, 6, 8]
    assert (second.queries, second.keys) == (slice(4, 8), slice(6, 12))
    assert (second.query_boundaries.tolist(), second.key_boundaries.tolist()) == ([0, 4], [0, 6])


def test_every_token_is_predicted_by_the_rank_that_has_the_one_before_it() -> None:
    row = packed(6, 8, 30, 2, 9)
    parts = [part(row, rank, context=4) for rank in range(4)]
    rows = response_rows(row)
    placed = np.sort(np.concatenate([one.places.numpy() for one in parts]))  # type: ignore[union-attr]
    np.testing.assert_array_equal(placed, np.arange(len(rows)))
    for one in parts:
        assert one.places is not None and one.kept is not None
        np.testing.assert_array_equal(one.kept[one.sources].numpy(), rows[one.places] - 1)
        np.testing.assert_array_equal(one.targets.numpy(), row.tokens[rows[one.places]])


def test_padding_is_a_sequence_without_loss() -> None:
    row = packed(6, 7)
    one = part(row, 0, context=2)
    assert (one.length, one.row.boundaries.tolist()) == (16, row.boundaries.tolist())
    assert one.positions.tolist() == [0, 1, 2, 3, *(12 - 6, 0, 1, 2)]  # the last 3 tokens are padding


@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_over_parts_equals_the_whole_row(ranks: int) -> None:
    row = packed(12, 30, 2, 17, 9, 23, 12, 7)  # 112 tokens
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(112, heads, 8, generator=generator) for heads in (4, 2, 2))
    whole = part(row, 0)
    expected = attention(query, key, value, whole.attention)
    for rank in range(ranks):
        one = part(row, rank, context=ranks)
        assert isinstance(one.attention, Pieces) and one.kept is not None
        here = Pieces(pieces=one.attention.pieces)  # all keys are local here; ranks gather them
        torch.testing.assert_close(attention(query[one.kept], key, value, here), expected[one.kept])
