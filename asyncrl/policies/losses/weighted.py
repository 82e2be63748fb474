"""Losses -w A logprob: REINFORCE with a detached weight per token, so that no token loses its gradient to a clip."""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.policies.losses.ratios import MAX_LOG_RATIO, finite, log_ratio, ratio
from asyncrl.policies.segments import Array, as_floats, segment_sum, spread


def reinforce(logprobs: Array, advantages: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """-A logprob.  f32[M] x 2 -> loss f32[M], clipped bool[M] (never)

    Source: Williams 1992. On data of older weights it needs a correction. GPG (arXiv:2504.02546) is this loss with the
    advantage ``gpg``.
    """
    loss = -as_floats(advantages).detach() * finite(logprobs)
    return loss, torch.zeros_like(loss, dtype=torch.bool)


def sft(logprobs: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """-logprob: negative log likelihood of the tokens, in nats.  f32[M] -> loss f32[M], clipped bool[M] (never)

    Also off-policy distillation, on a teacher's samples. slime sums the mean of each sequence over the batch, verl and
    we leave that to the aggregation.
    """
    loss = -finite(logprobs)
    return loss, torch.zeros_like(loss, dtype=torch.bool)


def cispo(
    logprobs: Array,
    anchor_logprobs: Array,
    advantages: Array,
    *,
    cap_mode: Literal["one_plus", "absolute"] = "one_plus",
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(ratio, capped) A logprob: every token keeps a gradient, of bounded weight.

    f32[M] x 3 -> loss f32[M], clipped bool[M] (where the weight is not the ratio). ``cap_mode`` says what the numbers
    mean: "one_plus" clips to [1 - clip_low, 1 + clip_high], "absolute" to at most clip_high, without a lower bound and
    without clip_low.

    Source: MiniMax-M1, arXiv:2506.13585 eq. 4; the defaults are ScaleRL's cap of 5 (arXiv:2510.13786), as AReaL and
    SkyRL have them. verl and slime also say one_plus (verl's 0.2 / 0.2 clips both sides, ROLL's 0.1 too), TRL absolute
    (5.0): the same number means different caps.
    """
    weight = ratio(logprobs, anchor_logprobs).detach()
    low, high = (1.0 - clip_low, 1.0 + clip_high) if cap_mode == "one_plus" else (0.0, clip_high)
    capped = weight.clamp(low, high)
    return -capped * as_floats(advantages).detach() * finite(logprobs), capped != weight


def aipo(
    logprobs: Array,
    behavior_logprobs: Array,
    advantages: Array,
    *,
    cap: float,
    is_surrogate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(min(ratio, cap)) A logprob, or as a surrogate -min(ratio, cap) A.

    f32[M] x 3 -> loss f32[M], clipped bool[M] (ratio over the cap). The ratio is the live policy's to the behavior's.
    The two agree below the cap; above it the surrogate has no gradient.

    Source: LlamaRL, arXiv:2505.24034 (the first form, and no value for the cap); older prime-rl has the second.
    """
    if not is_surrogate:
        return cispo(logprobs, behavior_logprobs, advantages, cap_mode="absolute", clip_high=cap)
    live = ratio(logprobs, behavior_logprobs)
    return -live.clamp(max=cap) * as_floats(advantages).detach(), (live > cap).detach()


def topr(
    logprobs: Array,
    behavior_logprobs: Array,
    advantages: Array,
    *,
    level: Literal["sequence", "token"] = "sequence",
    sequence: Array | None = None,
    num_sequences: int = 0,
    is_positive: Array | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-w A logprob with w = 1 for good samples, and the ratio clipped to [0, 1], detached, for bad ones.

    f32[M] x 3 -> loss f32[M], clipped bool[M] (bad tokens whose ratio is over 1). Good is ``is_positive`` bool[M], else
    an advantage > 0. Level "sequence", with ``sequence`` and ``num_sequences``: the product of the sequence's ratios.

    Source: TOPR, arXiv:2503.14286 eq. 8, per trajectory. ROLL takes the token's ratio, and its score for the sign.
    """
    advantage = as_floats(advantages).detach()
    exponent = log_ratio(logprobs, behavior_logprobs).detach()
    if level == "sequence":
        if sequence is None:
            raise ValueError('topr of level "sequence" needs the sequence of each token')
        exponent = spread(segment_sum(exponent, sequence, num_sequences=num_sequences), sequence)
    weight = exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    good = advantage > 0 if is_positive is None else torch.as_tensor(is_positive).bool()
    tapered = torch.where(good, 1.0, weight.clamp(max=1.0))
    return -tapered * advantage * finite(logprobs), ~good & (weight > 1.0)


def p3o(
    logprobs: Array, behavior_logprobs: Array, advantages: Array, *, effective_fraction: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(min(ratio, E)) A logprob + (1 - E) k3(policy || behavior), where E is the effective sample fraction.

    f32[M] x 3 -> loss f32[M], clipped bool[M] (ratio over E). E = (sum w)^2 / (n sum w^2) in (0, 1] of the token ratios
    w over all tokens of the batch, every rank's: a batch that is off policy gets small weights and a strong pull back,
    one on policy is plain REINFORCE. No hyper-parameter.

    Source: P3O, arXiv:2605.12380, as FeynRL has it. Meant with the aggregation ``token_mean``.
    """
    exponent = log_ratio(logprobs, behavior_logprobs)
    weight = exponent.detach().exp()
    fraction = torch.as_tensor(effective_fraction, dtype=weight.dtype, device=weight.device).detach()
    pull = (-exponent).exp() + exponent - 1.0
    policy_loss = -torch.minimum(weight, fraction) * as_floats(advantages).detach() * finite(logprobs)
    return policy_loss + (1.0 - fraction) * pull, weight > fraction
