"""Promises of the aggregation: what a token weighs, and that cutting the batch up changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.policies import aggregation

MASKS = [np.array(row, bool) for row in ([1, 1, 0, 1], [1, 1], [0, 0, 0], [1])]  # 3 + 2 + 0 + 1 tokens
KEPT = [np.array(row, bool) for row in ([1, 0, 0, 0], [1, 1], [0, 0, 0], [0])]  # 1 + 2 + 0 + 0 left
GROUP = [7, 7, 9, 9]

MODES: dict[str, Callable[..., list[Any]]] = {
    "token_mean": aggregation.token_mean,
    "token_sum": aggregation.token_sum,
    "seq_mean_token_mean": aggregation.seq_mean_token_mean,
    "seq_mean_token_sum": aggregation.seq_mean_token_sum,
    "seq_mean_token_sum_norm": lambda masks, **options: aggregation.seq_mean_token_sum_norm(
        masks, max_response_tokens=10, **options
    ),
    "prompt_mean": lambda masks, **options: aggregation.prompt_mean(masks, group=GROUP[: len(masks)], **options),
}
WITH_DENOMINATOR = ["token_mean", "seq_mean_token_mean", "prompt_mean"]

# Weight of the tokens of each trajectory, by hand: 4 trajectories, 6 tokens, 2 prompts of 5 and 1 tokens.
EXPECTED = {
    "token_mean": [1 / 6, 1 / 6, 0, 1 / 6],
    "token_sum": [1, 1, 0, 1],
    "seq_mean_token_mean": [1 / 12, 1 / 8, 0, 1 / 4],
    "seq_mean_token_sum": [1 / 4, 1 / 4, 0, 1 / 4],
    "seq_mean_token_sum_norm": [1 / 40, 1 / 40, 0, 1 / 40],
    "prompt_mean": [1 / 10, 1 / 10, 0, 1 / 2],
}
# After rejection: 3 tokens left, 1 and 2 of the first two trajectories, all of the first prompt.
EXPECTED_AFTER = {
    "token_mean": [1 / 3, 1 / 3],
    "seq_mean_token_mean": [1 / 4, 1 / 8],
    "prompt_mean": [1 / 6, 1 / 6],
}


@pytest.mark.parametrize("mode", MODES)
def test_a_token_weighs_what_its_mode_says(mode: str) -> None:
    for weights, mask, expected in zip(MODES[mode](MASKS), MASKS, EXPECTED[mode], strict=True):
        assert weights.dtype == np.float32
        np.testing.assert_allclose(weights, mask * expected, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_rejecting_tokens_leaves_the_weight_of_the_others_unless_told_otherwise(mode: str) -> None:
    before = MODES[mode](MASKS)
    for weights, full, kept in zip(MODES[mode](MASKS, kept=KEPT), before, KEPT, strict=True):
        np.testing.assert_array_equal(weights, full * kept)


@pytest.mark.parametrize("mode", WITH_DENOMINATOR)
def test_the_denominator_after_rejection_counts_what_is_left(mode: str) -> None:
    after = MODES[mode](MASKS, kept=KEPT, denominator="after")
    for weights, kept, expected in zip(after, KEPT, [*EXPECTED_AFTER[mode], 0, 0], strict=True):
        np.testing.assert_allclose(weights, kept * expected, rtol=1e-6)


@pytest.mark.parametrize("mode", WITH_DENOMINATOR)
def test_rejecting_everything_gives_weights_of_zero(mode: str) -> None:
    nothing = [np.zeros_like(mask) for mask in MASKS]
    for denominator in ("before", "after"):
        assert not np.concatenate(MODES[mode](MASKS, kept=nothing, denominator=denominator)).any()
    assert not np.concatenate(MODES[mode](nothing)).any()
    assert MODES[mode]([]) == []


@pytest.mark.parametrize("mode", MODES)
@given(data=st.data())
def test_gradients_do_not_depend_on_how_the_batch_is_cut(mode: str, data: st.DataObject) -> None:
    """Trajectories dealt to ranks and micro-batches in any way; each adds its part to the gradient."""
    parts = data.draw(st.lists(st.integers(0, 2), min_size=4, max_size=4))
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.randn(sum(map(len, MASKS)), generator=generator, dtype=torch.float64, requires_grad=True)
    masks = [mask.astype(np.float64) for mask in MASKS]
    weights = torch.tensor(np.concatenate(MODES[mode](masks)))
    place = torch.tensor(np.repeat(parts, [len(mask) for mask in MASKS]))

    def gradient(mask: torch.Tensor) -> torch.Tensor:
        loss = aggregation.total(logprobs.square()[mask], weights[mask])
        return torch.autograd.grad(loss, logprobs)[0]

    whole = gradient(torch.ones_like(place, dtype=torch.bool))
    cut = torch.stack([gradient(place == part) for part in range(3)]).sum(0)
    torch.testing.assert_close(cut, whole, rtol=1e-12, atol=0)


def test_a_weight_of_zero_silences_a_nan_and_its_gradient() -> None:
    loss = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    total = aggregation.total(loss, torch.tensor([0.5, 0.0, 0.0]))
    total.backward()
    assert total.item() == 0.5
    assert loss.grad is not None and loss.grad.tolist() == [0.5, 0.0, 0.0]
