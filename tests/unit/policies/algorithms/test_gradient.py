"""The gradient of the default algorithm, computed by hand, and names that do not exist."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.losses.loss import LossInputs


def inputs(logprobs: torch.Tensor, behavior: torch.Tensor, advantage: torch.Tensor) -> LossInputs:
    return LossInputs(
        staleness=torch.zeros(len(behavior), dtype=torch.int32),
        sequence=torch.zeros(len(behavior), dtype=torch.int64),
        num_sequences=1,
        logprobs=logprobs,
        entropy=torch.zeros_like(logprobs),
        behavior_logprobs=behavior,
        advantages=advantage,
        loss_weights=torch.full_like(logprobs, 1 / len(logprobs)),
        is_fresh=torch.ones(len(logprobs), dtype=torch.bool),
    )


def test_the_grpo_gradient_is_the_truncated_importance_weighted_policy_gradient() -> None:
    # One step per batch: r = 1, so d loss / d logprob = -A * min(ratio, 2) / tokens.
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    behavior = torch.tensor([-1.5, -4.0])
    advantage = torch.tensor([1.0, -0.5])
    total, _ = resolve(ALGORITHMS["grpo"]).objective(inputs(logprobs, behavior, advantage))
    (gradient,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-np.exp(0.5) / 2, 0.5 * 2.0 / 2], dtype=torch.float32))


def test_an_unknown_option_or_correction_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no option 'clip'"):
        resolve(ALGORITHMS["grpo"], options={"clip": 0.1})
    with pytest.raises(ConfigError, match="correction must be one of"):
        resolve(ALGORITHMS["grpo"], correction="tis")
    assert resolve(ALGORITHMS["grpo"], options={"cap": 5}).correction[0].options == {"cap": 5.0}
