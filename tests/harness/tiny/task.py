"""A task whose expected reward is computed exactly, so that learning curves have no evaluation noise.

A prompt is a pair (a, b), 8 x 8 in total. The answer is y_t = (a + b t) mod 8 for t < 6; the reward is 1 when all six
tokens are right. The policy is a net with one hidden layer on (a, b, position, previous token). The expected reward J
is the mean over the 64 prompts of the product of the right tokens' probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

SIZE: Final = 8
LENGTH: Final = 6
HIDDEN: Final = 64
START: Final = SIZE
"""The token before the first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """inputs   f32[2 x SIZE + LENGTH + SIZE + 1, HIDDEN]: one row per value of each feature
    outputs  f32[HIDDEN, SIZE]

    The features' rows are summed, which equals a matrix product with one-hot vectors.
    """

    inputs: torch.Tensor
    hidden_bias: torch.Tensor
    outputs: torch.Tensor
    output_bias: torch.Tensor

    @classmethod
    def new(cls, generator: torch.Generator) -> Policy:
        rows = SIZE + SIZE + LENGTH + SIZE + 1
        return cls(
            inputs=torch.randn(rows, HIDDEN, generator=generator) * 0.5,
            hidden_bias=torch.zeros(HIDDEN),
            outputs=torch.randn(HIDDEN, SIZE, generator=generator) / HIDDEN**0.5,
            output_bias=torch.zeros(SIZE),
        )

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], *, is_trained: bool = False) -> Policy:
        """Return a policy with copies of the tensors from ``named_parameters``."""
        return cls(**{name: tensor.detach().clone().requires_grad_(is_trained) for name, tensor in tensors.items()})

    @property
    def named_parameters(self) -> dict[str, torch.Tensor]:
        return {name: getattr(self, name) for name in Policy.__slots__}

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(self.named_parameters.values())

    def copy(self, *, is_trained: bool = False) -> Policy:
        return Policy.of(self.named_parameters, is_trained=is_trained)

    def distribution(self, prompts: torch.Tensor, positions: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Return logprobs of the next token.  i64[N, 2], i64[N], i64[N] -> f32[N, SIZE]"""
        rows = torch.stack(
            [prompts[:, 0], SIZE + prompts[:, 1], 2 * SIZE + positions, 2 * SIZE + LENGTH + previous], dim=1
        )
        hidden = torch.tanh(self.inputs[rows].sum(1) + self.hidden_bias)
        return torch.log_softmax(hidden @ self.outputs + self.output_bias, dim=1)

    def distributions(self, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Return logprobs at each token of the answers.  i64[N, 2], i64[N, LENGTH] -> f32[N x LENGTH, SIZE]"""
        count = len(prompts)
        previous = torch.cat([torch.full((count, 1), START), answers[:, :-1]], dim=1)
        positions = torch.arange(LENGTH).repeat(count)
        return self.distribution(prompts.repeat_interleave(LENGTH, dim=0), positions, previous.ravel())

    def logprobs(self, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
        """Return logprobs of each token given those before it.  i64[N, 2], i64[N, LENGTH] -> f32[N, LENGTH]"""
        each = self.distributions(prompts, answers)
        return each.gather(1, answers.reshape(-1, 1)).view(answers.shape)

    @torch.no_grad()
    def sample(self, prompts: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sampled answers and their logprobs.  i64[N, 2] -> i64[N, LENGTH], f32[N, LENGTH]"""
        previous = torch.full((len(prompts),), START)
        tokens, logprobs = [], []
        for position in range(LENGTH):
            each = self.distribution(prompts, torch.full_like(previous, position), previous)
            previous = torch.multinomial(each.exp(), 1, generator=generator)[:, 0]
            tokens.append(previous)
            logprobs.append(each.gather(1, previous[:, None])[:, 0])
        return torch.stack(tokens, 1), torch.stack(logprobs, 1)


def all_prompts() -> torch.Tensor:
    """i64[SIZE x SIZE, 2]"""
    return torch.cartesian_prod(torch.arange(SIZE), torch.arange(SIZE))


def right_answers(prompts: torch.Tensor) -> torch.Tensor:
    """i64[N, 2] -> i64[N, LENGTH]"""
    return (prompts[:, :1] + prompts[:, 1:] * torch.arange(LENGTH)) % SIZE


@torch.no_grad()
def expected_reward(policy: Policy) -> float:
    """Return J, the exact mean reward of the policy's samples over all prompts."""
    prompts = all_prompts()
    return float(policy.logprobs(prompts, right_answers(prompts)).sum(1).exp().mean())


def warm_start(seed: int, *, reward: float, noise: float, learning_rate: float = 3e-3) -> Policy:
    """Return a policy trained on labels, a fraction ``noise`` of them random, until J reaches ``reward``."""
    generator = torch.Generator().manual_seed(seed)
    policy = Policy.new(generator).copy(is_trained=True)
    optimizer = torch.optim.Adam(policy.parameters, lr=learning_rate)
    while expected_reward(policy) < reward:
        prompts = all_prompts()[torch.randint(SIZE * SIZE, (128,), generator=generator)]
        right = right_answers(prompts)
        is_noise = torch.rand(right.shape, generator=generator) < noise
        labels = right.where(~is_noise, torch.randint(SIZE, right.shape, generator=generator))
        optimizer.zero_grad()
        (-policy.logprobs(prompts, labels).mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return policy.copy()


def rewards(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1 when every token is right.  i64[N, 2], i64[N, LENGTH] -> f32[N]"""
    return (answers == right_answers(prompts)).all(1).float()
