"""KL estimates, distillation and the critic's loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from asyncrl.policies.algorithms.critic import value_loss
from asyncrl.policies.losses import kl
from asyncrl.policies.losses.distillation import OPD, OPDReward

ESTIMATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": kl.k1,
    "k2": kl.k2,
    "k3": kl.k3,
    "absolute": kl.absolute,
    "low_variance": kl.low_variance,
    "unbiased": lambda new, ref: kl.unbiased(new, ref, ref),
}
logits = st.lists(st.floats(-3, 3), min_size=4, max_size=4).map(lambda x: torch.tensor(x, dtype=torch.float64))


def gradient(loss: Tensor, inputs: Tensor) -> Tensor:
    (result,) = torch.autograd.grad(loss.sum(), inputs, retain_graph=True)
    return result


@given(policy=logits, reference=logits, behavior=logits)
def test_estimates_are_right_in_expectation(policy: Tensor, reference: Tensor, behavior: Tensor) -> None:
    p, q, mu = (torch.log_softmax(x, -1) for x in (policy, reference, behavior))
    exact = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * kl.k1(p, q)).sum(), exact)
    torch.testing.assert_close((p.exp() * kl.k3(p, q)).sum(), exact)
    torch.testing.assert_close((mu.exp() * kl.unbiased(p, q, mu)).sum(), exact)


@given(policy=logits, reference=logits, behavior=logits)
def test_which_estimate_has_the_gradient_of_the_kl_as_a_loss(
    policy: Tensor, reference: Tensor, behavior: Tensor
) -> None:
    policy = policy.clone().requires_grad_()
    p, q, mu = torch.log_softmax(policy, -1), torch.log_softmax(reference, -1), torch.log_softmax(behavior, -1)
    reverse, forward = gradient(p.exp() * (p - q), policy), gradient(q.exp() * (q - p), policy)
    sampled = p.detach().exp()
    torch.testing.assert_close(gradient(sampled * kl.k1(p, q), policy), torch.zeros_like(policy))
    torch.testing.assert_close(gradient(sampled * kl.k2(p, q), policy), reverse)
    torch.testing.assert_close(gradient(sampled * kl.k3(p, q), policy), forward)
    torch.testing.assert_close(gradient(mu.exp() * kl.unbiased(p, q, mu), policy), reverse)


@pytest.mark.parametrize("name", sorted(set(ESTIMATES) - {"k1"}))
@given(policy=logits, reference=logits)
def test_all_but_k1_are_never_negative_and_zero_where_nothing_differs(
    name: str, policy: Tensor, reference: Tensor
) -> None:
    assert bool((ESTIMATES[name](policy, reference) >= -1e-12).all())
    assert not ESTIMATES[name](policy, policy).any()


@pytest.mark.parametrize("name", ESTIMATES)
def test_an_extreme_logprob_makes_neither_nan_nor_an_infinite_gradient(name: str) -> None:
    extremes = torch.tensor([-math.inf, -1e30, -50.0, 0.0])
    for shift in range(4):
        logprobs = extremes.clone().requires_grad_()
        result = ESTIMATES[name](logprobs, extremes.roll(shift))
        assert bool(result.isfinite().all())
        assert bool(gradient(result, logprobs).isfinite().all())


def test_low_variance_is_bounded_by_its_limit() -> None:
    assert kl.low_variance(torch.tensor([-30.0]), torch.tensor([0.0])).item() == 10.0
    assert kl.low_variance(torch.tensor([-30.0]), torch.tensor([0.0]), limit=3.0).item() == 3.0


def test_a_token_that_the_teacher_likes_better_gets_a_larger_advantage() -> None:
    # 0.5 - 2 x (log 0.25 - log 0.5) = 0.5 + 2 log 2
    result = OPDReward(coef=2.0).mixed(torch.tensor([0.25]).log(), torch.tensor([0.5]), torch.tensor([0.5]).log())
    torch.testing.assert_close(result, torch.tensor([0.5 + 2 * math.log(2)]))


def test_distillation_stops_pulling_down_a_token_that_has_dropped_enough() -> None:
    logprobs = torch.tensor([0.2, 0.6]).log().requires_grad_()  # sampled at 0.5: dropped by 0.3, risen by 0.1
    teacher = torch.tensor([0.1, 0.1]).log()
    loss, clipped = OPD(kl_coef=0.0).formula(logprobs, torch.tensor([0.5, 0.5]).log(), teacher)
    assert clipped.tolist() == [True, False]
    # d/dlogp of -R sg(log teacher - log student) is -R times the log ratio: -1.2 x log(0.1 / 0.6)
    torch.testing.assert_close(gradient(loss, logprobs), torch.tensor([0.0, -1.2 * math.log(0.1 / 0.6)]))


finite = st.floats(-5, 5).map(lambda x: x + 1e-5 * math.sin(1e6 * x))  # away from clip edges
four = st.lists(finite, min_size=4, max_size=4)


@given(now=four, old=four, target=four)
@example(now=[0.0, 0.0, 0.0, 0.031244537549981702], old=[0.0, 0.0, 0.0, 0.24999003992719374], target=[0.0] * 4)
def test_a_critic_learns_nothing_where_the_clipped_error_is_larger(
    now: list[float], old: list[float], target: list[float]
) -> None:
    estimate = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    loss, clipped = value_loss(estimate, np.array(old), np.array(target), clip=0.3)
    for i, (v, o, t) in enumerate(zip(now, old, target, strict=True)):
        bounded = o + min(max(v - o, -0.3), 0.3)
        assert loss[i].item() == pytest.approx(0.5 * max((v - t) ** 2, (bounded - t) ** 2))
    expected = torch.where(clipped, 0.0, estimate.detach() - torch.tensor(target, dtype=torch.float64))
    torch.testing.assert_close(gradient(loss, estimate), expected)


def test_a_critic_without_a_clip_learns_from_every_value() -> None:
    loss, clipped = value_loss([0.0, 3.0], [9.0, 9.0], [1.0, 1.0], clip=None, scale=1.0)
    assert loss.tolist() == [1.0, 4.0]
    assert not clipped.any()
    huge, _ = value_loss([1000.0], [1000.0], [0.0], kind="huber")
    assert huge.item() == 10.0 * (1000.0 - 5.0)
