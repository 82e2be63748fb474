"""Promises of advantages and returns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncrl.policies import advantages, returns

reward = st.floats(-10, 10).map(lambda x: round(x, 3))
group = st.lists(reward, min_size=2, max_size=8)

BASELINES = {
    "grpo": advantages.grpo,
    "grpo_biased": lambda r: advantages.grpo(r, std="biased"),
    "dr_grpo": advantages.dr_grpo,
    "rloo": advantages.rloo,
    "gpg": advantages.gpg,
    "maxrl": advantages.maxrl,
}


@pytest.mark.parametrize("name", BASELINES)
@given(rewards=group)
def test_advantages_of_a_group_sum_to_zero(name: str, rewards: list[float]) -> None:
    values = BASELINES[name](np.array(rewards))
    assert abs(values.sum()) <= 1e-9 * (1 + np.abs(values).sum())


@pytest.mark.parametrize("name", BASELINES)
@given(rewards=group, data=st.data())
def test_the_order_of_a_group_does_not_matter(name: str, rewards: list[float], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(rewards))))
    values = np.array(rewards)
    np.testing.assert_allclose(BASELINES[name](values[order]), BASELINES[name](values)[order], atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "grpo_biased", "maxrl"])
@given(rewards=group, scale=st.floats(0.5, 100))
def test_a_relative_advantage_does_not_depend_on_the_scale_of_rewards(
    name: str, rewards: list[float], scale: float
) -> None:
    values = np.array(rewards)
    assume(values.std() > 1e-2 and values.mean() > 1e-2)  # eps is small against that
    np.testing.assert_allclose(BASELINES[name](values * scale), BASELINES[name](values), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["dr_grpo", "rloo", "gpg"])
@given(rewards=group, scale=st.floats(0.5, 100), shift=reward)
def test_an_absolute_advantage_scales_with_rewards_and_ignores_a_shift(
    name: str, rewards: list[float], scale: float, shift: float
) -> None:
    values = np.array(rewards)
    np.testing.assert_allclose(BASELINES[name](values * scale + shift), BASELINES[name](values) * scale, atol=1e-7)


@pytest.mark.parametrize("name", BASELINES)
def test_a_group_of_equals_or_of_one_or_of_none_has_no_advantage(name: str) -> None:
    for size in (1, 3, 4):
        assert not BASELINES[name](np.full(size, 5.391)).any()


def test_an_empty_group_gives_no_advantages() -> None:
    for function in BASELINES.values():
        assert function([]).shape == (0,)
    assert advantages.opo([], []).shape == (0,)


def test_a_group_of_one_keeps_its_reward_only_when_told_to() -> None:
    np.testing.assert_allclose(advantages.grpo([0.7], singleton="raw"), [0.7], rtol=1e-5)


@given(rewards=group)
def test_rloo_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(advantages.rloo(np.array(rewards)), expected, atol=1e-9)


def test_opo_weighs_the_baseline_by_length() -> None:
    # (1 x 10 + 0 x 30) / 40 = 0.25
    np.testing.assert_allclose(advantages.opo([1.0, 0.0], [10, 30]), [0.75, -0.25])
    np.testing.assert_allclose(advantages.opo([1.0, 0.0], [0, 0]), [0.5, -0.5])


def test_gpg_makes_up_for_samples_without_a_signal() -> None:
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2]
    assert advantages.gpg_alpha(rewards, groups) == 6 / 3  # three rewards are not 0
    assert advantages.gpg_alpha(rewards, groups, count="groups_with_variance") == 3 / 1
    assert advantages.gpg_alpha([0.0, 0.0], [0, 0]) == 1.0
    assert advantages.gpg_alpha([1.0, 1.0], [0, 0], count="groups_with_variance") == 1.0


def test_results_are_float32_unless_rewards_are_a_float64_array() -> None:
    assert advantages.grpo([0.0, 1.0]).dtype == np.float32
    assert advantages.grpo(np.array([0.0, 1.0])).dtype == np.float64


# -- returns -----------------------------------------------------------------------------------------------------------


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float, last_value: float) -> list[float]:
    """One sequence, backwards, as in the paper."""
    result, running, following = [], 0.0, last_value
    for reward_, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward_ + gamma * following - value + gamma * lam * running
        following = value
        result.append(running)
    return result[::-1]


lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)
discount = st.floats(0.0, 1.0)


@given(lengths=lengths, gamma=discount, lam=discount, seed=st.integers(0, 2**16))
def test_gae_of_a_batch_is_that_of_each_sequence_alone(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rewards, values = generator.normal(size=(2, sum(lengths)))
    bootstrap = generator.normal(size=len(lengths))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    advantage, target = returns.gae(rewards, values, sequence, gamma=gamma, lam=lam, bootstrap=bootstrap)
    expected = [
        number
        for i in range(len(lengths))
        for number in plain_gae(
            rewards[sequence == i].tolist(), values[sequence == i].tolist(), gamma, lam, bootstrap[i]
        )
    ]
    np.testing.assert_allclose(advantage, expected, atol=1e-9)
    np.testing.assert_allclose(target, advantage + values)


@given(lengths=lengths, gamma=discount, seed=st.integers(0, 2**16))
def test_returns_are_gae_without_a_critic(lengths: list[int], gamma: float, seed: int) -> None:
    rewards = np.random.default_rng(seed).normal(size=sum(lengths))
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    advantage, _ = returns.gae(rewards, np.zeros_like(rewards), sequence, gamma=gamma, lam=1.0)
    np.testing.assert_allclose(returns.reinforce(rewards, sequence, gamma=gamma), advantage, atol=1e-12)


def test_a_truncated_answer_is_worth_what_the_critic_expects_of_the_rest() -> None:
    # Values 0.5; the first is cut where the critic says 0.8, the second is finished with reward 1.
    advantage, target = returns.gae([0.0, 1.0], [0.5, 0.5], [0, 1], bootstrap=[0.8, 0.0])
    np.testing.assert_allclose(advantage, [0.8 - 0.5, 1.0 - 0.5])
    np.testing.assert_allclose(target, [0.8, 1.0])


def test_a_return_is_carried_over_observations_or_ends_there_as_told() -> None:
    # Tokens at 0, 1 and 4, 5 of one sequence: an observation of two between them. The reward is on the last.
    tokens = {"token_rewards": [0.0, 0.0, 0.0, 1.0], "sequence": [0, 0, 0, 0], "positions": [0, 1, 4, 5]}
    np.testing.assert_allclose(returns.reinforce(**tokens, gamma=0.5), [0.125, 0.25, 0.5, 1.0])
    np.testing.assert_allclose(returns.reinforce(**tokens, gamma=0.5, observations="reset"), [0, 0, 0.5, 1.0])
    # With a critic: the first stretch is an episode of its own, ending with value 0 behind it.
    advantage, _ = returns.gae(
        tokens["token_rewards"], [0.5] * 4, [0] * 4, observations="reset", positions=tokens["positions"]
    )
    np.testing.assert_allclose(advantage, [-0.5, -0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="needs the positions"):
        returns.reinforce([1.0], [0], observations="reset")


def test_a_reward_goes_to_the_last_token_and_a_sequence_without_tokens_loses_it() -> None:
    # Sequences of 2, 0 and 1 tokens.
    result = returns.token_rewards([1.0, 5.0, -1.0], [0, 0, 2], kl=[0.1, 0.2, 0.3], kl_coef=0.5)
    np.testing.assert_allclose(result, [-0.05, 1.0 - 0.1, -1.0 - 0.15])


@given(values=st.lists(reward, min_size=2, max_size=30), cut=st.integers(0, 30))
def test_whitening_in_parts_is_whitening_at_once(values: list[float], cut: int) -> None:
    numbers = np.array(values)
    assume(numbers.std() > 1e-2)
    whole = returns.whiten(numbers)
    parts = numbers[:cut], numbers[cut:]
    totals = sum(returns.moments(part) for part in parts)
    np.testing.assert_allclose(
        np.concatenate([returns.whiten(part, totals=totals) for part in parts]), whole, atol=1e-6
    )
    assert abs(whole.mean()) < 1e-9
    assert whole.std(ddof=1) == pytest.approx(1.0, abs=1e-3)
    assert returns.whiten(numbers, std="biased").std() == pytest.approx(1.0, abs=1e-3)


def test_whitening_one_value_or_equal_ones_gives_zeros() -> None:
    for values in ([], [3.0], [0.1] * 5):
        np.testing.assert_allclose(returns.whiten(values), np.zeros(len(values)), atol=1e-9)
        assert np.isfinite(returns.whiten(values, totals=returns.moments(values))).all()


def test_whitening_can_keep_the_mean() -> None:
    assert returns.whiten([4.0, 6.0], keep_mean=True).mean() == pytest.approx(5.0)


def test_a_batch_without_tokens_has_no_returns() -> None:
    assert returns.reinforce([], []).shape == (0,)
    assert returns.gae([], [], [], bootstrap=[0.3])[0].shape == (0,)
    assert returns.reinforce_pp([1.0], []).shape == (0,)
