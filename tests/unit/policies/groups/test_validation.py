"""Impossible groups are rejected with the reason; possible groups pass."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from asyncrl.messages import Trajectory, TrajectoryGroup, TurnReward, VersionSpan, replace
from asyncrl.messages.likeliest import Likeliest
from asyncrl.messages.support import WHOLE as WHOLE_VOCABULARY
from asyncrl.messages.support import Support
from asyncrl.policies.groups.validation import LEAST_LOGPROB, UNLIKELY, GroupValidation, PromptSpec, digest

VETTING = GroupValidation(vocabulary_size=100, context_tokens=8)
SPAN = VersionSpan(start=0, incarnation=1, policy_version=6)
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
    """Validate ``group`` at version 6 of incarnation 1, which began from version 4."""
    return VETTING.problem(group, incarnation=1, policy_version=6, resume_points={1: 4})


def of(**changes: Any) -> TrajectoryGroup:
    group: TrajectoryGroup = replace(GROUP, trajectories=(TRAJECTORY, replace(TRAJECTORY, **changes)))
    return group


def test_a_group_that_can_be_is_let_through() -> None:
    assert problem(GROUP) == ""
    assert problem(TrajectoryGroup(group_id=1, prompt_tokens=[], trajectories=(), error="reward failed")) == ""


def test_tokens_of_rolled_back_versions_are_let_through() -> None:
    """Version 9 of incarnation 0 counts as version 4, from which incarnation 1 began."""
    assert problem(of(version_spans=(VersionSpan(start=0, incarnation=0, policy_version=9),))) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": np.array([3, 100, 0], np.int32)}, "token 100 is outside the vocabulary of 100"),
        ({"tokens": np.array([3, -1, 0], np.int32)}, "token -1 is outside"),
        ({"reward": math.nan}, "reward is nan"),
        ({"reward": -math.inf}, "reward is -inf"),
        ({"reward_parts": {"format": math.inf}}, "format is inf"),
        ({"version_spans": (VersionSpan(start=0, incarnation=1, policy_version=7),)}, "version 7 of incarnation 1"),
        ({"version_spans": (VersionSpan(start=0, incarnation=2, policy_version=0),)}, "incarnation 2"),
        ({"version_spans": (SPAN, VersionSpan(start=1, incarnation=1, policy_version=2**52))}, "at version 6 of 1"),
    ],
)
def test_what_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in problem(of(**changes))


@pytest.mark.parametrize("name", ["seconds", "began", "reward_seconds"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e308, -1.0])
def test_a_time_that_cannot_be_is_named(name: str, value: float) -> None:
    assert f"its {name} are {value:.4g}" in problem(replace(GROUP, **{name: value}))


def test_what_does_not_fit_into_the_model_is_named() -> None:
    long = replace(GROUP, prompt_tokens=np.ones(6, np.int32))
    assert problem(long) == "prompt and answer have 9 tokens, the model's context 8"


def test_answers_that_nothing_sampled_may_name_any_version() -> None:
    given = of(version_spans=(VersionSpan(start=0, incarnation=99, policy_version=7),))
    vetting = GroupValidation(vocabulary_size=100, context_tokens=8, are_sampled=False)
    assert vetting.problem(given, incarnation=1, policy_version=6, resume_points={}) == ""


SUPPORT = Support.of([[3, 4], [99], [0, 7, 50]])


@pytest.mark.parametrize(
    ("support", "is_cut", "words"),
    [
        (SUPPORT, True, ""),
        (SUPPORT, None, ""),
        (WHOLE_VOCABULARY, False, ""),
        (WHOLE_VOCABULARY, None, ""),
        (WHOLE_VOCABULARY, True, "does not say which tokens it was sampled from"),
        (SUPPORT, False, "and nothing cut them"),
        (Support.of([[3, 4], [], [0]]), True, "a sampled token does not say which tokens"),
        (Support.of([[3, 4], [98], [0]]), True, "a token is none of those that it was sampled from"),
        (Support.of([[3, 100], [99], [0]]), True, "outside the vocabulary of 100"),
        (Support.of([[3, -4], [99], [0]]), True, "outside the vocabulary of 100"),
    ],
)
def test_an_answer_says_what_its_tokens_were_sampled_from_if_something_was_cut(
    support: Support, is_cut: bool | None, words: str
) -> None:
    group = replace(GROUP, trajectories=(replace(TRAJECTORY, support=support),))
    spec = PromptSpec(samples=frozenset({1}), max_tokens=4, max_prompt_tokens=2, reports_support=is_cut)
    found = VETTING.problem(group, incarnation=1, policy_version=6, resume_points={1: 4}, asked=spec)
    assert words in found if words else found == ""


def test_a_group_of_another_temperature_than_was_asked_for_is_named() -> None:
    spec = PromptSpec(samples=frozenset({1}), max_tokens=4, max_prompt_tokens=2, temperature=0.5)
    found = VETTING.problem(GROUP, incarnation=1, policy_version=6, resume_points={1: 4}, asked=spec)
    assert found == "it was sampled at temperature 0, and its prompt asked for 0.5"


# -- limits of the group's prompt --------------------------------------------------------------------------------------

ASKED = PromptSpec(samples=frozenset({2}), max_tokens=4, max_prompt_tokens=2, prompt_digest=digest(GROUP.prompt_tokens))
WHOLE = GroupValidation(vocabulary_size=100, context_tokens=50, largest_reward=10.0, are_answers_whole=True)
PAIR: TrajectoryGroup = replace(GROUP, trajectories=(TRAJECTORY, TRAJECTORY))


def asked_problem(group: TrajectoryGroup, validation: GroupValidation = WHOLE, asked: PromptSpec | None = ASKED) -> str:
    return validation.problem(group, incarnation=1, policy_version=6, resume_points={1: 4}, asked=asked)


def answers(*lengths: int, **changes: Any) -> tuple[Trajectory, ...]:
    return tuple(
        replace(
            TRAJECTORY,
            tokens=np.full(length, 5, np.int32),
            response_mask=np.ones(length, np.bool_),
            behavior_logprobs=np.full(length, -1.0, np.float32),
            **changes,
        )
        for length in lengths
    )


def test_the_group_that_was_asked_for_is_let_through() -> None:
    assert asked_problem(PAIR) == ""
    assert asked_problem(replace(PAIR, trajectories=answers(1, 4, reward=-10.0))) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trajectories": answers(3)}, "1 answers and 0 cut off, and 2 were asked for"),
        ({"trajectories": answers(1) * 20_000}, "20000 answers, and 2 were asked for"),
        ({"trajectories": answers(3), "cancelled": 1}, "this run cuts none"),
        ({"cancelled": 2**52}, f"2 answers and {2**52} cut off"),
        ({"trajectories": answers(3, 5)}, "an answer has 5 tokens, and at most 4 were asked for"),
        ({"prompt_tokens": np.array([1, 3], np.int32)}, "its prompt is not the one that was asked"),
        ({"prompt_tokens": np.ones(40, np.int32)}, "its prompt has 40 tokens, and no prompt has more than 2"),
        ({"worker": "w" * 300}, "has 300"),
        ({"worker": "é" * 40}, "has 240"),
        ({"worker": "w0\nall is well"}, "must be printable"),
    ],
)
def test_another_group_than_was_asked_for_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in asked_problem(replace(PAIR, **changes))


def test_answers_may_be_missing_where_stragglers_are_cut_off_and_are_counted() -> None:
    cutting = GroupValidation(vocabulary_size=100, context_tokens=50)
    assert asked_problem(replace(PAIR, trajectories=answers(3), cancelled=1), cutting) == ""
    assert "1 answers and 0 cut off" in asked_problem(replace(PAIR, trajectories=answers(3)), cutting)


def test_a_prompt_of_an_earlier_life_may_have_asked_for_what_any_life_asked_for() -> None:
    before = PromptSpec(samples=frozenset({1, 3}), max_tokens=4, max_prompt_tokens=9)
    resumed = GroupValidation(vocabulary_size=100, context_tokens=50, asked_before=before)
    assert asked_problem(replace(PAIR, trajectories=answers(2)), resumed, asked=None) == ""
    assert "1 or 3 were asked for" in asked_problem(PAIR, resumed, asked=None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"response_mask": np.zeros(3, np.bool_), "behavior_logprobs": np.zeros(3, np.float32)}, "nothing to train"),
        ({"reward": 1e308}, "reward is 1e+308, beyond reward.largest = 10"),
        ({"reward": 1e308, "reward_parts": {"reward": 0.0}}, "reward is 1e+308, beyond reward.largest = 10"),
        ({"reward_parts": {"format": -11.0}}, "format is -11"),
        ({"reward_parts": {"mean": 1.0}}, "reward/mean is a metric of the learner"),
        ({"reward_parts": {"x" * 200: 1.0}}, "1 to 128 printable characters"),
        ({"reward_parts": {f"{number}": 0.1 for number in range(65)}}, "65 parts, over 64"),
        ({"behavior_logprobs": np.array([-1.0, -1e30, -1.0], np.float32)}, "a behavior logprob is -1e+30"),
        ({"behavior_logprobs": np.full(3, -80.0, np.float32)}, "3 tokens add up to -240"),
    ],
)
def test_an_answer_that_cannot_be_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in asked_problem(replace(PAIR, trajectories=(TRAJECTORY, replace(TRAJECTORY, **changes))))


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
def test_no_answer_that_a_sampler_drew_is_ever_unlikely(scale: float) -> None:
    """For any distribution: a hundred thousand tokens, sampled from logits of any size and scored in float32."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((200, 100)) * scale).astype(np.float32)
    shifted = logits - logits.max(1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    drawn = (np.exp(logprobs).cumsum(1)[:, None, :] < rng.random((200, 500, 1)) * 0.999999).sum(2)
    sampled = np.take_along_axis(logprobs, drawn, 1)
    assert sampled.min() >= LEAST_LOGPROB
    assert (sampled.sum(1) >= -(500 * np.log(100) + UNLIKELY)).all()
    assert (sampled >= -(np.log(100) + UNLIKELY)).all()  # an answer of one token


EXPERTS = np.array([[[0, 1]], [[2, 3]], [[255, 255]], [[1, 0]], [[255, 255]]], np.uint8)
"""One layer, two experts per token, for two prompt tokens and three answer tokens."""


def about_experts(experts: NDArray[Any], *, num_experts: int = 4) -> str:
    vetting = GroupValidation(vocabulary_size=100, context_tokens=8, num_experts=num_experts, experts_shape=(1, 2))
    return vetting.problem(of(experts=experts), incarnation=1, policy_version=6, resume_points={1: 4})


def test_an_answer_without_the_logprobs_of_a_served_teacher_is_named() -> None:
    vetting = GroupValidation(vocabulary_size=100, context_tokens=8, needs_teacher=True)
    where: dict[str, Any] = {"incarnation": 1, "policy_version": 6, "resume_points": {1: 4}}
    assert "no logprobs of a teacher" in vetting.problem(of(), **where)
    scored = replace(TRAJECTORY, teacher_logprobs=np.full(3, -0.5, np.float32))
    assert "no logprobs of a teacher" in vetting.problem(of(teacher_logprobs=scored.teacher_logprobs), **where)
    assert vetting.problem(replace(GROUP, trajectories=(scored, scored)), **where) == ""


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[1, 2], [3, 4], [5, 6]], ""),
        ([[1, 2], [3, 3], [5, 6]], "names a token twice at one place"),
        ([[1, 2], [3, 4], [5, 100]], "outside the vocabulary of 100"),
        ([[1], [3], [5]], "has 1 teacher likeliest tokens at each place, not 2"),
        (np.zeros((0, 0)), "has 0 teacher likeliest tokens"),
    ],
)
def test_likeliest_tokens_that_a_run_cannot_use_are_named(tokens: Any, words: str) -> None:
    vetting = GroupValidation(vocabulary_size=100, context_tokens=8, likeliest={"teacher_likeliest": 2})
    found = np.array(tokens, np.int32)
    made = Likeliest(tokens=found, logprobs=np.full(found.shape, -1, np.float32))
    group = replace(GROUP, trajectories=(replace(TRAJECTORY, teacher_likeliest=made),))
    problem = vetting.problem(group, incarnation=1, policy_version=6, resume_points={1: 4})
    assert words in problem if words else not problem


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        (EXPERTS[1:], r"\(4, 1, 2\) of uint8, and must be \(5, 1, 2\)"),
        (EXPERTS.astype(np.uint16), "of uint16"),
        (np.where(EXPERTS == 3, np.uint8(4), EXPERTS), "none of the 4"),
        (np.where(EXPERTS == 3, np.uint8(2), EXPERTS), "an expert twice"),
    ],
)
def test_experts_that_no_token_can_have_gone_to_are_named(experts: NDArray[Any], words: str) -> None:
    assert about_experts(EXPERTS) == about_experts(EXPERTS[:0]) == ""
    assert re.search(words, about_experts(experts))


def parts(*changes: dict[str, Any]) -> TrajectoryGroup:
    """A group with rollout 0, which has one trajectory for each of ``changes``."""
    made = tuple(replace(TRAJECTORY, rollout=0, part=part, **change) for part, change in enumerate(changes))
    group: TrajectoryGroup = replace(GROUP, trajectories=made)
    return group


@pytest.mark.parametrize(
    ("possible", "group", "words"),
    [
        ({}, parts({}, {"prompt_tokens": np.array([5] * 5, np.int32)}), ""),
        ({}, parts({}, {"prompt_tokens": np.array([5] * 6, np.int32)}), "prompt and answer have 9 tokens"),
        ({}, parts({}, {"prompt_tokens": np.array([100], np.int32)}), "prompt token 100 is outside"),
        ({"max_parts": 1}, parts({}, {}), "a rollout has 2 parts, over rollout.max_parts = 1"),
        ({"are_whole": True}, parts({}, {}), "a rollout has 2 parts, and this run's rollout function gives one"),
        ({"are_whole": True}, parts({"prompt_tokens": np.array([5], np.int32)}), "a prompt of its own"),
        ({"largest_reward": 1.0}, parts({"turn_rewards": (TurnReward(start=1, reward=2.0),)}), "reward of turn 1 is 2"),
    ],
)
def test_the_parts_of_a_rollout_are_vetted_each(possible: dict[str, Any], group: TrajectoryGroup, words: str) -> None:
    vetting = GroupValidation(vocabulary_size=100, context_tokens=8, **possible)
    found = vetting.problem(group, incarnation=1, policy_version=6, resume_points={1: 4})
    assert found == "" if not words else words in found


def test_rollouts_are_counted_and_not_their_parts() -> None:
    """Two answers were requested. Three parts of one rollout are one answer, and a rollout 2 is not allowed."""
    asked = PromptSpec(samples=frozenset({2}), max_tokens=8, max_prompt_tokens=8)
    third = replace(GROUP, trajectories=(replace(TRAJECTORY, rollout=0), replace(TRAJECTORY, rollout=2)))
    for group, words in (
        (replace(parts({}, {}, {}), cancelled=1), ""),
        (parts({}, {}, {}), "it has 1 answers and 0 cut off"),
        (third, "it has rollout 2, and 2 were asked for"),
    ):
        found = VETTING.problem(group, incarnation=1, policy_version=6, resume_points={1: 4}, asked=asked)
        assert found == "" if not words else words in found
