"""Advantages and returns."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from asyncrl.policies.advantages.advantage import AdvantageInputs, GroupAdvantage
from asyncrl.policies.advantages.groups import GPG, GRPO, OPO, RLOO, DrGRPO, MaxRL, OPMDAdvantage
from asyncrl.policies.advantages.returns import GAE, Returns, whiten

reward = st.floats(-10, 10).map(lambda x: round(x, 3))
group = st.lists(reward, min_size=2, max_size=8)

PARTS: dict[str, GroupAdvantage] = {
    "grpo": GRPO(),
    "grpo_biased": GRPO(std="biased"),
    "grpo_batch": GRPO(std_over="batch"),
    "grpo_leave_one_out": GRPO(baseline="others", std="none"),
    "dr_grpo": DrGRPO(),
    "rloo": RLOO(),
    "gpg": GPG(),
    "maxrl": MaxRL(),
}


def of(part: GroupAdvantage, rewards: Any, **more: Any) -> np.ndarray:
    """Return the advantages of one group."""
    values = np.asarray(rewards, np.float64)
    made: np.ndarray = part.formula(values, np.zeros(len(values), np.int64), **more)
    return made


BASELINES = {name: functools.partial(of, part) for name, part in PARTS.items()}


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
    assume(values.std() > 1e-2 and values.mean() > 1e-2)  # so that eps is small by comparison
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


def test_a_group_of_one_keeps_its_reward_only_when_told_to() -> None:
    np.testing.assert_allclose(of(GRPO(singleton="raw"), [0.7]), [0.7], rtol=1e-5)
    np.testing.assert_allclose(of(RLOO(singleton="raw"), [0.7]), [0.7])


@given(rewards=group)
def test_leaving_one_out_takes_mean_and_deviation_of_the_others(rewards: list[float]) -> None:
    """The default of NeMo-RL. If the other rewards are equal, nothing is divided."""
    expected = []
    for place, value in enumerate(rewards):
        others = np.delete(rewards, place)
        spread = others.std(ddof=1) if len(others) > 1 and np.ptp(others) > 0 else 0.0
        expected.append((value - others.mean()) / (spread + 1e-6 if spread else 1.0))
    found = of(GRPO(baseline="others", std_over="others"), rewards)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def test_leaving_one_out_of_the_baseline_alone_divides_by_the_group_s_deviation() -> None:
    """AReaL's mean_leave1out: 1 - 0, 0 - 1/2 and 0 - 1/2, divided by sqrt(1/3)."""
    found = of(GRPO(baseline="others"), [1.0, 0.0, 0.0])
    np.testing.assert_allclose(found, np.array([1.0, -0.5, -0.5]) * np.sqrt(3), rtol=1e-5)


def test_a_soft_maximum_as_baseline_is_above_the_mean_and_below_the_best() -> None:
    rewards = [1.0, 0.0, 0.0, 1.0]
    np.testing.assert_allclose(of(OPMDAdvantage(tau=1e6), rewards), [0.5, -0.5, -0.5, 0.5], atol=1e-5)
    np.testing.assert_allclose(of(OPMDAdvantage(tau=1e-3), rewards), [0.0, -1.0, -1.0, 0.0], atol=1e-2)


@given(rewards=group)
def test_rloo_compares_with_the_mean_of_the_others(rewards: list[float]) -> None:
    expected = [r - np.mean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(of(RLOO(), rewards), expected, atol=1e-9)


def test_opo_weighs_the_baseline_by_length() -> None:
    # (1 x 10 + 0 x 30) / 40 = 0.25
    np.testing.assert_allclose(of(OPO(), [1.0, 0.0], lengths=np.array([10, 30])), [0.75, -0.25])
    np.testing.assert_allclose(of(OPO(), [1.0, 0.0], lengths=np.array([0, 0])), [0.5, -0.5])


def test_gpg_makes_up_for_samples_without_a_signal() -> None:
    rewards, groups = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 1.0]), np.array([0, 0, 1, 1, 2, 2])
    assert GPG(count="nonzero_rewards").alpha(rewards, groups) == 6 / 3  # three rewards are nonzero
    assert GPG().alpha(rewards, groups) == 3 / 1
    assert GPG(count="nonzero_rewards").alpha(np.zeros(2), np.zeros(2, np.int64)) == 1.0
    assert GPG().alpha(np.ones(2), np.zeros(2, np.int64)) == 1.0


# -- returns -----------------------------------------------------------------------------------------------------------


def plain_gae(rewards: list[float], values: list[float], gamma: float, lam: float, last_value: float) -> list[float]:
    """Compute GAE for one sequence backwards, as in the paper."""
    result, running, following = [], 0.0, last_value
    for reward_, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward_ + gamma * following - value + gamma * lam * running
        following = value
        result.append(running)
    return result[::-1]


lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)
discount = st.floats(0.0, 1.0)


def batch(token_rewards: Any, sequence: Any, *, num_answers: int, **more: Any) -> AdvantageInputs:
    """Make answers whose tokens have these rewards; the reward of each answer is 0."""
    return AdvantageInputs(
        rewards=np.zeros(num_answers),
        group=np.arange(num_answers),
        sequence=np.asarray(sequence, np.int64),
        kl=-np.asarray(token_rewards, np.float64),
        **more,
    )


def compute(part: Any, inputs: AdvantageInputs) -> Any:
    return part.formula(**{name: getattr(inputs, name) for name in part.inputs})


@given(lengths=lengths, gamma=discount, lam=discount, seed=st.integers(0, 2**16))
def test_gae_of_a_batch_is_that_of_each_sequence_alone(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    rewards, values = generator.normal(size=(2, sum(lengths)))
    final, is_cut = generator.normal(size=len(lengths)), generator.normal(size=len(lengths)) > 0
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    inputs = batch(rewards, sequence, num_answers=len(lengths), values=values, final_values=final, is_truncated=is_cut)
    gae = GAE(gamma=gamma, lam=lam, truncated="bootstrap", whitening="none")
    advantage, target = compute(gae, inputs)
    expected = [
        number
        for i in range(len(lengths))
        for number in plain_gae(
            rewards[sequence == i].tolist(),
            values[sequence == i].tolist(),
            gamma,
            lam,
            final[i] if is_cut[i] else 0.0,
        )
    ]
    np.testing.assert_allclose(advantage, expected, atol=1e-9)
    np.testing.assert_allclose(target, advantage + values)


@given(lengths=lengths, gamma=discount, seed=st.integers(0, 2**16))
def test_returns_are_gae_without_a_critic(lengths: list[int], gamma: float, seed: int) -> None:
    rewards = np.random.default_rng(seed).normal(size=sum(lengths))
    nothing = {"values": np.zeros(len(rewards)), "final_values": np.zeros(len(lengths))}
    inputs = batch(
        rewards,
        np.repeat(np.arange(len(lengths)), lengths),
        num_answers=len(lengths),
        is_truncated=np.zeros(len(lengths), np.bool_),
        **nothing,
    )
    advantage, _ = compute(GAE(gamma=gamma, whitening="none"), inputs)
    np.testing.assert_allclose(compute(Returns(gamma=gamma), inputs), advantage, atol=1e-12)


def test_a_truncated_answer_is_worth_what_the_critic_expects_of_the_rest_when_told_so() -> None:
    # Values are 0.5. The first answer is truncated where the critic predicts 0.8; the second is finished with reward 1.
    inputs = batch(
        [0.0, 1.0],
        [0, 1],
        num_answers=2,
        values=np.array([0.5, 0.5]),
        final_values=np.array([0.8, 0.3]),
        is_truncated=np.array([True, False]),
    )
    advantage, target = compute(GAE(truncated="bootstrap", whitening="none"), inputs)
    np.testing.assert_allclose(advantage, [0.8 - 0.5, 1.0 - 0.5])
    np.testing.assert_allclose(target, [0.8, 1.0])
    _, target = compute(GAE(), inputs)
    np.testing.assert_allclose(target, [0.0, 1.0])


def test_a_return_is_carried_over_observations_or_ends_there_as_told() -> None:
    # Tokens 0, 1 and 4, 5 of one sequence, with an observation of two tokens between. The last has the reward.
    inputs = batch(
        [0.0, 0.0, 0.0, 1.0],
        [0, 0, 0, 0],
        num_answers=1,
        positions=np.array([0, 1, 4, 5]),
        values=np.full(4, 0.5),
        final_values=np.zeros(1),
        is_truncated=np.array([False]),
    )
    np.testing.assert_allclose(compute(Returns(gamma=0.5), inputs), [0.125, 0.25, 0.5, 1.0])
    np.testing.assert_allclose(compute(Returns(gamma=0.5, observations="reset"), inputs), [0, 0, 0.5, 1.0])
    # With a critic, the first stretch is its own episode, with value 0 after it.
    advantage, _ = compute(GAE(observations="reset", whitening="none"), inputs)
    np.testing.assert_allclose(advantage, [-0.5, -0.5, 0.5, 0.5])
    with pytest.raises(ValueError, match="needs the positions"):
        compute(Returns(observations="reset"), batch([1.0], [0], num_answers=1))


def test_a_reward_goes_to_the_last_token_and_a_sequence_without_tokens_loses_it() -> None:
    # Sequences of 2, 0 and 1 tokens.
    inputs = AdvantageInputs(
        rewards=np.array([1.0, 5.0, -1.0]),
        group=np.zeros(3, np.int64),
        sequence=np.array([0, 0, 2]),
        kl=np.array([0.05, 0.1, 0.15]),
    )
    np.testing.assert_allclose(inputs.token_rewards, [-0.05, 1.0 - 0.1, -1.0 - 0.15])


@given(values=st.lists(reward, min_size=2, max_size=30))
def test_whitened_values_have_a_mean_of_0_and_a_deviation_of_1(values: list[float]) -> None:
    numbers = np.array(values)
    assume(numbers.std() > 1e-2)
    whole = whiten(numbers)
    assert abs(whole.mean()) < 1e-9
    assert whole.std(ddof=1) == pytest.approx(1.0, abs=1e-3)
    assert whiten(numbers, std="biased").std() == pytest.approx(1.0, abs=1e-3)
