"""Base of the policy losses: a number per token, before aggregation, to be minimised. The table is in table.py.

Shapes: the M response tokens of a micro-batch, concatenated, without prompt and observation tokens. A formula may ask
for any field of ``LossInputs`` and for outputs of other models. Gradients flow only through ``logprobs``, ``entropy``
and ``logits``. Numpy arrays are accepted, float64 stays float64, and log ratios are clamped to +-20 before exp.

A loss moves the policy relative to an anchor:
  prox logprobs      the learner at the start of the batch, in its own numerics; a correction covers the rest
  behavior logprobs  the policy that sampled; the loss then corrects and bounds at once, and an additional correction
                     would count the same ratio twice
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from asyncrl.errors import ConfigError
from asyncrl.policies.component import Component
from asyncrl.policies.losses.segments import Array


class LikeliestTokens(NamedTuple):
    """The K likeliest tokens at the place of each response token, with the logprobs of whoever found them likely.

    tokens    i64[M, K], different in each row
    logprobs  f32[M, K], without gradient
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """The inputs of a loss: the M response tokens of one micro-batch, without prompt and observation tokens.

    logprobs           f32[M]   trainer logprobs at the sampling temperature, with gradient
    entropy            f32[M]   entropy of the trainer's distribution, in nats
    behavior_logprobs, advantages, loss_weights  f32[M]
    is_fresh           bool[M]  True if the version being trained sampled every token of the sequence
    staleness          i32[M]   version being trained - version that sampled the token
    sequence           i64[M]   index of the token's sequence among the micro-batch's ``num_sequences``, non-decreasing
    tokens             i64[M]   the tokens themselves
    logits             f32[M, V] of the trainer over the whole vocabulary, divided by the sampling temperature, with
                       gradient; only for a loss whose formula asks for them, because they take 4 V bytes a token and
                       as much again for their gradient
    behavior_likeliest, teacher_likeliest  of the policy that sampled (rollout.top_logprobs) and of a served teacher
                       (teacher.top_logprobs)
    model_outputs      f32[M] each, by name: outputs of other models, and values computed over the whole batch
                       (packing.MicroBatch)
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
    tokens: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    behavior_likeliest: LikeliestTokens | None = None
    teacher_likeliest: LikeliestTokens | None = None
    model_outputs: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def prox_logprobs(self) -> torch.Tensor:
        """Logprobs of the learner before the batch: stored ones if there are several optimizer steps, else its own."""
        return self.model_outputs["prox_logprobs"] if "prox_logprobs" in self.model_outputs else self.logprobs.detach()

    def __getitem__(self, name: str) -> Any:
        """Return a field or a model output by its name."""
        return self.model_outputs[name] if name in self.model_outputs else getattr(self, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Component):
    """Base of all losses.

    ``formula`` returns the loss f32[M] and ``clipped`` bool[M]. A token is clipped if a rule limits its gradient: an
    active clip, a cap, a mask.

    is_supervised  the data need not come from the policy, so staleness does not matter
    """

    is_supervised: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss f32[M] and clipped bool[M].

        Raises ConfigError if the formula returns anything else, or a loss without a gradient.
        """
        made = self.formula(**{name: inputs[name] for name in self.inputs})
        shape = inputs.logprobs.shape  # a mean would spread over all tokens without a word
        if not isinstance(made, tuple) or [getattr(one, "shape", None) for one in made] != [shape, shape]:
            found = (
                [list(getattr(one, "shape", ())) for one in made] if isinstance(made, tuple) else type(made).__name__
            )
            raise ConfigError(
                f"algorithm.loss: {self.name}.formula must return two tensors, the loss of each token and whether it "
                f"was clipped, both of shape {list(shape)}, and returned {found}"
            )
        if inputs.logprobs.requires_grad and not made[0].requires_grad:  # a KL term beside it would hide that
            raise ConfigError(
                f"algorithm.loss: {self.name}.formula returned a loss without a gradient; let it depend on logprobs, "
                "without .detach(), .item() or numpy on the way"
            )
        return made

    def trained_advantages(self, inputs: LossInputs) -> torch.Tensor:
        """Return the advantages that the loss trains on, for masks that need them.  f32[M]"""
        return inputs.advantages

    def kept(self, prox_logprobs: Array, behavior_logprobs: Array) -> torch.Tensor:
        """Return ``keep``: the tokens of the batch that the loss trains, if it asks for that.  f32[N] x 2 -> bool[N]"""
        return torch.ones(len(prox_logprobs), dtype=torch.bool)

    @property
    def is_of_many_steps(self) -> bool:
        """Whether several optimizer steps per batch are valid: the loss has a ratio to an anchor, or is supervised."""
        return self.is_supervised or bool({"prox_logprobs", "behavior_logprobs"} & set(self.inputs))

    @property
    def is_around_behavior(self) -> bool:
        """Whether, with these options, the loss itself weights or bounds policy / behavior. No correction may weight by
        that ratio again."""
        return "behavior_logprobs" in self.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchoredLoss(Loss):
    """A loss that can use either anchor.

    anchor  "behavior" bounds the distance to the policy that sampled, so no correction may weight by that ratio again
    """

    anchor: Literal["prox", "behavior"] = "prox"

    @property
    def is_around_behavior(self) -> bool:
        return self.anchor == "behavior"

    def center(self, prox_logprobs: Array, behavior_logprobs: Array) -> Array:
        """Return the logprobs of the anchor.  f32[M] x 2 -> f32[M]"""
        return behavior_logprobs if self.is_around_behavior else prox_logprobs


def never(loss: torch.Tensor) -> torch.Tensor:
    """Return ``clipped`` for a loss that never clips.  f32[M] -> bool[M]"""
    return torch.zeros_like(loss, dtype=torch.bool)
