"""Reductions over the tokens of each sequence."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.losses.segments import segment_count, segment_max, segment_mean, segment_sum, spread


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_reductions_are_those_of_each_sequence_alone(lengths: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=sum(lengths))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    rows = [values[sequence == i] for i in range(len(lengths))]
    size = {"num_sequences": len(lengths)}
    np.testing.assert_allclose(segment_sum(values, sequence, **size), [row.sum() for row in rows], atol=1e-12)
    np.testing.assert_allclose(segment_mean(values, sequence, **size), [row.mean() if len(row) else 0 for row in rows])
    np.testing.assert_allclose(segment_max(values, sequence, **size), [row.max(initial=-np.inf) for row in rows])
    assert segment_count(sequence, **size).tolist() == lengths
    assert spread(torch.arange(len(lengths)), sequence).tolist() == sequence.tolist()


def test_gradients_flow_through_sums_and_means() -> None:
    values = torch.ones(3, requires_grad=True)
    index = torch.tensor([0, 0, 2])
    (segment_mean(values, index, num_sequences=3) * torch.tensor([2.0, 5.0, 7.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [1.0, 1.0, 7.0]
