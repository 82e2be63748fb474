"""Ratios of probabilities that gradients flow through, and that no infinity or nan comes out of."""

from __future__ import annotations

from typing import Final

import torch

from asyncrl.policies.losses.segments import Array, as_floats

MAX_LOG_RATIO: Final = 20.0
"""exp(20) is 5e8: larger than any bound in use, and far from the end of float32."""

MIN_LOGPROB: Final = -1e4
"""A token that the policy rules out altogether (-inf) costs this much and pulls no gradient."""


def difference(logprobs: Array, anchor_logprobs: Array) -> torch.Tensor:
    """logprobs - anchor logprobs, 0 where both are the same infinity; a nan stays one. Gradient in the first only."""
    policy, anchor = as_floats(logprobs), as_floats(anchor_logprobs).detach()
    is_same = policy.isinf() & (policy == anchor)
    return (policy - anchor).masked_fill(is_same, 0.0)


def log_ratio(logprobs: Array, anchor_logprobs: Array) -> torch.Tensor:
    """``difference`` clamped to +-20. Gradient in the first only."""
    return difference(logprobs, anchor_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio(logprobs: Array, anchor_logprobs: Array) -> torch.Tensor:
    """exp(logprobs - anchor logprobs), in [e^-20, e^20]. Gradient in the first only."""
    return log_ratio(logprobs, anchor_logprobs).exp()


def live_one(logprobs: Array) -> torch.Tensor:
    """1, with the gradient of logprobs: weight x live_one has the value of the weight and REINFORCE's gradient."""
    return ratio(logprobs, logprobs)


def finite(logprobs: Array) -> torch.Tensor:
    """logprobs with a floor, so that a weight of 0 times one of them is 0."""
    return as_floats(logprobs).clamp(min=MIN_LOGPROB)
