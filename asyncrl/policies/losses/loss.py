"""Base of the policy losses: a number per token before aggregation, to be minimised. The table is table.py.

Shapes: the M response tokens of a micro-batch, end to end; prompt and observation tokens are left out. A formula may
ask for any field of ``LossInputs`` and for the scores of other models. Gradients flow through ``logprobs`` alone.
Numpy arrays are accepted, float64 stays float64, log ratios are clamped to +-20 before exp.

A loss moves the policy relative to an anchor. *prox logprobs*: the learner at the start of the batch, in its own
numerics; what that does not cover is left to a correction. *behavior logprobs*: the policy that sampled; the loss then
corrects and bounds at once, and a correction on top would count the same ratio twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from asyncrl.policies.losses.segments import Array
from asyncrl.policies.parts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The response tokens of one micro-batch, M of them, without prompt and observation tokens.

    logprobs           f32[M]  trainer logprobs at the sampling temperature, with gradient
    entropy            f32[M]  of the trainer's distribution, in nats
    behavior_logprobs, advantages, loss_weights  f32[M]
    is_fresh           bool[M]  the version being trained sampled the token and all before it
    staleness          i32[M]   version being trained - version that sampled the token
    sequence           i64[M]   which of the micro-batch's ``num_sequences`` documents the token belongs to, rising
    scores             f32[M] each, by name: what other models say of the tokens, and what is decided over the whole
                       batch (packing.MicroBatch)
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    behavior_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_weights: torch.Tensor
    is_fresh: torch.Tensor
    staleness: torch.Tensor
    sequence: torch.Tensor
    num_sequences: int
    scores: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def prox_logprobs(self) -> torch.Tensor:
        """The learner before the batch: itself, or what it said then when it takes several optimizer steps."""
        return self.scores["prox_logprobs"] if "prox_logprobs" in self.scores else self.logprobs.detach()

    def __getitem__(self, name: str) -> Any:
        """A field or a score by its name."""
        return self.scores[name] if name in self.scores else getattr(self, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Part):
    """``formula`` returns the loss f32[M] and ``clipped`` bool[M]: where the rule, not the advantage, limits the
    gradient (an active clip, a cap, a mask).

    is_coupled     the loss weights or bounds policy / behavior itself, so no correction may weight by it again
    is_supervised  the data need not come from the policy: staleness does not matter
    """

    is_coupled: ClassVar[bool] = False
    is_supervised: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss f32[M] and clipped bool[M]."""
        made: tuple[torch.Tensor, torch.Tensor] = self.formula(**{name: inputs[name] for name in self.inputs})
        return made

    def trained_advantages(self, inputs: LossInputs) -> torch.Tensor:
        """The advantages that the loss trains on, for masks that look at them.  f32[M]"""
        return inputs.advantages

    def kept(self, prox_logprobs: Array, behavior_logprobs: Array) -> torch.Tensor:
        """``keep`` of a loss that asks for it: which tokens of the whole batch it trains.  f32[N] x 2 -> bool[N]"""
        return torch.ones(len(prox_logprobs), dtype=torch.bool)

    @property
    def is_of_many_steps(self) -> bool:
        """Whether it may take several optimizer steps on a batch: it has a ratio to an anchor, or no policy sampled."""
        return self.is_supervised or bool({"prox_logprobs", "behavior_logprobs"} & set(self.inputs))

    @property
    def is_around_behavior(self) -> bool:
        """Whether the ratio to the behavior policy is part of the loss with these options."""
        return self.is_coupled


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchoredLoss(Loss):
    """A loss that may move the policy relative to either anchor.

    anchor  "behavior" bounds the distance to the policy that sampled, so no correction may weight by it again
    """

    anchor: Literal["prox", "behavior"] = "prox"

    @property
    def is_around_behavior(self) -> bool:
        return self.anchor == "behavior"

    def center(self, prox_logprobs: Array, behavior_logprobs: Array) -> Array:
        """Logprobs of the anchor.  f32[M] x 2 -> f32[M]"""
        return behavior_logprobs if self.is_around_behavior else prox_logprobs


def never(loss: torch.Tensor) -> torch.Tensor:
    """``clipped`` of a loss that never clips.  f32[M] -> bool[M]"""
    return torch.zeros_like(loss, dtype=torch.bool)
