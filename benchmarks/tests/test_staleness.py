"""The learning benchmark on exact rewards: its task, its controls, and its promise on one seed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks import staleness
from benchmarks.staleness import ARMS, HIGH, LOW
from tests.harness.tiny import task as staleness_task


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, because the tensors are so small that two threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def start(one_thread: None) -> staleness_task.Policy:
    return staleness_task.warm_start(0, reward=0.105, noise=0.25)


def test_the_expected_reward_is_what_samples_have_on_average(start: staleness_task.Policy) -> None:
    prompts = staleness_task.all_prompts().repeat(100, 1)
    answers, logprobs = start.sample(prompts, torch.Generator().manual_seed(0))
    torch.testing.assert_close(start.logprobs(prompts, answers), logprobs)
    sampled = staleness_task.rewards(prompts, answers).mean().item()
    assert sampled == pytest.approx(staleness_task.expected_reward(start), abs=0.02)  # 5 standard errors


def test_lags_are_what_the_arm_says(start: staleness_task.Policy) -> None:
    row = staleness.run(ARMS["tis_token_4"], start, seed=0, learning_rate=LOW, steps=7)
    assert row["lags"] == [0, 1, 2, 3, 4, 4, 4]


def test_at_lag_zero_there_is_nothing_to_correct(start: staleness_task.Policy) -> None:
    batch = staleness.sample(start, torch.Generator().manual_seed(0))
    for correction in ("none", "tis_token", "tis_sequence"):
        loss, metrics = staleness.objective(start, batch, correction=correction)
        assert loss.item() == pytest.approx(-batch.advantages.mean().item(), abs=1e-5)
        assert metrics["offpolicy/sequence_ess"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("how", ["shuffled", "shifted"])
def test_broken_logprobs_are_the_same_numbers_elsewhere(start: staleness_task.Policy, how: str) -> None:
    batch = staleness.sample(start, torch.Generator().manual_seed(0))
    wrong = staleness.broken(batch, how, torch.Generator().manual_seed(1)).behavior_logprobs
    assert not torch.equal(wrong, batch.behavior_logprobs)
    torch.testing.assert_close(wrong.ravel().sort().values, batch.behavior_logprobs.ravel().sort().values)


@pytest.mark.slow
def test_token_tis_keeps_what_staleness_without_correction_loses(start: staleness_task.Policy) -> None:
    arms = ("sync", "none", "tis_token")
    plans = [(ARMS[name], rate) for rate in (HIGH, LOW) for name in arms]
    rows = [staleness.run(arm, start, seed=0, learning_rate=rate, steps=200) for arm, rate in plans]
    speeds = torch.ones(17).numpy()
    found = [row for rate in (HIGH, LOW) for row in staleness.summary(rows, learning_rate=rate, speeds=speeds)]
    assert list(staleness.broken_promises(found)) == []
