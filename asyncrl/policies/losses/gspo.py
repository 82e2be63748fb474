"""GSPO: PPO's clip with one ratio per sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from asyncrl.policies.losses.loss import AnchoredLoss
from asyncrl.policies.losses.ppo import clip
from asyncrl.policies.losses.ratios import log_ratio
from asyncrl.policies.losses.segments import Array, as_floats, segment_mean, spread
from asyncrl.policies.parts import ClipWidth, Positive


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
