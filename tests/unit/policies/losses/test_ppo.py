"""PPO's clip, computed by hand."""

from __future__ import annotations

import torch

from asyncrl.policies.losses.ppo import PPOClip


def test_ppo_clip_stops_the_gradient_only_where_it_would_go_further() -> None:
    logprobs = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5])).requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, clipped = PPOClip().formula(logprobs, torch.zeros(4), advantage)
    # -1.2 (clipped at 1 + 0.2), 1.5, -0.5, 0.8 (clipped at 1 - 0.2)
    torch.testing.assert_close(loss, torch.tensor([-1.2, 1.5, -0.5, 0.8]))
    assert clipped.tolist() == [True, False, False, True]
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.5, -0.5, 0.0]))
