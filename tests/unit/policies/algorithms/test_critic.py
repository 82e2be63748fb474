"""The critic's objective: its loss, and metrics that do not depend on how the batch was cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.policies.algorithms.critic import Critic
from asyncrl.policies.algorithms.objective import ValueInputs
from tests.harness.metric_names import is_known

RETURNS = torch.tensor([1.0, 0.0, 2.0, 1.0])


def inputs(values: torch.Tensor, rows: slice = slice(None), **changes: Any) -> ValueInputs:
    columns = {"values": values, "old_values": values.detach(), "returns": RETURNS} | changes
    of_rows = {name: column[rows] for name, column in columns.items()}
    count = len(of_rows["values"])
    return ValueInputs(
        loss_weights=torch.full((count,), 0.25),
        sequence=torch.zeros(count, dtype=torch.int64),
        num_sequences=1,
        **of_rows,
    )


def test_the_loss_is_half_the_mean_squared_error_and_pulls_values_to_returns() -> None:
    values = torch.tensor([0.0, 0.0, 1.0, 1.0], requires_grad=True)
    loss, _ = Critic().objective(inputs(values))
    assert float(loss.detach()) == pytest.approx(0.5 * (1 + 0 + 1 + 0) / 4)
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.25, 0.0, -0.25, 0.0])


def test_metrics_of_parts_add_up_to_those_of_the_whole() -> None:
    critic, values = Critic(), torch.tensor([0.5, 0.0, 1.0, 1.0])
    _, whole = critic.objective(inputs(values))
    total = critic.zero(torch.device("cpu"))
    for rows in (slice(0, 1), slice(1, 4)):
        total += critic.objective(inputs(values, rows))[1]
    got, expected = critic.metrics(total), critic.metrics(whole)
    assert got == pytest.approx(expected)
    errors = RETURNS.numpy() - values.numpy()
    assert got["critic/explained_variance"] == pytest.approx(1 - np.var(errors) / np.var(RETURNS.numpy()))
    assert got["critic/value_mean"] == pytest.approx(0.625)
    assert got["critic/return_mean"] == pytest.approx(1.0)
    assert all(is_known(name) for name in got)


def test_values_that_moved_past_the_clip_are_counted_and_held_back() -> None:
    values = torch.tensor([0.0, 0.0, 1.9, 1.0], requires_grad=True)
    old = torch.tensor([0.0, 0.0, 0.0, 1.0])
    loss, sums = Critic(clip=0.5).objective(inputs(values, old_values=old))
    assert Critic().metrics(sums)["critic/clip_fraction"] == 0.25
    loss.backward()
    assert values.grad is not None
    assert values.grad[2] == 0.0
    assert (
        Critic().metrics(Critic(clip=0.0).objective(inputs(values, old_values=old))[1])["critic/clip_fraction"] == 0.0
    )


def test_huber_is_linear_in_far_errors() -> None:
    values = torch.tensor([0.0, 0.0, 1.0, 1.0])
    far, _ = Critic(kind="huber", huber_delta=1.0).objective(inputs(values, returns=RETURNS + 100))
    further, _ = Critic(kind="huber", huber_delta=1.0).objective(inputs(values, returns=RETURNS + 200))
    assert float(further - far) == pytest.approx(100.0)
