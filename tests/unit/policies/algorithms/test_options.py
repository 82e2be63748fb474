"""Options of an algorithm's parts follow their formulas, in a batch as the learner builds it."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

import numpy as np
import pytest

from asyncrl.actors.learner.training_step import train_batch
from asyncrl.errors import ConfigError
from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.policies.advantages.advantage import AdvantageInputs
from asyncrl.policies.advantages.returns import GAE
from asyncrl.policies.algorithms.algorithm import Algorithm
from asyncrl.policies.algorithms.spec import resolve
from asyncrl.policies.algorithms.table import ALGORITHMS
from asyncrl.policies.batching import batch as batches
from asyncrl.policies.batching.batch import Batch
from tests.harness.fakes import Backend
from tests.harness.packing import pack


def answer(reward: float, mask: str = "xxx", *, finish_reason: str = "stop") -> Trajectory:
    """``mask`` has x for a sampled token and o for an observation."""
    return Trajectory(
        tokens=np.arange(4, 4 + len(mask), dtype=np.int32),
        response_mask=np.array([letter == "x" for letter in mask]),
        behavior_logprobs=np.full(len(mask), -0.5, np.float32),
        version_spans=(VersionSpan(start=0, incarnation=0, policy_version=5),),
        reward=reward,
        finish_reason=finish_reason,
    )


def build(algorithm: Algorithm, *groups: tuple[Trajectory, ...]) -> Batch:
    made = [
        TrajectoryGroup(group_id=i, prompt_tokens=np.array([1], np.int32), trajectories=group, error="")
        for i, group in enumerate(groups)
    ]
    return batches.build(made, algorithm=algorithm, policy_version=5, max_staleness=4, resume_points={})


def advantages(batch: Batch) -> np.ndarray:
    return np.concatenate([sequence.advantages[sequence.response_mask] for sequence in batch.sequences])


CUT = answer(0.0, "x" * 9, finish_reason="length")


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_whitening_is_over_the_tokens_that_are_trained(name: str) -> None:
    algorithm = dataclasses.replace(resolve(ALGORITHMS[name]), masks_truncated=True)
    made = advantages(build(algorithm, (answer(1.0), answer(0.0, "xx"), CUT), (answer(0.5), answer(1.0), CUT)))
    assert len(made) == 11
    assert made.mean() == pytest.approx(0, abs=1e-6)
    assert made.std(ddof=1) == pytest.approx(1, abs=1e-6)


def test_any_estimator_is_whitened_over_the_trained_tokens_of_the_batch() -> None:
    # dr_grpo: rewards 1 and 0 of a group are 0.5 and -0.5, on 3 and 2 tokens; the masked answer of the second group
    # has a reward, but no token that counts. The other one's 2 tokens are (1 - 0) / 2 = 0.5.
    # 5 x 0.5 and 2 x -0.5: mean 1.5 / 7, unbiased variance (7 / 4 - 7 (1.5 / 7)^2) / 6.
    algorithm = dataclasses.replace(resolve(ALGORITHMS["dr_grpo"], whitening="unbiased"), masks_truncated=True)
    made = advantages(build(algorithm, (answer(1.0), answer(0.0, "xx")), (answer(1.0, "xx"), CUT)))
    mean = 1.5 / 7
    deviation = ((7 / 4 - 7 * mean**2) / 6) ** 0.5
    high, low = (0.5 - mean) / deviation, (-0.5 - mean) / deviation
    assert made.tolist() == pytest.approx([high] * 3 + [low] * 2 + [high] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("reinforce_pp", "advantage reinforce_pp is whitened already"),
        ("ppo", "advantage gae is whitened already"),
        ("opd", "advantage none with loss opd_reward leaves no advantages to whiten"),
        ("sft", "advantage reinforce with loss sft leaves no advantages to whiten"),
    ],
)
def test_whitening_that_would_do_nothing_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve(ALGORITHMS[name], whitening="unbiased")
    resolve(ALGORITHMS["ppo"], whitening="biased", options={"whitening": "none"})


def test_gae_whitens_over_the_tokens_that_are_trained() -> None:
    trained = np.array([True, True, True, False, False])
    inputs = AdvantageInputs(
        rewards=np.array([1.0, 0.0]),
        group=np.zeros(2, np.int64),
        sequence=np.array([0, 0, 0, 1, 1]),
        is_trained=trained,
        is_truncated=~np.array([True, False]),
        values=np.array([0.1, 0.5, 0.2, 3.0, 4.0]),
        final_values=np.zeros(2),
    )
    made, returned = GAE().with_returns(inputs)
    assert made[trained].mean() == pytest.approx(0, abs=1e-6)
    assert returned is not None
    assert returned.tolist() == [1, 1, 1, 0, 0]


def test_a_masked_answer_counts_in_its_group_s_mean() -> None:
    algorithm = dataclasses.replace(resolve(ALGORITHMS["dr_grpo"]), masks_truncated=True)
    made = advantages(build(algorithm, (answer(1.0), answer(0.5), CUT)))
    assert made.tolist() == [0.5] * 3 + [0.0] * 3


def test_a_batch_counts_the_tokens_that_it_trains(caplog: pytest.LogCaptureFixture) -> None:
    algorithm = dataclasses.replace(resolve(ALGORITHMS["grpo"]), masks_truncated=True)
    some, none = build(algorithm, (answer(1.0), CUT)), build(algorithm, (CUT, CUT))
    assert (some.num_tokens, none.num_tokens) == (3, 0)
    assert [made.metrics["length/trained_tokens"] for made in (some, none)] == [3.0, 0.0]
    assert some.metrics["staleness/histogram"].counts == (3, 0, 0, 0, 0)  # type: ignore[union-attr]
    step = functools.partial(train_batch, Backend(), algorithm=algorithm)
    with caplog.at_level(logging.WARNING):
        step(some, [[pack(some.sequences, max_tokens=99)]], step=6, learning_rate=1e-3)
        assert not caplog.messages
        step(none, [[pack(none.sequences, max_tokens=99)]], step=6, learning_rate=1e-3)
    assert caplog.messages == ["step 7 trains nothing: no answer of its batch has a token that is trained"]


def test_overlong_shaping_counts_what_the_policy_wrote() -> None:
    algorithm = dataclasses.replace(resolve(ALGORITHMS["dr_grpo"]), overlong_tokens=2, max_response_tokens=4)
    rewards = build(algorithm, (answer(1.0, "xooooox"), answer(1.0, "xxx"))).advantage_inputs.rewards
    assert rewards.tolist() == [1.0, 0.5]


# -- variants of advantages --------------------------------------------------------------------------------------------

GROUPS = ((answer(1.0), answer(0.0), answer(0.0)), (answer(3.0), answer(1.0)), (answer(2.0),))
REWARDS = np.array([1.0, 0.0, 0.0, 3.0, 1.0, 2.0])
CENTRED = np.array([2 / 3, -1 / 3, -1 / 3, 1.0, -1.0, 0.0])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"std": "none"}, CENTRED),
        ({"std": "biased"}, CENTRED / np.repeat([np.sqrt(2) / 3, 1.0, 1.0], [3, 2, 1])),
        ({"std": "unbiased"}, CENTRED / np.repeat([np.sqrt(1 / 3), np.sqrt(2), 1.0], [3, 2, 1])),
        ({"std_over": "batch"}, CENTRED / REWARDS.std(ddof=1)),
        ({"std_over": "batch", "std": "biased"}, CENTRED / REWARDS.std()),
        ({"std": "none", "singleton": "raw"}, CENTRED + np.array([0, 0, 0, 0, 0, 2.0])),
    ],
)
def test_grpo_divides_by_the_standard_deviation_that_is_chosen(options: dict[str, Any], expected: Any) -> None:
    made = advantages(build(resolve(ALGORITHMS["grpo"], options=options), *GROUPS))
    assert made[::3] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("observations", "first"), [("carry", 0.25), ("reset", 0.0)])
def test_a_return_is_carried_over_an_observation_or_ends_there(observations: str, first: float) -> None:
    algorithm = resolve(ALGORITHMS["topr"], options={"gamma": 0.5, "advantage.observations": observations})
    made = advantages(build(algorithm, (answer(1.0, "xoxx"),)))
    assert made.tolist() == [first, 0.5, 1.0]
