"""Scatter tokens to their experts and gather the results."""

from __future__ import annotations

import torch

from asyncrl.backends.kernels.expert_rows import ExpertRows

EXPERTS = torch.tensor([[2, 0], [0, 1], [2, 1]])


def test_the_rows_of_an_expert_follow_one_another_in_the_order_of_their_tokens() -> None:
    rows = ExpertRows.of(EXPERTS, 4)
    assert rows.counts.tolist() == [2, 2, 2, 0]
    assert rows.tokens.tolist() == [0, 1, 1, 2, 0, 2]
    assert rows.places.tolist() == [[4, 0], [1, 2], [5, 3]]


def test_a_token_and_its_gradient_are_the_sums_of_its_rows() -> None:
    rows = ExpertRows.of(EXPERTS, 4)
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    spread = rows.spread(x)
    torch.testing.assert_close(spread, x[rows.tokens])
    weights = torch.arange(6.0)[:, None]
    gathered = rows.gathered(spread * weights)
    torch.testing.assert_close(gathered, x * torch.tensor([[4.0], [3.0], [8.0]]))
    (gradient,) = torch.autograd.grad(gathered.sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([[4.0, 4.0], [3.0, 3.0], [8.0, 8.0]]))
