"""Groups that cannot be are found out with the reason; those that can be are let through."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan, replace
from asyncrl.policies.vetting import Vetting

VETTING = Vetting(vocabulary_size=100, context_tokens=8)
SPAN = VersionSpan(start=0, run_epoch=1, policy_version=6)
TRAJECTORY = Trajectory(
    tokens=[3, 99, 0],
    response_mask=[True, True, True],
    behavior_logprobs=[-1.0, -1.0, 0.0],
    version_spans=(SPAN,),
    reward=0.5,
    reward_parts={"format": 1.0},
)
GROUP = TrajectoryGroup(group_id=0, prompt_tokens=[1, 2], trajectories=(TRAJECTORY,), worker="w")


def problem(group: TrajectoryGroup) -> str:
    """At version 6 of run epoch 1, which began from version 4."""
    return VETTING.problem(group, run_epoch=1, policy_version=6, forks={1: 4})


def of(**changes: Any) -> TrajectoryGroup:
    group: TrajectoryGroup = replace(GROUP, trajectories=(TRAJECTORY, replace(TRAJECTORY, **changes)))
    return group


def test_a_group_that_can_be_is_let_through() -> None:
    assert problem(GROUP) == ""
    assert problem(TrajectoryGroup(group_id=1, prompt_tokens=[], trajectories=(), error="reward failed")) == ""


def test_tokens_of_a_lost_history_are_let_through() -> None:
    """Version 9 of run epoch 0 counts as version 4, from which epoch 1 began."""
    assert problem(of(version_spans=(VersionSpan(start=0, run_epoch=0, policy_version=9),))) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": np.array([3, 100, 0], np.int32)}, "token 100 is outside the vocabulary of 100"),
        ({"tokens": np.array([3, -1, 0], np.int32)}, "token -1 is outside"),
        ({"reward": math.nan}, "reward is nan"),
        ({"reward": -math.inf}, "reward is -inf"),
        ({"reward_parts": {"format": math.inf}}, "format is inf"),
        ({"version_spans": (VersionSpan(start=0, run_epoch=1, policy_version=7),)}, "version 7 of run epoch 1"),
        ({"version_spans": (VersionSpan(start=0, run_epoch=2, policy_version=0),)}, "run epoch 2"),
        ({"version_spans": (SPAN, VersionSpan(start=1, run_epoch=1, policy_version=2**52))}, "at version 6 of 1"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in problem(of(**changes))


def test_a_prompt_that_cannot_be_is_named() -> None:
    assert "prompt token 100" in problem(replace(GROUP, prompt_tokens=np.array([100], np.int32)))
    assert "no prompt tokens" in problem(replace(GROUP, prompt_tokens=np.zeros(0, np.int32)))


def test_what_does_not_fit_into_the_model_is_named() -> None:
    long = replace(GROUP, prompt_tokens=np.ones(6, np.int32))
    assert problem(long) == "prompt and answer have 9 tokens, the model's context 8"


def test_answers_that_nothing_sampled_may_name_any_version() -> None:
    given = of(version_spans=(VersionSpan(start=0, run_epoch=99, policy_version=7),))
    vetting = Vetting(vocabulary_size=100, context_tokens=8, are_sampled=False)
    assert vetting.problem(given, run_epoch=1, policy_version=6, forks={}) == ""
