"""Attention with sinks equals an explicit softmax with one more column, in values and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from asyncrl.backends.megatron.packed_attention import Piece, Pieces, visible
from asyncrl.backends.megatron.sink_attention import attention_with_sinks, plain, with_sinks

HEADS, GROUPS, SIZE = 4, 2, 16


def inputs(length: int, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key and value of a row, and sinks near the largest scores."""
    random = torch.Generator().manual_seed(0)
    shapes = [(length, HEADS, SIZE), (length, GROUPS, SIZE), (length, GROUPS, SIZE), (HEADS,)]
    made = [torch.randn(shape, generator=random) * 2 for shape in shapes]
    return [one.to(device, dtype).requires_grad_() for one in made]


def explicit(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    """One sequence, head by head and query by query."""
    rows = []
    for position in range(len(query)):
        first = max(0, position + 1 - window) if window else 0
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = key[first : position + 1, group] @ query[position, head] / SIZE**0.5
            weights = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
            heads.append(weights @ value[first : position + 1, group])
        rows.append(torch.stack(heads))
    return torch.stack(rows)


def with_gradients(attended: torch.Tensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    towards = torch.randn(attended.shape, generator=torch.Generator().manual_seed(1)).to(attended)
    return [attended.detach(), *torch.autograd.grad(attended, tensors, towards)]


@dataclass(frozen=True)
class OnCpu:
    """A kernel like FlashAttention's for one sequence: its backward pass knows the weights only from ``lse``."""

    window: int

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self._scores(query, key)
        return self._weighted(scores.softmax(-1), value), scores.logsumexp(-1)

    def backward(
        self,
        of_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = (self._scores(query, key) - lse[..., None]).exp()
        products = (of_out * out).sum(-1).t()
        of_weights = torch.einsum("nhd,mhd->hnm", of_out, value.repeat_interleave(HEADS // GROUPS, 1))
        of_scores = weights * (of_weights - products[..., None]) / SIZE**0.5
        of_query = torch.einsum("hnm,mhd->nhd", of_scores, key.repeat_interleave(HEADS // GROUPS, 1))
        of_key = torch.einsum("hnm,nhd->mhd", of_scores, query)
        of_value = torch.einsum("hnm,nhd->mhd", weights, of_out)
        return of_query, *(x.unflatten(1, (GROUPS, -1)).sum(2) for x in (of_key, of_value))

    def _scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        length = len(query)
        seen = visible(length, length, self.window, query.device)
        seen = torch.ones(length, length, dtype=torch.bool).tril() if seen is None else seen
        scores = torch.einsum("nhd,mhd->hnm", query, key.repeat_interleave(HEADS // GROUPS, 1)) / SIZE**0.5
        return scores.masked_fill(~seen, -torch.inf)

    def _weighted(self, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hnm,mhd->nhd", weights, value.repeat_interleave(HEADS // GROUPS, 1))


def in_columns(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    return plain(*(x.transpose(0, 1)[None] for x in (query, key, value)), sinks, window)[0].transpose(0, 1)


def on_top_of_a_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    return with_sinks(query, key, value, sinks, OnCpu(window))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("attend", [in_columns, on_top_of_a_kernel])
def test_attention_sink_is_a_softmax_with_one_more_column(attend: Callable[..., torch.Tensor], window: int) -> None:
    tensors = inputs(19)
    found = with_gradients(attend(*tensors, window), tensors)
    expected = with_gradients(explicit(*tensors, window), tensors)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)


def cut_row(device: str) -> Pieces:
    """Sequences of 7 and 12 tokens. A rank has the tokens [4, 10) and keys from the first sequence on."""
    boundaries = {"dtype": torch.int32, "device": device}
    piece = Piece(
        queries=slice(0, 6),
        keys=slice(0, 10),
        query_boundaries=torch.tensor([0, 3, 6], **boundaries),  # type: ignore[arg-type]
        key_boundaries=torch.tensor([0, 7, 10], **boundaries),  # type: ignore[arg-type]
        longest_query=3,
        longest_key=7,
        runs=[(slice(0, 3), slice(0, 7)), (slice(3, 6), slice(7, 10))],
    )
    return Pieces(pieces=[piece])


def of_cut_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    """The rank's queries, sequence by sequence."""
    sequences = (slice(0, 7), slice(7, 19))
    whole = torch.cat([explicit(query[one], key[one], value[one], sinks, window) for one in sequences])
    return whole[4:10]


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float32, 2e-5),
        pytest.param("cuda", torch.float32, 1e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 0.05, marks=pytest.mark.gpu),
    ],
)
def test_a_piece_of_a_row_attends_within_its_sequences(
    window: int, device: str, dtype: torch.dtype, tolerance: float
) -> None:
    tensors = inputs(19, device=device, dtype=dtype)
    query, key, value, sinks = tensors
    attended = attention_with_sinks(query[4:10], key, value, sinks, cut_row(device), window=window)
    found = with_gradients(attended, tensors)
    exact = [one.detach().float().cpu().requires_grad_() for one in tensors]
    expected = with_gradients(of_cut_row(*exact, window), exact)
    for ours, theirs in zip(found, expected, strict=True):
        largest = float(theirs.detach().abs().max())
        torch.testing.assert_close(ours.float().cpu() / largest, theirs / largest, atol=tolerance, rtol=0)
