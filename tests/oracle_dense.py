"""Oracle vectors' arrays [B, T] with masks to the flat arrays of our formulas, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from asyncrl.policies import aggregation

Params = Mapping[str, Any]
Inputs = Mapping[str, Any]
Outputs = dict[str, Any]


class Dense:
    """[B, T] arrays and their mask to the flat arrays of the response tokens, and back with zeros in between."""

    def __init__(self, inputs: Inputs, *, like: str) -> None:
        shape = np.shape(inputs[like])
        self.inputs = inputs
        self.shape = shape
        self.mask = np.asarray(inputs.get("mask", np.ones(shape))).reshape(-1, shape[-1]) > 0
        self.sequence = torch.as_tensor(np.nonzero(self.mask)[0])
        self.positions = np.nonzero(self.mask)[1]
        self.num_sequences = len(self.mask)
        self.segments = {"sequence": self.sequence, "num_sequences": self.num_sequences}

    def flat(self, *names: str) -> torch.Tensor:
        """f64[M] of the first of the names that the vector has; a value per sequence goes to its tokens."""
        name = next((name for name in names if name in self.inputs), names[0])
        array = np.asarray(self.inputs[name], np.float64)
        if array.ndim == 1 and len(self.shape) == 2:
            array = np.repeat(array[:, None], self.shape[-1], axis=1)
        return torch.tensor(array.reshape(self.mask.shape)[self.mask])

    def live(self, *names: str) -> torch.Tensor:
        return self.flat(*names).requires_grad_()

    def back(self, tokens: Any) -> list[Any]:
        flat = torch.as_tensor(tokens).detach().numpy()
        dense = np.zeros(self.mask.shape, flat.dtype)
        dense[self.mask] = flat
        return dense.reshape(self.shape).tolist()

    def total(self, loss: torch.Tensor, mode: str = "token_mean", **options: Any) -> torch.Tensor:
        """The batch's loss, by the aggregation of that name."""
        masks = [row.astype(np.float64) for row in self.mask]
        weights = getattr(aggregation, mode)(masks, **options)
        return aggregation.total(loss, np.stack(weights)[self.mask])

    def gradient(self, number: torch.Tensor, logprobs: torch.Tensor) -> list[Any]:
        (gradient,) = torch.autograd.grad(number, logprobs, retain_graph=True)
        return self.back(gradient)


def renamed(params: Params, **names: str) -> dict[str, Any]:
    """Keywords of ours from the parameters that the vector sets; what it leaves out keeps our default."""
    return {ours: params[theirs] for ours, theirs in names.items() if theirs in params}


CLIP = {"clip_low": "eps_low", "clip_high": "eps_high"}
STD = {0: "biased", 1: "unbiased"}
