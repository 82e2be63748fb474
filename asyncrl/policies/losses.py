"""Policy losses per token, before aggregation. Minimised. Shapes: M response tokens."""

from __future__ import annotations

import torch


def ppo_clip(
    logprobs: torch.Tensor,
    prox_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - prox_logprobs).

    f32[M] x 3 -> loss f32[M], clipped bool[M] (where the clip stops the gradient). Source: PPO, arXiv:1707.06347 eq. 7.
    With one optimizer step per batch r is 1 and the gradient is -A grad(logprobs): the clip acts from the second step
    on the same data on.
    """
    ratio = (logprobs - prox_logprobs).clamp(-20.0, 20.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.maximum(unclipped, clipped), (clipped > unclipped).detach()
