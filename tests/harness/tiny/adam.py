"""AdamW, identical to torch.optim's to the last bit, without its imports.

The first step of a torch optimizer imports torch._dynamo, which costs each starting learner 1.7 s of CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch


class Adam:
    def __init__(
        self, parameters: Sequence[torch.Tensor], *, betas: tuple[float, float], eps: float, weight_decay: float
    ) -> None:
        self._parameters = parameters
        self._betas, self._eps, self._weight_decay = betas, eps, weight_decay
        self._steps = 0
        self._means = [torch.zeros_like(parameter) for parameter in parameters]
        self._squares = [torch.zeros_like(parameter) for parameter in parameters]

    def clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self._steps += 1
        first, second = self._betas
        scale = -learning_rate / (1 - first**self._steps)
        root = math.sqrt(1 - second**self._steps)
        for parameter, mean, square in zip(self._parameters, self._means, self._squares, strict=True):
            assert parameter.grad is not None
            parameter.mul_(1 - learning_rate * self._weight_decay)
            mean.lerp_(parameter.grad, 1 - first)
            square.mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
            parameter.addcdiv_(mean, (square.sqrt() / root).add_(self._eps), value=scale)

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, "means": self._means, "squares": self._squares}

    def load(self, state: dict[str, Any]) -> None:
        self._steps, self._means, self._squares = state["steps"], state["means"], state["squares"]
