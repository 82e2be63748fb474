"""Scatter tokens to their experts and gather the results."""

from __future__ import annotations

import torch

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
