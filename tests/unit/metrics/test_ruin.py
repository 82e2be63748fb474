"""A model that is being ruined is reported; one that learns, or is only noisy, is not."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from asyncrl.metrics.alarms import Alarm
from asyncrl.metrics.ruin import CollapseAlarm, DivergenceAlarm, RewardFallAlarm
from tests.unit.metrics.test_alarms import Row, states


def rows(count: int, **values: float | Sequence[float]) -> list[Row]:
    """Steps whose metrics go from the first value to the second. ``__`` stands for "/"."""
    made = []
    for index in range(count):
        row: Row = {}
        for name, value in values.items():
            first, last = (value, value) if isinstance(value, float | int) else value
            row[name.replace("__", "/")] = first + (last - first) * index / max(1, count - 1)
        made.append(row)
    return made


def rewards(means: Sequence[float], *, std: float = 0.3) -> list[Row]:
    return [{"reward/mean": mean, "reward/std": std} for mean in means]


def noisy(seed: int, *, count: int = 400, deviation: float = 0.1) -> list[float]:
    generator = random.Random(seed)
    return [0.5 + generator.gauss(0, deviation) for _ in range(count)]


LEARNS = rows(40, reward__mean=(0.1, 0.98), reward__std=(0.2, 0.05), entropy=(2.4, 0.05), mismatch__mean=0.6)
ZERO: Row = {"reward/mean": 0.0, "reward/std": 0.0, "loss": 0.0}

QUIET: dict[str, tuple[Alarm, Sequence[Row]]] = {
    "diverged: the steepest steps of the demo": (DivergenceAlarm(), LEARNS),
    "diverged: nothing is measured": (DivergenceAlarm(), [{}] * 3),
    "diverged: a skipped step has a line of its own": (
        DivergenceAlarm(),
        [{"loss": math.nan, "grad_norm": math.inf, "learner/skipped_steps": 1.0}],
    ),
    "diverged: one step learned it all": (
        DivergenceAlarm(),
        [{"entropy": 2.0, "reward/mean": 0.1}, {"entropy": 0.001, "reward/mean": 1.0}],
    ),
    "collapse: certain and right": (CollapseAlarm(), LEARNS),
    "collapse: short answers are what is asked for": (
        CollapseAlarm(),
        rows(40, reward__mean=(0.2, 0.9), reward__std=0.4, length__trained_mean=(200, 2), entropy=0.5),
    ),
    "collapse: all tokens are used for a reward": (
        CollapseAlarm(),
        rows(40, reward__mean=(0.2, 0.9), reward__std=0.4, length__truncated_fraction=(0.1, 1.0), entropy=0.5),
    ),
    "collapse: SFT learns its answers by heart": (CollapseAlarm(), rows(40, loss=(3.0, 0.01), entropy=(2.0, 0.01))),
    "collapse: nothing changes": (
        CollapseAlarm(),
        rows(40, entropy=1.0, reward__mean=0.2, reward__std=0.4, kl=0.1, length__trained_mean=100.0),
    ),
    "reward: rises": (RewardFallAlarm(), LEARNS),
    "reward: solved from the start": (RewardFallAlarm(), rewards([1.0] * 50, std=0.0)),
    "reward: solved, and not quite": (RewardFallAlarm(), rewards([1.0] * 20 + [0.97] * 30, std=0.05)),
    "reward: none": (RewardFallAlarm(), [ZERO] * 50),
    "reward: of SFT": (RewardFallAlarm(), rows(30, loss=1.0)),
    "reward: below zero, rising": (RewardFallAlarm(), rewards([-1 + index / 50 for index in range(50)])),
}


@pytest.mark.parametrize("case", QUIET)
def test_a_run_that_is_well_raises_no_alarm(case: str, caplog: pytest.LogCaptureFixture) -> None:
    alarm, steps = QUIET[case]
    assert not any(states(alarm, steps))
    assert not caplog.records


@pytest.mark.parametrize("deviation", [0.02, 0.1, 0.3])
def test_noise_alone_is_no_fall(deviation: float) -> None:
    for seed in range(20):
        assert not any(states(RewardFallAlarm(), rewards(noisy(seed, deviation=deviation))))


RUINED: dict[str, tuple[Alarm, Sequence[Row], str]] = {
    "learning_rate = 1000": (
        DivergenceAlarm(),
        [{"mismatch/mean": 0.0}, {"mismatch/mean": 2.1e7, "entropy": 0.0, "grad_norm": 12.0}],
        "the model is 2.1e+07 nats per token away from the versions that sampled the batch (a healthy run stays below "
        "1); entropy 0, grad norm 12",
    ),
    "one step takes all entropy": (
        DivergenceAlarm(),
        [{"entropy": 2.41, "reward/mean": 0.106}, {"entropy": 0.0, "reward/mean": 0.031, "grad_norm": 0.0}],
        "one step took the entropy from 2.41 nats to nearly nothing, and the reward is no better",
    ),
    "not finite": (DivergenceAlarm(), [{"entropy": math.nan, "loss": 1.0}], "not finite: entropy"),
    "learning_rate = 1000, in sync": (
        CollapseAlarm(),
        [ZERO | {"reward/mean": 0.1, "reward/std": 0.2, "entropy": 2.4}, *[ZERO | {"entropy": 0.0}] * 4],
        "the entropy fell from 2.4 to 0 nats: all answers are nearly the same, and the reward went from",
    ),
    "the entropy collapses": (
        CollapseAlarm(),
        rows(40, entropy=(1.0, 0.0), reward__mean=0.2, reward__std=0.4),
        "the entropy fell from 1 to ",
    ),
    "answers become noise": (
        CollapseAlarm(),
        rows(40, entropy=(0.5, 6.0), reward__mean=(0.3, 0.0), reward__std=0.4),
        "the entropy rose from 0.5 to ",
    ),
    "KL explodes": (
        CollapseAlarm(),
        rows(40, kl=(0.0, 5.0), reward__mean=0.3, reward__std=0.4),
        "the KL to the reference is ",
    ),
    "answers shrink": (
        CollapseAlarm(),
        rows(40, length__trained_mean=(200, 1), reward__mean=0.3, reward__std=0.4),
        "answers shrank from 200 to ",
    ),
    "answers grow to the limit": (
        CollapseAlarm(),
        rows(40, length__truncated_fraction=(0.1, 1.0), reward__mean=0.3, reward__std=0.4),
        "of the answers are cut at rollout.max_new_tokens, at the start 10%",
    ),
    "SFT forgets": (CollapseAlarm(), rows(40, loss=(1.0, 9.0), entropy=(1.0, 8.0)), "and the loss went from 1"),
    "the reward falls from 1.0 to 0.7": (
        RewardFallAlarm(),
        rewards([1.0] * 20 + [0.7] * 15, std=0.1),
        "the reward fell from 1 to 0.",
    ),
    "the reward rises and is lost again": (
        RewardFallAlarm(),
        rewards([*(index / 30 for index in range(30)), *(1 - index / 60 for index in range(30)), *[0.5] * 20]),
        "the reward fell from ",
    ),
    "a reward of both signs": (
        RewardFallAlarm(),
        rewards([0.0] * 20 + [-0.8] * 15, std=1.0),
        "the reward fell from 0 to",
    ),
}


@pytest.mark.parametrize("case", RUINED)
def test_a_model_that_is_ruined_is_reported_once_in_one_line_with_a_remedy(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    alarm, steps, text = RUINED[case]
    assert states(alarm, steps)[-1]
    assert len(caplog.records) == 1
    assert text in alarm.text
    assert "the model is getting worse, and every further step costs as much as before -> stop" in alarm.text
    assert "\n" not in alarm.text and alarm.text.count(" -> ") == 1
