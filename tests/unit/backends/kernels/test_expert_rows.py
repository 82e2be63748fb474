"""Rows of experts: their order, their sums, and the bias that each expert adds."""

from __future__ import annotations

import pytest
import torch

from asyncrl.backends.kernels.expert_bias import with_bias
from asyncrl.backends.kernels.expert_rows import ExpertRows

EXPERTS = torch.tensor([[2, 0], [0, 1], [2, 1]])


def test_rows_are_sorted_by_expert_then_token() -> None:
    rows = ExpertRows.from_choices(EXPERTS, 4)
    assert rows.counts.tolist() == [2, 2, 2, 0]
    assert rows.tokens.tolist() == [0, 1, 1, 2, 0, 2]
    assert rows.places.tolist() == [[4, 0], [1, 2], [5, 3]]


def test_gathering_rows_sums_them_per_token() -> None:
    rows = ExpertRows.from_choices(EXPERTS, 4)
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    spread = rows.spread(x)
    torch.testing.assert_close(spread, x[rows.tokens])
    weights = torch.arange(6.0)[:, None]
    gathered = rows.gather(spread * weights)
    torch.testing.assert_close(gathered, x * torch.tensor([[4.0], [3.0], [8.0]]))
    (gradient,) = torch.autograd.grad(gathered.sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([[4.0, 4.0], [3.0, 3.0], [8.0, 8.0]]))


COUNTS = (2, 0, 3)
"""The second expert has no token."""


@pytest.mark.parametrize("is_scored", [False, True])
def test_expert_bias_is_added_to_its_rows_and_gets_their_gradients(is_scored: bool) -> None:
    random = torch.Generator().manual_seed(0)
    x, bias, scores, slopes = (torch.randn(size, generator=random) for size in ((5, 8), (3, 8), (5,), (5, 8)))
    ends = torch.tensor(COUNTS).cumsum(0).int()
    found, expected = [], []
    for results in (found, expected):
        leaves = [one.clone().requires_grad_() for one in (x, bias, scores)]
        if results is found:
            out = with_bias(leaves[0], leaves[1], ends, leaves[2] if is_scored else None)
        else:
            of_rows = leaves[1].repeat_interleave(torch.tensor(COUNTS), dim=0)
            out = leaves[0] + (of_rows * leaves[2][:, None] if is_scored else of_rows)
        results += [out, *torch.autograd.grad(out, leaves if is_scored else leaves[:2], slopes)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_expert_bias_without_rows_gets_zero_gradient() -> None:
    x, bias = torch.zeros(0, 8, requires_grad=True), torch.ones(3, 8, requires_grad=True)
    with_bias(x, bias, torch.zeros(3, dtype=torch.int32)).sum().backward()
    assert bias.grad is not None
    assert not bias.grad.any()
