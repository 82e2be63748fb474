"""CISPO: -w A logprob with a capped, detached ratio w, so that a clip never removes a token's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from asyncrl.config.checks import Range
from asyncrl.policies.component import ClipWidth
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import finite, ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(Loss):
    """-sg(ratio, capped) A logprob: every token keeps a gradient of bounded weight. Clipped: the cap is active.

    ``cap_mode`` defines the options. "one_plus" clips the ratio to [1 - clip_low, 1 + clip_high]. "absolute" clips it
    to at most clip_high, without a lower bound; clip_low is unused. The defaults are ScaleRL's cap of 5
    (arXiv:2510.13786), as in AReaL and SkyRL. verl and slime also use "one_plus" (verl's 0.2 / 0.2 and ROLL's 0.1 clip
    both sides). TRL's 5.0 is absolute, so the same number means another cap there.
    """

    name = "cispo"
    paper = "MiniMax-M1, arXiv:2506.13585 eq. 4"

    cap_mode: Literal["one_plus", "absolute"] = "one_plus"
    clip_low: ClipWidth = 1.0
    clip_high: Annotated[float, Range(low=0.0, is_open=True)] = 4.0

    @classmethod
    def defaults_for(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"clip_high": 5.0} if options.get("cap_mode") == "absolute" else {}

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weight = ratio(logprobs, behavior_logprobs).detach()
        is_relative = self.cap_mode == "one_plus"
        low, high = (1.0 - self.clip_low, 1.0 + self.clip_high) if is_relative else (0.0, self.clip_high)
        capped = weight.clamp(low, high)
        return -capped * as_floats(advantages).detach() * finite(logprobs), capped != weight
