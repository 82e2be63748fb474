"""Losses over the likeliest tokens at each place: score centering, and distillation. Numbers are worked by hand.

Vocabulary of three: pi = (.5, .3, .2). The sampling policy is mu = (.2, .5, .3), the teacher (.4, .4, .2).
The gradient of log pi(v) by the logits is onehot(v) - pi.
"""

from __future__ import annotations

import math

import pytest
import torch

from asyncrl.policies.losses.centered import ScoreCentered
from asyncrl.policies.losses.distillation import Distill
from asyncrl.policies.losses.loss import LikeliestTokens

PI, MU, TEACHER = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3), (0.4, 0.4, 0.2)


def likeliest(distribution: tuple[float, ...], *tokens: int) -> LikeliestTokens:
    return LikeliestTokens(
        tokens=torch.tensor([tokens]), logprobs=torch.tensor([[math.log(distribution[token]) for token in tokens]])
    )


def logits_of(distribution: tuple[float, ...] = PI) -> torch.Tensor:
    return (torch.tensor([distribution]).log() + 0.7).requires_grad_()  # a constant changes nothing


def centered(token: int, *known: int, cap: float = 2.0, advantage: float = 1.0) -> tuple[float, list[float]]:
    """Return loss and gradient of one sampled token, where mu is known for some tokens."""
    logits = logits_of()
    every = torch.log_softmax(logits, -1)
    loss, _ = ScoreCentered(cap=cap).formula(
        logprobs=every[:, token],
        behavior_logprobs=torch.tensor([math.log(MU[token])]),
        advantages=torch.tensor([advantage]),
        entropy=-(every.exp() * every).sum(-1),
        logits=logits,
        behavior_likeliest=likeliest(MU, *known),
    )
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return float(loss.detach()), logits.grad[0].tolist()


@pytest.mark.parametrize(
    ("known", "cap", "expected"),
    [
        # w(0) = min(2.5, 2); mu w = (.4, .3, .2), .9 in all: 2 (.5, -.3, -.2) - [(.4, .3, .2) - .9 pi]
        ((0, 1, 2), 2.0, [1.05, -0.63, -0.42]),
        # tail alpha = .8 / .5, cap alpha > 1: mu w = (.4; .3, .2), the same
        ((0,), 2.0, [1.05, -0.63, -0.42]),
        # tail alpha = .5 / .7, cap alpha > 1: mu w = (.5, .3, .2) = pi, whose center is 0
        ((1,), 2.0, [1.0, -0.6, -0.4]),
        # cap alpha = .857: mu w = (.4286, .3, .1714), .9 in all; w(0) = 1.2
        ((1,), 1.2, [0.62143, -0.39, -0.23143]),
    ],
)
def test_score_centering_is_the_one_worked_by_hand(known: tuple[int, ...], cap: float, expected: list[float]) -> None:
    _, gradient = centered(0, *known, cap=cap, advantage=-3.0)
    assert gradient == pytest.approx([3 * value for value in expected], abs=1e-4)


def test_its_value_has_the_tail_as_well() -> None:
    """-[2 ln .5 - (.4 ln .5 + .3 ln .3 + .2 ln .2)]"""
    expected = -(2 * math.log(0.5) - (0.4 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2)))
    assert centered(0, 0, 1, 2)[0] == pytest.approx(expected, abs=1e-5)
    assert centered(0, 0)[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("cap", [1.0, 1.3, 2.0])
def test_a_constant_advantage_teaches_nothing_in_expectation_whatever_the_cap(cap: float) -> None:
    expected = [sum(MU[token] * centered(token, 0, 1, 2, cap=cap)[1][v] for token in range(3)) for v in range(3)]
    assert expected == pytest.approx([0.0] * 3, abs=1e-6)
    weights = [min(pi / mu, cap) for pi, mu in zip(PI, MU, strict=True)]
    not_centered = sum(MU[token] * weights[token] * ((token == 0) - PI[0]) for token in range(3))
    assert abs(not_centered) > 0.01, "the cap alone leaves a drift"


def distilled(*known: int, divergence: str = "forward") -> tuple[float, list[float]]:
    logits = logits_of()
    loss, _ = Distill(divergence=divergence).formula(  # type: ignore[arg-type]
        logits=logits, teacher_likeliest=likeliest(TEACHER, *known)
    )
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    return float(loss.detach()), logits.grad[0].tolist()


def test_with_all_tokens_it_is_the_kl_over_the_vocabulary() -> None:
    """NeMo-RL's values; the gradient of the forward KL is pi - teacher."""
    loss, gradient = distilled(0, 1, 2)
    assert loss == pytest.approx(0.025815408, abs=1e-6)
    assert gradient == pytest.approx([0.1, -0.1, 0.0], abs=1e-5)
    assert distilled(0, 1, 2, divergence="reverse")[0] == pytest.approx(0.025267154, abs=1e-6)


def test_tokens_that_are_not_sent_count_as_one() -> None:
    """Teacher (.4, .6), policy (.5, .5): .4 ln .8 + .6 ln 1.2, and .5 ln 1.25 + .5 ln (5 / 6)."""
    loss, gradient = distilled(0)
    assert loss == pytest.approx(0.4 * math.log(0.8) + 0.6 * math.log(1.2), abs=1e-6)
    assert gradient == pytest.approx([0.1, -0.06, -0.04], abs=1e-5)
    assert loss < distilled(0, 1, 2)[0], "taking tokens together never raises a KL"
    reverse = 0.5 * math.log(1.25) + 0.5 * math.log(5 / 6)
    assert distilled(0, divergence="reverse")[0] == pytest.approx(reverse, abs=1e-6)


def test_a_student_that_is_certain_still_learns_of_the_tokens_that_are_not_sent() -> None:
    """The gradient of the forward KL is pi - teacher for the token that is sent: 1 - 0.4; the others are alike."""
    logits = torch.tensor([[20.0, 0.0, 0.0]], requires_grad=True)
    loss, _ = Distill().formula(logits=logits, teacher_likeliest=likeliest(TEACHER, 0))
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([0.6, -0.3, -0.3], abs=1e-5)
    of_others = math.log(2) - 20  # logprob of the two others together
    assert float(loss.detach()) == pytest.approx(0.4 * math.log(0.4) + 0.6 * (math.log(0.6) - of_others), rel=1e-5)


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
def test_certain_models_make_no_nan(divergence: str) -> None:
    for certain in ([50.0, -50.0, -50.0], [-50.0, 50.0, 0.0]):
        logits = torch.tensor([certain], requires_grad=True)
        never = LikeliestTokens(tokens=torch.tensor([[0, 2]]), logprobs=torch.tensor([[0.0, -math.inf]]))
        loss, _ = Distill(divergence=divergence).formula(  # type: ignore[arg-type]
            logits=logits, teacher_likeliest=never
        )
        loss.sum().backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        assert bool(torch.isfinite(loss).all()) and bool(torch.isfinite(logits.grad).all())
