"""Promises of the policy losses: gradients worked by hand, and no nan whatever comes in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.policies import losses

SEQUENCE = torch.tensor([0, 0, 0, 2, 2, 3])  # sequence 1 has no tokens
SEGMENTS = {"sequence": SEQUENCE, "num_sequences": 4}
WEIGHTS = torch.tensor([2.0, 1.0, 0.0, 0.5, 1.5, 1.0])
KEEP = WEIGHTS > 0

Loss = Callable[[Any, Any, Any], tuple[Tensor, Tensor]]

LOSSES: dict[str, Loss] = {
    "reinforce": lambda new, old, advantages: losses.reinforce(new, advantages),
    "sft": lambda new, old, advantages: losses.sft(new),
    "cispo": losses.cispo,
    "cispo_absolute": lambda *three: losses.cispo(*three, cap_mode="absolute", clip_high=1.5),
    "aipo": lambda *three: losses.aipo(*three, cap=2.0),
    "aipo_surrogate": lambda *three: losses.aipo(*three, cap=2.0, is_surrogate=True),
    "topr": lambda *three: losses.topr(*three, **SEGMENTS),
    "topr_token": lambda *three: losses.topr(*three, level="token"),
    "p3o": lambda *three: losses.p3o(*three, effective_fraction=0.75),
    "ppo_clip": losses.ppo_clip,
    "ppo_dual_clip": lambda *three: losses.ppo_clip(*three, clip_high=0.28, dual_clip=3.0),
    "coupled_ppo": losses.coupled_ppo,
    "decoupled_ppo": lambda *three: losses.decoupled_ppo(*three, weights=WEIGHTS),
    "gspo": lambda *three: losses.gspo(*three, **SEGMENTS, clip_low=0.2, clip_high=0.2),
    "aspo": losses.aspo,
    "sapo": losses.sapo,
    "dppo_tv": losses.dppo,
    "dppo_kl": lambda *three: losses.dppo(*three, divergence="kl", delta_low=0.05, delta_high=0.05),
    "m2po": lambda *three: losses.m2po(*three, keep=KEEP),
}


def sums(values: list[float]) -> list[float]:
    """Of each token's sequence, by a loop."""
    index = SEQUENCE.tolist()
    return [sum(v for v, other in zip(values, index, strict=True) if other == mine) for mine in index]


def means(values: list[float]) -> list[float]:
    return [total / count for total, count in zip(sums(values), sums([1.0] * len(values)), strict=True)]


def clip_slope(a: float, r: float, low: float = 0.2, high: float = 0.2) -> float:
    return 0.0 if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low) else -a * r


def sapo_slope(a: float, r: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (r - 1)))
    return -a * 4 * gate * (1 - gate) * r


def aspo_slope(a: float, r: float) -> float:
    if a > 0:
        return 0.0 if r > 1.2 else -a * min(1 / r, 3.0)
    return -a * min(r, 3.0) if r > 0.8 else 0.0


def dppo_slope(a: float, new: float, old: float, *, is_kl: bool) -> float:
    p, q = math.exp(new), math.exp(old)
    distance = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) if is_kl else abs(p - q)
    is_away = (a > 0 and p > q) or (a < 0 and p < q)
    return 0.0 if is_away and distance > (0.05 if is_kl else 0.2) else -a * min(p / q, 20.0)


def slopes(name: str, new: list[float], old: list[float], advantages: list[float]) -> list[float]:
    """d loss / d logprob of each token, the formulas differentiated by hand."""
    ratios = [math.exp(n - o) for n, o in zip(new, old, strict=True)]
    logs = [n - o for n, o in zip(new, old, strict=True)]
    paired = list(zip(advantages, ratios, strict=True))
    table: dict[str, Callable[[], list[float]]] = {
        "reinforce": lambda: [-a for a in advantages],
        "sft": lambda: [-1.0] * len(new),
        "cispo": lambda: [-a * min(r, 5.0) for a, r in paired],
        "cispo_absolute": lambda: [-a * min(r, 1.5) for a, r in paired],
        "aipo": lambda: [-a * min(r, 2.0) for a, r in paired],
        "aipo_surrogate": lambda: [-a * r if r < 2.0 else 0.0 for a, r in paired],
        "topr": lambda: [
            -a if a > 0 else -a * min(math.exp(s), 1.0) for a, s in zip(advantages, sums(logs), strict=True)
        ],
        "topr_token": lambda: [-a if a > 0 else -a * min(r, 1.0) for a, r in paired],
        "p3o": lambda: [-a * min(r, 0.75) + 0.25 * (1 - 1 / r) for a, r in paired],
        "ppo_clip": lambda: [clip_slope(a, r) for a, r in paired],
        "ppo_dual_clip": lambda: [0.0 if a < 0 and r > 3 else clip_slope(a, r, high=0.28) for a, r in paired],
        "coupled_ppo": lambda: [clip_slope(a, r) for a, r in paired],
        "decoupled_ppo": lambda: [w * clip_slope(a, r) for (a, r), w in zip(paired, WEIGHTS.tolist(), strict=True)],
        "gspo": lambda: [clip_slope(a, math.exp(m)) for a, m in zip(advantages, means(logs), strict=True)],
        "aspo": lambda: [aspo_slope(a, r) for a, r in paired],
        "sapo": lambda: [sapo_slope(a, r) for a, r in paired],
        "dppo_tv": lambda: [dppo_slope(a, n, o, is_kl=False) for a, n, o in zip(advantages, new, old, strict=True)],
        "dppo_kl": lambda: [dppo_slope(a, n, o, is_kl=True) for a, n, o in zip(advantages, new, old, strict=True)],
        "m2po": lambda: [-a * r if k else 0.0 for (a, r), k in zip(paired, KEEP.tolist(), strict=True)],
    }
    return table[name]()


# Off the round numbers, where a token would sit on the very edge of a clip and either gradient is right.
logprob = st.floats(-4.0, -0.05).map(lambda x: x + 1e-5 * math.sin(1e6 * x))
six = st.lists(logprob, min_size=6, max_size=6)
six_advantages = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0]), min_size=6, max_size=6)


def tensor(values: Any, *, is_live: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=is_live)


def gradient(loss: Tensor, logprobs: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss.sum(), logprobs, retain_graph=True)
    return result


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=30)
@given(new=six, old=six, advantages=six_advantages)
def test_the_gradient_is_the_one_worked_by_hand(
    name: str, new: list[float], old: list[float], advantages: list[float]
) -> None:
    logprobs = tensor(new, is_live=True)
    loss, clipped = LOSSES[name](logprobs, tensor(old), tensor(advantages))
    expected = slopes(name, new, old, advantages)
    np.testing.assert_allclose(gradient(loss, logprobs).numpy(), expected, rtol=1e-6, atol=1e-9)
    assert loss.shape == clipped.shape == (6,)
    assert clipped.dtype == torch.bool and not clipped.requires_grad


@pytest.mark.parametrize("name", ["ppo_clip", "ppo_dual_clip", "gspo", "aspo", "dppo_tv", "dppo_kl", "m2po"])
@settings(max_examples=30)
@given(new=six, old=six, advantages=six_advantages)
def test_clipped_tokens_have_no_gradient_and_others_have_one(
    name: str, new: list[float], old: list[float], advantages: list[float]
) -> None:
    logprobs = tensor(new, is_live=True)
    loss, clipped = LOSSES[name](logprobs, tensor(old), tensor(advantages))
    is_zero = gradient(loss, logprobs) == 0
    has_advantage = tensor(advantages) != 0
    # ASPO's soft dual clip cuts a weight and keeps its gradient, so it is not counted.
    assert bool((is_zero == clipped)[has_advantage].all())


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"p3o", "sft"}))
@settings(max_examples=30)
@given(new=six, old=six, advantages=six_advantages, scale=st.floats(0.1, 10.0))
def test_a_loss_scales_with_its_advantages(
    name: str, new: list[float], old: list[float], advantages: list[float], scale: float
) -> None:
    once, _ = LOSSES[name](tensor(new), tensor(old), tensor(advantages))
    scaled, _ = LOSSES[name](tensor(new), tensor(old), tensor(advantages) * scale)
    torch.testing.assert_close(scaled, once * scale)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"decoupled_ppo", "m2po"}))  # their weights stay where they are
@settings(max_examples=30)
@given(new=six, old=six, advantages=six_advantages)
def test_the_order_of_tokens_in_a_sequence_does_not_matter(
    name: str, new: list[float], old: list[float], advantages: list[float]
) -> None:
    order = torch.tensor([2, 0, 1, 4, 3, 5])  # within sequences 0 and 2
    loss, clipped = LOSSES[name](tensor(new), tensor(old), tensor(advantages))
    moved, moved_clipped = LOSSES[name](tensor(new)[order], tensor(old)[order], tensor(advantages)[order])
    torch.testing.assert_close(moved, loss[order])
    assert torch.equal(moved_clipped, clipped[order])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_logprob_however_extreme_makes_nan_or_an_infinite_gradient(name: str, dtype: torch.dtype) -> None:
    extremes = [-math.inf, -1e30, -1e4, -50.0, -1e-8, 0.0]
    for shift in range(6):
        for advantage in (-1.0, 0.0, 1.0):
            logprobs = torch.tensor(extremes, dtype=dtype, requires_grad=True)
            anchor = torch.tensor(extremes[shift:] + extremes[:shift], dtype=dtype)
            loss, _ = LOSSES[name](logprobs, anchor, torch.full((6,), advantage, dtype=dtype))
            assert bool(loss.isfinite().all()), (name, loss)
            assert bool(gradient(loss, logprobs).isfinite().all()), name


@pytest.mark.parametrize("name", LOSSES)
def test_numpy_and_torch_give_the_same(name: str) -> None:
    generator = np.random.default_rng(0)
    new, old = -generator.exponential(1.0, (2, 6))
    advantages = generator.normal(size=6)
    for given_numpy, given_torch in zip(
        LOSSES[name](new, old, advantages), LOSSES[name](*map(torch.tensor, (new, old, advantages))), strict=True
    ):
        assert torch.equal(given_numpy, given_torch)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"decoupled_ppo", "m2po", "gspo", "topr"}))
def test_no_tokens_give_no_losses(name: str) -> None:
    nothing = torch.zeros(0, requires_grad=True)
    loss, clipped = LOSSES[name](nothing, torch.zeros(0), torch.zeros(0))
    assert loss.shape == clipped.shape == (0,)
    loss.sum().backward()


def test_sequence_losses_take_a_micro_batch_without_tokens() -> None:
    nothing, no_tokens = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for function in (losses.gspo, losses.topr):
        loss, _ = function(nothing, nothing, nothing, sequence=no_tokens, num_sequences=3)
        assert loss.shape == (0,)
    assert losses.m2po_mask(nothing, nothing).shape == (0,)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_flow_through_the_trained_logprobs_only(name: str) -> None:
    logprobs, anchor, advantages = (torch.full((6,), -1.0, requires_grad=True) for _ in range(3))
    LOSSES[name](logprobs, anchor, advantages)[0].sum().backward()
    assert logprobs.grad is not None
    assert anchor.grad is None and advantages.grad is None


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_float32(name: str) -> None:
    half = torch.full((6,), -1.0, dtype=torch.bfloat16)
    assert LOSSES[name](half, half, half)[0].dtype == torch.float32


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"sft", "decoupled_ppo", "m2po"}))
@settings(max_examples=30)
@given(new=six, advantages=six_advantages)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(
    name: str, new: list[float], advantages: list[float]
) -> None:
    logprobs = tensor(new, is_live=True)
    loss = losses.p3o(logprobs, new, advantages, effective_fraction=1.0) if name == "p3o" else None
    loss = loss or LOSSES[name](logprobs, tensor(new), tensor(advantages))
    torch.testing.assert_close(gradient(loss[0], logprobs), -tensor(advantages))


@settings(max_examples=30)
@given(new=six, old=six, threshold=st.floats(1e-6, 4.0))
def test_m2po_keeps_the_most_tokens_whose_second_moment_is_below_the_threshold(
    new: list[float], old: list[float], threshold: float
) -> None:
    squares = np.square(np.array(new) - np.array(old))
    kept = losses.m2po_mask(tensor(new), tensor(old), threshold=threshold).numpy()
    count = kept.sum()
    assert count >= 1
    assert count == 1 or squares[kept].mean() < threshold
    assert squares[kept].max() <= squares[~kept].min(initial=math.inf)
    if count < 6:
        assert np.sort(squares)[: count + 1].mean() >= threshold * (1 - 1e-9)


def test_topr_per_trajectory_needs_to_know_the_trajectories() -> None:
    with pytest.raises(ValueError, match="needs the sequence"):
        losses.topr(torch.zeros(2), torch.zeros(2), torch.zeros(2))
