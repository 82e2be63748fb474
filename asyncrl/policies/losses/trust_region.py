"""Losses that bound how far the policy moves from an anchor: clipped, gated or masked ratios."""

from __future__ import annotations

from typing import Literal

import torch

from asyncrl.policies.losses.ratios import finite, live_one, log_ratio, ratio
from asyncrl.policies.segments import Array, as_floats, segment_mean, spread


def ppo_clip(
    logprobs: Array,
    prox_logprobs: Array,
    advantages: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) with r = exp(logprobs - prox_logprobs).

    f32[M] x 3 -> loss f32[M], clipped bool[M] (where a clip stops the gradient). With ``dual_clip`` c > 1 also at most
    -A c where A < 0. With one optimizer step per batch r is 1 and the gradient is -A grad(logprobs): the clip acts from
    the second step on the same data on.

    Source: PPO, arXiv:1707.06347 eq. 7; dual clip arXiv:1912.09729 eq. 5, on (c = 3) in verl only; ROLL's c is
    1 + 2 x clip. DAPO (arXiv:2503.14476) clips higher: 0.2 / 0.28.
    """
    return _clip(ratio(logprobs, prox_logprobs), advantages, low=clip_low, high=clip_high, dual_clip=dual_clip)


def coupled_ppo(
    logprobs: Array,
    behavior_logprobs: Array,
    advantages: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``ppo_clip`` around what sampled instead of around the learner: clip and correction are one ratio.

    f32[M] x 3 -> loss f32[M], clipped bool[M]. No importance weight may come on top: it would count the ratio twice.
    verl's bypass mode, slime with rollout logprobs, TRL's asynchronous GRPO.
    """
    return ppo_clip(
        logprobs, behavior_logprobs, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


def decoupled_ppo(
    logprobs: Array,
    prox_logprobs: Array,
    advantages: Array,
    *,
    weights: Array,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """sg(w) x ``ppo_clip`` around the proximal policy.  f32[M] x 4 -> loss f32[M], clipped bool[M]

    ``weights`` f32[M] is a correction of exp(prox - behavior logprobs), 0 where rejected: the identity in the paper,
    truncated elsewhere. AReaL without a rejection rule applies none at all.

    Source: arXiv:2110.00641 section 3; AReaL, arXiv:2505.24298 eq. 5.
    """
    weight = as_floats(weights).detach()
    loss, clipped = ppo_clip(
        logprobs, prox_logprobs, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return torch.where(weight == 0, 0.0, weight * loss), clipped


def gspo(
    logprobs: Array,
    prox_logprobs: Array,
    advantages: Array,
    *,
    sequence: Array,
    num_sequences: int,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    max_log_ratio: float = 10.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``ppo_clip`` with one ratio per sequence: the geometric mean of its token ratios.

    f32[M] x 3, i64[M] -> loss f32[M], clipped bool[M]. In the form per token, sg(s) pi / sg(pi), so that advantages may
    differ within a sequence; where they do not, the gradient is that of the form per sequence. The log of the ratio is
    capped at ``max_log_ratio``, as in verl.

    Source: GSPO, arXiv:2507.18071 eq. 5 and 15; its clip range is small as the ratio is a mean. Meant with the
    aggregation ``seq_mean_token_mean`` (the paper, verl); AReaL takes the token mean. With one optimizer step per batch
    the ratio to the proximal policy is 1 and nothing is clipped; around the behavior logprobs it is.
    """
    mean = segment_mean(log_ratio(logprobs, prox_logprobs).detach(), sequence, num_sequences=num_sequences)
    exponent = spread(mean, sequence) + log_ratio(logprobs, logprobs)
    return _clip(exponent.clamp(max=max_log_ratio).exp(), advantages, low=clip_low, high=clip_high)


def aspo(
    logprobs: Array,
    prox_logprobs: Array,
    advantages: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    cap_positive: float = 3.0,
    cap_negative: float = 3.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``ppo_clip``, but good tokens weigh 1/r: the rarer one has become, the more it is pulled up again.

    f32[M] x 3 -> loss f32[M], clipped bool[M] (no gradient). Good (A > 0): no gradient where r > 1 + clip_high, else
    weight 1/r. Bad: PPO's clip. Weights over the caps are cut to them and keep their gradient (a soft dual clip).

    Source: ASPO, arXiv:2510.06062 section 3, as Archer2.0 has it.
    """
    advantage = as_floats(advantages).detach()
    r = ratio(logprobs, prox_logprobs)
    gradient = live_one(logprobs)
    is_past = r.detach() > 1.0 + clip_high
    good_weight = torch.where(is_past, 1.0 / (1.0 + clip_high), (1.0 / r.detach()).clamp(max=cap_positive) * gradient)
    bad, bad_clipped = _clip(r, advantage, low=clip_low, high=clip_high)
    bad = torch.where(r.detach() > cap_negative, -advantage * cap_negative * gradient, bad)
    good = advantage > 0
    return torch.where(good, -advantage * good_weight, bad), torch.where(good, is_past, bad_clipped)


def sapo(
    logprobs: Array,
    anchor_logprobs: Array,
    advantages: Array,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-A ``sapo_gate``: a clip without an edge.  f32[M] x 3 -> loss f32[M], clipped bool[M] (never)

    At r = 1 the gradient is REINFORCE's; away from it on either side it fades. Source: SAPO, arXiv:2511.20347 eq. 5;
    1.0 and 1.05 in verl, AReaL, SkyRL and TRL.
    """
    advantage = as_floats(advantages).detach()
    gate = sapo_gate(logprobs, anchor_logprobs, advantage, tau_positive=tau_positive, tau_negative=tau_negative)
    return -advantage * gate, torch.zeros_like(advantage, dtype=torch.bool)


def sapo_gate(
    logprobs: Array,
    anchor_logprobs: Array,
    advantages: Array,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> torch.Tensor:
    """(4 / tau) sigmoid(tau (r - 1)), tau by the sign of the advantage.  f32[M] x 3 -> f32[M] in (0, 4 / tau)"""
    r = ratio(logprobs, anchor_logprobs)
    is_positive = as_floats(advantages).detach() > 0
    tau = torch.where(is_positive, r.new_tensor(tau_positive), r.new_tensor(tau_negative))
    return 4.0 / tau * torch.sigmoid(tau * (r - 1.0))


def dppo(
    logprobs: Array,
    behavior_logprobs: Array,
    advantages: Array,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    delta_low: float = 0.2,
    delta_high: float = 0.2,
    ratio_cap: float | None = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-sg(min(r, cap)) A logprob, 0 where the token's probability has moved far and A would move it further.

    f32[M] x 3 -> loss f32[M], clipped bool[M] (masked). Far is a divergence of the two-outcome distribution {this
    token, any other} over ``delta_high`` upwards (A > 0) or ``delta_low`` downwards: total variation |pi - mu|, or
    KL(mu || pi) in nats (0.05 in a run file then). A rare token may change its ratio a lot and is not masked for it.

    Source: DPPO, arXiv:2602.04879; the cap of 20 is verl's, whose value (not gradient) differs from the paper's -A r.
    SkyRL has no cap.
    """
    advantage = as_floats(advantages).detach()
    policy, behavior = finite(logprobs).detach(), finite(behavior_logprobs).detach()
    moved = policy.exp() - behavior.exp()
    distance = moved.abs() if divergence == "tv" else _binary_kl(behavior, policy)
    is_far_up = (distance > delta_high) & (moved > 0) & (advantage > 0)
    is_far_down = (distance > delta_low) & (moved < 0) & (advantage < 0)
    masked = is_far_up | is_far_down
    weight = ratio(logprobs, behavior_logprobs).detach().clamp(max=ratio_cap)
    return torch.where(masked, 0.0, -weight * advantage * finite(logprobs)), masked


def m2po(logprobs: Array, prox_logprobs: Array, advantages: Array, *, keep: Array) -> tuple[torch.Tensor, torch.Tensor]:
    """-A r without a clip, 0 for the tokens that ``m2po_mask`` does not keep.

    f32[M] x 3, bool[M] -> loss f32[M], clipped bool[M] (not kept). Source: M2PO, arXiv:2510.01161; AReaL. The authors'
    own repository clips instead, in a range it adapts to the tokens that A would move further; not offered.
    """
    kept = torch.as_tensor(keep).bool()
    loss = -as_floats(advantages).detach() * ratio(logprobs, prox_logprobs)
    return torch.where(kept, loss, 0.0), ~kept


def m2po_mask(prox_logprobs: Array, behavior_logprobs: Array, *, threshold: float = 0.04) -> torch.Tensor:
    """The tokens left when those of largest squared log ratio are taken out until its mean is below the threshold.

    f32[N] x 2 over all response tokens of the batch -> bool[N]; at least one token is kept, the one nearest the policy.
    The second moment is the batch's, so this is decided before the batch is cut up: on one part of it the rule holds
    for the part. Source: M2PO, arXiv:2510.01161 section 3.3, threshold 0.04.
    """
    squares = log_ratio(prox_logprobs, behavior_logprobs).detach().double().square()
    ordered, order = squares.sort(stable=True)
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    # Means of ever larger squares only grow, so the kept ones are a prefix.
    count = max(int((means < threshold).sum()), min(len(ordered), 1))
    kept = torch.zeros_like(squares, dtype=torch.bool)
    kept[order[:count]] = True
    return kept


def _clip(
    r: torch.Tensor, advantages: Array, *, low: float, high: float, dual_clip: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's pessimistic maximum over the ratio and the clipped ratio; ``clipped`` where the gradient stops."""
    advantage = as_floats(advantages).detach()
    unbounded = -advantage * r
    bounded = -advantage * r.clamp(1.0 - low, 1.0 + high)
    loss, clipped = torch.maximum(unbounded, bounded), (bounded > unbounded).detach()
    if dual_clip is None:
        return loss, clipped
    ceiling = -advantage * dual_clip
    is_over = ((advantage < 0) & (loss > ceiling)).detach()
    return torch.where(is_over, ceiling, loss), clipped | is_over


def _binary_kl(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """KL of {token, any other} between two policies, from the token's logprobs, in nats."""
    left_other, right_other = _log_of_others(left), _log_of_others(right)
    return left.exp() * (left - right) + left_other.exp() * (left_other - right_other)


def _log_of_others(logprobs: torch.Tensor) -> torch.Tensor:
    """log(1 - p), finite where p rounds to 1."""
    others: torch.Tensor = -torch.expm1(logprobs)
    return others.clamp(min=1e-30).log()
