"""A critic for each of the tiny runs that have one: the value of the tokens before a token, by one hidden layer.

Advantages are those of the package's GAE with gamma = lambda = 1, or of BRACE; both are whitened over the batch.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.policies.advantages.advantage import AdvantageInputs
from asyncrl.policies.advantages.returns import GAE, whiten
from benchmarks.old_tokens.candidates import brace
from benchmarks.old_tokens.guards import Guard

_HIDDEN: Final = 48
_SPREAD: Final = 0.1
Floats = NDArray[np.float64]


class Critic:
    """One run's critic, which learns at the policy's rate.  inputs: size of the one-hot encoding of a state"""

    def __init__(self, guard: Guard, *, inputs: int, rate: float, seed: int) -> None:
        self._guard = guard
        generator = torch.Generator().manual_seed(seed)
        self._first = (torch.randn(inputs, _HIDDEN, generator=generator) * _SPREAD).requires_grad_()
        self._bias = torch.zeros(_HIDDEN, requires_grad=True)
        self._last = torch.zeros(_HIDDEN + 1, requires_grad=True)  # starts with values of 0
        weights = [self._first, self._bias, self._last]
        self._optimizer = torch.optim.Adam(weights, lr=rate, betas=(0.9, 0.95))

    def learn(
        self, states: torch.Tensor, final_states: torch.Tensor, ratios: Floats, rewards: Floats, sequence: Any
    ) -> NDArray[np.float32]:
        """Return the advantages of M tokens of B answers by today's values, then take a step towards their targets.

        states i64[M, W], final_states i64[B, W]: places of the ones;  ratios f64[M]: pi / mu;  sequence i64[M]
        """
        values, finals = self._values(states), self._values(final_states)
        before, after = (one.detach().double().numpy() for one in (values, finals))
        if self._guard.critic == "brace":
            advantages, targets = brace(before, after, rewards, ratios, sequence, trace=self._guard.trace)
            made = whiten(advantages).astype(np.float32)
            errors = torch.cat([values - _tensor(targets), finals - _tensor(rewards)])  # V* after the last token is R
        else:
            cut = np.zeros(len(rewards), bool)
            made, returns = GAE().with_returns(
                AdvantageInputs(
                    rewards=rewards,
                    group=np.arange(len(rewards)),
                    sequence=sequence,
                    is_truncated=cut,
                    values=before,
                    final_values=after,
                )
            )
            assert returns is not None
            errors = values - _tensor(returns)
        self._optimizer.zero_grad()
        errors.square().mean().backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return made

    def _values(self, states: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(torch.nn.functional.embedding(states, self._first).sum(-2) + self._bias)
        return hidden @ self._last[:-1] + self._last[-1]


def _tensor(values: Any) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.float32))
