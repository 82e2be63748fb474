"""Losses -w A logprob with a capped, detached ratio w, so that a clip never removes a token's gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch

from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import finite, ratio
from asyncrl.policies.losses.segments import Array, as_floats
from asyncrl.policies.parts import Cap, ClipWidth, Range


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
    is_coupled = True

    cap_mode: Literal["one_plus", "absolute"] = "one_plus"
    clip_low: ClipWidth = 1.0
    clip_high: Annotated[float, Range(low=0.0, is_open=True, is_finite=False)] = 4.0

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AIPO(Loss):
    """LlamaRL's -sg(min(ratio, cap)) A logprob, or as a "surrogate" -min(ratio, cap) A.

    The two have the same gradient below the cap. Above it, the surrogate (formerly prime-rl's loss) has none. The paper
    gives no cap; 5 is ScaleRL's.
    """

    name = "aipo"
    paper = "LlamaRL, arXiv:2505.24034"
    is_coupled = True

    cap: Cap = 5.0
    form: Literal["weight", "surrogate"] = "weight"

    def formula(
        self, logprobs: Array, behavior_logprobs: Array, advantages: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        live, advantage = ratio(logprobs, behavior_logprobs), as_floats(advantages).detach()
        capped, is_over = live.clamp(max=self.cap), (live > self.cap).detach()
        if self.form == "surrogate":
            return -capped * advantage, is_over
        return -capped.detach() * advantage * finite(logprobs), is_over
