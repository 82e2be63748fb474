"""Off-policy corrections: a weight per token that says how much a stale or mismatched sample counts.

Weights carry no gradient. ``log_ratio`` is proximal - behavior logprobs: learner's weights at the start of the step,
in the learner's numerics, against whatever really sampled the token.
"""

from __future__ import annotations

import torch

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clamped to +- this before exp: e^20 is larger than any cap and far from overflow."""


def ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp of the clamped log ratio, in float32 or better."""
    return log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def none(log_ratio: torch.Tensor) -> torch.Tensor:
    """Every token counts 1: stale data is trained as if it were fresh.  f32[M] -> f32[M]"""
    return torch.ones_like(log_ratio).detach()


def tis_token(log_ratio: torch.Tensor, *, cap: float = 2.0) -> torch.Tensor:
    """Truncated importance sampling per token: min(ratio, cap).  f32[M] -> f32[M] in (0, cap]

    Source: fengyao.notion.site/off-policy-rl (2025), Espeholt et al. arXiv:1802.01561 for the truncation. Cap 2.0 as in
    slime and verl.
    """
    return ratio(log_ratio).clamp(max=cap)
