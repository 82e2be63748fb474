"""AIPO: -w A logprob with a ratio w that is capped above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.policies.component import Cap
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import finite, ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class AIPO(Loss):
    """LlamaRL's -sg(min(ratio, cap)) A logprob, or as a "surrogate" -min(ratio, cap) A.

    The two have the same gradient below the cap. Above it, the surrogate (formerly prime-rl's loss) has none. The paper
    gives no cap; 5 is ScaleRL's.
    """

    name = "aipo"
    paper = "LlamaRL, arXiv:2505.24034"

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
