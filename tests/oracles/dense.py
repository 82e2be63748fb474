"""Oracle vectors' arrays [B, T] with masks to the flat arrays of our formulas, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from asyncrl.policies.losses.aggregation import AGGREGATIONS, total
from asyncrl.policies.parts import Part


class NotOffered(KeyError):
    """The vector lacks what the call needs, or asks for what we do not have."""


class Table(Mapping[str, Any]):
    """Parameters or inputs of a vector, and which of them nobody has read.

    Looking up what it lacks raises NotOffered; a KeyError of our own code is another matter.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise NotOffered(name)
        if name not in self._read:
            self._read[name] = _wrapped(self._values[name])
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        raise TypeError("read parameters and inputs by name: a copy of them all would pass for having read them")

    def __len__(self) -> int:
        return len(self._values)

    @property
    def unread(self) -> set[str]:
        """Names never looked up, those within tables with the name of the table in front."""
        within = {
            f"{name}.{inner}"
            for name, value in self._read.items()
            for table in (value if isinstance(value, list) else [value])
            if isinstance(table, Table)
            for inner in table.unread
        }
        return set(self._values) - set(self._read) | within


def _wrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return Table(value)
    is_table = isinstance(value, list) and value and all(isinstance(row, Mapping) for row in value)
    return [Table(row) for row in value] if is_table else value


Params = Inputs = Table
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

    def total(self, loss: torch.Tensor, mode: str = "token_mean", *, group: Any = None, **options: Any) -> torch.Tensor:
        """The batch's loss, by the aggregation of that name."""
        masks = [row.astype(np.float64) for row in self.mask]
        members = np.arange(len(masks)) if group is None else np.asarray(group)
        weights = AGGREGATIONS[mode](**options)(masks, group=members)
        return total(loss, np.stack(weights)[self.mask])

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


def compute(part: Part, **given: Callable[[], Any]) -> Any:
    """The part's formula, of what it asks for: each input is read from the vector only then."""
    return part.formula(**{name: given[name]() for name in part.inputs})
