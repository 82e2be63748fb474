"""Proximal logprobs without a second forward pass: guessed from the behavior and the live policy's, by version.

Needed where one batch takes several optimizer steps and nobody recomputed logprobs at the start of the first; with one
step per batch the live logprobs, detached, are exact. Needs per-token versions.
"""

from __future__ import annotations

import torch

from asyncrl.policies.segments import Array, as_floats

_PROBABILITY_FLOOR = 1e-10
"""Added before log, as AReaL does."""


def prox_share(staleness: Array, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """How far from behavior (0) to live (1) the proximal policy is.  i32[M] -> f32[M] in [0, 1)

    (v_prox - v_token) / (v_live - v_token) with v_prox = v_live - 1 and staleness v_live - v_token; 0 where it is 0.
    """
    ages = torch.as_tensor(staleness).to(dtype)
    return torch.where(ages > 0, (ages - 1) / ages.clamp(min=1), 0.0)


def loglinear_prox(logprobs: Array, behavior_logprobs: Array, *, staleness: Array) -> torch.Tensor:
    """behavior + share x (live - behavior), between the logprobs.  f32[M] x 2, i32[M] -> f32[M], no gradient

    Source: A-3PO, arXiv:2512.06547. AReaL's "loglinear".
    """
    live, behavior = as_floats(logprobs).detach(), as_floats(behavior_logprobs)
    return behavior + prox_share(staleness, dtype=live.dtype) * (live - behavior)


def linear_prox(logprobs: Array, behavior_logprobs: Array, *, staleness: Array) -> torch.Tensor:
    """The same between the probabilities: log of their weighted mean.  f32[M] x 2, i32[M] -> f32[M], no gradient"""
    live, behavior = as_floats(logprobs).detach().exp(), as_floats(behavior_logprobs).exp()
    share = prox_share(staleness, dtype=live.dtype)
    return torch.log((1 - share) * behavior + share * live + _PROBABILITY_FLOOR)
