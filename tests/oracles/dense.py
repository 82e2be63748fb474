"""Converts between the vectors' arrays [B, T] with masks and the flat arrays of asyncrl's formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from asyncrl.policies.component import Component
from asyncrl.policies.losses.aggregation import AGGREGATIONS, total


class NotOffered(KeyError):
    """The vector lacks an input of the call, or asks for something that asyncrl does not have."""


class Table(Mapping[str, Any]):
    """Parameters or inputs of a vector; tracks which of them have not been read.

    Looking up a missing name raises NotOffered, so that it cannot be confused with a KeyError of asyncrl's own code.
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
        """Names never looked up; names within tables are prefixed with the table's name."""
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
"""Several outputs are variants of the formula; neither parameters nor inputs say which one is meant."""


class Dense:
    """Converts [B, T] arrays with a mask to flat arrays of response tokens, and back with zeros elsewhere."""

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
        """Return f64[M] of the first of the names that the vector has; a value per sequence is repeated for its
        tokens."""
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
        """Return the batch's loss, using the aggregation of that name."""
        masks = [row.astype(np.float64) for row in self.mask]
        members = np.arange(len(masks)) if group is None else np.asarray(group)
        weights = AGGREGATIONS[mode](**options)(masks, group=members)
        return total(loss, np.stack(weights)[self.mask])

    def gradient(self, number: torch.Tensor, logprobs: torch.Tensor) -> list[Any]:
        (gradient,) = torch.autograd.grad(number, logprobs, retain_graph=True)
        return self.back(gradient)


def one_of(table: Mapping[Any, Any], name: Any) -> Any:
    """Return the entry for the vector's name. Raises NotOffered if the table does not have it."""
    if name not in table:
        raise NotOffered(name)
    return table[name]


def renamed(params: Params, **names: str) -> dict[str, Any]:
    """Return asyncrl's keywords for the parameters that the vector sets; the others keep asyncrl's defaults."""
    return {ours: params[theirs] for ours, theirs in names.items() if theirs in params}


def compute(component: Component, **given: Callable[[], Any]) -> Any:
    """Compute the component's formula. Each input is read from the vector only if the component asks for it."""
    return component.formula(**{name: given[name]() for name in component.inputs})
