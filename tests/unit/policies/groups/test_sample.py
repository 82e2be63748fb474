"""A recorded sample: its numbers, its text token by token, and its turns."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.messages import Trajectory, TrajectoryGroup, VersionSpan
from asyncrl.messages.codec import from_json
from asyncrl.policies.groups.sample import Answer, GroupSample, decoded, picked, sample_of
from asyncrl.policies.groups.token_text import token_texts
from asyncrl.policies.groups.turn_text import other_pieces, pieces_of, sampled_pieces

SPANS = (
    VersionSpan(start=0, incarnation=0, policy_version=3),
    VersionSpan(start=2, incarnation=0, policy_version=5),
)


def group(*, mask: tuple[bool, ...] = (True, True, False, True), reward: float = 0.5) -> TrajectoryGroup:
    trajectory = Trajectory(
        tokens=np.array([7, 8, 9, 1], np.int32),
        response_mask=np.array(mask),
        behavior_logprobs=np.array([-1, -2, 0, -0.5], np.float32),
        version_spans=SPANS,
        reward=reward,
        reward_parts={"right": 1.0, "broken": math.nan},
        finish_reason="length",
    )
    return TrajectoryGroup(group_id=4, prompt_tokens=np.array([1, 2], np.int32), trajectories=(trajectory,), worker="w")


def words(tokens: object) -> str:
    return "".join(f"<{token}>" for token in tokens)  # type: ignore[attr-defined]


def test_an_answer_is_split_where_an_environment_wrote() -> None:
    sample = decoded(sample_of(group()), words)
    (answer,) = sample.answers
    assert sample.prompt == "<1><2>"
    assert answer.turns == (("policy", "<7><8>"), ("environment", "<9>"), ("policy", "<1>"))
    assert answer.text == "<7><8><9><1>"


def test_staleness_is_that_of_the_oldest_token_at_the_version_that_trained_it() -> None:
    assert sample_of(group(), fate="trained", step=8, resume_points={}).staleness == 4  # step 8 trains version 7
    assert sample_of(group(), fate="dropped", step=8, resume_points={}).staleness == 5
    assert sample_of(group(), fate="trained", step=8, resume_points={1: 2}).staleness == 5  # counts as version 2
    assert sample_of(group()).staleness is None


def test_what_a_step_left_out_as_too_old_is_counted_and_has_no_part_in_the_other_numbers() -> None:
    """Step 9 trains version 8 with a bound of 3: two tokens are of version 3, one token is of version 5."""
    advantages = [np.array([0, 0, 0, 2], np.float32)]
    (answer,) = sample_of(group(), fate="trained", step=9, resume_points={}, bound=3, advantages=advantages).answers
    assert (answer.staleness, answer.old_tokens, answer.advantage) == (3, 2, 2.0)
    (answer,) = sample_of(group(), fate="trained", step=9, resume_points={}, bound=5).answers
    assert (answer.staleness, answer.old_tokens) == (5, 0)
    (answer,) = sample_of(group(), fate="dropped", step=9, resume_points={}, bound=3).answers
    assert (answer.staleness, answer.old_tokens) == (6, 0)
    sample = sample_of(group(), fate="trained", step=9, resume_points={}, bound=3)
    assert read_again(sample) == sample


def test_json_gives_it_back_also_with_fields_of_another_version() -> None:
    sample = decoded(sample_of(group(), fate="trained", step=8, resume_points={}), words)
    assert read_again(sample) == sample
    assert read_again(sample, mood="new") == sample
    assert from_json(b'{"group_id": 3}', GroupSample) == GroupSample(group_id=3)


def test_the_same_groups_of_a_step_are_picked_in_every_run() -> None:
    first = [picked(64, count=2, seed=1, step=step) for step in range(20)]
    assert first == [picked(64, count=2, seed=1, step=step) for step in range(20)]
    assert len({index for indexes in first for index in indexes}) > 10
    assert picked(2, count=9, seed=0, step=1) == [0, 1]


def test_the_worst_answer_ranks_a_group() -> None:
    one = sample_of(group()).answers[0]
    sample = GroupSample(group_id=1, answers=(one, dataclasses.replace(one, reward=-2.0)))
    assert (sample.worst, sample.reward) == (-2.0, -0.75)


def test_the_parts_of_a_rollout_are_told_apart_and_have_one_reward() -> None:
    """Rewards 1 (in two parts) and 0 have a mean of 1/2 over rollouts."""
    whole, *_ = group(reward=1.0).trajectories
    parts = (
        dataclasses.replace(whole, rollout=0),
        dataclasses.replace(whole, rollout=0, part=1, prompt_tokens=np.array([5], np.int32)),
        dataclasses.replace(whole, rollout=2, reward=0.0),
    )
    sample = decoded(sample_of(dataclasses.replace(group(), trajectories=parts)), words)
    assert sample.reward == 0.5
    assert [answer.prompt for answer in sample.answers] == [None, "<5>", None]
    assert [sample.title(index) for index in range(3)] == ["answer 1, part 1 of 2", "answer 1, part 2 of 2", "answer 3"]
    assert read_again(sample) == sample


def read_again(sample: GroupSample, **more: Any) -> GroupSample:
    return from_json(json.dumps(sample.as_json() | more).encode(), GroupSample)


def of_bytes(tokens: Sequence[int]) -> str:
    """A byte-level tokenizer: a letter may take several tokens."""
    return bytes(tokens).decode(errors="replace")


def of_words(tokens: Sequence[int]) -> str:
    """A tokenizer that puts a space between words, but not before the first."""
    return " ".join(f"w{token}" for token in tokens)


def test_a_letter_of_several_tokens_comes_with_its_last_one() -> None:
    assert token_texts(list("aé€".encode()), of_bytes) == ["a", "", "é", "", "", "€"]


def test_what_a_token_gives_may_depend_on_the_one_before() -> None:
    assert token_texts([1, 2, 3], of_words) == ["w1", " w2", " w3"]


def test_an_answer_that_was_cut_within_a_letter_shows_so() -> None:
    assert token_texts(list("a€".encode())[:-1], of_bytes) == ["a", "", "\N{REPLACEMENT CHARACTER}"]


@given(st.text(max_size=60))
def test_together_they_are_the_text(text: str) -> None:
    tokens = list(text.encode())
    assert "".join(token_texts(tokens, of_bytes)) == text
    assert len(token_texts(tokens, of_bytes)) == len(tokens)


QWEN = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LLAMA = "<|start_header_id|>ipython<|end_header_id|>\n\n5<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


def found(pieces: object) -> list[tuple[str, str]]:
    return [(piece.kind, piece.text) for piece in pieces]  # type: ignore[attr-defined]


def test_a_turn_is_thought_text_and_calls() -> None:
    text = (
        '<think>\nhm\n</think>\n\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    )
    assert found(sampled_pieces(text)) == [
        ("thinking", "hm"),
        ("text", "I add."),
        ("tool call", 'add({"a": 1})'),
    ]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hm</think>yes", [("thinking", "hm"), ("text", "yes")]),  # the prompt ended with <think>
        ("a <think>cut", [("text", "a "), ("thinking", "cut")]),
        ("<tool_call>add(1)</tool_call>", [("tool call", "add(1)")]),  # not JSON: shown as it is
        ('<tool_call>{"name": "f", "arguments": "x"}', [("tool call", "f(x)")]),
        ("<tool_call>[1]</tool_call>", [("tool call", "[1]")]),
        ("0123", [("text", "0123")]),
        ("<|im_end|>", [("text", "<|im_end|>")]),  # the whole answer
        ("<|im_start|>user\n5", [("text", "<|im_start|>user\n5")]),  # markers that a model writes begin no new turn
    ],
)
def test_what_is_not_as_expected_stays_text(text: str, pieces: list[tuple[str, str]]) -> None:
    assert found(sampled_pieces(text)) == pieces


def test_results_of_tools_and_words_of_users_are_told_apart() -> None:
    assert found(other_pieces(QWEN)) == [("tool result", "5")]
    assert found(other_pieces(LLAMA)) == [("tool result", "5")]
    assert found(other_pieces("<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n")) == [
        ("user", "and now?")
    ]
    assert found(other_pieces("6")) == [("text", "6")]


def test_pieces_say_which_turn_they_are_of() -> None:
    pieces = pieces_of([("policy", "a"), ("environment", QWEN), ("policy", "<think>b</think>c")])
    assert [(piece.turn, piece.kind) for piece in pieces] == [
        (0, "text"),
        (1, "tool result"),
        (2, "thinking"),
        (2, "text"),
    ]


def test_an_image_is_shown_by_its_digest_in_place_of_its_placeholders() -> None:
    digest = "ab" * 32
    answer = Answer(tokens=(7, 9, 9, 8), environment=((1, 3),), images=((1, 3, digest), (5, 7, "cd" * 32)))
    shown = decoded(
        GroupSample(group_id=0, prompt_tokens=(6, 9, 9, 5), answers=(answer,)),
        lambda tokens: "".join(map(str, tokens)),
    )
    assert shown.prompt == "6[image abababababab]5"
    assert shown.answers[0].turns == (("policy", "7"), ("environment", "[image cdcdcdcdcdcd]"), ("policy", "8"))
    assert read_again(shown).answers[0].images == answer.images
