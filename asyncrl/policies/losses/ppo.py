"""PPO's clip: around the learner or around the behavior policy, per token or with one ratio per sequence (GSPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.policies.component import ClipWidth, NonNegative, Positive
from asyncrl.policies.losses.loss import AnchoredLoss, Loss
from asyncrl.policies.losses.ratios import log_ratio, ratio
from asyncrl.policies.losses.segments import Array, as_floats, segment_mean, spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(Loss):
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)) around an anchor.

    ``dual_clip`` c > 1 also limits the loss to -A c where A < 0; 0 turns it off.
    """

    clip_low: ClipWidth = 0.2
    clip_high: ClipWidth = 0.2
    dual_clip: NonNegative = 0.0

    def problem(self) -> str:
        if 0 < self.dual_clip <= 1:
            return (
                f"dual_clip of {self.name} limits what a bad token may cost to that many times its advantage: use more "
                f"than 1, such as 3, or 0 for none, got {self.dual_clip:g}"
            )
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOClip(Clip):
    """The clip around the proximal policy, r = exp(logprobs - prox logprobs).

    In the first optimizer step on a batch r is 1 and the gradient is -A grad(logprobs); the clip acts only from the
    second step on the same data. Only verl turns on the dual clip of arXiv:1912.09729 eq. 5 (c = 3); ROLL's c is
    1 + 2 x clip. DAPO (arXiv:2503.14476) clips at 0.2 / 0.28.
    """

    name = "ppo_clip"
    paper = "arXiv:1707.06347 eq. 7"

    def formula(self, logprobs: Array, prox_logprobs: Array, advantages: Array) -> tuple[torch.Tensor, torch.Tensor]:
        return clip(ratio(logprobs, prox_logprobs), advantages, self.clip_low, self.clip_high, self.dual_clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPPO(PPOClip):
    """``ppo_clip`` times a correction of exp(prox - behavior logprobs), which the algorithm applies.

    The paper's correction is the whole ratio; elsewhere it is truncated. AReaL without a rejection rule has none.
    """

    name = "decoupled_ppo"
    paper = "arXiv:2110.00641 section 3; AReaL, arXiv:2505.24298 eq. 5"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledPPO(Clip):
    """The clip around the policy that sampled: clip and correction use the same ratio.

    Used by verl's bypass mode, slime with rollout logprobs, and TRL's asynchronous GRPO.
    """

    name = "coupled_ppo"
    paper = "arXiv:1707.06347 eq. 7"

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return clip(ratio(logprobs, behavior_logprobs), advantages, self.clip_low, self.clip_high, self.dual_clip)


def clip(
    r: torch.Tensor, advantages: Array, low: float, high: float, dual_clip: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's pessimistic maximum over the ratio and the clipped ratio; ``clipped`` where the gradient stops."""
    advantage = as_floats(advantages).detach()
    unbounded = -advantage * r
    bounded = -advantage * r.clamp(1.0 - low, 1.0 + high)
    loss, clipped = torch.maximum(unbounded, bounded), (bounded > unbounded).detach()
    if not dual_clip:
        return loss, clipped
    ceiling = -advantage * dual_clip
    is_over = ((advantage < 0) & (loss > ceiling)).detach()
    return torch.where(is_over, ceiling, loss), clipped | is_over


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(AnchoredLoss):
    """``ppo_clip`` where the ratio is the geometric mean of the sequence's token ratios.

    It uses the token form, sg(s) pi / sg(pi), so advantages may differ within a sequence; if they do not, the gradient
    equals that of the sequence form. ``advantage_per`` "sequence" first averages the advantages over the sequence
    (AReaL). The log of the ratio is capped at ``max_log_ratio``, as in verl.

    The clip range is small because the ratio is a mean. Intended for the aggregation ``seq_mean_token_mean`` (the
    paper, verl); AReaL uses the token mean. With one optimizer step per batch, the ratio to the proximal policy is 1
    and nothing is clipped; the ratio to the behavior policy (``anchor``) is clipped.
    """

    name = "gspo"
    paper = "arXiv:2507.18071 eq. 5 and 15"

    clip_low: ClipWidth = 3e-4
    clip_high: ClipWidth = 4e-4
    advantage_per: Literal["token", "sequence"] = "token"
    max_log_ratio: Positive = 10.0

    def formula(
        self,
        logprobs: Array,
        prox_logprobs: Array,
        behavior_logprobs: Array,
        advantages: Array,
        sequence: Array,
        num_sequences: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        center = self.center(prox_logprobs, behavior_logprobs)
        mean = segment_mean(log_ratio(logprobs, center).detach(), sequence, num_sequences=num_sequences)
        exponent = spread(mean, sequence) + log_ratio(logprobs, logprobs)
        if self.advantage_per == "sequence":
            average = segment_mean(as_floats(advantages).detach(), sequence, num_sequences=num_sequences)
            advantages = spread(average, sequence)
        return clip(exponent.clamp(max=self.max_log_ratio).exp(), advantages, self.clip_low, self.clip_high)
