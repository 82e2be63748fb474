"""Base of the off-policy corrections: how much a token counts that something other than the learner's policy sampled.

A correction is a *weight* (an importance ratio, tamed) or a *mask* (1 keeps, 0 rejects); chains.py multiplies them.
``log_ratio`` f32[M] is proximal - behavior logprobs: the learner's weights at the start of the step, in the learner's
numerics, against whatever really sampled the token. So it covers staleness and engine mismatch at once, also where the
tokens of a sequence come from several versions. Shapes as in losses/segments.py: M tokens of S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from asyncrl.policies.losses.segments import Array
from asyncrl.policies.parts import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionInputs:
    """What corrections may look at: M tokens of S sequences.

    log_ratio    f32[M]  proximal - behavior logprobs
    sequence     i64[M]  which sequence a token belongs to;  num_sequences  S
    advantages   f32[M]
    mean_weight  of the whole batch, for self_norm alone; 1.0 when the caller divides the summed gradients by it
    """

    log_ratio: Array
    sequence: Array
    num_sequences: int
    advantages: Array
    mean_weight: float | torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction(Part):
    """``formula`` takes fields of CorrectionInputs and returns f32[M] without gradient: the factor of each token.

    kind   "weight" (a ratio, of which a chain has at most one), "mask" (0 and 1), or "norm", whose formula takes the
           ``weights`` made so far and returns others
    level  of a weight: "token", or "sequence" where all tokens of a sequence carry the same
    """

    kind: ClassVar[Literal["weight", "mask", "norm"]] = "weight"
    level: ClassVar[Literal["token", "sequence"]] = "token"

    def apply(self, weights: torch.Tensor, inputs: CorrectionInputs) -> torch.Tensor:
        """``weights`` with this correction's factor.  f32[M] -> f32[M].  Raises ValueError when an input is missing."""
        given = {name: weights if name == "weights" else getattr(inputs, name) for name in self.inputs}
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise ValueError(f"correction {self.name} needs {', '.join(missing)} of the whole batch")
        made: torch.Tensor = self.formula(**given)
        return made if self.kind == "norm" else weights * made


def bounds_problem(correction: Correction, low: float, high: float) -> str:
    """What is wrong with bounds that nothing lies between; empty if nothing is."""
    return "" if low < high else f"low of {correction.name} must be < its high, got {low:g} and {high:g}"
