"""Oracle vectors' arrays [B, T] with masks to the flat arrays of our formulas, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from asyncrl.policies import aggregation


class NotOffered(KeyError):
    """The vector lacks what the call needs, or asks for what we do not have."""


class Inputs(Mapping[str, Any]):
    """A table of a vector. Looking up what it lacks raises NotOffered; a KeyError of our own code is another matter."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise NotOffered(name)
        value = self._values[name]
        if isinstance(value, Mapping):
            return Inputs(value)
        is_table = isinstance(value, list) and all(isinstance(row, Mapping) for row in value)
        return [Inputs(row) for row in value] if is_table else value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Params(Inputs):
    """The parameters of a vector, and which of them are ``unread``."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.unread = set(values)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.unread.discard(name)
        return value

    def __iter__(self) -> Iterator[str]:
        raise TypeError("read parameters by name: a copy of them all would pass for having read them")


Outputs = dict[str, Any]
Adapter = Callable[[Params, Inputs], Outputs | list[Outputs]]
"""Several outputs are variants of the formula where neither parameters nor inputs say which one is meant."""


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


def one_of(table: Mapping[Any, Any], name: Any) -> Any:
    """What the vector's word means. Raises NotOffered for one that is not in the table."""
    if name not in table:
        raise NotOffered(name)
    return table[name]


def renamed(params: Params, **names: str) -> dict[str, Any]:
    """Keywords of ours from the parameters that the vector sets; what it leaves out keeps our default."""
    return {ours: params[theirs] for ours, theirs in names.items() if theirs in params}
