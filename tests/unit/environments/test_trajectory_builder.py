"""Trajectories: built turn by turn, or given by the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from asyncrl.engines.generation import Generation
from asyncrl.environments.builtin import given
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.errors import MessageError
from asyncrl.messages import PromptGroup, SamplingParams, TrajectoryGroup, VersionSpan
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.support import Support
from asyncrl.policies.staleness.staleness import per_token

PROMPT = np.array([9, 8], np.int32)


def answer(
    tokens: Sequence[int], *versions: tuple[int, int], logprob: float = -1.0, finish_reason: str = "stop"
) -> Generation:
    """Make an answer; ``versions`` has (start, policy version)."""
    return Generation(
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), logprob, np.float32),
        version_spans=tuple(VersionSpan(start=start, incarnation=0, policy_version=v) for start, v in versions),
        finish_reason=finish_reason,
    )


def starts_and_versions(spans: Sequence[VersionSpan]) -> list[tuple[int, int]]:
    return [(span.start, span.policy_version) for span in spans]


def test_what_the_model_said_is_trained_and_what_it_observed_is_not() -> None:
    turns = TrajectoryBuilder(PROMPT)
    turns.add_answer(answer([1, 2], (0, 3), logprob=-0.5))
    turns.add_observation([3])
    turns.add_answer(answer([4], (0, 3), logprob=-0.25))
    made = turns.trajectory()
    assert made.tokens.tolist() == [1, 2, 3, 4]
    assert made.response_mask.tolist() == [True, True, False, True]
    assert made.behavior_logprobs.tolist() == [-0.5, -0.5, 0.0, -0.25]
    assert (made.tokens.dtype, made.response_mask.dtype, made.behavior_logprobs.dtype) == (np.int32, bool, np.float32)


def test_every_token_keeps_what_it_was_sampled_from_also_on_the_wire() -> None:
    """An observation was sampled from nothing, and the second answer from the whole vocabulary."""
    turns = TrajectoryBuilder(PROMPT)
    turns.add_answer(dataclasses.replace(answer([1, 2], (0, 3)), support=Support.of([[1, 5], [2]])))
    turns.add_observation([3])
    turns.add_answer(answer([4], (0, 3)))
    made = turns.trajectory()
    sent = decode(
        encode(TrajectoryGroup(group_id=0, prompt_tokens=PROMPT, trajectories=(made,), temperature=0.5)),
        TrajectoryGroup,
    )
    assert sent.temperature == 0.5
    for one in (made, sent.trajectories[0]):
        assert one.support.counts.tolist() == [2, 1, 0, 0]
        assert one.support.tokens.tolist() == [1, 5, 2]


def test_what_to_continue_is_the_prompt_and_all_turns() -> None:
    turns = TrajectoryBuilder(PROMPT)
    before = turns.tokens
    said = answer([1, 2], (0, 0))
    assert turns.add_answer(said) is said
    turns.add_observation(np.array([3], np.int64))
    assert (turns.tokens.tolist(), turns.tokens.dtype, turns.num_tokens) == ([9, 8, 1, 2, 3], np.int32, 3)
    assert before.tolist() == PROMPT.tolist() == [9, 8]


def test_versions_move_to_where_their_answer_is() -> None:
    """Version 3 samples 1 2. Version 4 takes over in the second answer: at 3 (after 1 2 and the observation) + 1."""
    turns = TrajectoryBuilder(PROMPT)
    turns.add_answer(answer([1, 2], (0, 3)))
    turns.add_observation([7])
    turns.add_answer(answer([4, 5, 6], (0, 3), (1, 4), (2, 5)))
    assert starts_and_versions(turns.trajectory().version_spans) == [(0, 3), (4, 4), (5, 5)]


def test_an_observation_has_no_version_of_its_own() -> None:
    """Observed, answered by 2, observed, answered by 5: at version 6 the tokens are 4, 4, 4 and 1 versions old."""
    turns = TrajectoryBuilder(PROMPT)
    turns.add_observation([1])
    turns.add_answer(answer([2], (0, 2)))
    turns.add_observation([3])
    turns.add_answer(answer([4], (0, 5)))
    made = turns.trajectory()
    assert starts_and_versions(made.version_spans) == [(0, 2), (3, 5)]
    assert per_token(made.version_spans, length=4, policy_version=6, resume_points={}).tolist() == [4, 4, 4, 1]


def test_a_conversation_may_end_with_an_observation_or_an_empty_one() -> None:
    turns = TrajectoryBuilder(PROMPT)
    turns.add_answer(answer([1], (0, 0), finish_reason="length"))
    turns.add_observation([])
    assert turns.trajectory().tokens.tolist() == [1]
    turns.add_observation([2, 3])
    made = turns.trajectory()
    assert made.response_mask.tolist() == [True, False, False]
    assert made.finish_reason == "length"


def test_the_last_answer_says_how_it_ended_unless_somebody_knows_better() -> None:
    turns = TrajectoryBuilder(PROMPT)
    turns.add_answer(answer([1], (0, 0), finish_reason="length"))
    turns.add_answer(answer([1], (0, 0), finish_reason="stop"))
    assert turns.trajectory().finish_reason == "stop"
    assert turns.trajectory(finish_reason="length").finish_reason == "length"


def test_a_reward_is_kept_and_there_is_none_until_somebody_gives_one() -> None:
    turns = TrajectoryBuilder(PROMPT)
    turns.add_answer(answer([1], (0, 0)))
    assert math.isnan(turns.trajectory().reward) and turns.trajectory().reward_parts == {}
    made = turns.trajectory(reward=0.5, reward_parts={"asked": 0.5})
    assert (made.reward, made.reward_parts) == (0.5, {"asked": 0.5})


def test_an_answer_that_was_not_awaited_is_told_so() -> None:
    async def generate() -> Generation:
        return answer([7])

    with pytest.raises(TypeError, match=r"write `await generate\(...\)`"):
        TrajectoryBuilder([1]).add_answer(generate())  # type: ignore[arg-type]


@pytest.mark.parametrize("observed", [[], [1, 2]], ids=["nothing", "observations"])
def test_conversation_without_an_answer_is_refused_in_one_line(observed: list[int]) -> None:
    turns = TrajectoryBuilder(PROMPT)
    turns.add_observation(observed)
    with pytest.raises(ValueError, match="needs an answer of the model") as caught:
        turns.trajectory()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ids", [[1.7], [-1], [2**31], [True], ["3"]])
def test_what_is_no_token_id_is_refused(ids: list[int]) -> None:
    turns = TrajectoryBuilder(np.array([1], np.int32))
    with pytest.raises(ValueError, match="an observation must be a list of token ids"):
        turns.add_observation(ids)


def prompt(*, mask: list[bool], most: int = 9) -> PromptGroup:
    return PromptGroup(
        group_id=0,
        prompt_tokens=np.array([1, 2], np.int32),
        group_size=1,
        sampling=SamplingParams(max_new_tokens=most),
        response_tokens=np.array([5, 6, 7, 8], np.int32),
        response_mask=np.array(mask, np.bool_),
    )


async def no_engine(*_: object, **__: object) -> None:
    raise AssertionError("nothing is generated")


@pytest.mark.parametrize(
    ("mask", "most", "expected"),
    [
        ([], 9, [True] * 4),
        ([True, False, False, True], 9, [True, False, False, True]),
        ([True, False, False, True], 3, [True, False, False]),
    ],
)
async def test_the_mask_of_the_data_is_the_mask_of_the_trajectory(
    mask: list[bool], most: int, expected: list[bool]
) -> None:
    sent = decode(encode(prompt(mask=mask, most=most)), PromptGroup)
    trajectory = await given(sent, no_engine, index=0)  # type: ignore[arg-type]
    assert trajectory.response_mask.tolist() == expected
    assert trajectory.finish_reason == ("stop" if most == 9 else "length")


def test_a_mask_of_another_length_is_no_message() -> None:
    with pytest.raises(MessageError, match="response_mask has 2 of 4 tokens"):
        prompt(mask=[True, False])
