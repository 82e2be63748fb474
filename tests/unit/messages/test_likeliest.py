"""The likeliest tokens at each place of an answer travel, are cut and joined with its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from asyncrl.engines.generation import Generation
from asyncrl.environments.trajectory_builder import TrajectoryBuilder
from asyncrl.errors import MessageError
from asyncrl.messages import SamplingParams, Trajectory, VersionSpan, replace
from asyncrl.messages.codec import decode, encode
from asyncrl.messages.likeliest import NONE, Likeliest, join

SPANS = (VersionSpan(start=0, incarnation=0, policy_version=1),)


def of(*tokens: int) -> Likeliest:
    """At each place a token of 0.6, and the next one of 0.3."""
    return Likeliest.of([[(np.log(0.6), token), (np.log(0.3), token + 1)] for token in tokens])


def generation(*tokens: int) -> Generation:
    return Generation(
        tokens=np.array(tokens, np.int32),
        logprobs=np.full(len(tokens), -1, np.float32),
        version_spans=SPANS,
        finish_reason="stop",
        likeliest=of(*tokens),
    )


def test_they_are_cut_and_joined_as_the_tokens_are() -> None:
    whole = generation(3, 5, 7)
    again = whole.first(1).then(whole.after(1))
    assert again.likeliest.tokens.tolist() == whole.likeliest.tokens.tolist() == [[3, 4], [5, 6], [7, 8]]
    np.testing.assert_array_equal(again.likeliest.logprobs, whole.likeliest.logprobs)


def test_what_the_environment_says_has_none_of_any_probability() -> None:
    turns = TrajectoryBuilder(np.array([1], np.int32))
    turns.add_answer(generation(3))
    turns.add_observation([9, 9])
    turns.add_answer(generation(5))
    made = turns.trajectory().likeliest
    assert made.tokens[[0, 3]].tolist() == [[3, 4], [5, 6]]
    assert np.exp(made.logprobs).sum(1).tolist() == pytest.approx([0.9, 0.0, 0.0, 0.9])
    assert join([(2, NONE), (0, NONE)]) is NONE


def test_they_survive_the_wire() -> None:
    one = Trajectory(
        tokens=np.array([3], np.int32),
        response_mask=np.ones(1, np.bool_),
        behavior_logprobs=np.zeros(1, np.float32),
        version_spans=SPANS,
        likeliest=of(3),
        teacher_likeliest=of(4),
    )
    read = decode(encode(one), Trajectory)
    assert read.likeliest.tokens.tolist() == [[3, 4]] and read.teacher_likeliest.tokens.tolist() == [[4, 5]]
    for wrong, words in ((of(3, 4), "of 2 tokens"), (_heavy(), "add up to 2")):
        with pytest.raises(MessageError, match=words):
            replace(one, likeliest=wrong)


def _heavy() -> Likeliest:
    return Likeliest(tokens=np.array([[1, 2]], np.int32), logprobs=np.zeros((1, 2), np.float32))


def test_a_cut_distribution_has_no_likeliest_of_all_tokens() -> None:
    with pytest.raises(MessageError, match=r"of the whole vocabulary, and top_p=0.9 cuts it"):
        SamplingParams(max_new_tokens=4, top_p=0.9, top_logprobs=8)
