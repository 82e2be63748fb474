"""M2PO: bounds the second moment of the log ratios by leaving out the most distant tokens of the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from asyncrl.policies.component import Positive
from asyncrl.policies.losses.loss import Loss
from asyncrl.policies.losses.ratios import log_ratio, ratio
from asyncrl.policies.losses.segments import Array, as_floats


@dataclass(frozen=True, slots=True, kw_only=True)
class M2PO(Loss):
    """-A r without a clip; 0 for the tokens that ``kept`` leaves out. Clipped: left out.

    ``keep`` is computed over the whole batch before it is split (batching/model_outputs.py), as in AReaL. The authors'
    own repository instead clips, with a range adapted to the tokens that A would move further; this is not offered.
    """

    name = "m2po"
    paper = "arXiv:2510.01161"

    threshold: Positive = 0.04

    def formula(
        self, logprobs: Array, prox_logprobs: Array, advantages: Array, keep: Array
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kept = torch.as_tensor(keep).bool()
        loss = -as_floats(advantages).detach() * ratio(logprobs, prox_logprobs)
        return torch.where(kept, loss, 0.0), ~kept

    def kept(self, prox_logprobs: Array, behavior_logprobs: Array) -> torch.Tensor:
        """Drop the tokens with the largest squared log ratios until the mean is below ``threshold``; return the rest.

        f32[N] x 2 over all response tokens of the batch -> bool[N]. At least one token is kept, the one nearest to the
        policy. Source: arXiv:2510.01161 section 3.3, threshold 0.04.
        """
        squares = log_ratio(prox_logprobs, behavior_logprobs).detach().double().square()
        ordered, order = squares.sort(stable=True)
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
        # Means over ever larger squares only grow, so the kept tokens are a prefix.
        count = max(int((means < self.threshold).sum()), min(len(ordered), 1))
        kept = torch.zeros_like(squares, dtype=torch.bool)
        kept[order[:count]] = True
        return kept
