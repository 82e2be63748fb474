"""PPO's clip, around the learner or around the behavior policy."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import ratio
from asyncrl.policies.losses.segments import Array, as_floats
from asyncrl.policies.parts import ClipWidth, NonNegative


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
    is_coupled = True

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
