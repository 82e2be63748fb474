"""The numbers of a data set, computed by hand and by enumerating every resample."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from asyncrl.policies.evaluation.bootstrap import interval
from asyncrl.policies.evaluation.results import Answered, Measured, metric_names, metrics


def answered(rewards: list[float], *, votes: str = "", tags: tuple[str, ...] = (), cut: int = 0) -> Answered:
    n = len(rewards)
    return Answered(
        rewards=tuple(rewards),
        votes=tuple(votes) or ("",) * n,
        lengths=tuple(range(1, n + 1)),
        truncated=tuple(index < cut for index in range(n)),
        tags=tags,
    )


def test_a_data_set_by_hand() -> None:
    measured = Measured(num_prompts=3, num_samples=4, has_labels=True)
    found = metrics(
        "sums",
        measured,
        [answered([1, 1, 0, 0], votes="aabc"), answered([0, 0, 0, 0.5], votes="abcc", cut=1)],
        seed=0,
    )
    assert found["sums/prompts"] == 3
    assert found["sums/missing"] == 1
    assert found["sums/mean@4"] == pytest.approx((0.5 + 0.125) / 2)
    assert found["sums/pass@1"] == pytest.approx(0.25)
    assert found["sums/pass@2"] == pytest.approx((1 - 1 / 6) / 2)  # in one of the 6 pairs, both answers are unsolved
    assert found["sums/pass@4"] == pytest.approx(0.5)
    assert found["sums/pass^2"] == pytest.approx(1 / 6 / 2)
    assert found["sums/pass^4"] == 0.0
    assert found["sums/majority@4"] == pytest.approx(0.5)
    assert found["sums/length_mean"] == 2.5
    assert found["sums/truncated_fraction"] == 1 / 8
    assert found["sums/mean@4/low"] <= found["sums/mean@4"] <= found["sums/mean@4/high"]


def test_what_counts_as_solved_is_the_data_sets_own() -> None:
    rewards = [answered([0.5, 0.4])]
    strict = metrics("d", Measured(num_prompts=1, num_samples=2), rewards, seed=0)
    lenient = metrics("d", Measured(num_prompts=1, num_samples=2, solved_at=0.5), rewards, seed=0)
    assert (strict["d/pass@1"], lenient["d/pass@1"]) == (0.0, 0.5)
    assert "d/majority@2" not in strict  # without labels


def test_each_tag_has_the_same_numbers() -> None:
    measured = Measured(num_prompts=3, num_samples=1, tags={"easy": 2, "hard": 2})
    found = metrics(
        "d",
        measured,
        [answered([1.0], tags=("easy",)), answered([0.0], tags=("hard",)), answered([1.0], tags=("easy", "hard"))],
        seed=0,
    )
    assert found["d[easy]/mean@1"] == 1.0
    assert found["d[hard]/mean@1"] == 0.5
    assert found["d[hard]/missing"] == 0.0


def test_every_name_is_told_beforehand() -> None:
    found = metrics("d", Measured(num_prompts=1, num_samples=3, has_labels=True), [answered([1, 0, 0])], seed=0)
    means = {name for name in found if "@" in name or "^" in name if not name.endswith(("/low", "/high"))}
    assert means == {f"d/{name}" for name in metric_names(3, has_labels=True)}


def test_the_interval_is_that_of_every_resample() -> None:
    """4 prompts have 4^4 resamples. The quantiles of their means match, up to the error of 20,000 drawn resamples."""
    values = np.array([[0.0], [0.25], [0.5], [1.0]])
    means = sorted(float(np.mean(drawn)) for drawn in itertools.product(values[:, 0], repeat=4))
    low, high = interval(values, seed=3, resamples=20_000)
    assert low[0] == pytest.approx(np.quantile(means, 0.025), abs=0.07)
    assert high[0] == pytest.approx(np.quantile(means, 0.975), abs=0.07)
