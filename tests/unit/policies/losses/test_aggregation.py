"""Means over tokens, answers and prompts, and sums over the segments of a batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies.losses.aggregation import (
    AGGREGATIONS,
    Aggregation,
    PromptMean,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    SeqMeanTokenSumNorm,
    total,
)
from asyncrl.policies.losses.segments import segment_count, segment_max, segment_mean, segment_sum, spread

MASKS = [np.array(row, bool) for row in ([1, 1, 0, 1], [1, 1], [0, 0, 0], [1])]  # 3 + 2 + 0 + 1 tokens
GROUP = [7, 7, 9, 9]

MODES: dict[str, Aggregation] = {
    name: SeqMeanTokenSumNorm(max_response_tokens=10.0) if kind is SeqMeanTokenSumNorm else kind()
    for name, kind in AGGREGATIONS.items()
}

# Token weights of each trajectory, computed by hand: 4 trajectories, 6 tokens, 2 prompts with 5 tokens and 1 token.
EXPECTED = {
    "token_mean": [1 / 6, 1 / 6, 0, 1 / 6],
    "token_sum": [1, 1, 0, 1],
    "seq_mean_token_mean": [1 / 12, 1 / 8, 0, 1 / 4],
    "seq_mean_token_sum": [1 / 4, 1 / 4, 0, 1 / 4],
    "seq_mean_token_sum_norm": [1 / 40, 1 / 40, 0, 1 / 40],
    "prompt_mean": [1 / 10, 1 / 10, 0, 1 / 2],
}


@pytest.mark.parametrize("mode", MODES)
def test_a_token_weighs_what_its_mode_says(mode: str) -> None:
    for weights, mask, expected in zip(MODES[mode](MASKS, group=GROUP), MASKS, EXPECTED[mode], strict=True):
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights, mask * expected, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_without_tokens_has_weights_of_zero(mode: str) -> None:
    nothing = [np.zeros_like(mask) for mask in MASKS]
    assert not np.concatenate(MODES[mode](nothing, group=GROUP)).any()
    assert MODES[mode]([], group=[]) == []


@pytest.mark.parametrize(
    ("counted", "skipped"),
    [
        (SeqMeanTokenMean(), SeqMeanTokenMean(masked_answers="skip")),
        (SeqMeanTokenSum(), SeqMeanTokenSum(masked_answers="skip")),
        (SeqMeanTokenSumNorm(), SeqMeanTokenSumNorm(masked_answers="skip")),
    ],
)
def test_an_answer_without_a_trained_token_counts_in_the_mean_unless_it_is_skipped(
    counted: Aggregation, skipped: Aggregation
) -> None:
    """One of four answers is masked: the other three share the whole mean, a third each instead of a quarter."""
    for one, other in zip(counted(MASKS, group=GROUP), skipped(MASKS, group=GROUP), strict=True):
        np.testing.assert_allclose(other, one * 4 / 3, rtol=1e-6)


def test_a_prompt_without_a_trained_token_counts_in_the_mean_unless_it_is_skipped() -> None:
    alone = [7, 7, 8, 9]
    for mask, one, other in zip(
        MASKS, PromptMean()(MASKS, group=alone), PromptMean(masked_prompts="skip")(MASKS, group=alone), strict=True
    ):
        assert mask.any() == other.any()
        np.testing.assert_allclose(other, one * 3 / 2, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
def test_gradients_do_not_depend_on_how_the_batch_is_cut(mode: str, data: st.DataObject) -> None:
    """Trajectories are dealt to ranks and micro-batches in any way; each adds its part to the gradient."""
    parts = data.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(sum(map(len, MASKS)), generator=generator, dtype=torch.float64, requires_grad=True)
    masks = [mask.astype(np.float64) for mask in MASKS]
    weights = torch.tensor(np.concatenate(MODES[mode](masks, group=GROUP)))
    place = torch.tensor(np.repeat(parts, [len(mask) for mask in MASKS]))

    def gradient(mask: torch.Tensor) -> torch.Tensor:
        loss = total(logprobs.square()[mask], weights[mask])
        return torch.autograd.grad(loss, logprobs)[0]

    whole = gradient(torch.ones_like(place, dtype=torch.bool))
    cut = torch.stack([gradient(place == part) for part in range(3)]).sum(0)
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=0)


def test_a_weight_of_zero_silences_a_nan_and_its_gradient() -> None:
    loss = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    made = total(loss, torch.tensor([0.5, 0.0, 0.0]))
    made.backward()
    assert made.item() == 0.5
    assert loss.grad is not None and loss.grad.tolist() == [0.5, 0.0, 0.0]


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
