"""The terms that an objective adds to the policy loss: entropy, KL to a reference, a teacher's signal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.errors import ConfigError
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.critic import Critic
from asyncrl.policies.algorithms.objective import ValueInputs
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.losses import kl
from asyncrl.policies.losses.kl import Penalty
from asyncrl.policies.losses.loss import LossInputs
from tests.harness.metric_names import is_known

BEHAVIOR = torch.tensor([-1.0, -1.0, -2.0, -1.0])
LOGPROBS = BEHAVIOR + torch.tensor([0.0, 1.0, 0.1, -1.0])
"""Ratios 1, e, 1.1 and 1 / e: the second is above icepop's 1.25, the last is below its 0.8."""
OTHER = torch.tensor([-1.5, -0.5, -2.0, -1.0])


def inputs(rows: slice = slice(None), **changes: Any) -> LossInputs:
    columns = {
        "logprobs": LOGPROBS.clone(),
        "entropy": torch.ones(4),
        "behavior_logprobs": BEHAVIOR,
        "advantages": torch.zeros(4),
        "loss_weights": torch.full((4,), 0.25),
        "is_fresh": torch.zeros(4, dtype=torch.bool),
        "staleness": torch.ones(4, dtype=torch.int32),
        "sequence": torch.tensor([0, 0, 1, 1]),
    } | changes
    model_outputs = {name: score[rows] for name, score in columns.pop("model_outputs", {}).items()}
    return LossInputs(
        num_sequences=2, model_outputs=model_outputs, **{name: column[rows] for name, column in columns.items()}
    )


def gradient(algorithm: Algorithm, of: str, *, cuts: tuple[slice, ...] = (slice(None),), **changes: Any) -> list[float]:
    """Return d loss / d ``of`` per token for the whole batch, computed from micro-batches as in a backend."""
    leaf = (changes.pop(of, None) if of in changes else getattr(inputs(), of)).clone().requires_grad_()
    totals = algorithm.zero(torch.device("cpu"))
    for rows in cuts:
        objective, sums = algorithm.objective(inputs(rows, **{of: leaf}, **changes))
        totals += sums
        objective.backward()
    scale = algorithm.gradient_scale(totals)
    assert leaf.grad is not None
    return [(1.0 if scale is None else scale) * value for value in leaf.grad.tolist()]


HALVES = (slice(0, 1), slice(1, 4))
NARROW = {"icepop.low": 0.8, "icepop.high": 1.25}
WEIGHTS = [1.0, 2.0, math.exp(0.1), math.exp(-1)]  # weights of tis_token
SHARES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "before": ({"correction": "icepop", "options": NARROW}, [0.25] * 4),
    "after, the two that are kept": (
        {"correction": "icepop", "options": NARROW, "denominator": "after"},
        [0.5, 0.0, 0.5, 0.0],
    ),
    "self_norm, by weight": ({"correction": "tis_token + self_norm"}, [w / sum(WEIGHTS) for w in WEIGHTS]),
}


@pytest.mark.parametrize("cuts", [(slice(None),), HALVES])
@pytest.mark.parametrize("case", SHARES)
def test_entropy_is_a_mean_over_what_the_loss_is_a_mean_over(case: str, cuts: tuple[slice, ...]) -> None:
    parts, shares = SHARES[case]
    algorithm = resolve(ALGORITHMS["grpo"], entropy_coef=0.1, **parts)
    assert gradient(algorithm, "entropy", cuts=cuts) == pytest.approx([-0.1 * share for share in shares])


@pytest.mark.parametrize("case", SHARES)
def test_kl_in_the_loss_is_a_mean_over_the_same_tokens(case: str) -> None:
    """The gradient of k2 is the log ratio to the reference."""
    parts, shares = SHARES[case]
    algorithm = resolve(ALGORITHMS["grpo"], kl=Penalty(coef=0.1, estimate="k2", place="loss"), **parts)
    got = gradient(algorithm, "logprobs", cuts=HALVES, model_outputs={"ref_logprobs": OTHER})
    expected = [0.1 * share * ratio for share, ratio in zip(shares, (LOGPROBS - OTHER).tolist(), strict=True)]
    assert got == pytest.approx(expected)


@pytest.mark.parametrize(
    ("estimate", "function"),
    [("k2", kl.k2), ("k3", kl.k3), ("low_variance", kl.low_variance), ("unbiased", kl.unbiased)],
)
def test_the_kl_of_the_run_file_is_the_function_of_that_name(estimate: Any, function: Any) -> None:
    algorithm = resolve(ALGORITHMS["grpo"], kl=Penalty(coef=0.3, estimate=estimate, place="loss"))
    leaf = LOGPROBS.clone().requires_grad_()
    more = (BEHAVIOR,) if estimate == "unbiased" else ()
    (0.3 * function(leaf, OTHER, *more)).mean().backward()
    assert leaf.grad is not None
    got = gradient(algorithm, "logprobs", model_outputs={"ref_logprobs": OTHER})
    assert got == pytest.approx(leaf.grad.tolist(), abs=1e-7)


def test_kl_in_the_reward_adds_nothing_to_the_loss() -> None:
    algorithm = resolve(ALGORITHMS["ppo"], kl=Penalty(coef=0.3, estimate="k1", place="reward"))
    assert gradient(algorithm, "logprobs", model_outputs={"ref_logprobs": OTHER}) == [0.0] * 4


def test_divergences_are_told_of_the_models_there_are() -> None:
    algorithm = resolve(ALGORITHMS["grpo"])

    def metrics(cuts: tuple[slice, ...], **model_outputs: torch.Tensor) -> dict[str, float]:
        totals = algorithm.zero(torch.device("cpu"))
        for rows in cuts:
            totals += algorithm.objective(inputs(rows, model_outputs=model_outputs))[1]
        return dict(algorithm.metrics(totals))

    assert not {"kl", "teacher_kl"} & metrics(HALVES).keys()
    got = metrics(HALVES, ref_logprobs=OTHER, teacher_logprobs=LOGPROBS)
    assert got["kl"] == pytest.approx(float(kl.k3(LOGPROBS, OTHER).mean()))
    assert got["teacher_kl"] == 0.0
    assert all(is_known(name) for name in got)


def test_on_policy_distillation_follows_the_log_ratio_to_the_teacher() -> None:
    """-A logprob with A = teacher - student, weighted by tis_token: 1, 2 (capped), e^0.1 and 1 / e."""
    algorithm = resolve(ALGORITHMS["opd"])
    got = gradient(algorithm, "logprobs", model_outputs={"teacher_logprobs": OTHER})
    signal = (OTHER - LOGPROBS).tolist()
    expected = [-0.25 * weight * gap for weight, gap in zip(WEIGHTS, signal, strict=True)]
    assert got == pytest.approx(expected)


def test_a_teacher_beside_rewards_adds_to_their_advantages() -> None:
    algorithm = resolve(ALGORITHMS["opd"], advantage="grpo", options={"coef": 0.5})
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    got = gradient(algorithm, "logprobs", model_outputs={"teacher_logprobs": OTHER}, advantages=advantages)
    mixed = (advantages + 0.5 * (OTHER - LOGPROBS)).tolist()
    assert got == pytest.approx([-0.25 * weight * value for weight, value in zip(WEIGHTS, mixed, strict=True)])


def test_a_mask_by_advantages_sees_the_teacher_s_part() -> None:
    """The second answer is off-policy (mean log ratio -0.45), and the teacher gives its last token a lower logprob."""
    algorithm = resolve(ALGORITHMS["opd"], correction="opsm", options={"delta": 0.4})
    teacher = LOGPROBS + torch.tensor([-1.0, -1.0, 1.0, -1.0])
    got = gradient(algorithm, "logprobs", model_outputs={"teacher_logprobs": teacher})
    assert got == pytest.approx([0.25, 0.25, -0.25, 0.0])


def test_the_loss_that_is_reported_is_the_one_whose_gradient_is_taken() -> None:
    """icepop keeps two of four tokens; the loss is their mean -w A logprob, even if gradients are scaled at the end."""
    parts = {"correction": "icepop", "options": NARROW, "loss": "reinforce"}
    after = resolve(ALGORITHMS["grpo"], denominator="after", **parts)
    totals = after.zero(torch.device("cpu"))
    for rows in HALVES:
        totals += after.objective(inputs(rows, advantages=torch.ones(4)))[1]
    kept = [-weight * logprob for weight, logprob in zip((1.0, math.exp(0.1)), LOGPROBS[::2].tolist(), strict=True)]
    assert after.metrics(totals)["loss"] == pytest.approx(sum(kept) / 2)


@pytest.mark.parametrize(
    ("loss", "options", "expected"),
    [
        ("cispo", {"cap_mode": "absolute"}, {"clip_high": 5.0}),
        ("cispo", {"cap_mode": "absolute", "loss.clip_high": 3.0}, {"clip_high": 3.0}),
        ("cispo", {"cap_mode": "one_plus"}, {"clip_high": 4.0}),
        ("dppo", {"divergence": "kl"}, {"delta_low": 0.05, "delta_high": 0.05}),
        ("dppo", {"divergence": "kl", "delta_low": 0.1}, {"delta_low": 0.1, "delta_high": 0.05}),
    ],
)
def test_numbers_that_mean_something_else_have_defaults_of_their_own(
    loss: str, options: dict[str, Any], expected: dict[str, float]
) -> None:
    made = resolve(ALGORITHMS["grpo"], loss=loss, correction="none", options=options).loss.options
    assert {name: made[name] for name in expected} == expected


def test_dual_clip_bounds_what_a_bad_token_costs() -> None:
    algorithm = resolve(ALGORITHMS["grpo"], loss="coupled_ppo", correction="none", options={"dual_clip": 2.0})
    got = gradient(algorithm, "logprobs", advantages=-torch.ones(4))
    assert got == pytest.approx([0.25, 0.0, 0.25 * math.exp(0.1), 0.0])  # e is above 2, 1 / e below 0.8


def test_gpg_counts_the_groups_with_variance_unless_told_otherwise() -> None:
    assert resolve(ALGORITHMS["gpg"]).advantage.options["count"] == "groups_with_variance"
    made = resolve(ALGORITHMS["gpg"], options={"count": "nonzero_rewards"})
    assert made.advantage.options["count"] == "nonzero_rewards"


def loss_inputs(logprobs: torch.Tensor, behavior: torch.Tensor, advantage: torch.Tensor) -> LossInputs:
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
    total, _ = resolve(ALGORITHMS["grpo"]).objective(loss_inputs(logprobs, behavior, advantage))
    (gradient,) = torch.autograd.grad(total, logprobs)
    torch.testing.assert_close(gradient, torch.tensor([-np.exp(0.5) / 2, 0.5 * 2.0 / 2], dtype=torch.float32))


def test_an_unknown_option_or_correction_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no option 'clip'"):
        resolve(ALGORITHMS["grpo"], options={"clip": 0.1})
    with pytest.raises(ConfigError, match="correction must be one of"):
        resolve(ALGORITHMS["grpo"], correction="tis")
    assert resolve(ALGORITHMS["grpo"], options={"cap": 5}).correction[0].options == {"cap": 5.0}


RETURNS = torch.tensor([1.0, 0.0, 2.0, 1.0])


def value_inputs(values: torch.Tensor, rows: slice = slice(None), **changes: Any) -> ValueInputs:
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
    loss, _ = Critic().objective(value_inputs(values))
    assert float(loss.detach()) == pytest.approx(0.5 * (1 + 0 + 1 + 0) / 4)
    loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-0.25, 0.0, -0.25, 0.0])


def test_metrics_of_parts_add_up_to_those_of_the_whole() -> None:
    critic, values = Critic(), torch.tensor([0.5, 0.0, 1.0, 1.0])
    _, whole = critic.objective(value_inputs(values))
    total = critic.zero(torch.device("cpu"))
    for rows in (slice(0, 1), slice(1, 4)):
        total += critic.objective(value_inputs(values, rows))[1]
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
    loss, sums = Critic(clip=0.5).objective(value_inputs(values, old_values=old))
    assert Critic().metrics(sums)["critic/clip_fraction"] == 0.25
    loss.backward()
    assert values.grad is not None
    assert values.grad[2] == 0.0
    assert (
        Critic().metrics(Critic(clip=0.0).objective(value_inputs(values, old_values=old))[1])["critic/clip_fraction"]
        == 0.0
    )


def test_huber_is_linear_in_far_errors() -> None:
    values = torch.tensor([0.0, 0.0, 1.0, 1.0])
    far, _ = Critic(kind="huber", huber_delta=1.0).objective(value_inputs(values, returns=RETURNS + 100))
    further, _ = Critic(kind="huber", huber_delta=1.0).objective(value_inputs(values, returns=RETURNS + 200))
    assert float(further - far) == pytest.approx(100.0)
