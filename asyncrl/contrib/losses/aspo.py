"""ASPO: good tokens are weighted by the inverse ratio."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.policies.component import Cap, ClipWidth
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ppo import clip
from asyncrl.policies.losses.ratios import live_one, ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ASPO(Loss):
    """``coupled_ppo``, but good tokens have weight 1/r: the rarer a good token has become, the more it is pulled up.

    Good (A > 0): no gradient where r > 1 + clip_high, else weight 1/r. Bad: PPO's clip. Weights over the caps are
    reduced to the caps and keep their gradient (a soft dual clip), as in Archer2.0.
    """

    name = "aspo"
    paper = "arXiv:2510.06062 section 3"

    clip_low: ClipWidth = 0.2
    clip_high: ClipWidth = 0.2
    cap_positive: Cap = 3.0
    cap_negative: Cap = 3.0

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        advantage = as_floats(advantages).detach()
        r = ratio(logprobs, behavior_logprobs)
        gradient = live_one(logprobs)
        is_past = r.detach() > 1.0 + self.clip_high
        inverse = (1.0 / r.detach()).clamp(max=self.cap_positive) * gradient
        good_weight = torch.where(is_past, 1.0 / (1.0 + self.clip_high), inverse)
        bad, bad_clipped = clip(r, advantage, self.clip_low, self.clip_high)
        bad = torch.where(r.detach() > self.cap_negative, -advantage * self.cap_negative * gradient, bad)
        good = advantage > 0
        return torch.where(good, -advantage * good_weight, bad), torch.where(good, is_past, bad_clipped)
