"""A rank that holds all experts sends tokens to them and back."""

from __future__ import annotations

import torch

from asyncrl.backends.megatron.mixture import OwnExperts


def test_dispatch_on_one_rank_never_synchronises() -> None:
    """Three tokens, three experts, two per token; every row returns times its score. On "meta" a wait is impossible."""
    routing_map = torch.tensor([[True, False, True], [True, True, False], [False, True, True]])
    scores = torch.tensor([[0.25, 0.0, 0.75], [0.5, 0.5, 0.0], [0.0, 0.125, 0.875]]).requires_grad_()
    hidden = torch.arange(6.0).view(3, 1, 2).requires_grad_()
    experts = OwnExperts(2)
    rows, own = experts.dispatch_postprocess(
        *experts.token_dispatch(*experts.dispatch_preprocess(hidden, routing_map, scores))
    )[::2]
    assert rows.tolist() == [[0, 1], [2, 3], [2, 3], [4, 5], [0, 1], [4, 5]]
    assert own.tolist() == [0.25, 0.5, 0.5, 0.125, 0.75, 0.875]
    back = experts.combine_postprocess(experts.token_combine(experts.combine_preprocess(rows * own[:, None])))
    torch.testing.assert_close(back, hidden)
    of_hidden, of_scores = torch.autograd.grad(back.sum(), (hidden, scores))
    torch.testing.assert_close(of_hidden, torch.ones(3, 1, 2))
    torch.testing.assert_close(of_scores, torch.tensor([[1.0], [5.0], [9.0]]) * routing_map)
    on_meta = [x.detach().to("meta") for x in (hidden, routing_map, scores)]
    assert OwnExperts(2).dispatch_preprocess(*on_meta)[0].shape == (6, 2)
